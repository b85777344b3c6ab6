"""Formulas with learned parameters: their derivatives, their records, and the names that numbers can have."""

import dataclasses

import numpy as np
import pytest

from fitact.fitter.analysis import Learned
from fitact.fitter.catalog import LEARNED
from tests.support.reals import MP, REAL

AT = np.array([-1e4, -30.0, -3.3, -0.4, -1e-3, 1e-3, 0.3, 2.2, 30.0, 1e4])
SIGMOID, SOFTPLUS, TANH, ERF, EXPM1 = (REAL[name] for name in ("sigmoid", "softplus", "tanh", "erf", "expm1"))
FORMULAS = {
    "dyt": lambda x, a, g, b: g * TANH(a * x) + b,
    "derf": lambda x, a, s, g, b: g * ERF(a * x + s) + b,
    "prelu": lambda x, w: x if x > 0 else w * x,
    "swish_beta": lambda x, b: x * SIGMOID(b * x),
    "xielu": lambda x, p, n: (
        SOFTPLUS(p) * x**2 + x / 2 if x > 0 else (SOFTPLUS(n) + 0.5) * (EXPM1(min(x, MP.mpf("-1e-6"))) - x) + x / 2
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_values_and_derivatives(name: str) -> None:
    formula = Learned.of(name, {})
    with MP.workdps(60):
        starts = [MP.mpf(repr(number.start)) for number in formula.numbers]
        formulas = [formula.formula, formula.derivative_formula, *formula.gradient_formulas]
        for k, ours in enumerate(formulas):
            order = tuple(int(i == k - 1) for i in range(len(starts) + 1))
            for x, value in zip(AT, formula.at_start(ours, AT), strict=True):
                at = (MP.mpf(float(x)), *starts)
                true = MP.diff(FORMULAS[name], at, order) if k else FORMULAS[name](*at)
                assert value == pytest.approx(float(true), rel=1e-12, abs=1e-30)


def test_a_quotient_of_exponentials_is_made_stable() -> None:
    formula = Learned.of("x/(1 + exp(-b*x))", {"b": (1.0, False)})
    swish = Learned.of("swish_beta", {})
    assert formula.formula == swish.formula.xreplace(dict(zip(swish.symbols, formula.symbols, strict=True)))
    for gradient_formula in (formula.derivative_formula, *formula.gradient_formulas):
        assert np.isfinite(formula.at_start(gradient_formula, np.array([-1e4, 1e4]))).all()


def test_the_catalog_is_of_formulas_that_are_finite() -> None:
    for name in LEARNED:
        formula, at = Learned.of(name, {}), np.linspace(-5, 5, 101)
        assert dataclasses.replace(formula, name=None).formula == formula.formula
        start, values = formula.start(), formula.at_start(formula.formula, at)
        assert start is not None
        np.testing.assert_allclose(start.value(at), values, rtol=1e-12, atol=1e-15)


def test_a_number_that_is_named_as_an_exponent() -> None:
    start = Learned.of("x*2.e3 + e3*x**2", {"e3": (0.5, False)}).start()
    assert start is not None and start.value(np.array([2.0])) == [4002.0]
