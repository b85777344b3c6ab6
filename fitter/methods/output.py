"""The method `output`: f′ as a function of the output y = f(x), so that only y is saved, and no fit is needed.

The next layer saves y anyway, so nothing is saved in addition. The catalog has the closed forms, most from
Inverted (Novikov and Oseledets, 2024); for any other activation a user may state one. Either is verified in
high precision before it is used.
"""

from __future__ import annotations

import numpy as np

from fitact.base import UsageError, quote
from fitact.fitter.analysis import REALS, Activation, float_check
from fitact.fitter.catalog import CATALOG
from fitact.fitter.expr import Expr, beyond_singles, parse, stable, text_of, value
from fitact.fitter.numerics import DTYPES, halves, in_single, stored
from fitact.fitter.records import OutputFit

METHOD = "output"
LARGEST = 3e38  # of a derivative that float32 holds
REACH = 50.0  # the verification samples x evenly from -REACH to REACH, and some beyond
AGREEMENT = 1e-15  # between the formula and f', relative to the larger of f' and 1: a constant may be rounded
# x in float32 for the stated error: dense round 0 and out to where every activation has met its asymptote
SINGLES = np.concatenate([np.linspace(-20.0, 20.0, 200_001), np.geomspace(1e-30, 1e4, 4001)]).astype(np.float32)


def fit(activation: Activation, name: str, derivative: str | None = None) -> OutputFit:
    """Verify f′ as a function of y, and state the errors from rounding y.

    Args:
        activation: f.
        name: of the fit.
        derivative: f′ as an expression in `y`; by default the closed form of the catalog.

    Returns:
        The fit, with its errors by storage dtype.

    Raises:
        UsageError: the catalog has no such form, or the formula is not f′; the message says where they differ.

    Warns:
        FitWarning: floating point fails on the formula, see `float_check.problem`.

    """
    if derivative is None:
        entry = CATALOG.get(activation.name or "")
        if entry is None or entry.output is None:
            raise UsageError(
                f"{activation}: no closed form of its derivative in the output is known; state one, as with "
                '--derivative "1 - y**2"'
            )
        derivative = entry.filled(entry.output, activation.parameters)
    typed = parse(derivative, what="derivative", variable="y")
    if (number := beyond_singles(typed)) is not None:
        raise UsageError(f"{activation}: its derivative in the output has {number}, which float32 cannot hold")
    text, formula = text_of(typed, "y"), stable(typed)
    _verify(activation, formula, text)
    float_check.warn(activation)
    error = errors(activation, formula)
    return OutputFit(name=name, method=METHOD, activation=activation, derivative=text, error=error)


def _verify(activation: Activation, formula: Expr, text: str) -> None:
    """Compare the formula with f′ in high precision, over the whole range and beside every breakpoint."""
    corners = activation.switch_points(-REALS, REALS)
    beyond = np.geomspace(REACH, 1e30, 60)
    beside = [corners + d for d in (-1e-3, -1e-6, 1e-6, 1e-3)]
    points = np.concatenate([np.linspace(-REACH, REACH, 101) + 0.0137, beyond, -beyond, *beside])
    points = points[np.min(np.abs(points[:, None] - corners), axis=1, initial=np.inf) > 1e-9]
    compared = 0
    for point in points.tolist():
        true, y = value(activation.derivative_formula, point), value(activation.formula, point)
        if y.is_finite() and not true.is_finite():
            raise UsageError(f"{activation}: its derivative is not finite at x = {point:.6g}, where its value is")
        if not y.is_finite():
            continue
        stated = value(formula, y)
        compared += 1
        if not abs(stated - true) <= AGREEMENT * max(1, abs(true)):
            raise UsageError(
                f"{activation}: its derivative is not that function of the output: at x = {point:.6g} it is "
                f"{float(true):.6g} where the formula {quote(text)} gives {float(stated):.6g}"
            )
    if not compared:
        raise UsageError(f"{activation}: its derivative is nowhere finite from {-REACH:g} to {REACH:g}")


def errors(activation: Activation, formula: Expr) -> dict[str, float]:
    """Return the error from rounding y to each storage dtype, for x of the same dtype, to four significant digits.

    It is the maximum of |g(y) − f′(x)| / max(1, |f′(x)|) with g in float32, over all finite x in half precision
    and over a dense sample in float32. Breakpoints, and y beyond the dtype's range, are left out. Where g is not
    finite, or nothing is, a UsageError says so.
    """
    singles = np.concatenate([SINGLES, -SINGLES]).astype(np.float64)
    corners = activation.switch_points(-1e6, 1e6)
    stated = {}
    for dtype in DTYPES:
        at = singles if dtype == "float32" else halves(dtype)
        at = at[~np.isin(at, corners)]
        true, y = activation.derivative(at), stored(activation, at, dtype)
        computed, valid = in_single(formula, y), (np.abs(true) < LARGEST) & np.isfinite(y)
        if not valid.any():
            raise UsageError(f"{activation}: {dtype} holds neither its value nor its derivative anywhere")
        if (lost := valid & ~np.isfinite(computed)).any():
            raise UsageError(
                f"{activation}: its derivative as a function of y is {computed[lost][0]:g} in place of "
                f"{true[lost][0]:g} where y rounds to {y[lost][0]:g} in {dtype}"
            )
        error = np.abs(computed[valid] - true[valid]) / np.maximum(1.0, np.abs(true[valid]))
        stated[dtype] = float(f"{error.max():.4g}")
    return stated
