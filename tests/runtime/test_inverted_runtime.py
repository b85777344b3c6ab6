"""What only inverted activations promise, on the PyTorch path: errors of gradients, formulas of users."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import special

from fitact.fitter.methods.inverted import TOLERANCE
from fitact.runtime.kernels import registry
from tests.support.curves import CURVES
from tests.support.generated import EACH_DTYPE, EACH_HALF, HALVES, backward_op, forward_op, half_ulp, patterns, run
from tests.support.inverses import SOME, Inverse, chain, each_inverse, inverses, made, unpacked
from tests.support.rows import full

SLACK = 5e-6  # stated errors include the roundings of float32, which may fall otherwise here


@each_inverse()
@EACH_HALF
def test_gradient_is_the_true_one_up_to_the_stated_error(case: Inverse, dtype: torch.dtype) -> None:
    x = patterns(dtype)
    y, dx = run(case.function, x)
    true = case.true(x)
    known = x.isfinite() & y.isfinite()
    assert bool(true[known].isfinite().all())
    allowed = case.error(dtype) * true.abs().clamp(min=1) + SLACK + half_ulp(dx.double(), dtype)
    assert bool(((dx.double() - true).abs() <= allowed)[known].all())


# How far off f′ may be within 0.01 of the minimum, of the outputs that PyTorch computes in float32.
NEARBY = {"gelu": 3e-4, "gelu_tanh": 3e-4, "hardswish": 2e-4, "mish": 3e-4, "quick_gelu": 2e-4}
NEARBY |= {"serf": 4e-4, "silu": 2e-4}
FITTED = [inverse for inverse in inverses() if inverse.plain in NEARBY and not inverse.name.endswith("_published")]


@pytest.mark.parametrize("case", FITTED, ids=lambda each: each.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_float32_and_float64(case: Inverse, dtype: torch.dtype) -> None:
    x = case.numbers(dtype)
    x = x[x.isfinite()]
    y, dx = run(case.function, x)
    assert y.dtype == dx.dtype == dtype
    error = (dx.double() - case.true(x)).abs()
    if dtype == torch.float64:
        # between hardswish's upper corner and the border, the float32 number below it
        known = (x >= 3) | (x <= np.nextafter(np.float32(3), np.float32(0))) | (case.plain != "hardswish")
        x, y, error = x[known], y[known], error[known]
    near = (x.double() - case.minimum).abs() <= 0.01
    assert int(near.sum()) > 2000
    assert bool(error.isfinite().all())
    assert float(error[~near].max()) <= 1e-4
    lost = CURVES[case.plain].lost(x.double().numpy(), y.double().numpy())
    assert float(error[near].max()) <= min(NEARBY[case.plain], 1e-4 + lost)


@EACH_DTYPE
def test_corners_have_pytorch_s_gradient(dtype: torch.dtype) -> None:
    """At both corners of hardswish, where no approximant has it."""
    item = next(each for each in inverses() if each.name == "hardswish_inverted2")
    x = torch.tensor([-3.0, 3.0], dtype=dtype)
    assert run(item.function, x)[1].tolist() == item.baseline_gradient(x, torch.ones_like(x)).tolist() == [0, 1]


@each_inverse()
@EACH_DTYPE
def test_infinity_and_nan(case: Inverse, dtype: torch.dtype) -> None:
    large = torch.finfo(dtype).max
    x = torch.tensor([np.inf, -np.inf, np.nan, large, -large, 0.0, -0.0], dtype=dtype)
    y, dx = run(case.function, x)
    baseline = case.baseline_gradient(x, torch.ones_like(x))
    assert torch.equal(dx.isnan(), y.isnan())
    assert dx[2].isnan()
    # only of hardswish, whose gradient PyTorch takes from the input, is there one where y is NaN
    assert case.plain == "hardswish" or bool(baseline.isnan()[dx.isnan()].all())
    # beyond the interval that t is clamped to, f′ is what it is at its end
    expected = torch.tensor([1, 0, np.nan, 1, 0, *[float(case.true(torch.zeros(())))] * 2], dtype=torch.float64)
    allowed = case.error(dtype) + SLACK + half_ulp(torch.ones(7, dtype=torch.float64), dtype)
    assert bool(((dx.double() - expected).abs() <= allowed)[~dx.isnan()].all())
    assert torch.equal(dx[5], dx[6])


@each_inverse(SOME | {"gelu_inverted2"})
@EACH_HALF
def test_small_and_large_tensors_agree(case: Inverse, dtype: torch.dtype) -> None:
    """What is looked up for half precision is what is computed, in whatever order they come."""
    x, dy = torch.randn(20_000).to(dtype), torch.randn(20_000)
    for order in ((50, 20_000, 50), (20_000, 50)):
        # under a key of its own nothing is known yet
        copied = dataclasses.replace(registry.find(case.key), key=f"{case.key}-{order}")
        registry.register(copied)
        results = []
        for n in order:
            y, codes = forward_op(x[:n], dtype, copied.key)
            results.append(backward_op(dy[:n], y, codes, torch.float32, copied.key)[0])
            assert torch.equal(unpacked(codes, case.bits)[:n], case.code(x[:n], dtype))
        for dx in results:
            torch.testing.assert_close(dx[:50], results[0][:50], rtol=1e-6, atol=1e-6)


def bumps(x: np.ndarray) -> np.ndarray:
    return 1 + np.sin(2 * x)


# text, domain, tolerance of the fit, pieces, f′, and f in PyTorch
OWN: list[tuple[str, tuple[float, float] | None, float, int, Callable, Callable]] = [
    ("softplus(x)", None, TOLERANCE, 1, special.expit, lambda x: F.softplus(x, threshold=80)),
    (
        "softplus(x) - 0.3*x",
        None,
        TOLERANCE,
        2,
        lambda x: special.expit(x) - 0.3,
        lambda x: F.softplus(x) - 0.3 * x,
    ),
    ("x + sin(x)**2", (-1, 2), TOLERANCE, 1, bumps, lambda x: x + x.sin() ** 2),
    # the ones above in the ordinary run
    ("x**3", (-1e12, 1e12), 0.01, 1, lambda x: 3 * x**2, lambda x: x**3),
    ("x*cos(x)", (-6, 6), 0.01, 7, lambda x: np.cos(x) - x * np.sin(x), lambda x: x * x.cos()),
    ("exp(-x**2)", None, 0.01, 2, lambda x: -2 * x * np.exp(-x * x), lambda x: (-x * x).exp()),
    ("x*sqrt(x)", (0, 4), 0.01, 1, lambda x: 1.5 * np.sqrt(x), lambda x: x * x.sqrt()),
]


@pytest.mark.parametrize(("text", "domain", "tol", "pieces", "derivative", "baseline"), full(OWN, OWN[:3]))
def test_formulas_from_text_to_gradient(text, domain, tol, pieces, derivative, baseline) -> None:
    each = made(text, domain, tol)
    assert each.bits == (pieces - 1).bit_length()
    low, high = domain or (-1e30, 1e30)
    for dtype in (torch.float32, *HALVES):
        x = patterns(dtype)[patterns(dtype).isfinite()] if dtype in HALVES else sample(each, low, high)
        x = x[(x.double() >= low) & (x.double() <= high)]
        y, dx = run(each.function, x)
        eps = torch.finfo(dtype).eps * (4 if dtype == torch.float32 else 1)
        known = y.isfinite()
        torch.testing.assert_close(y[known].double(), baseline(x[known].double()), rtol=eps, atol=4e-6)
        assert bool(((1 + 2 * eps) * baseline(x.double())).to(dtype)[~known].isinf().all())
        true = torch.from_numpy(derivative(x.double().numpy()))
        scale = true.abs().clamp(min=1)
        # of half precision all inputs were judged, of float32 a sample
        stated = each.error(dtype) * (1.1 if dtype == torch.float32 else 1)
        allowed = (stated + 1e-6) * scale + half_ulp(dx.double(), dtype)
        assert bool(((dx.double() - true).abs() <= allowed)[known].all()), dtype
        dy = torch.randn(x.shape).to(dtype)
        each.check_gradient(x, y, dy, run(each.function, x, dy)[1])


def sample(each: Inverse, low: float, high: float) -> torch.Tensor:
    """float32 numbers in a domain, dense at its ends, where f′ is 0 or jumps, and about 0."""
    tails = np.geomspace(1e-30, 1e30, 2000)
    parts = [np.linspace(max(low, -30), min(high, 30), 50_001), tails, -tails]
    for border in (*each.fit["borders"]["float32"], low, high):
        if abs(border) < 1e30:
            parts += [chain(border, 100, np.float32), border + np.linspace(-1e-2, 1e-2, 10_001)]
    return torch.from_numpy(np.concatenate([np.asarray(part, dtype=np.float32) for part in parts]))
