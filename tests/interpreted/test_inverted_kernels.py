"""The kernels that keep the output and codes, in Triton's interpreter: run with TRITON_INTERPRET=1.

The interpreter truncates float32 to bfloat16 where a GPU rounds. It misreads subnormals of bfloat16: none here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fitact.runtime.kernels import registry
from tests.support.generated import DTYPES, HALVES, backward_op, forward_op, patterns
from tests.support.inverses import SOME, Inverse, each_inverse, made, named, unpacked

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ULP = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-22, torch.float64: 2**-52}
TILE = 8192


def smallest(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return info.smallest_normal * (1 if dtype == torch.bfloat16 else info.eps)


def normal(x: torch.Tensor) -> torch.Tensor:
    """Whether a number is no subnormal of bfloat16."""
    return (x.dtype != torch.bfloat16) | (x == 0) | ~(x.abs() < torch.finfo(torch.bfloat16).smallest_normal)


def check_codes(one: Inverse, x: torch.Tensor, codes: torch.Tensor, dtype: torch.dtype) -> None:
    """Bit for bit those of the definition, 0 beyond the end, and the bytes of the PyTorch path."""
    tiles = -(-x.numel() // TILE)
    assert (codes.dtype, codes.shape) == (torch.uint8, (tiles * one.bits * 1024,))
    if one.bits:
        expected = torch.zeros(tiles * TILE, dtype=torch.long)
        expected[: x.numel()] = one.code(x, dtype)
        assert torch.equal(unpacked(codes, one.bits), expected)
    assert torch.equal(codes, registry.find(one.key).encode(x, dtype))


def check_gradient(one: Inverse, x: torch.Tensor, y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor) -> None:
    """dx is dy times the approximant of that y, up to roundings and one truncation; NaN where y is."""
    code = one.code(x, y.dtype)
    exact = dy.double() * one.approximant(y, code)
    known = y.isfinite() & normal(y) & exact.to(dx.dtype).isfinite()
    allowed = ULP[dx.dtype] * exact.abs() + dy.double().abs() * one.lost(y, code) + 2 * smallest(dx.dtype)
    assert bool(((dx.double() - exact).abs() <= allowed)[known].all())
    assert bool(dx[y.isnan()].isnan().all())


def check(
    one: Inverse, x: torch.Tensor, dtype: torch.dtype | None = None, baseline: Callable | None = None
) -> None:
    """Both passes; y of another dtype than x's is what autocast asks for."""
    baseline, key = baseline or one.baseline, one.key
    dtype = dtype or x.dtype
    x = x[normal(x)]
    y, codes = forward_op(x, dtype, key)
    assert (y.dtype, y.shape) == (dtype, x.shape)
    check_codes(one, x, codes, dtype)
    exact = baseline(x.double())
    known = exact.to(dtype).isfinite() & x.isfinite()
    # on the far left the device functions' 5e-7, times x
    allowed = (ULP[dtype] + 2e-6) * exact.abs() + 5e-7 * x.double().abs() + smallest(dtype)
    assert bool(((y.double() - exact).abs() <= allowed)[known].all())
    assert bool(y[x.isnan()].isnan().all())

    y = baseline(x).to(dtype)
    dy = torch.randn(x.shape).to(dtype)
    dx = backward_op(dy, y, codes, x.dtype, key)[0]
    assert (dx.dtype, dx.shape) == (x.dtype, x.shape)
    check_gradient(one, x, y, dy, dx)


@named("gelu_inverted1", "hardswish_inverted2")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "n", [0, 1, 8193, *(pytest.param(n, marks=pytest.mark.full) for n in (8191, 8192, 3 * 8192 + 5))]
)
def test_sizes_round_the_tile(one: Inverse, dtype: torch.dtype, n: int) -> None:
    check(one, torch.randn(n).to(dtype) * 3)


@each_inverse(SOME - {"gelu_inverted1"})
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_pattern(one: Inverse, dtype: torch.dtype) -> None:
    check(one, patterns(dtype))


@each_inverse(SOME)
def test_float32(one: Inverse) -> None:
    near = [one.minimum + d for d in (0.0, 1e-7, -1e-7, 1e-4, -1e-4)]
    borders = torch.tensor(one.fit["borders"]["float32"])
    beside = [torch.nextafter(borders, torch.tensor(side)) for side in (float("inf"), -float("inf"))]
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e30, -1e30])
    check(one, torch.cat([torch.linspace(-30, 30, 20_001), torch.tensor(near), borders, *beside, special]))


