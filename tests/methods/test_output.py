"""Activations that save their output: the closed forms, a user's own, the record, the errors of gradients.

Every oracle is independent: formulas in mpmath and closed forms written in `outputs`, PyTorch's own autograd.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fitact.codegen.generate import render
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.catalog import CATALOG
from fitact.fitter.methods import output
from fitact.fitter.methods.table import again
from fitact.fitter.records.reading import from_json
from tests.support.curves import CURVES
from tests.support.generated import EACH_DTYPE, HALVES, patterns, run, same
from tests.support.outputs import CLOSED, LINEAR, Output, each_output, outputs
from tests.support.reals import MP, real
from tests.support.refusals import refused

UNIT = 2.0**-24  # the rounding of float32


def rounding(dtype: torch.dtype) -> float:
    """Half a unit in the last place, relative."""
    return torch.finfo(dtype).eps / 2


# ------------------------------------------------------------------------------------------------ the closed forms


def compare(value: Callable, derivative: Callable, points: list[float], tolerance: str = "1e-15") -> None:
    """Compare derivative(f(x)) with f′(x), by differences."""
    for point in points:
        x = MP.mpf(point)
        true = MP.diff(value, x)
        assert abs(derivative(value(x)) - true) <= MP.mpf(tolerance) * max(abs(true), 1), point


def sample(corners: tuple[float, ...] = ()) -> list[float]:
    points = np.random.default_rng(0).uniform(-30.0, 30.0, 40)
    near = [c + d for c in corners for d in (-0.7, -0.3, -1e-3, -1e-9, 1e-9, 1e-3, 0.3, 0.7)]
    return [*points.tolist(), *near]


def test_what_is_shipped() -> None:
    assert {one.plain for one in outputs()} == set(CLOSED)
    more = {"hardsigmoid", "identity", "logsigmoid"}  # where others save as much
    assert {name for name, entry in CATALOG.items() if entry.output} == set(CLOSED) | more
    assert all(one.name == f"{one.plain}_output" for one in outputs())


@each_output()
def test_shipped_derivative(one: Output) -> None:
    """The fit's text, the closed form written here, and f′ by differences are the same."""
    value, closed, corners = CLOSED[one.plain]
    for text in (one.fit["derivative"], closed):
        compare(real(value), real(text, "y"), sample(corners))


# f, its derivative in y, and the corners of f
STATED = [
    ("hardsigmoid", None, (-3.0, 3.0)),
    ("logsigmoid", None, ()),
    ("identity", None, ()),
    ("asinh(x)", "1/cosh(y)", ()),
    ("sinh(x)", "sqrt(1 + y**2)", ()),
    ("atan(x)", "cos(y)**2", ()),
    ("1.7159*tanh(2*x/3)", "2/3*(1.7159 - y**2/1.7159)", ()),
    ("log(1+exp(2*x))/2", "1 - exp(-2*y)", ()),
    ("x/sqrt(1+x**2)", "(1 - y**2)**1.5", ()),
    ("where(x<0,0.1*x-1,2*x+3)", "where(y > 0, 2, 0.1)", (0.0,)),
    ("softshrink(x)", "where(y > 0, 1, where(y < 0, 1, 0))", (-0.5, 0.5)),
    ("relu(x - 1)**3", "3*relu(y)**(2/3)", (1.0,)),
]


@pytest.mark.parametrize(("text", "derivative", "corners"), STATED, ids=[text for text, *_ in STATED])
def test_stated(text: str, derivative: str | None, corners: tuple[float, ...]) -> None:
    fit = output.fit(Activation.of(text), "own", derivative)
    names = {"hardsigmoid", "logsigmoid"}
    value = {"identity": "x"} | {name: f"{name}(x)" for name in names}
    compare(real(value.get(text, text)), real(fit.derivative, "y"), sample(corners))
    read = from_json(fit.to_json())
    assert read == fit and render(read) == render(fit)
    assert again(read).to_json() == fit.to_json()


REFUSED = [
    ("gelu", None, "no closed form of its derivative in the output is known; state one"),
    ("asinh(x)", None, "no closed form of its derivative in the output is known; state one"),
    ("asinh(x)", "1/cosh(y) + 1e-9", "its derivative is not that function of the output: at x = "),
    ("silu", "y*(1 - y)", "its derivative is not that function of the output"),
    ("x**2", "2*sqrt(y)", "its derivative is not that function of the output: at x = -"),
    ("asinh(x)", "1/cosh(x)", "unknown name 'x'"),
    ("asinh(x)", "1/cosh(y", "not a formula"),
    ("asinh(x)", "1e39*y", "1e+39, which float32 cannot hold"),
    ("exp(-exp(-x))", "-y*log(y)", "gives nan"),
    ("1e39*tanh(x)", "1 - y**2", "constant 1e+39"),
]


@pytest.mark.parametrize(("text", "derivative", "reason"), REFUSED, ids=[f"{t}: {d}" for t, d, _ in REFUSED])
def test_refused(text: str, derivative: str | None, reason: str) -> None:
    assert reason in refused(lambda: output.fit(Activation.of(text), "own", derivative))


@pytest.mark.parametrize("slope", [-0.1, 0.2])
def test_the_closed_form_holds_for_the_parameters_or_is_refused(slope: float) -> None:
    activation = Activation.of("leaky_relu", {"negative_slope": slope})
    if slope < 0:
        assert "not that function of the output" in refused(output.fit, activation, "own")
    else:
        fit = from_json(output.fit(activation, "own").to_json())
        assert (fit.activation.parameters, fit.derivative) == ({"negative_slope": 0.2}, "where(y > 0, 1, 1/5)")


# ---------------------------------------------------------------------------------------------------- its errors


