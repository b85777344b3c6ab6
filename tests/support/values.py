"""Formulas, the modules generated from them, and the error that a value may have beside float64.

For a unit roundoff u that is `roundings` · u · (|f| + |x f′|) + FLOOR, then one rounding. Where a root of f is
within NEAR, the larger sum at x ± NEAR counts, because only absolute accuracy is promised there.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import special

from fitact.fitter.analysis.activation import Activation
from fitact.fitter.analysis.float_check import problem
from fitact.fitter.catalog import CATALOG
from tests.conftest import INTERPRETED
from tests.support.generated import load, made_up, patterns
from tests.support.literature import LITERATURE
from tests.support.rows import full, listed
from tests.support.shared import shared

Array = NDArray[np.float64]

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24}
FLOOR = 1e-34  # PyTorch has no sigmoid below 1e-38, and what is lost there may be multiplied by x² = 8000
NEAR = 0.1
LIMIT = 1e38  # of |x| and |f|: beyond, twice a number overflows
ROUNDINGS = 24
PROMISED = 64  # by `check`, which also passes what is off by LOST
LOST = 2.0**-9

# What a user may write beside the literature: some of it floating point cannot evaluate, and then `check` says so.
WRITTEN = listed("""
x**2/(exp(x) + exp(-x))**3   x*exp(x)/(exp(x)**3 + 2)   x*exp(2*x)/(1 + exp(x))**4   exp(x)/(1 + exp(x))**2
exp(x)/(1 + exp(2*x) + x**2)   x*exp(-x)/(1 + exp(-3*x))   exp(-x)*x**3   exp(x)*exp(-x**2)   x**3*exp(-x**2)
x**2*exp(-abs(x))   (x**2 + x)*exp(-x**2/2)   x**3/(1 + x**2)   (x**2 - 1)/(x**2 + 1)   x**4/(1 + x**4)
sqrt(x**4 + 1)   x/(1 + x**2)   (1 + x**2)**0.25   x/(1 + x**4)**0.25   x*exp(-x**4)   cos(x**2)*exp(-x**2)
sin(x)/x   tanh(x)*exp(-x**2)*x**2   log(1 + x**2)   log(exp(x) + exp(2*x) + 1)   sqrt(1 + exp(x))
sqrt(1 + exp(2*x)) - exp(x)   sigmoid(x)**0.5   sigmoid(x)*(1 - sigmoid(x))   sigmoid(x) - sigmoid(x - 1)
sigmoid(x) - sigmoid(2*x)   tanh(x) - tanh(x/2)   erf(x) - erf(x - 1)   exp(-x)*(exp(x) - 1)   1 - exp(-x**2)
atan(x) - x   x - sin(x)   x - log(1 + exp(x))   asinh(x) - log(abs(x) + 1)   x*(sqrt(1 + x**2) - x)
x/(x + sqrt(1 + x**2))   x/(1 + abs(x))**2   x*abs(x)/(1 + x**2)   x**2*sigmoid(x)   x**2*sigmoid(-x**2)
where(x > 0, sqrt(x), -sqrt(-x))   log(1 + abs(x))*sign(x)   where(x > 0, log(x + 1), -log(1 - x))
exp(x)*erfc(x)   exp(x**2)*erfc(x)   softplus(x)**2   exp(sigmoid(x)) - 1   exp(exp(-x**2)) - 1   cosh(x) - 1
cosh(x) - sinh(x)   x*sinh(x)/cosh(x)**2   1/cosh(x)**3   x/cosh(x)   1/(cosh(x) + 1)   1/(x**2 + 1e-6)
x*sigmoid(100*x)   x*sigmoid(x**3)   x*tanh(1/(1 + x**2))   exp(-(x - 50)**2)   sin(50*x)/(1 + x**2)
relu(x)**3/(1 + relu(x)**2)   x*relu(x + 3)/(6 + abs(x))   x*exp(x)*exp(-2*abs(x))   x**2/(x**2 + exp(-x))
x*exp(-exp(-x))   exp(x - exp(x))   exp(-softplus(x))*x   log(2 + exp(x)) - log(1 + exp(x))
x*log(1 + exp(-abs(x)))   sqrt(x**2 + 1e-12)   (sigmoid(x) - 0.5)*x   x*2**(-abs(x))
(1 + x)**3/(1 + abs(x)**3)   x*tanh(log(1 + x**2))   tanh(x)/x   (exp(x) - 1)/x   x/(exp(x) - 1)
e**(2*x)/(e**(2*x) + e**x + 1)   1/(1 + exp(-x) + exp(x))   x/(1 + exp(-x)*(1 + x**2))
1/(1 + exp(-x))**2 - 1/(1 + exp(-2*x))   x*sigmoid(x)*sigmoid(-x)*exp(x)   1/(exp(x) + exp(-2*x))
x/(exp(3*x) + exp(-x) + 1)   x/(2 + exp(x) + exp(-x))   (exp(x) - exp(-x))/(exp(x) + exp(-x) + 2)
x*(exp(2*x) + 2*exp(x))/(exp(2*x) + 2*exp(x) + 2)
""")


@dataclass(frozen=True)
class Formula:
    """A formula; `roundings` are those that it may be off by, `lost` the relative error that is passed anyway."""

    name: str
    text: str
    roundings: int = ROUNDINGS
    lost: float = 0.0

    @cached_property
    def activation(self) -> Activation:
        return Activation.of(self.text)


CANCELS = {"tanhshrink": (PROMISED, LOST)}  # by design: PyTorch's own cancels as much
# The catalog's formulas as a user would write them: PyTorch's own function does not stand in for them.
FORMULAS = (
    *(Formula(*item) for item in LITERATURE.items()),
    *(
        Formula(name, entry.filled(entry.expression, {}), *CANCELS.get(name, ()))
        for name, entry in CATALOG.items()
    ),
    *(Formula(line, line, PROMISED, LOST) for line in WRITTEN),
)


# Parametrises `formula`; interpreted, where tests/interpreted checks each function, by fewer.
EACH = pytest.mark.parametrize(
    "formula",
    full(FORMULAS[::2], FORMULAS[::4])
    if INTERPRETED
    else full(FORMULAS, FORMULAS[: -len(WRITTEN)] + FORMULAS[-len(WRITTEN) :: 8]),
    ids=lambda formula: formula.name,
)


@shared
def reported(text: str) -> str | None:
    return problem(Activation.of(text))


@cache
def module(text: str) -> ModuleType:
    return load(made_up(text))


@cache
def points(dtype: torch.dtype) -> torch.Tensor:
    """Every number of a half-precision dtype; for float32 all of these and 70 000 more, up to LIMIT."""
    if dtype in (torch.bfloat16, torch.float16):
        x = patterns(dtype)
        return x[x.isfinite() & (x.float().abs() <= LIMIT)]
    far = torch.from_numpy(np.geomspace(1e-30, LIMIT, 20_000).astype(np.float32))
    tails = torch.from_numpy(np.geomspace(20, 400, 5_000).astype(np.float32))
    halves = [points(torch.bfloat16).float(), points(torch.float16).float()]
    return torch.cat([*halves, torch.linspace(-30, 30, 20_000), far, -far, tails, -tails]).unique()


def _sum(activation: Activation, at: Array, value: Array) -> Array:
    """|f| + |x f′|, without the latter where float64 has none."""
    with np.errstate(all="ignore"):
        condition = np.abs(at * activation.derivative(at))
        return np.abs(value) + np.where(np.isfinite(condition), condition, 0.0)


def bounds(formula: Formula, at: Array, dtype: torch.dtype = torch.float32) -> tuple[Array, Array]:
    """Return f, and the error that it may have in the dtype's arithmetic."""
    activation = formula.activation
    unit = UNIT.get(dtype, UNIT[torch.float32])
    with np.errstate(all="ignore"):
        middle, left, right = (activation.value(at + d) for d in (0, -NEAR, NEAR))
        near = np.sign(left) * np.sign(right) < 0
        near |= np.abs(middle) < 0.1 * np.minimum(np.abs(left), np.abs(right))
        scale = _sum(activation, at, middle)
        sides = ((-NEAR, left), (NEAR, right))
        around = np.maximum(*(_sum(activation, at[near] + d, value[near]) for d, value in sides))
        scale[near] = np.maximum(scale[near], around)
        result = np.maximum(formula.roundings * unit * scale, formula.lost * np.abs(middle))
    return middle, np.where(np.isfinite(result), result, 0.0) + (FLOOR if unit > 1e-10 else 1e-300)


