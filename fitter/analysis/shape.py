"""What a formula looks like: breakpoints, asymptotes, monotone pieces.

All functions take SymPy formulas in `x`: f, and its derivatives where they need them. The domain of "the reals" is
the range of float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from flint import arb, ctx

from fitact.fitter.expr import (
    LEAST_ORDER,
    ONE,
    Array,
    Expr,
    Number,
    order,
    shifted,
    sign_of,
    value,
)

from .roots import REALS, Roots, breaks, roots

TOLERANCE = 1e-12  # relative: values that differ by less count as equal
SCALES = (4, 8, 16, 32, 64)  # of |x|, as powers of ten, at which limits are looked for
OFFSETS = 6  # neighbouring points at every scale
LIMIT_DIGITS = 150


@dataclass(frozen=True)
class Breakpoint:
    """A point where f jumps (`kind` "jump"), or is continuous and f′ jumps ("corner")."""

    at: float
    kind: Literal["jump", "corner"]


@dataclass(frozen=True)
class Asymptote:
    """How f behaves toward +∞ or −∞.

    `kind` is "line" where f − (slope·x + intercept) tends to 0; "infinite" where f tends to ±∞ along no line;
    "none" where no limit is seen, as for an oscillation; "undefined" where f is not real.
    """

    kind: Literal["line", "infinite", "none", "undefined"]
    slope: float = math.nan  # of the line, else NaN
    intercept: float = math.nan
    limit: float = math.nan  # of f, ±∞ included; NaN where there is none


@dataclass(frozen=True)
class Piece:
    """A maximal interval on which f rises (`direction` 1), falls (−1) or is constant (0)."""

    low: float
    high: float
    direction: int


@dataclass(frozen=True)
class Root:
    """An isolated root of f′.

    `order_below` and `order_above` are a in f′(at ∓ h) ~ hᵃ: fractional at a radical, infinite where f′ is flatter
    than any power, 0 on a side where the limit of f′ is not 0.
    """

    at: float
    order_below: float
    order_above: float


@dataclass(frozen=True)
class Monotone:
    """The pieces on which f is monotone, and the isolated roots of f′, both increasing.

    If `reach` is finite, f′ has more roots than the search looks for, and the lists end at |x| = `reach`.
    """

    pieces: tuple[Piece, ...]
    roots: tuple[Root, ...]
    reach: float


def switch_points(f: Expr, low: float, high: float) -> Array:
    """Return the points inside (low, high) where `where`, `relu`, `abs` or `sign` switches, increasing.

    Points are rounded once from exact ones. Not all are breakpoints: `relu(x)**2` switches smoothly.
    """
    return np.array(list(breaks(f, float(low), float(high), switches_only=True)[0]), dtype=np.float64)


def breakpoints(f: Expr, df: Expr, low: float = -REALS, high: float = REALS) -> tuple[Breakpoint, ...]:
    """Return the points inside (low, high) where f or f′ jumps, increasing.

    One-sided values at distances of 1e-12 and 1e-20 (relative to |x| beyond 1) decide: a difference that shrinks
    between them, or is less than 1e-12 of the value, is no jump.
    """
    points = {**breaks(f, low, high, switches_only=True)[0], **breaks(df, low, high, switches_only=True)[0]}
    places = []
    for at in sorted(points):
        if _jumps(f, points[at]):
            places.append(Breakpoint(at, "jump"))
        elif _jumps(df, points[at]):
            places.append(Breakpoint(at, "corner"))
    return tuple(places)


def asymptote(f: Expr, side: int) -> Asymptote:
    """Return how f behaves toward +∞ (side 1) or −∞ (side −1).

    f is evaluated to 150 digits at |x| of 1e4, 1e8, 1e16, 1e32 and 1e64, at six neighbouring points each. The line
    through the last two scales is an asymptote if f stays within 1e-10 of max(1, |intercept|) of it at all points
    of these two scales, and within 1e-5 at 1e16. So 1/√x tends to 0, and the limit of 1/log x is not seen. f tends
    to infinity if |f| grows from scale to scale, each time by at least 3/4 of the time before. Slopes and
    intercepts below 1e-15 count as 0.
    """
    with ctx.workprec(4 * LIMIT_DIGITS):
        at = [[side * (10**k + j * arb(2).sqrt()).mid() for j in range(OFFSETS)] for k in SCALES]
        values = [[value(f, point, LIMIT_DIGITS) for point in points] for points in at]
        last = values[-1]
        if all(number.is_nan() for number in values[-2] + last):
            return Asymptote("undefined")
        if all(number.is_finite() for row in values[-3:] for number in row):
            slope = (last[0] - values[-2][0]) / (at[-1][0] - at[-2][0])
            residues = [
                [v - slope * p for v, p in zip(*rows, strict=True)] for rows in zip(values, at, strict=True)
            ]
            intercept = residues[-2][-1]
            size = max(ONE, abs(intercept))

            def strays(row: list[Number]) -> Number:
                return max(abs(residue - intercept) for residue in row) / size

            if max(strays(residues[-1]), strays(residues[-2])) <= 1e-10 and strays(residues[-3]) <= 1e-5:
                m, b = snapped(slope), snapped(intercept)
                return Asymptote("line", m, b, m * side * math.inf if m else b)
        if _diverges(values):
            return Asymptote("infinite", limit=sign_of(last[0]) * math.inf)
        return Asymptote("none")


@lru_cache(maxsize=512)
def pieces(f: Expr, df: Expr, low: float = -REALS, high: float = REALS) -> Monotone:
    """Return the maximal intervals of (low, high) on which f is monotone, and the isolated roots of f′.

    Intervals end where f′ changes sign, where f is constant or undefined, and where f jumps against its direction;
    on a jump along its direction f stays monotone.
    """
    zeros = roots(df, low, high)
    points, reach = breaks(f, low, high)
    reach = min(reach, zeros.reach)
    parts: list[Piece] = []
    for piece in _split(zeros, points, reach):
        if value(f, inside(piece.low, piece.high), 15).is_nan():
            continue
        before = parts[-1] if parts else None
        if (
            before is not None
            and before.high == piece.low
            and before.direction == piece.direction
            and _continues(f, points.get(piece.low), piece.direction)
        ):
            parts[-1] = Piece(before.low, piece.high, piece.direction)
        else:
            parts.append(piece)
    stationary = []
    for at, exact in zeros.points.items():
        orders = order(df, exact, -1), order(df, exact, 1)
        if abs(at) < reach and max(orders) > LEAST_ORDER and not value(f, exact, 15).is_nan():
            stationary.append(Root(at, *orders))
    return Monotone(tuple(parts), tuple(stationary), reach)


def _beside(expr: Expr, at: Number, side: int, distance: str = "1e-20") -> Number:
    """Return the value just below (side −1) or above (1) a point."""
    return value(expr, shifted(at, side, distance), 30)


def _jumps(expr: Expr, at: Number) -> bool:
    with ctx.workprec(300):
        sides = [(_beside(expr, at, -1, h), _beside(expr, at, 1, h)) for h in ("1e-12", "1e-20")]
        below, above = sides[1]
        if below.is_nan() or above.is_nan():
            return bool(below.is_nan() != above.is_nan())
        if any(0 < 1.3 * abs(far) < abs(near) for far, near in zip(*sides, strict=True)):  # a pole
            return True
        if below == above:
            return False
        far, near = (abs(b - a) for a, b in sides)
        return bool(near > far / 2 and near > TOLERANCE * max(abs(below), abs(above)))


def _continues(f: Expr, at: Number | None, direction: int) -> bool:
    """Whether a piece of that direction continues across a break of f."""
    if at is None:
        return True
    with ctx.workprec(300):
        below, above = _beside(f, at, -1), _beside(f, at, 1)
        if not (below.is_finite() and above.is_finite()):
            return False
        slack = TOLERANCE * max(abs(below), abs(above))
        return bool((above - below) * direction >= -slack) if direction else abs(above - below) <= slack


def _split(zeros: Roots, points: dict[float, Number], reach: float) -> Iterator[Piece]:
    for a, b, sign in zeros.signs:
        low, high = max(a, -reach), min(b, reach)
        edges = [low, *(point for point in points if low < point < high), high]
        for start, stop in itertools.pairwise(edges):
            if start < stop:
                yield Piece(start, stop, sign)


def inside(low: float, high: float) -> float:
    """Return a point between two that is unlikely to be a special one."""
    return low + (high - low) * 0.4871 if math.isfinite(high - low) else low * 0.5129 + high * 0.4871


def snapped(number: Number | float) -> float:
    """Return a number as a float, 0 if it is below 1e-15."""
    return 0.0 if abs(number) < 1e-15 else float(number)


def _diverges(values: list[list[Number]]) -> bool:
    """Whether |f| grows without bound from scale to scale, with one sign."""
    seen = [number for row in values[-3:] for number in row]
    if any(number.is_nan() for number in seen) or len({sign_of(number) for number in seen[OFFSETS:]}) > 1:
        return False
    sizes = [[abs(number) for number in row] for row in values]
    if not any(size.is_finite() for size in sizes[-1]):
        return True
    first, second, third = sizes[-3:]
    rising = all(a <= b for a, b in itertools.pairwise(third))
    if not rising and min(third) < max(third) / 10:
        return False
    return bool(min(third) > max(second) > max(first) and third[0] - second[0] >= 0.75 * (second[0] - first[0]))
