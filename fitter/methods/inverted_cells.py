"""Cells: the intervals of x on each of which f′ is a smooth function of a variable made of y = f(x)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from flint import arb

from fitact.errors import UsageError
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.analysis.roots import REALS, breaks, roots
from fitact.fitter.analysis.shape import breakpoints
from fitact.fitter.expr.exact import LEAST_ORDER, Number, order, shifted, value
from fitact.fitter.records.approximants import Radical

LARGEST = 1e37  # of values and derivatives that are fitted
BESIDE = 1e-7  # relative distance from a corner at which f′ is taken on its sides
CORNER = 1e-3  # least difference of f′ between the sides


@dataclass(frozen=True)
class Cell:
    """An interval of x on which f is monotone and smooth.

    Attributes:
        low, high: its ends; ±REALS stand for ±∞.
        direction: 1 where f rises, −1 where it falls, 0 where it is constant.
        radicals: the terms of the variable t in which f′ is a smooth function of y.
        roots: for each radical the root of f′, in x, that it comes from; NaN if there is none.

    """

    low: float
    high: float
    direction: int
    radicals: tuple[Radical, ...]
    roots: tuple[float, ...]


def smooth_cells(activation: Activation, low: float, high: float) -> tuple[Cell, ...]:
    """Return the intervals on which f is monotone and f, f′ and f″ are continuous; see `inverted.cells`."""
    shape = activation.monotone(low, high)
    if not shape.complete:
        where = "over the reals" if high - low > REALS else f"from {low:g} to {high:g}"
        raise UsageError(
            f"{activation}: it has too many monotone pieces {where} for any number of bits; "
            "fit it on a smaller domain"
        )
    f, df = activation.formula, activation.derivative_formula
    points: dict[float, Number] = {}
    for expr in (f, df):
        points.update(breaks(expr, low, high)[0])
    found = roots(df, low, high)
    points.update(zip(found.at.tolist(), found.exact, strict=True))
    ends = [low, *(piece.low for piece in shape.pieces[1:]), high]
    gaps = [a.high for a, b in itertools.pairwise(shape.pieces) if a.high != b.low]
    if not shape.pieces or shape.pieces[0].low != low or shape.pieces[-1].high != high or gaps:
        at = gaps[0] if gaps else low if not shape.pieces or shape.pieces[0].low != low else high
        raise UsageError(
            f"{activation}: it is not defined all over the domain (see x = {at:g}); fit it on a smaller one"
        )
    kinks = breakpoints(df, activation.second_derivative_formula, low, high)
    edges = {*ends, *(point.at for point in (*activation.breakpoints(low, high), *kinks))}
    for a, b in itertools.pairwise(sorted(edges)):
        within = [root for root in shape.roots if a < root.at < b]
        if len(within) > 1 or any(root.order_below != root.order_above for root in within):
            edges |= {root.at for root in within}
    ends = sorted(edges)
    near = (high - low) / 3
    beyond = {low: _beyond(activation, low, low - near), high: _beyond(activation, high, high + near)}
    outer = {end: exact for end, exact in beyond.items() if exact is not None}
    parts = []
    for a, b in itertools.pairwise(ends):
        inside = next((root.at for root in shape.roots if a < root.at < b), None)
        direction = next(piece.direction for piece in shape.pieces if piece.low <= a and b <= piece.high)
        parts.append(_cell(activation, points, a, b, inside, direction, outer))
    return tuple(parts)


def _beyond(activation: Activation, end: float, far: float) -> Number | None:
    """Return the root of f′ beyond an end of a bounded domain if f is smooth up to it: it matters inside too."""
    if abs(far) > REALS:
        return None
    low, high = sorted((end, far))
    found = roots(activation.derivative_formula, low, high)
    if not found.exact:
        return None
    nearest = found.exact[0 if far > end else -1]
    corners = [
        at for expr in (activation.formula, activation.derivative_formula) for at in breaks(expr, low, high)[0]
    ]
    return None if any(abs(at - end) <= abs(nearest - end) for at in corners) else nearest


def _cell(
    activation: Activation,
    points: dict[float, Number],
    low: float,
    high: float,
    inside: float | None,
    direction: int,
    outer: dict[float, Number],
) -> Cell:
    """Return the cell between two borders, with the terms of its variable."""
    f, df = activation.formula, activation.derivative_formula
    radicals: list[Radical] = []
    roots_of: list[float] = []
    for at, side in ((low, 1), (inside, 0), (high, -1)):
        if at is None or abs(at) >= REALS or not direction:
            continue
        exact = points.get(at, arb(at))
        power = order(df, exact, side or 1)
        if abs(power) <= LEAST_ORDER and at in outer:
            exact = outer[at]
            power = order(df, exact, side)
        beside = float(value(f, shifted(exact, side or 1, "1e-30"), 30))
        if math.isnan(power) or power < -LEAST_ORDER or not abs(beside) < LARGEST:
            raise UsageError(
                f"{activation}: it or its derivative is infinite at x = {at:g}; fit it on a smaller domain"
            )
        if LEAST_ORDER < power < math.inf:
            degree = Fraction(1 + power).limit_denominator(8).numerator  # of f in a variable in which f′ is smooth
            radicals.append(Radical(float(np.float32(beside)), degree, side * direction))
            roots_of.append(float(exact))
    if len(radicals) > 1:
        radicals = [replace(radical, sign=radical.side or 1) for radical in radicals]
    if not radicals:
        values = [float(value(f, at, 20)) for at in (low, high) if abs(at) < REALS]
        near = min(values, key=abs) if len(values) == 2 and values[0] * values[1] > 0 else 0.0
        near = near if abs(near) < LARGEST else 0.0  # float32 has none of its outputs
        radicals, roots_of = [Radical(float(np.float32(near)), 1, 0)], [math.nan]
    return Cell(low, high, direction, tuple(radicals), tuple(roots_of))


def cell_borders(activation: Activation, parts: Sequence[Cell]) -> tuple[float, ...]:
    """Return the borders between cells, float32 numbers; a border belongs to the cell whose f′ it has."""
    borders = []
    for cell in parts[1:]:
        at = cell.low
        border = np.float32(at)
        below, here, above = activation.derivative(at + BESIDE * np.array([-1, 0, 1]) * max(1.0, abs(at)))
        upper = border > at or (border == at and abs(here - above) < abs(here - below))
        if upper and abs(above - below) > CORNER:
            border = np.nextafter(border, np.float32(-np.inf))
        borders.append(float(border))
    if any(a >= b for a, b in itertools.pairwise(borders)):
        raise UsageError(f"{activation}: two of its pieces meet in float32")
    return tuple(borders)