def check(formula: Formula, actual: torch.Tensor, x: torch.Tensor, limit: float = LIMIT, known=None) -> None:
    """Compare values with f; `known` are its bounds at these points, if they are."""
    assert actual.dtype == x.dtype and actual.shape == x.shape
    at = x.double().numpy()
    true, error = known or bounds(formula, at, x.dtype)
    error = np.where(np.isfinite(true), error, 0.0)
    low, high = (torch.from_numpy(true + d).to(x.dtype).double().numpy() for d in (-error, error))
    result = actual.double().numpy()
    wrong = ~((result >= low) & (result <= high)) & (np.abs(true) <= limit)
    lines = [f"at {at[i]!r}: {result[i]!r}, not {true[i]!r} ± {error[i]:.1e}" for i in np.flatnonzero(wrong)]
    assert not lines, "\n".join([f"{formula.text}: wrong at {len(lines)} points", *lines[:4], *lines[-4:]])


# In float64, which is precise enough for float32: fast.
FLOAT64: dict[str, Any] = {
    **{name: getattr(np, name) for name in ("expm1", "log1p", "tanh", "sinh", "cosh", "tan")},
    **dict.fromkeys(("exponential", "exp_full", "exp_half"), np.exp),
    "softplus": lambda u: np.logaddexp(u, 0),
    "sech2": lambda u: np.cosh(u) ** -2.0,
    "tsech2": lambda u: u * np.cosh(u) ** -2.0,
    "logcosh": lambda u: np.where(
        np.abs(u) < 1, np.log1p(2 * np.sinh(u / 2) ** 2), np.logaddexp(u, -u) - np.log(2)
    ),
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "erfc": special.erfc,
    "ndtr": special.ndtr,
    "sigmoid": special.expit,
    "tanh_softplus": lambda u: np.tanh(np.logaddexp(u, 0)),
    "hypot1": lambda u: np.hypot(u, 1),
    "isru": lambda u: u / np.hypot(u, 1),
    "squareplus": lambda u: np.where(u > 0, (u + np.hypot(u, 2)) / 2, 2 / (np.hypot(u, 2) - u)),
    "softsign": lambda u: u / (1 + np.abs(u)),
}
for _name in ("expm1", "ndtr", "sech2", "sigmoid", "softplus", "tanh", "tanh_softplus"):
    FLOAT64[f"{_name}_half"] = FLOAT64[_name]
