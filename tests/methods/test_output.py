"""Activations that save their output: the closed forms, a user's own, the record, the errors of gradients.

Every oracle is independent: formulas in mpmath and closed forms written in `outputs`, PyTorch's own autograd.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fitact.codegen.generate import render
from fitact.fitter.analysis import Activation
from fitact.fitter.catalog import CATALOG
from fitact.fitter.methods import again, output
from fitact.fitter.records import from_json
from tests.support.generated import EACH_HALF, patterns
from tests.support.outputs import CLOSED, Output, each_output, outputs
from tests.support.reals import MP, real
from tests.support.refusals import refused


def compare(value: Callable, derivative: Callable, corners: tuple[float, ...]) -> None:
    """Compare derivative(f(x)) with f′(x), by differences, beside corners too."""
    points = np.random.default_rng(0).uniform(-30.0, 30.0, 40).tolist()
    points += [c + d for c in corners for d in (-0.7, -0.3, -1e-3, -1e-9, 1e-9, 1e-3, 0.3, 0.7)]
    for x in map(MP.mpf, points):
        true = MP.diff(value, x)
        assert abs(derivative(value(x)) - true) <= MP.mpf("1e-15") * max(abs(true), 1), x


def test_what_is_shipped() -> None:
    assert {each.plain for each in outputs()} == set(CLOSED)
    more = {"hardsigmoid", "identity", "logsigmoid"}  # where others save as much
    assert {name for name, entry in CATALOG.items() if entry.output} == set(CLOSED) | more


# f, its derivative in y, and the corners of f
STATED = [
    ("hardsigmoid", None, (-3.0, 3.0)),
    ("logsigmoid", None, ()),
    ("identity", None, ()),
    ("asinh(x)", "1/cosh(y)", ()),
    ("1.7159*tanh(2*x/3)", "2/3*(1.7159 - y**2/1.7159)", ()),
    ("log(1+exp(2*x))/2", "1 - exp(-2*y)", ()),
    ("x/sqrt(1+x**2)", "(1 - y**2)**1.5", ()),
    ("where(x<0,0.1*x-1,2*x+3)", "where(y > 0, 2, 0.1)", (0.0,)),
    ("softshrink(x)", "where(y > 0, 1, where(y < 0, 1, 0))", (-0.5, 0.5)),
    ("relu(x - 1)**3", "3*relu(y)**(2/3)", (1.0,)),
]


@pytest.mark.parametrize(
    ("text", "derivative", "corners"),
    [*((name, None, corners) for name, (*_, corners) in CLOSED.items()), *STATED],
    ids=[*CLOSED, *(text for text, *_ in STATED)],
)
def test_stated(text: str, derivative: str | None, corners: tuple[float, ...]) -> None:
    """A user's, or the catalog's, and the closed form written in `outputs`, are the derivative by differences."""
    fit = output.fit(Activation.of(text), "own", derivative)
    names = {"identity": "x", "hardsigmoid": "hardsigmoid(x)", "logsigmoid": "logsigmoid(x)"}
    value, closed, _ = CLOSED.get(text, (names.get(text, text), fit.derivative, ()))
    for form in {fit.derivative, closed}:
        compare(real(value), real(form, "y"), corners)
    read = from_json(fit.to_json())
    assert read == fit and render(read) == render(fit)
    assert again(read).to_json() == fit.to_json()


REFUSED = [
    ("asinh(x)", None, "no closed form of its derivative in the output is known; state one"),
    ("asinh(x)", "1/cosh(y) + 1e-9", "its derivative is not that function of the output: at x = "),
    ("x**2", "2*sqrt(y)", "its derivative is not that function of the output: at x = -"),
    ("asinh(x)", "1/cosh(x)", "unknown name 'x'"),
    ("asinh(x)", "1e39*y", "1e+39, which float32 cannot hold"),
    ("exp(-exp(-x))", "-y*log(y)", "gives nan"),
]


@pytest.mark.parametrize(("text", "derivative", "reason"), REFUSED, ids=[f"{t}: {d}" for t, d, _ in REFUSED])
def test_refused(text: str, derivative: str | None, reason: str) -> None:
    assert reason in refused(lambda: output.fit(Activation.of(text), "own", derivative))


def test_the_closed_form_holds_for_the_parameters_or_is_refused() -> None:
    negative, positive = (Activation.of("leaky_relu", {"negative_slope": slope}) for slope in (-0.1, 0.2))
    assert "not that function of the output" in refused(output.fit, negative, "own")
    fit = from_json(output.fit(positive, "own").to_json())
    assert (fit.activation.parameters, fit.derivative) == ({"negative_slope": 0.2}, "where(y > 0, 1, 1/5)")


def measured(each: Output, x: np.ndarray, dtype: torch.dtype) -> float:
    x = torch.from_numpy(x[np.isfinite(x) & ~np.isin(x, each.corners)].astype(np.float64))
    true, y = each.baseline_gradient(x, torch.ones_like(x)), each.baseline(x).to(dtype).double()
    error = (each.derivative(y).float() - true).abs() / true.abs().clamp(min=1)
    return float(error[y.isfinite() & true.isfinite()].max())


@each_output()
@EACH_HALF
def test_stated_error_of_half_precision(case: Output, dtype: torch.dtype) -> None:
    """Over every finite value, up to the roundings of float32 in the formula, which are stated with it."""
    x = patterns(dtype).double().numpy()
    assert case.error(dtype) == pytest.approx(measured(case, x, dtype), rel=6e-4, abs=1e-9)


@each_output()
def test_stated_error_of_float32(case: Output) -> None:
    """Of another sample, up to a tenth, as both are maxima of many roundings, and two roundings in the formula."""
    chance = np.random.default_rng(1)
    x = np.concatenate([chance.uniform(-20, 20, 300_000), chance.uniform(-1, 1, 100_000)]).astype(np.float32)
    actual = measured(case, x, torch.float32)
    assert 0.9 * actual <= case.error(torch.float32) <= 1.1 * actual + 2 * 2.0**-24


@pytest.mark.parametrize("text", ["clamp(x, -60, 60)", "clamp(x, -1e6, 1e6)", "where(x < 1000, x, 2*x)"])
def test_formulas_that_fail_far_out_are_refused(text):
    assert "its derivative is not that function of the output" in refused(
        output.fit, Activation.of(text), "a", "1"
    )
