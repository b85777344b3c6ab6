"""The norms' Triton kernels in Triton's interpreter, against the PyTorch path: run with TRITON_INTERPRET=1.

The interpreter truncates float32 to bfloat16 where a GPU rounds: bfloat16 may differ by a unit in the last place.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fitact.runtime.kernels.norm_tiles import LONGEST, plan
from fitact.runtime.kernels.norms import LAYER, RMS
from fitact.runtime.norms.modules import ms_layer_norm, ms_rms_norm
from tests.support.generated import backward_op, forward_op

# NaN and infinity on purpose, in NumPy, which warns of them
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

EPS = 1e-5
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# A unit in the last place; float32 sums in another order.
UNIT = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 4e-6}
# Several rows a block, one row a block, and rows that are longer than a block; none a power of two, and some.
COLUMNS = [1, 7, 32, 100, 768, 4096, 5000, LONGEST, LONGEST + 1, 40_000]
every_kind = pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])


def check(x: torch.Tensor, centred: bool, out: torch.dtype) -> None:
    """Both passes, through the ops, against the same ops by PyTorch's operators."""
    key, inner = LAYER if centred else RMS, x.shape[-1]
    z, scale = forward_op(x, out, key, inner=inner, eps=EPS)
    expected_z, expected_scale = forward_op(x, out, key, inner=inner, eps=EPS, reference=True)
    unit = UNIT[out]
    torch.testing.assert_close(z, expected_z, rtol=unit, atol=unit, equal_nan=True)
    torch.testing.assert_close(scale, expected_scale, rtol=2e-6, atol=0, equal_nan=True)
    dz = torch.randn(x.shape).to(out)
    given = dz, expected_z, expected_scale, x.dtype, key
    dx, expected_dx = (backward_op(*given, inner=inner, reference=one)[0] for one in (False, True))
    size = float((expected_scale.view(-1, 1) * dz.abs()).nan_to_num(posinf=0).max()) if x.numel() else 0.0
    torch.testing.assert_close(dx, expected_dx, rtol=UNIT[x.dtype], atol=4e-6 * size, equal_nan=True)


@every_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_lengths(centred: bool, dtype: torch.dtype, columns: int) -> None:
    rows = plan(1000, columns).height + 1  # a block and one row
    check((torch.randn(min(rows, 40), columns) * 2 + 0.3).to(dtype), centred, dtype)


@every_kind
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 41, 128, 129, 300])
def test_rows_round_the_block(centred: bool, rows: int) -> None:
    check(torch.randn(rows, 24), centred, torch.float32)


@every_kind
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16], ids=str)
def test_the_dtype_of_autocast(centred: bool, out: torch.dtype) -> None:
    check(torch.randn(9, 200), centred, out)


@every_kind
@pytest.mark.parametrize("columns", [50, LONGEST + 30])
def test_nan_infinity_and_zeros(centred: bool, columns: int) -> None:
    x = torch.randn(5, columns)
    x[0, 3], x[1, 40], x[2] = float("nan"), float("inf"), 0.0
    check(x, centred, torch.float32)


@pytest.mark.parametrize("columns", [1000, LONGEST + 30])
def test_variance_does_not_cancel(columns: int) -> None:
    x = torch.randn(3, columns) + 1e4
    z, _ = forward_op(x, torch.float32, LAYER, inner=columns, eps=EPS)
    exact = F.layer_norm(x.double(), (columns,), eps=EPS)
    torch.testing.assert_close(z.double(), exact, rtol=0, atol=4e-3)


@every_kind
def test_through_autograd_and_the_compiler(centred: bool) -> None:
    torch._dynamo.reset()
    norm = ms_layer_norm if centred else ms_rms_norm
    baseline = F.layer_norm if centred else F.rms_norm
    dy = torch.randn(300, 50)
    for function in (norm, torch.compile(norm, fullgraph=True, backend="aot_eager")):
        x = torch.randn(50, 300).t().requires_grad_()
        y = function(x, 50, EPS)
        reference = baseline(x, (50,), eps=EPS)
        torch.testing.assert_close(y, reference)
        (dx,), (expected,) = (torch.autograd.grad(out, x, dy) for out in (y, reference))
        torch.testing.assert_close(dx, expected)