# f and f′ in float64, stable over the whole range
STABLE: dict[str, tuple[Callable, Callable]] = {
    **{name: (CURVES[name].value, CURVES[name].derivative) for name in CLOSED if name in CURVES},
    "exp": (np.exp, np.exp),
    "hardtanh": (lambda x: np.clip(x, -1, 1), lambda x: (np.abs(x) < 1).astype(float)),
    "leaky_relu": (lambda x: np.where(x > 0, x, 0.01 * x), lambda x: np.where(x > 0, 1, 0.01)),
    "relu2": (lambda x: np.maximum(x, 0) ** 2, lambda x: 2 * np.maximum(x, 0)),
    "relu6": (lambda x: np.clip(x, 0, 6), lambda x: ((x > 0) & (x < 6)).astype(float)),
    "squareplus": (
        lambda x: np.where(x > 0, (x + np.hypot(x, 2)) / 2, 2 / (np.hypot(x, 2) - x)),
        CURVES["squareplus"].derivative,
    ),
}


def measured(one: Output, x: np.ndarray, dtype: torch.dtype) -> float:
    """Return the largest error that the rounding of y makes at the points."""
    value, derivative = STABLE[one.plain]
    x = x[np.isfinite(x) & ~np.isin(x, one.corners)].astype(np.float64)
    with np.errstate(all="ignore"):
        true = derivative(x)
        y = torch.from_numpy(value(x)).to(dtype).double().numpy()
        found = one.derivative(torch.from_numpy(y)).numpy().astype(np.float32)
        valid = np.isfinite(y) & np.isfinite(true)
        error = np.abs(found[valid] - true[valid]) / np.maximum(1, np.abs(true[valid]))
    return float(error.max())


@each_output()
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_stated_error_of_half_precision(one: Output, dtype: torch.dtype) -> None:
    """Over every finite value, up to the roundings of float32 in the formula, which are stated with it."""
    x = patterns(dtype).double().numpy()
    assert one.error(dtype) == pytest.approx(measured(one, x, dtype), rel=6e-4, abs=1e-9)


@each_output()
def test_stated_error_of_float32(one: Output) -> None:
    """Of another sample, up to a tenth, as both are maxima of many roundings, and two roundings in the formula."""
    chance = np.random.default_rng(1)
    x = np.concatenate([chance.uniform(-20, 20, 300_000), chance.uniform(-1, 1, 100_000)]).astype(np.float32)
    found = measured(one, x, torch.float32)
    assert 0.9 * found <= one.error(torch.float32) <= 1.1 * found + 2 * 2.0**-24


# --------------------------------------------------------------------------------------------- values, gradients


@each_output()
@EACH_DTYPE
def test_gradient_is_pytorch_s_up_to_the_stated_error(one: Output, dtype: torch.dtype) -> None:
    """PyTorch's own gradient is taken in float64, at the same x."""
    x = one.numbers(dtype)
    y, dx = run(one.function, x)
    true = one.baseline_gradient(x.double(), torch.ones(x.shape, dtype=torch.float64))
    known = x.isfinite() & y.isfinite() & true.to(dtype).isfinite()
    if one.plain not in LINEAR:
        corner = torch.tensor(one.corners, dtype=torch.float64)
        known &= ~torch.isin(x.double(), corner)
    scale = true.abs().clamp(min=1)
    # PyTorch's softplus is x beyond 20, where the derivative is 1 − 2e-9
    unit = 2.0**-50 if dtype == torch.float64 and one.plain != "softplus" else 4 * UNIT
    # PyTorch's softsign rounds 1 + |x| to half precision too
    roundings = 3 if one.plain == "softsign" and dtype in HALVES else 1
    allowed = one.error(dtype) * roundings * 1.001 * scale + rounding(dtype) * dx.double().abs() + unit * scale
    assert bool(((dx.double() - true).abs() <= allowed)[known].all())


@pytest.mark.parametrize("name", LINEAR)
@EACH_DTYPE
def test_piecewise_linear_gradient_is_pytorch_s(name: str, dtype: torch.dtype) -> None:
    """Bit for bit, at the corners and next to them and at infinity too."""
    one = next(one for one in outputs() if one.plain == name)
    x = one.numbers(dtype)
    x = x[~x.isnan()]
    dy = torch.randn(x.shape).to(dtype)
    _, dx = run(one.function, x, dy)
    assert bool((dx == one.baseline_gradient(x, dy)).all())


SPECIAL = {
    "celu": (1.0, 0.0),
    "elu": (1.0, 0.0),
    "exp": (float("inf"), 0.0),
    "hardtanh": (0.0, 0.0),
    "leaky_relu": (1.0, 0.01),
    "relu": (1.0, 0.0),
    "relu2": (float("inf"), 0.0),
    "relu6": (0.0, 0.0),
    "selu": (1.0507009873554805, 0.0),
    "sigmoid": (0.0, 0.0),
    "softplus": (1.0, 0.0),
    "softsign": (float("nan"), float("nan")),  # ∞/∞, as in PyTorch
    "squareplus": (1.0, 0.0),
    "tanh": (0.0, 0.0),
}


@each_output()
@EACH_DTYPE
def test_infinity(one: Output, dtype: torch.dtype) -> None:
    x = torch.tensor([float("inf"), -float("inf")], dtype=dtype)
    y, dx = run(one.function, x)
    assert same(y, one.baseline(x))
    expected = torch.tensor(SPECIAL[one.plain], dtype=torch.float64)
    allowed = one.error(dtype) * 1.001 + (2**-50 if dtype == torch.float64 else 4 * UNIT) + rounding(dtype)
    torch.testing.assert_close(dx.double(), expected, rtol=allowed, atol=allowed, equal_nan=True)