# Where a function is compared, if not at every float32.
DOMAIN: dict[str, tuple[float, float]] = {
    "log1p": (-1 + 2**-24, np.inf),
    "tan": (-1e4, 1e4),
    "exponential": (-np.inf, 88.3),
}


def function_points(name: str, kind: type = np.float32) -> Array:
    """Float32 (or float64) numbers over the whole range, dense where functions bend."""
    far, middle = np.geomspace(1e-38, 3.4e38, 40_000), np.geomspace(1e-3, 200, 40_000)
    line = np.concatenate([[0.0], far, -far, middle, -middle, np.linspace(-12, 12, 40_001)])
    line = np.unique(line.astype(kind)).astype(np.float64)
    low, high = DOMAIN.get(name, (-np.inf, np.inf))
    return line[(line >= low) & (line <= high)]


def worst(actual: Array, true: Array, kind: type = np.float32, slack: Array | float = 0.0) -> tuple[float, int]:
    """Return the largest error in ulp, beyond `slack` and the smallest normal number, and where it is."""
    info = np.finfo(kind)
    with np.errstate(all="ignore"):
        ulp = np.spacing(np.maximum(np.abs(true), info.tiny).astype(kind)).astype(np.float64)
        error = np.abs(actual - true) - float(info.tiny)
        error = np.maximum(np.where(np.isnan(error), np.inf, error), 0.0) / ulp - slack
        same = (actual == true) | (np.isinf(actual) & (np.abs(true) > float(info.max)) & (actual * true > 0))
        error = np.where(same, 0.0, error)
    i = int(np.argmax(error))
    return float(error[i]), i
