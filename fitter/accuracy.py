"""How far a step function is from f′, and its primitive from f."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .activation import Activation
from .expression import Array
from .moments import nodes, quadrature, running
from .weight import Weight

CELLS = 4000


def step_errors(
    activation: Activation,
    weight: Weight,
    domain: tuple[float, float],
    borders: Array,
    levels: Array,
    even: bool,
) -> dict[str, float]:
    """Return the errors of a step function q, by name, each to ten significant digits.

    Args:
        activation: f.
        weight: w.
        domain: [A, B], over which the errors are taken.
        borders: inner borders, increasing; of |x| if `even`.
        levels: one more than the borders.
        even: whether q is a function of |x|.

    Returns:
        `objective` = ∫ (f′ − q)² w, `rms` = √(objective / ∫ w), `max` = sup |f′ − q|, and `primitive_max` =
        sup |h − h̃|, where h and h̃ are the integrals of f′ and q from A.

    """
    low, high = domain

    def step(x: Array) -> Array:
        return levels[np.searchsorted(borders, np.abs(x) if even else x)]

    def error(x: Array) -> Array:
        return activation.derivative(x) - step(x)

    inner = np.union1d(-borders, borders) if even else borders
    inner = np.union1d(inner, np.union1d(activation.breakpoints(low, high), weight.breakpoints(low, high)))
    inner = inner[(low < inner) & (inner < high)]
    edges = np.union1d(np.linspace(low, high, CELLS + 1), inner)

    objective = quadrature(lambda x: error(x) ** 2 * weight(x), edges).sum()
    mass = quadrature(weight, edges).sum()

    sums = running(quadrature(error, edges)[None])[0]

    def primitive(x: Array) -> Array:
        cell = np.clip(np.searchsorted(edges, x) - 1, 0, len(edges) - 2)
        at, weights = nodes(np.stack([edges[cell], x], axis=-1).ravel())
        inside = (error(at[::2]) * weights[::2]).sum(axis=1)
        return np.asarray(sums[cell] + inside)

    # A border may be the float32 just below a breakpoint (see fewbit): nothing in float32 lies between them.
    whole = np.diff(edges) > 1.5 * np.spacing(np.abs(edges[1:]).astype(np.float32))
    # f′ and q are smooth between the edges: the floats next to each edge stand for its two sides
    sides = np.concatenate([np.nextafter(edges[1:], -np.inf)[whole], np.nextafter(edges[:-1], np.inf)[whole]])
    errors = {
        "objective": objective,
        "rms": np.sqrt(objective / mass),
        "max": _supremum(error, edges, whole, sides),
        "primitive_max": _supremum(primitive, edges, whole, edges),
    }
    return {key: float(f"{value:.10g}") for key, value in errors.items()}


def _supremum(function: Callable[[Array], Array], edges: Array, whole: NDArray[np.bool_], points: Array) -> float:
    """Return sup |function|, found on the points and each whole cell's nodes and then within the best cells."""
    at = nodes(edges)[0][whole]
    starts, ends = edges[:-1][whole], edges[1:][whole]
    values = np.abs(function(at.ravel()).reshape(at.shape))
    best = float(max(np.max(np.abs(function(points))), values.max()))
    for cell in np.argsort(-values.max(axis=1), kind="stable")[:3]:
        left, right = starts[cell], ends[cell]
        for _ in range(8):  # each pass narrows the bracket 32-fold: 64 points, the two cells round the best
            grid = np.linspace(np.nextafter(left, right), np.nextafter(right, left), 65)
            found = np.abs(function(grid))
            i = int(found.argmax())
            best = max(best, float(found[i]))
            left, right = grid[max(i - 1, 0)], grid[min(i + 1, 64)]
    return best