@each_inverse(SOME | {"gelu_inverted2"})
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_output_of_another_dtype(one: Inverse, dtype: torch.dtype) -> None:
    """The borders and the approximant are those of y's dtype."""
    borders = torch.tensor(one.fit["borders"]["float32"] + one.fit["borders"][str(dtype).removeprefix("torch.")])
    check(one, torch.cat([torch.randn(9000) * 3, borders, borders + 1e-6, borders - 1e-6]), dtype)


@each_inverse(SOME)
def test_nothing_is_written_beyond_the_end(one: Inverse) -> None:
    """Nor left out: the codes of the last tile are written whole."""
    n, k = TILE + 5, one.bits
    x = torch.randn(n)
    y, codes = torch.full((3 * TILE,), 7.0), torch.full((3 * k * 1024,), 0xAA, dtype=torch.uint8)
    one.module.__dict__[f"{one.name}_forward"][(2,)](x, y, codes, n)
    assert bool((y[n:] == 7).all()) and not bool((y[:n] == 7).any())
    assert bool((codes[2 * k * 1024 :] == 0xAA).all())
    check_codes(one, x, codes[: 2 * k * 1024], torch.float32)
    dx = torch.full((3 * TILE,), 7.0)
    one.module.__dict__[f"{one.name}_backward"][(2,)](torch.ones(n), y, codes, dx, n)
    assert bool((dx[n:] == 7).all())
    check_gradient(one, x, y[:n], torch.ones(n), dx[:n])


@each_inverse({"hardswish_inverted2"})
def test_through_autograd_and_the_compiler(one: Inverse) -> None:
    torch._dynamo.reset()
    dy = torch.randn(300, 50)
    for function in (one.function, torch.compile(one.function, fullgraph=True, backend="aot_eager")):
        x = torch.randn(50, 300).t().requires_grad_()
        y = function(x)
        (dx,) = torch.autograd.grad(y, x, dy)
        torch.testing.assert_close(y, one.baseline(x), rtol=2e-6, atol=1e-6)
        check_gradient(one, x, y, dy, dx)


def bumpy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.sin(x) ** 2


@pytest.mark.parametrize(
    ("domain", "bits", "variables"),
    [
        # one radical on both sides of its anchor and one on one side, no codes
        ((-1, 2), 0, 1),
        # four codes, three variables
        pytest.param((-3, 3), 2, 3, marks=pytest.mark.full),
    ],
)
def test_cubic_radicals(domain: tuple[float, float], bits: int, variables: int) -> None:
    one, baseline, (low, high) = made("x + sin(x)**2", domain), bumpy, domain
    assert one.bits == bits
    approximants = one.fit["approximants"]["float32"]
    assert len({str(approximant["radicals"]) for approximant in approximants}) == variables
    assert {radical["order"] for approximant in approximants for radical in approximant["radicals"]} == {3}
    for dtype in (torch.float32, *HALVES):
        x = torch.cat([torch.linspace(low, high, 2 * TILE + 77), torch.tensor([float("nan")])])
        check(one, x.to(dtype), baseline=baseline)
        check(one, x, dtype, baseline=baseline)
    x = torch.linspace(low, high, 3000).view(50, 60).t().requires_grad_()
    dy = torch.randn(60, 50)
    torch._dynamo.reset()
    for function in (one.function, torch.compile(one.function, fullgraph=True, backend="aot_eager")):
        y = function(x)
        (dx,) = torch.autograd.grad(y, x, dy)
        torch.testing.assert_close(y, baseline(x), rtol=2e-6, atol=1e-6)
        check_gradient(one, x, y, dy, dx)
    kernel, buffer = one.module.__dict__, torch.full((2 * TILE,), 7.0)
    codes = forward_op(x.detach().reshape(-1), torch.float32, one.key)[1]
    x, y = x.detach().reshape(-1), y.detach().reshape(-1)
    kernel[f"{one.name}_forward"][(1,)](x, buffer, *([codes] if one.bits else []), 3000)
    assert bool((buffer[3000:] == 7).all())
    torch.testing.assert_close(buffer[:3000], y)
    kernel[f"{one.name}_backward"][(1,)](dy.reshape(-1), y, *([codes] if one.bits else []), buffer, 3000)
    assert bool((buffer[3000:] == 7).all())
    check_gradient(one, x, y, dy.reshape(-1), buffer[:3000])
