"""The Triton kernels in Triton's interpreter, against the PyTorch path: run with TRITON_INTERPRET=1.

There the CPU runs the kernels through the ops, autograd and the compiler. The interpreter truncates float32 to
bfloat16 where a GPU rounds, so bfloat16 values may differ by a unit in the last place; codes may not differ.
It also misreads and miswrites bfloat16 subnormals, which are left out.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fitact.runtime.kernels import math
from fitact.runtime.kernels.triton_compat import jit, tl
from tests.support.generated import DTYPES, backward_op, forward_op, patterns
from tests.support.steps import Shipped, around, each, shipped

# NaN and infinity on purpose, in NumPy, which warns of them
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ULP = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6, torch.float64: 0.0}

# The interpreter is slow: the ordinary run has one of each width and an even one.
FEW = {"gelu_fewbit3", "gelu_fewbit4", "hardtanh_fewbit1", "relu6_fewbit2", "tanh_fewbit3"}
SIZES = (0, 1, 1023, 1024, 1025, 8191, 8192, 8193, 20_000)


def sizes(one: Shipped) -> tuple[list[int], list[int]]:
    """The sizes of the ordinary run, and those of the full one: where a tile ends is nothing of its own."""
    if one.name == "gelu_fewbit3":
        return [*SIZES], []
    return ([1025, 8193], [n for n in SIZES if n not in (1025, 8193)]) if one.name in FEW else ([], [8193])


def check(one: Shipped, x: torch.Tensor) -> None:
    key = one.module._KEY
    y, codes = forward_op(x, x.dtype, key)
    assert torch.equal(codes, forward_op(x, x.dtype, key, reference=True)[1])
    exact = one.baseline(x.double())
    # x (1 + erf) cancels on the far left and x − tanh x near 0: the device functions' 5e-7, times x
    info = torch.finfo(x.dtype)
    smallest = info.smallest_normal * (1 if x.dtype == torch.bfloat16 else info.eps)
    allowed = ULP[x.dtype] * exact.abs() + 5e-7 * x.double().abs() + smallest
    rounded = exact.to(x.dtype).double()
    assert bool(((y.double() - exact).abs() <= allowed)[rounded.isfinite()].all())
    assert torch.equal(y[~rounded.isfinite()].double().nan_to_num(), rounded[~rounded.isfinite()].nan_to_num())

    dy = torch.randn(x.shape).to(x.dtype)
    dx = backward_op(dy, None, codes, dy.dtype, key)[0]
    expected = one.gradient(x, dy)
    if x.dtype == torch.bfloat16:
        assert bool(((dx.double() - expected.double()).abs() <= 2**-7 * expected.double().abs()).all())
    else:
        assert torch.equal(dx, expected)


@pytest.mark.parametrize(
    ("one", "n"),
    [
        pytest.param(one, n, id=f"{one.name}-{n}", marks=marks)
        for one in shipped()
        for ns, marks in zip(sizes(one), ([], pytest.mark.full), strict=True)
        for n in ns
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes_round_the_tile(one: Shipped, dtype: torch.dtype, n: int) -> None:
    check(one, torch.randn(n).to(dtype) * 3)


@each(FEW)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_borders_and_special_values(one: Shipped, dtype: torch.dtype) -> None:
    check(one, around(one.fit["borders"], dtype).to(dtype))


@each(FEW)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_pattern(one: Shipped, dtype: torch.dtype) -> None:
    x = patterns(dtype)
    if dtype == torch.bfloat16:
        x = x[(x == 0) | ~(x.abs() < torch.finfo(dtype).smallest_normal)]
    check(one, x)


@each(FEW)
def test_through_autograd_and_the_compiler(one: Shipped) -> None:
    torch._dynamo.reset()
    dy = torch.randn(300, 50)
    for function in (one.function, torch.compile(one.function, fullgraph=True, backend="aot_eager")):
        x = torch.randn(50, 300).t().requires_grad_()
        y = function(x)
        (dx,) = torch.autograd.grad(y, x, dy[: len(y)].expand_as(y))
        assert torch.equal(dx, one.gradient(x, dy.expand_as(y)))
        torch.testing.assert_close(y, one.baseline(x), rtol=2e-6, atol=1e-6)


@jit
def _apply(x, y, n, function: tl.constexpr):
    at = tl.arange(0, 4096)
    tl.store(y + at, function(tl.load(x + at, mask=at < n, other=0.0)), mask=at < n)


EVERYWHERE = np.concatenate([[0.0, -0.0], *(s * np.geomspace(1e-30, 80, 2000) for s in (1, -1))])
FUNCTIONS = {
    "expm1": (np.expm1, EVERYWHERE),
    "log1p": (np.log1p, EVERYWHERE[EVERYWHERE > -0.99]),
    "softplus": (lambda x: np.logaddexp(x, 0), EVERYWHERE),
    "tanh": (np.tanh, EVERYWHERE),
    "relu": (lambda x: np.maximum(x, 0), EVERYWHERE),
    "sign": (np.sign, EVERYWHERE),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_device_functions(name: str) -> None:
    """Within 5e-7 relative of float64, tiny arguments and tails included."""
    oracle, points = FUNCTIONS[name]
    x = torch.from_numpy(points.astype(np.float32))
    y = torch.full_like(x, float("nan"))
    _apply[(1,)](x, y, len(x), getattr(math, name))
    expected = oracle(x.double().numpy())
    assert np.all(np.abs(y.double().numpy() - expected) <= 5e-7 * np.abs(expected) + 1e-38)
