"""Rewriting: the same values, by many digits, in a form that float32 evaluates at least as well."""

import numpy as np
import pytest

from fitact.fitter.analysis import FLOAT32
from fitact.fitter.expr import parse, stable, value, x
from tests.support.rows import listed

POINTS = [-41.3, -7.7, -2.3, -0.61, -1e-3, 0.0137, 0.37, 1.9, 5.3, 12.1, 33.7]
WRITTEN = listed("""
log(1 + exp(x)) -> softplus(x)   1/(1 + exp(-x)) -> sigmoid(x)   exp(x)/(1 + exp(x)) -> sigmoid(x)
exp(x)/(1 + exp(x))**2 -> sigmoid(-x)*sigmoid(x)   x*(1 + erf(x/sqrt(2)))/2 -> x*erfc(-x/sqrt(2))/2
0.5*x*(1 + tanh(x)) -> x*sigmoid(2*x)   0.5*x + 0.5*x*tanh(x) -> x*sigmoid(2*x)
(exp(x) - exp(-x))/(exp(x) + exp(-x)) -> tanh(x)   (exp(2*x) - 1)/(exp(2*x) + 1) -> tanh(x)
2/(1 + exp(-2*x)) - 1 -> tanh(x)   1 - tanh(x)**2 -> sech2(x)   log(cosh(x)) -> logcosh(x)
(x + sqrt(x**2 + 4))/2 -> squareplus(x)   x/sqrt(1 + x**2) -> isru(x)   x/(1 + abs(x)) -> softsign(x)
1 - exp(-exp(x)) -> -expm1(-exp(x))   sigmoid(x) - 1 -> -sigmoid(-x)   x - log(1 + exp(x)) -> -softplus(-x)
(1 + exp(-(x - 30)**3))**-1 -> sigmoid((x - 30)**3)   exp(-(x - 50)**2)**2 -> exp(-2*(x - 50)**2)
1/(exp(2*x) + exp(x))**3 -> exp(-3*x)*sigmoid(-x)**3
""")
IDIOMS = dict(row.split(" -> ") for row in WRITTEN)
OTHERS = listed("""
sigmoid(10*x + 50) - sigmoid(10*x - 50)   sigmoid(10*x - 50) - sigmoid(10*x + 50)   x*log(2 - exp(-exp(x)))
sqrt(1 + x**2) - 1 + x   sqrt(1 + x**2) - x   x*(1 + x/sqrt(1 + x**2))/2   x/(x/2 + exp(-x/3))
exp((x - 1)/x**2)**2   (1 + exp(-1.5*x))**(-1/3)   cos(x) - 1   cosh(x) - 1   exp(x)*(e - 1)
""")


@pytest.mark.parametrize(("text", "better"), IDIOMS.items(), ids=IDIOMS)
def test_idiom(text: str, better: str) -> None:
    assert stable(parse(text)) == parse(better)


@pytest.mark.parametrize("text", [*IDIOMS, *OTHERS])
def test_the_values_stay_and_float32_is_no_worse(text: str) -> None:
    typed = parse(text)
    for formula, rewritten in ((typed, stable(typed)), (typed.diff(x), stable(stable(typed).diff(x)))):
        for point in POINTS:
            expected, actual = value(formula, point, 40), value(rewritten, point, 40)
            if expected.is_finite():
                assert abs(actual - expected) <= 1e-15 * abs(expected) + 1e-300, point
    # in float32, worse by 32 roundings at most, and better where the formula as typed is not finite
    at = np.array([*POINTS, -100.0, 100.0], dtype=np.float32)
    with np.errstate(all="ignore"):
        before = np.broadcast_to(FLOAT32.evaluate(typed, at), at.shape)
        after = np.broadcast_to(FLOAT32.evaluate(stable(typed), at), at.shape)
    for point, old, new in zip(at.tolist(), before.tolist(), after.tolist(), strict=True):
        true = float(value(typed, point, 20))
        if abs(true) < 3e38:
            worse = abs(new - true) - abs(old - true)
            assert np.isfinite(new) and (not np.isfinite(old) or worse <= 32 * 2.0**-24 * abs(true) + 1e-37), point
