"""The kernels that keep the output, in Triton's interpreter: run with TRITON_INTERPRET=1.

The interpreter truncates float32 to bfloat16 where a GPU rounds. It misreads subnormals of bfloat16: none here.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.generated import DTYPES, HALVES, backward_op, forward_op, patterns
from tests.support.outputs import SOME, Output, each_output

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ULP = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-21, torch.float64: 2**-50}


def smallest(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return info.smallest_normal * (1 if dtype == torch.bfloat16 else info.eps)


def check(one: Output, x: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Compare both passes with float64; y of another dtype than x's is what autocast asks for."""
    dtype, key = dtype or x.dtype, one.module._KEY
    ulp = max(ULP[dtype], ULP[x.dtype])
    y, codes = forward_op(x, dtype, key)
    assert (y.dtype, codes.dtype, codes.numel()) == (dtype, torch.uint8, 0)
    baseline = one.baseline(x)
    for expected in (one.baseline(x.double()), baseline.double()):
        rounded = expected.to(dtype).double()
        known = rounded.isfinite()
        allowed = 2 * ulp * expected.abs() + smallest(dtype)
        assert bool(((y.double() - expected).abs() <= allowed)[known].all())
    # where the last finite value is met, truncation and rounding part
    far = ~baseline.to(dtype).isfinite() & (x.isnan() | x.isinf())
    assert torch.equal(y[far].double().nan_to_num(), baseline.to(dtype)[far].double().nan_to_num())

    y = baseline.to(dtype)
    dy = torch.randn(x.shape).to(dtype)
    dx = backward_op(dy, y, codes, x.dtype, key)[0]
    assert dx.dtype == x.dtype
    exact = dy.double() * one.derivative(y)
    known = exact.to(x.dtype).isfinite()
    allowed = ulp * exact.abs() + 5e-7 * dy.double().abs() + 2 * smallest(x.dtype)
    if x.dtype == torch.float64:
        allowed = 1e-14 * dy.abs()
    assert bool(((dx.double() - exact).abs() <= allowed)[known].all())


@each_output(SOME)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 8191, 8192, 8193, 3 * 8192 + 5])
def test_sizes_round_the_tile(one: Output, dtype: torch.dtype, n: int) -> None:
    check(one, torch.randn(n).to(dtype) * 3)


@each_output(SOME)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_pattern(one: Output, dtype: torch.dtype) -> None:
    x = patterns(dtype)
    if dtype == torch.bfloat16:
        x = x[(x == 0) | ~(x.abs() < torch.finfo(dtype).smallest_normal)]
    check(one, x)


@each_output()
def test_float32(one: Output) -> None:
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan")]
    near = [c + d for c in one.corners for d in (0.0, 1e-6, -1e-6)]
    check(one, torch.cat([torch.linspace(-30, 30, 20_001), torch.tensor(special + near)]))


@each_output(SOME)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_output_of_another_dtype(one: Output, dtype: torch.dtype) -> None:
    check(one, torch.randn(9000) * 3, dtype)


@each_output(SOME)
def test_nothing_is_written_beyond_the_end(one: Output) -> None:
    x = torch.randn(8192 + 5)
    for tensor, run in (
        (torch.full((3 * 8192,), 7.0), lambda at: one.module.__dict__[f"{one.name}_forward"][(2,)](x, at, len(x))),
        (
            torch.full((3 * 8192,), 7.0),
            lambda at: one.module.__dict__[f"{one.name}_backward"][(2,)](x, x.abs(), at, len(x)),
        ),
    ):
        run(tensor)
        assert bool((tensor[len(x) :] == 7.0).all())
        assert bool((tensor[: len(x)] != 7.0).any())


@each_output(SOME)
def test_through_autograd_and_the_compiler(one: Output) -> None:
    torch._dynamo.reset()
    dy = torch.randn(300, 50)
    for function in (one.function, torch.compile(one.function, fullgraph=True, backend="aot_eager")):
        x = torch.randn(50, 300).t().requires_grad_()
        y = function(x)
        (dx,) = torch.autograd.grad(y, x, dy)
        torch.testing.assert_close(y, one.baseline(x), rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(dx, (dy * one.derivative(y)).float(), rtol=2e-6, atol=2e-6)
