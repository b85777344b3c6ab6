"""Few-Bit: the step function nearest to f′.

Novikov et al., *Few-Bit Backward: Quantized Gradients of Activation Functions for Memory Footprint
Reduction*, arXiv 2202.00441. Over borders s and levels y, minimise (eq. 3)

    L(s, y) = ∫ (f′(x) − q(x))² w(x) dx,    q(x) = y_i on (s_i, s_{i+1}].

For given borders the best level is the weighted mean of f′ over its interval (eq. 4), so an interval costs
its spread about that mean, and the best borders on a grid follow from a dynamic programme (eq. 7, 8; the
paper's eq. 6 misses the denominator of the mean), see `partition`. The borders then move off the grid to the
nearby stationary point, where f′(s_i) is midway between the levels on its two sides (eq. 5).
"""

from __future__ import annotations

import warnings

import numpy as np

from fitact.base import FitWarning, UsageError, quote
from fitact.fitter.analysis import Activation, breaks, float_check, roots
from fitact.fitter.catalog import DOMAINS
from fitact.fitter.expr import Array, order
from fitact.fitter.numerics import Function, Moments, Weight, dp_borders, newton, step_errors
from fitact.fitter.records import StepFit, check_bits, check_domain

METHOD = "fewbit"
CELLS = 4000  # grid of the programme; its optimum is then refined, so this only has to find the right valley
DOMAIN = DOMAINS["fewbit"]
MAX_DOMAIN = 1e12  # in size: the cells of a grid beside 0 and beside breakpoints are then at most 7 wide
MAX_VALUE = 1e30  # of f, f′ and 1/w: float32 holds up to 3e38, and squares stay in float64
POINTS = 4001  # of the domain at which these sizes are checked
BEYOND = 100.0  # times the domain's width: how far outside it a fit is checked for a warning
JUMP = 2.0**-30  # relative: a smaller difference between two sides is no jump
MIN_WIDTH = 1e-4  # relative: a hundred float32 spacings between two of the 15 borders


def fit(
    activation: Activation,
    bits: int,
    name: str,
    *,
    domain: tuple[float, float] = DOMAIN,
    weight: Weight | None = None,
    cells: int = CELLS,
    seed: int = 0,
) -> StepFit:
    """Fit the best step function with 2^bits levels to f′.

    If f′, weight and domain are symmetric about 0, the fit is made on |x|, and one half-line gets all the levels.
    If the weight alone is not, such as one from data, the fit on x is made too, and the better one is returned.
    Borders and levels are rounded to float32, and the errors are those of the rounded numbers.

    Args:
        activation: what to fit.
        bits: 1 to 4.
        name: the fit's name, a Python identifier.
        domain: the interval [A, B] on which the error counts; the outer levels hold beyond it.
        weight: how much an error counts; uniform by default.
        cells: grid cells of the dynamic programme.
        seed: recorded; the programme is deterministic.

    Returns:
        The fit. Its `error["objective"]` is L.

    Raises:
        UsageError: bits, domain or weight are out of range, or f′ or w is not finite on the domain.

    Warns:
        FitWarning: beyond the domain f′ leaves the outer levels; or f′ is a step function itself, with more steps
            than the levels can hold; or floating point fails on the formula, see `float_check.problem`.

    """
    check_bits(bits, StepFit.BITS)
    low, high = map(float, domain)
    weight = weight or Weight()
    _check_domain(weight, low, high)
    check_finite(activation, low, high)
    even = -low == high and activation.derivative_parity(high) == "even"
    fits = []
    for on_magnitude in [even] if not even or _is_even(weight, high) else [True, False]:
        borders, levels = _fitted(activation, bits, low, high, weight, cells, even=on_magnitude)
        fits.append(
            StepFit(
                name=name,
                method=METHOD,
                activation=activation,
                bits=bits,
                domain=(low, high),
                weight=weight,
                even=on_magnitude,
                borders=tuple(borders.tolist()),
                levels=tuple(levels.tolist()),
                error=step_errors(activation, weight, (low, high), borders, levels, on_magnitude),
                options={"cells": cells, "seed": seed},
            )
        )
    best = min(fits, key=lambda fitted: fitted.error["objective"])
    _warn(best)
    return best


