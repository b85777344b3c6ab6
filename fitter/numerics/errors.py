"""How far a step function is from f′, and its primitive from f."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fitact.base import UsageError
from fitact.fitter.analysis import Activation, roots
from fitact.fitter.expr import Array

from .moments import Moments, nodes, quadrature, running
from .weight import Weight

CELLS = 4000
NOISE = 2.0**-44  # relative error of a value of f
MISSED = 1e-6  # of the variation of f


def step_errors(
    activation: Activation, weight: Weight, domain: tuple[float, float], borders: Array, levels: Array, even: bool
) -> dict[str, float]:
    """Return the errors of a step function q over a domain [A, B], by name, each to ten significant digits.

    They are `objective` = ∫ (f′ − q)² w, `rms` = √(objective / ∫ w), `max` = sup |f′ − q|; and `primitive_norm` =
    √∫ (h − h̃)² and `primitive_max` = sup |h − h̃|, where h and h̃ are the integrals of f′ and q from A. The
    borders are of |x| if `even`. If f′ has features too narrow to be integrated, raise UsageError.
    """
    low, high = domain
    corners = activation.switch_points(low, high)
    borders = snapped(borders, np.abs(corners) if even else corners)

    def step(x: Array) -> Array:
        return levels[np.searchsorted(borders, np.abs(x) if even else x)]

    def error(x: Array) -> Array:
        return activation.derivative(x) - step(x)

    steps = np.union1d(-borders, borders) if even else borders
    breakpoints = np.union1d(corners, weight.breakpoints(low, high))
    marks = np.union1d(breakpoints, roots(activation.second_derivative_formula, low, high).at)
    grid = Moments(activation.derivative, weight, low, high, marks, CELLS).grid
    edges = np.union1d(grid, steps[(low < steps) & (steps < high)])
    check_seen(activation, edges)

    at, weights = nodes(edges[:-1], edges[1:])
    missing = error(at)
    objective = (missing**2 * weight(at) * weights).sum(axis=1).sum()
    mass = quadrature(weight, edges).sum()
    sums = running((missing * weights).sum(axis=1)[None])[0]

    def primitive(x: Array) -> Array:
        cell = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, len(edges) - 2)
        at, weights = nodes(edges[cell], x)
        return np.asarray(sums[cell] + (error(at) * weights).sum(axis=1))

    risen = primitive(at.ravel()).reshape(at.shape)
    errors = {
        "objective": objective,
        "rms": np.sqrt(objective / mass),
        "max": _supremum(error, inside(edges), missing),
        "primitive_norm": np.sqrt((risen**2 * weights).sum(axis=1).sum()),
        "primitive_max": _supremum(primitive, (edges[:-1], edges[1:]), risen),
    }
    return {key: float(f"{value:.10g}") for key, value in errors.items()}


def check_seen(activation: Activation, edges: Array) -> None:
    """Raise UsageError if the integral of f′ over a cell is not the growth of f: a narrow feature was missed.

    All extrema of f′ are edges, so a step between two nodes lifts f from one edge to the next.
    """
    before, after = map(activation.value, inside(edges))  # at an edge f may jump
    with np.errstate(invalid="ignore"):  # what is not finite is refused
        grown = after - before
        integral = quadrature(activation.derivative, edges)
        missed = np.abs(integral - grown) - NOISE * (np.abs(after) + np.abs(before))
    worst = int(np.argmax(missed))
    if not missed[worst] <= MISSED * np.maximum(np.abs(integral), np.abs(grown)).sum():
        raise UsageError(
            f"{activation}: its derivative is too steep for the domain {edges[0]:g} "
            f"{edges[-1]:g} between x = {edges[worst]:.6g} and {edges[worst + 1]:.6g}: choose a narrower domain"
        )


def snapped(borders: Array, corners: Array) -> Array:
    """Return the borders, and move those beside a corner of f′ onto it.

    A border may be the float32 beside a corner, if the corner is no float32 or belongs to the upper side. No
    float32 lies between the two, so the gap causes no error.
    """
    snapped = borders.copy()
    for corner in corners:
        snapped[np.abs(borders - corner) < 1.5 * np.spacing(np.abs(np.float32(corner)))] = corner
    return snapped


def inside(edges: Array) -> tuple[Array, Array]:
    """Return points a hair inside both ends of each cell, for the limits of functions that jump between cells."""
    starts, ends = edges[:-1], edges[1:]
    inset = np.maximum(np.maximum(np.abs(starts), np.abs(ends)) * 2.0**-48, (ends - starts) * 2.0**-40)
    return starts + inset, ends - inset


def _supremum(function: Callable[[Array], Array], cells: tuple[Array, Array], inner: Array) -> float:
    """Return sup |function| of a function that is smooth on each of some cells, from their starts to their ends.

    The search looks at cells' ends and at `inner`, the values at their nodes, then closer around the largest.
    """
    limits = np.stack(cells, axis=1)
    values = np.abs(np.concatenate([function(limits.ravel()).reshape(limits.shape), inner], axis=1))
    best = float(values.max())
    for cell in np.argsort(-values.max(axis=1), kind="stable")[:3]:
        left, right = limits[cell]
        for _ in range(8):  # each pass narrows the bracket 32-fold: 64 points, the two cells round the best
            grid = np.linspace(left, right, 65)
            sizes = np.abs(function(grid))
            i = int(sizes.argmax())
            best = max(best, float(sizes[i]))
            left, right = grid[max(i - 1, 0)], grid[min(i + 1, 64)]
    return best
