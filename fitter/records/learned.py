"""The records of formulas with learned numbers: rebuilt exactly, or with a code in place of x."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fitact.errors import UsageError, quote
from fitact.fitter.analysis.learned import Learned

from .coded import DEVIATIONS, CodedFit
from .fit import Fit

REACH, COUNT = 12.0, 200_001  # of the normal density of the stated errors, in deviations, and its points


@dataclass(frozen=True, kw_only=True)
class LearnedFit(Fit):
    """A formula that keeps x for backward, from which all is computed again, exactly.

    Attributes:
        activation: the formula.
        error: empty.

    """

    METHODS = ("learned_rebuild",)
    ERRORS = ()

    activation: Learned


@dataclass(frozen=True, kw_only=True)
class CodedLearnedFit(Fit):
    """A formula that keeps a code of x, from which a point is looked up; all is computed again at the point.

    Attributes:
        activation: the formula.
        code: the code of x, and the table of points: a fit of the identity, of the same name as this fit.
        error: for each of `DEVIATIONS` σ, the relative root mean square error for x normal with deviation σ, the
            learned numbers at their starts: `value_σ` of f, `derivative_σ` of its derivative in x, and
            `learned_σ` of its derivatives in the learned numbers, of these the largest.

    """

    METHODS = ("learned_coded",)
    PARTS = ("code",)
    ERRORS = tuple(
        f"{what}_{deviation:g}" for what in ("derivative", "learned", "value") for deviation in DEVIATIONS
    )

    activation: Learned
    code: CodedFit

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.code.name != self.name:
            raise UsageError(f"code.name: expected {quote(self.name)}, as the fit's, got {quote(self.code.name)}")
        if self.code.activation.name != "identity":
            raise UsageError(f"code.activation: expected 'identity', got {quote(self.code.activation.expression)}")

    @property
    def bits(self) -> int:
        """Bits of a code of x."""
        return self.code.bits


def errors(formula: Learned, code: CodedFit) -> dict[str, float]:
    """Return the errors of a formula at the points of a code, each to four significant digits; see the record."""
    numbers = {f"learned {name}": one for name, one in zip(formula.names, formula.gradient_formulas, strict=True)}
    formulas = {"value": formula.formula, "derivative": formula.derivative_formula, **numbers}
    steps = np.linspace(-REACH, REACH, COUNT)
    density = np.exp(-(steps**2) / 2)
    found: dict[str, float] = {}
    for deviation in DEVIATIONS:
        at = steps * deviation
        points = np.asarray(code.values)[np.searchsorted(code.borders, at)]
        for what, one in formulas.items():
            exact = formula.at_start(one, at)
            missed = float(np.sum(density * (formula.at_start(one, points) - exact) ** 2))
            whole = float(np.sum(density * exact**2))
            key = f"{what.partition(' ')[0]}_{deviation:g}"
            found[key] = max(found.get(key, 0.0), float(np.sqrt(missed / whole)) if missed else 0.0)
    return {key: float(f"{value:.4g}") for key, value in found.items()}