def _fitted(
    activation: Activation, bits: int, low: float, high: float, weight: Weight, cells: int, *, even: bool
) -> tuple[Array, Array]:
    """Return the best borders and levels, of |x| if `even`, where f′ and the domain are symmetric, or of x."""
    breakpoints = np.union1d(activation.switch_points(low, high), weight.breakpoints(low, high))
    counted: Function = weight
    if even:
        breakpoints = np.unique(np.abs(breakpoints[breakpoints != 0]))
        counted = weight if _is_even(weight, high) else lambda at: weight(at) + weight(-at)
    # a grid that has the extrema of f′ misses no feature of it, however narrow
    extrema = roots(activation.second_derivative_formula, low, high).at
    marks = np.union1d(breakpoints, np.abs(extrema) if even else extrema)
    try:
        moments = Moments(activation.derivative, counted, 0.0 if even else low, high, marks, cells)
    except UsageError as error:
        raise UsageError(f"{activation}: {error}") from None

    borders = refine(moments, activation, dp_borders(moments, 2**bits), breakpoints)
    levels = best_levels(moments, borders)
    levels = without_noise(levels, np.max(np.abs(levels))).astype(np.float32).astype(np.float64)
    smooth = without_noise(borders, max(np.max(np.abs(borders)), (high - low) / 16))
    return round_borders(borders, smooth, breakpoints, activation.derivative, high - low), levels


def best_levels(moments: Moments, borders: Array, ends: tuple[float, float] | None = None) -> Array:
    """Return the weighted mean of f′ on each interval, (borders + 1,); its plain mean where w vanishes.

    The first and the last level are `ends` if these are given.
    """
    mass, first, _ = moments.between(borders)
    edges = np.concatenate([moments.grid[:1], borders, moments.grid[-1:]])
    levels: Array = np.divide(first, mass, out=np.zeros_like(mass), where=mass > 0)
    for i in np.flatnonzero(mass <= 0):
        plain = Moments(moments.function, np.ones_like, edges[i], edges[i + 1], np.empty(0), 64).sums[:, -1]
        levels[i] = plain[1] / plain[0]
    if ends is not None:
        levels[[0, -1]] = ends
    return levels


def refine(
    moments: Moments,
    activation: Activation,
    borders: Array,
    breakpoints: Array,
    ends: tuple[float, float] | None = None,
) -> Array:
    """Move borders off the grid to the optimum nearby, where 2 f′(s_i) − y_{i−1} − y_i = 0 (eq. 5).

    A border on a jump of f′ stays there, and so does one where the weight vanishes or the levels on both sides
    agree, because that equation says nothing there.
    """

    def gradient(borders: Array) -> Array:
        levels = best_levels(moments, borders, ends)
        return 2 * activation.derivative(borders) - levels[:-1] - levels[1:]

    levels = best_levels(moments, borders, ends)
    below, above = _sides(activation.derivative, borders, moments.grid[-1] - moments.grid[0])
    matters = np.abs(np.diff(levels)) > 1e-9 * np.ptp(levels)
    on_jump = np.isin(borders, breakpoints) & (np.abs(above - below) > 1e-9 * np.ptp(levels))
    stops = np.concatenate([moments.grid[[0, -1]], breakpoints])
    return newton(gradient, borders, (moments.weight(borders) > 0) & matters & ~on_jump, stops)


def _sides(function: Function, at: Array, width: float) -> tuple[Array, Array]:
    """Return a function just below and just above the points: so near that only a jump makes a difference."""
    step = np.maximum(np.abs(at), width) * 2.0**-40
    return function(at - step), function(at + step)


def without_noise(numbers: Array, scale: float) -> Array:
    """Round to 40 bits of the scale: the rest is noise, and a number that is 0 by symmetry becomes 0."""
    unit = 2.0 ** (np.floor(np.log2(np.maximum(scale, 1e-300))) - 40)
    return np.asarray(np.round(numbers / unit) * unit + 0.0)


