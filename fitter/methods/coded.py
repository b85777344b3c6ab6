"""Coded inputs: one code of x from which f and f′ are both looked up.

Few-Bit's step function for two functions at once. Novikov et al., *Few-Bit Backward*, arXiv 2202.00441, keep a
code from which only f′ is known. Here the cells of the code are the best ones for f and f′ together, so that an
operation that needs f again in backward, such as the next linear layer, can keep the code too. `coding` defines
what is minimised. The programme of `partition` finds the best borders on a grid. They then move off it to the
stationary point nearby, where x at a border costs the same in both neighbouring cells.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from scipy.linalg import LinAlgError, solve_banded

from fitact.errors import FitWarning, UsageError, quote
from fitact.fitter.analysis import float_check
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.analysis.gate import Gate
from fitact.fitter.analysis.learned import Learned
from fitact.fitter.expr.evaluate import Array
from fitact.fitter.numerics.coding import Objective, Steps, errors, reach
from fitact.fitter.numerics.partition import dp_borders
from fitact.fitter.numerics.weight import Weight
from fitact.fitter.records.coded import DEVIATIONS, MAX_DOMAIN, CodedFit
from fitact.fitter.records.gate import BITS_U, KEPT, CodedGateFit, combined
from fitact.fitter.records.learned import CodedLearnedFit
from fitact.fitter.records.learned import errors as errors_at_points
from fitact.fitter.records.validate import check_bits

from .fewbit import check_finite, check_height, check_width, round_borders, without_noise

METHOD = "coded"
CELLS = 4000  # grid of the programme, some 16 for each of 256 levels; its optimum is then refined
DOMAIN = (-64.0, 64.0)
WEIGHT = "student(3)"  # heavy tails: serves inputs of deviation 0.5 to 4 without a scale, and their outliers
MOST_STEPS = 200
DAMPINGS = (0.0, *(10.0**k for k in range(-4, 9)))  # of Newton's step, until J does not grow
ROUNDING = 1e-13  # of J: near the optimum it is flat to float64 while the borders still gain digits
FLAT = 5  # steps that no longer lower J: Newton's method doubles the digits with each
SETTLED = 1e-6  # relative to the cells beside a border: smaller steps go on until they no longer shrink
USELESS = 0.5  # relative error of a table for x normal with deviation 1


def fit(
    activation: Activation,
    bits: int,
    name: str,
    *,
    domain: tuple[float, float] = DOMAIN,
    weight: Weight | None = None,
    cells: int = CELLS,
) -> CodedFit:
    """Fit the cells of a code of x, and the tables of f and f′ over them.

    Borders and tables are rounded to float32, and the errors are those of the rounded numbers.

    Args:
        activation: what to fit, f.
        bits: 3 to 8.
        name: the fit's name, a Python identifier.
        domain: the interval [A, B] on which the error counts, at most 65504 in size; beyond, the outer cells hold.
        weight: how much an error counts; by default the density of Student's t with 3 degrees of freedom.
        cells: grid cells of the dynamic programme.

    Returns:
        The fit. Its `error["objective"]` is J.

    Raises:
        UsageError: bits, domain or weight are out of range; f, f′ or w is not finite on the domain; or f or f′
            is 0 all over it.

    Warns:
        FitWarning: the tables are of no use for x normal with deviation 1; or floating point fails on the formula,
            see `float_check.problem`.

    """
    check_bits(bits, CodedFit.BITS)
    objective = _objective(activation, domain, weight, cells)
    low, high = objective.domain

    borders = refine(objective, dp_borders(objective.moments, 2**bits))
    levels = objective.steps(borders).levels
    scale = np.maximum(np.abs(levels), np.sqrt(objective.mean_squares)[:, None])
    tables = without_noise(levels, scale).astype(np.float32).astype(np.float64)
    smooth = without_noise(borders, np.maximum(np.abs(borders), _gaps(objective, borders)))
    functions = (activation.value, activation.derivative)
    borders = round_borders(borders, smooth, objective.switches, functions, high - low)
    fitted = CodedFit(
        name=name,
        method=METHOD,
        activation=activation,
        bits=bits,
        domain=objective.domain,
        weight=objective.weight,
        borders=tuple(borders.tolist()),
        values=tuple(tables[0].tolist()),
        derivatives=tuple(tables[1].tolist()),
        reach=reach(objective, borders, tables[0]),
        error=errors(objective, borders, tables, DEVIATIONS),
        options={"cells": cells},
    )
    _warn(fitted)
    return fitted


def _objective(
    activation: Activation, domain: tuple[float, float], weight: Weight | None, cells: int
) -> Objective:
    """Return J; UsageError if it is not defined."""
    low, high = float(domain[0]), float(domain[1])
    check_width(low, high, MAX_DOMAIN)
    weight = weight or Weight(WEIGHT)
    check_finite(activation, low, high)
    check_height(weight, low, high)
    return Objective(activation, weight, (low, high), cells)


def check(activation: Activation) -> None:
    """Raise UsageError if the activation cannot be fitted with the default domain and weight."""
    check_finite(activation, *DOMAIN)
    Objective(activation, Weight(WEIGHT), DOMAIN, CELLS // 10)


def refine(objective: Objective, borders: Array) -> Array:
    """Move borders off the grid to the optimum nearby, by Newton's method with steps damped until J does not grow.

    At the optimum each border costs the same in both neighbouring cells: with the shares v of `Objective.shares`,
    g_i = Σ v·((f − F_i)² − (f − F_{i+1})²) = 0, the sum over f and f′. Where f or f′ jumps or has a corner, g has
    two sides, and a border that neither side draws away stays there. A border stays too where the weight vanishes,
    or where the tables on both sides agree, because g says nothing there.

    Returns:
        The refined borders, (borders,); J there is not above J at those given.

    """
    stops = np.concatenate([[-np.inf], objective.switches, [np.inf]])
    now = objective.steps(borders)
    total, last, flat = now.total, np.inf, 0
    dampings = DAMPINGS
    for _ in range(MOST_STEPS):
        gradient, bands, least, most = _stationarity(objective, borders, now, stops)
        gaps = _gaps(objective, borders)
        for damping in dampings:
            damped = bands.copy()
            damped[1] += damping * np.abs(bands[1])
            try:
                step = solve_banded((1, 1), damped, -gradient)
            except LinAlgError:
                continue
            moved = np.clip(borders + step, least, most)
            if np.any(np.diff(np.concatenate([objective.domain[:1], moved, objective.domain[1:]])) <= 0):
                continue
            now = objective.steps(moved)
            if now.total <= total * (1 + ROUNDING):
                break
        else:
            break
        size = np.max(np.abs(moved - borders) / gaps)
        flat = flat + 1 if now.total > total * (1 - ROUNDING) else 0
        borders, total = moved, min(total, now.total)
        if flat > FLAT or (size <= SETTLED and size > last / 2):  # what is left is rounding
            break
        last = size
        dampings = DAMPINGS[max(DAMPINGS.index(damping) - 2, 0) :]
    return borders


def _stationarity(
    objective: Objective, borders: Array, now: Steps, stops: Array
) -> tuple[Array, Array, Array, Array]:
    """Return g (n,), its Jacobian in bands (3, n), and how far down and up each border may move, both (n,).

    For a border that stays, g is 0 and its row is that of the unit matrix.
    """
    mass, levels, _ = now
    left, right = levels[:, :-1], levels[:, 1:]

    def costs(at: Array) -> tuple[Array, Array, Array]:
        both = objective.both(at)
        shares = objective.shares(both)
        return both, shares, (shares * ((both - left) ** 2 - (both - right) ** 2)).sum(axis=0)

    on_stop = np.isin(borders, stops)
    hair = np.where(on_stop, np.maximum(np.abs(borders), np.ptp(objective.domain)) * 2.0**-40, 0.0)
    falls, rises = costs(borders - hair)[2], costs(borders + hair)[2]
    down, up = on_stop & (falls > 0), on_stop & (rises < 0)
    down &= ~up | (falls > -rises)
    up &= ~down
    at = borders + np.where(up, hair, np.where(down, -hair, 0.0))
    both, shares, gradient = costs(at)

    weight = objective.weight(at)
    apart = (shares * (right - left) ** 2).sum(axis=0)
    stays = (on_stop & ~down & ~up) | ~(weight > 0) | ~(apart > 1e-18 * apart.max())
    slopes = np.stack([both[1], objective.activation.second_derivative(at)])
    # of the shares: that of f falls where |f| grows
    steeper = -2 * objective.mass * shares[0] ** 2 * both[0] * slopes[0]
    diagonal = (2 * shares * slopes * (right - left)).sum(axis=0)
    diagonal += steeper * ((both[0] - left[0]) ** 2 - (both[0] - right[0]) ** 2)
    # the means on both sides answer to a border: by v·w·(f − F)/mass, and the other way on its right
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        below = np.nan_to_num(weight * shares * (both - left) / mass[:, :-1], posinf=0.0, neginf=0.0)
        above = np.nan_to_num(weight * shares * (both - right) / mass[:, 1:], posinf=0.0, neginf=0.0)
    diagonal -= (2 * shares * ((both - left) * below + (both - right) * above)).sum(axis=0)
    stays |= ~np.isfinite(diagonal)  # f″ is no number there
    bands = np.zeros((3, len(borders)))
    bands[0, 1:] = (2 * (shares * (both - right))[:, :-1] * below[:, 1:]).sum(axis=0)
    bands[1] = diagonal
    bands[2, :-1] = (2 * (shares * (both - left))[:, 1:] * above[:, :-1]).sum(axis=0)
    bands[1, stays], gradient[stays] = 1.0, 0.0
    bands[0, 1:][stays[:-1]] = 0.0
    bands[2, :-1][stays[1:]] = 0.0
    bands[1, bands[1] == 0] = 1.0

    after = np.searchsorted(stops, borders, side="right")
    before = np.searchsorted(stops, borders, side="left") - 1
    least = np.where(stays | up, borders, stops[before])
    most = np.where(stays | down, borders, stops[after])
    return gradient, bands, least, most


def _gaps(objective: Objective, borders: Array) -> Array:
    """Return the width of the narrower of the two cells beside each border, (n,)."""
    low, high = objective.domain
    widths = np.diff(np.concatenate([[low], borders, [high]]))
    return np.asarray(np.minimum(widths[:-1], widths[1:]))


def _warn(fit: CodedFit) -> None:
    """Warn if a fit is worse than it seems."""
    float_check.warn(fit.activation)
    what = fit.activation.name or quote(fit.activation.expression)
    for table, of in (("value", ""), ("derivative", "the derivative of ")):
        if (error := fit.error[f"{table}_1"]) > USELESS:
            low, high = fit.domain
            warnings.warn(
                f"for x normal with deviation 1 the table of {of}{what} is off by {error:.2g} of its root mean "
                f"square: choose a domain that suits your x better than {low:g} {high:g}, another weight, or more "
                "bits",
                FitWarning,
                stacklevel=3,
            )
            return


def fit_gate(
    gate: Gate,
    bits: int,
    name: str,
    *,
    bits_u: int = KEPT,
    weight: Weight | None = None,
    weight_u: Weight | None = None,
) -> CodedGateFit:
    """Fit the code of g of a gate a(g)·b(u), and that of u if it is to have one.

    Args:
        gate: the gate.
        bits: of a code of g, 3 to 8.
        name: the fit's name, a Python identifier.
        bits_u: 6 or 8, of a code of u; 16 to keep u as it is.
        weight: how much an error counts by g; as in `fit`.
        weight_u: by u, where that is coded; likewise.

    Returns:
        The fit, whose parts are those of `fit` for a and b.

    Raises:
        UsageError: a number of bits is another, or one of the factors cannot be coded; see `fit`.

    """
    if bits_u not in (*BITS_U, KEPT):
        raise UsageError(
            f"--bits-u: expected {', '.join(map(str, BITS_U))}, or {KEPT} to keep u as it is, got {quote(bits_u)}"
        )
    code_u = None if bits_u == KEPT else fit(gate.b, bits_u, name, weight=weight_u)
    return _gate_of(gate, fit(gate.a, bits, name, weight=weight), code_u)


def fit_gate_again(gate_fit: CodedGateFit) -> CodedGateFit:
    """Fit a gate again from its record: the same bytes, if nothing has changed."""
    code_u = None if gate_fit.code_u is None else again(gate_fit.code_u)
    return _gate_of(gate_fit.activation, again(gate_fit.code_g), code_u)


def _gate_of(gate: Gate, code_g: CodedFit, code_u: CodedFit | None) -> CodedGateFit:
    error = combined(code_g, code_u)
    return CodedGateFit(
        name=code_g.name, method="gate_coded", activation=gate, code_g=code_g, code_u=code_u, error=error
    )


def again(code: CodedFit) -> CodedFit:
    """Fit a code again from its record: the same bytes, if nothing has changed."""
    cells = int(code.options.get("cells", CELLS))
    return fit(code.activation, code.bits, code.name, domain=code.domain, weight=code.weight, cells=cells)


def fit_learned(formula: Learned, bits: int, name: str, **options: Any) -> CodedLearnedFit:
    """Fit a code of x for a formula with learned numbers, and state the formula's errors at the points.

    A table of f would go stale as the numbers move. So the code is one of the identity: a point is looked up in
    place of x, and f and its derivatives are computed there. The arguments are those of `fit`.
    """
    warn_at_start(formula)
    code = fit(Activation.of("identity"), bits, name, **options)
    error = errors_at_points(formula, code)
    return CodedLearnedFit(name=name, method="learned_coded", activation=formula, code=code, error=error)


def warn_at_start(formula: Learned) -> None:
    """Warn if floating point fails on a formula at the starts of its learned numbers."""
    if (start := formula.start()) is not None:
        float_check.warn(start)
