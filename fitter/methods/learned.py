"""Formulas with learned numbers: x is kept, or a code of it, and all is computed again with the numbers.

A table of f would go stale as the numbers move. So the code is one of the identity: what is looked up is a point
in place of x, at which f and its derivatives are computed.
"""

from __future__ import annotations

import numpy as np

from fitact.fitter.analysis import float_check
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.analysis.learned import Learned
from fitact.fitter.numerics.weight import Weight
from fitact.fitter.records.coded import DEVIATIONS, CodedFit
from fitact.fitter.records.learned import CodedLearnedFit, LearnedFit

from . import coded

REACH, COUNT = 12.0, 200_001  # of the normal density of the stated errors, in deviations, and its points


def fit(formula: Learned, name: str) -> LearnedFit:
    """Return the record of a formula that keeps x.

    Warns:
        FitWarning: floating point fails on the formula at the starts of its numbers, see `float_check.problem`.

    """
    _warn(formula)
    return LearnedFit(name=name, method="learned_rebuild", activation=formula, error={})


def fit_coded(
    formula: Learned,
    bits: int,
    name: str,
    *,
    domain: tuple[float, float] = coded.DOMAIN,
    weight: Weight | None = None,
    cells: int = coded.CELLS,
) -> CodedLearnedFit:
    """Fit a code of x, and state the errors of the formula at the points.

    Args:
        formula: the formula.
        bits: of a code, 3 to 8.
        name: the fit's name.
        domain: of x, see `coded.fit`.
        weight: of x, likewise.
        cells: likewise.

    Raises:
        UsageError: bits, domain or weight are out of range, see `coded.fit`.

    Warns:
        FitWarning: as `fit`.

    """
    code = coded.fit(Activation.of("identity"), bits, name, domain=domain, weight=weight, cells=cells)
    _warn(formula)
    return CodedLearnedFit(
        name=name, method="learned_coded", activation=formula, code=code, error=errors(formula, code)
    )


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


def _warn(formula: Learned) -> None:
    """Warn if floating point fails on a formula at its start."""
    if (start := formula.start()) is not None:
        float_check.warn(start)