def round_borders(borders: Array, smooth: Array, breakpoints: Array, derivative: Function, width: float) -> Array:
    """Round to float32; a border on a jump where f′ has the upper side's value goes to the float32 below.

    Those on no breakpoint are taken from `smooth`, without noise. If two have the same float32, raise UsageError.
    """
    on_breakpoint = np.isin(borders, breakpoints)
    rounded = np.where(on_breakpoint, borders, smooth).astype(np.float32)
    here = derivative(borders)
    below, above = _sides(derivative, borders, width)
    jumps = np.abs(above - below) > JUMP * np.maximum(np.abs(above), np.abs(below))
    upper = on_breakpoint & jumps & (np.abs(here - above) < np.abs(here - below))
    rounded = np.where(upper, np.nextafter(rounded, np.float32(-np.inf)), rounded)
    if np.any(np.diff(rounded) <= 0):
        raise UsageError(
            f"domain: too narrow for {len(borders) + 1} levels, whose borders coincide in float32; use fewer bits"
        )
    return rounded.astype(np.float64)


def _is_even(weight: Weight, high: float) -> bool:
    at = np.linspace(0.0, high, 1001)
    return bool(np.allclose(weight(at), weight(-at), rtol=1e-12, atol=0.0))


def _check_domain(weight: Weight, low: float, high: float) -> None:
    """Raise UsageError unless the domain is neither too large nor too narrow, and the weight valid on it."""
    check_domain((low, high), MAX_DOMAIN)
    if high - low < max(MIN_WIDTH * max(abs(low), abs(high)), 1 / MAX_DOMAIN):
        raise UsageError(f"domain: too narrow for borders in float32, got {low!r} {high!r}")
    weight.check(low, high)
    if (height := weight(np.linspace(low, high, POINTS)).max()) < 1 / MAX_VALUE:
        raise UsageError(
            f"weight {quote(weight.text)} is at most {height:g}: expected at least {1 / MAX_VALUE:g} somewhere"
        )


def check_finite(activation: Activation, low: float, high: float) -> None:
    """Raise UsageError if f or f′ is not finite somewhere on the domain, however slowly it grows."""
    df = f"the derivative of {quote(activation.expression)}"
    points = breaks(activation.derivative_formula, low, high)[0]
    at = np.array(list(points))
    for i in np.flatnonzero(~np.isfinite(activation.derivative(at)) & np.isfinite(activation.value(at))):
        if min(order(activation.derivative_formula, points[float(at[i])], side) for side in (-1, 1)) < 0:
            raise UsageError(
                f"{df} is infinite at x = {at[i]:g}: no step function is near it there; choose a domain without "
                "that point"
            )
    at = np.linspace(low, high, POINTS)
    for values, what in ((activation.value(at), activation), (activation.derivative(at), df)):
        bad = ~(np.abs(values) <= MAX_VALUE)
        if bad.any():
            raise UsageError(
                f"{what} is {values[bad][0]:g} at x = {at[bad][0]:g}: choose a domain on which it is at most "
                f"{MAX_VALUE:g} in size"
            )


def _warn(fit: StepFit) -> None:
    """Warn if a fit is worse than it seems."""
    float_check.warn(fit.activation)
    what = fit.activation.name or quote(fit.activation.expression)
    low, high = fit.domain
    steps = fit.activation.steps(0.0 if fit.even else low, high)
    if steps is not None and len(steps) >= len(fit.levels):
        bits = len(steps).bit_length()
        advice = f"{bits} bits are exact" if bits <= 4 else "no fit of at most 4 bits is exact"
        warnings.warn(
            f"the derivative of {what} is a step function with {len(steps) + 1} levels, and --bits {fit.bits} "
            f"holds {len(fit.levels)}: {advice}",
            FitWarning,
            stacklevel=3,
        )
    reach = (high - low) * np.geomspace(1e-3, BEYOND, 200)
    beyond = np.concatenate([low - reach, high + reach])
    error = np.abs(fit.activation.derivative(beyond) - fit(beyond))
    error = np.where(np.isfinite(error), error, np.inf)
    worst = int(error.argmax())
    if error[worst] > 2 * fit.error["max"] + 1e-6:
        warnings.warn(
            f"beyond the domain {low:g} {high:g} the derivative of {what} leaves the step function, by "
            f"{error[worst]:.3g} at x = {beyond[worst]:.3g}: choose a wider domain, or, where the derivative is "
            "unbounded, another form",
            FitWarning,
            stacklevel=3,
        )
