"""All roots of a formula, all its breaks, and its sign between them, by bisecting boxes with enclosures.

A box is an interval of x. If the enclosure of a formula on a box is positive, the formula has no root in it,
however narrow its features are. Boxes are taken outward from 0: if there are too many roots or boxes, it is known
up to which |x| the roots are all.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import sympy
from flint import arb, ctx

from fitact.fitter.expr import (
    LEAST_ORDER,
    ZERO,
    Array,
    Expr,
    Interval,
    Number,
    atoms,
    enclose,
    order,
    roughly,
    sign_of,
    steps,
    value,
    x,
)

Part = tuple[float, float, int]  # low, high, sign

REALS = float(np.finfo(np.float32).max)  # the end of the default domain
MAX_SWITCHES = 256
FLAT, UNKNOWN, TINY, UNDEFINED = 0, 2, 3, 4  # signs of boxes, beside −1 and 1
UNDERFLOW = 1e-290  # a smaller value has no sign of its own: the formula fades away there
NARROW = 2.0**-40  # relative width of a box that is not cut further; 1e-15 near 0
MAX_WORK = 200_000  # parts of formulas, evaluated on boxes
NOISE_BITS = 7  # a value with fewer is left to exact arithmetic
MIDDLE = 0.0587  # where the first boxes meet, about 0
# The formula may have a corner or a jump where the first argument of these changes sign.
SWITCHES = (atoms.Where, atoms.relu, atoms.absolute, atoms.sign)
# These are infinite, or begin to be defined, where that of their argument is 0.
SINGULAR: dict[Expr, Callable[[Expr], Expr]] = {
    atoms.log: lambda u: u,
    atoms.log1p: lambda u: 1 + u,
    atoms.tan: atoms.cos,
}


@dataclass(frozen=True)
class Roots:
    """The roots of a formula in an open interval, and its signs between them.

    `signs` are of all intervals, increasing, on which the sign is −1, 0 or 1 except at isolated roots; where the
    formula is undefined there is no interval.
    """

    points: dict[float, Number]  # where it is zero or jumps from one sign to the other, increasing; as in `breaks`
    signs: tuple[Part, ...]
    reach: float  # the |x| up to which these are all roots; infinite if there are no more

    @property
    def at(self) -> Array:
        """The points as float64."""
        return np.array(list(self.points), dtype=np.float64)


@lru_cache(maxsize=512)
def roots(expr: Expr, low: float, high: float, limit: int = 64) -> Roots:
    """Find all roots of a formula in (low, high), outward from 0.

    They are exact where the formula is linear, otherwise correct to the last bit of float64. A formula that fades
    below 1e-290 toward an end of the interval, whose ends are at most 1.7e308 in size, keeps its last sign. The
    search stops when it has found more roots than `limit`.
    """
    low, high = float(low), float(high)
    if x not in expr.free_symbols:
        constant = value(expr, 0)
        return Roots({}, () if constant.is_nan() else ((low, high, sign_of(constant)),), math.inf)
    search = _Search(expr, low, high, limit, *breaks(expr, low, high))
    search.run()
    signs = tuple(search.whole())
    points = {point: search.points[point] for point in sorted(search.points) if abs(point) < search.reach}
    return Roots(points, signs, search.reach)


def breaks(
    expr: Expr, low: float, high: float, *, switches_only: bool = False
) -> tuple[dict[float, Number], float]:
    """Return the points inside (low, high) where a formula may not be smooth, and up to which |x| they are all.

    They are the roots of the arguments of `where`, `relu`, `abs` and `sign` and, unless `switches_only`, the roots
    of denominators and of bases of fractional powers, and the ends of domains.

    The points are float64, increasing, each with the same point to 25 digits or more.
    """
    points: dict[float, Number] = {}
    reach = math.inf
    for u in _arguments(expr, switches_only):
        result = roots(u, low, high, MAX_SWITCHES)
        points.update(result.points)
        ends = {end for *flat, sign in result.signs if sign == FLAT for end in flat if low < end < high}
        points.update({end: arb(end) for end in ends - set(points)})
        reach = min(reach, result.reach)
    apart: dict[float, Number] = {}
    last = -math.inf
    for point in sorted(points):
        if point - last > 4 * gap(point) and abs(point) < reach:
            apart[point] = points[point]
            last = point
    return apart, reach


def _arguments(expr: Expr, switches_only: bool) -> list[Expr]:
    arguments = []
    for node in sympy.preorder_traversal(expr):
        if isinstance(node, SWITCHES):
            arguments.append(node.args[0])
        elif not switches_only and node.is_Pow and not (node.exp.is_Integer and node.exp.p > 0):
            arguments.append(node.base)
        elif not switches_only and node.func in SINGULAR:
            arguments.append(SINGULAR[node.func](node.args[0]))
    return [u for u in dict.fromkeys(arguments) if x in u.free_symbols]


def gap(point: float) -> float:
    """Return half the width of the hole that the search leaves around a break."""
    return max(8 * float(np.spacing(abs(point))), 1e-300)


class _Search:
    """One search for the roots of one formula."""

    def __init__(
        self, expr: Expr, low: float, high: float, limit: int, cuts: dict[float, Number], reach: float
    ) -> None:
        self.expr, self.low, self.high, self.limit = expr, low, high, limit
        self.cuts, self.reach = cuts, reach
        self.derivative = expr.diff(x)
        self.signs: list[Part] = []
        self.rough: list[Part] = []  # boxes beyond what enclosures can tell
        self.points: dict[float, Number] = {}

    def run(self) -> None:
        """Cut boxes until each is decided, or has one crossing, or is left to exact values."""
        holes = {point - gap(point): point + gap(point) for point in self.cuts}
        inner = {-1.0173 * MIDDLE, MIDDLE, *holes, *holes.values()}
        bounds = sorted({self.low, self.high, *(at for at in inner if self.low < at < self.high)})
        boxes = [(_nearest(a, b), a, b) for a, b in itertools.pairwise(bounds) if holes.get(a) != b]
        heapq.heapify(boxes)
        left = MAX_WORK // (len(steps(self.expr)) + len(steps(self.derivative)) + 1)
        crossings: list[Part] = []
        while boxes:
            near, a, b = heapq.heappop(boxes)
            if near >= self.reach:
                break
            if len(crossings) > self.limit:
                self.reach = near
                break
            if left <= 0:
                self.rest([(a, b), *((a, b) for _, a, b in boxes)])
                break
            left -= 1
            sign = self.decided(a, b)
            if sign == UNKNOWN:
                middle = _between(a, b)
                for box in ((a, middle), (middle, b)):
                    heapq.heappush(boxes, (_nearest(*box), *box))
            elif abs(sign) == 10:
                crossings.append((a, b, sign // 10))
            elif sign == TINY:
                self.rough.append((a, b, TINY))
            elif sign != UNDEFINED:
                self.signs.append((a, b, sign))
        for a, b, sign in sorted([*crossings, *self.merged()], key=lambda part: _nearest(*part[:2])):
            if (near := _nearest(a, b)) >= self.reach:
                break
            if len(self.points) > self.limit:
                self.reach = near
                break
            if sign in (UNKNOWN, TINY):
                self.judge(a, b, FLAT if sign == UNKNOWN else TINY)
            else:
                self.crossing(a, b, sign)

    def decided(self, a: float, b: float) -> int:
        """Return the sign on a box; ±10 if it has one crossing, from ±1; UNKNOWN if it must be cut."""
        enclosed = enclose(self.expr, a, b)
        if (sure := _sign(enclosed)) != UNKNOWN:
            return sure
        slope = enclose(self.derivative, a, b)
        ends = [*enclosed, *slope]
        if all(end.is_finite() for end in ends) and (slope[0] >= 0 or slope[1] <= 0):
            first, last = (sign_of(value(self.expr, at, 20)) for at in (a, b))
            if first == last:
                return first if first or slope[0] == slope[1] else TINY
            if first == -last:
                return 10 * first
        noise = b - a < max(abs(a), abs(b)) / 2 and all(
            at_share.rel_accuracy_bits() < NOISE_BITS and not at_share.is_zero()
            for at_share in (roughly(self.expr, a + (b - a) * share) for share in (0.23, 0.4871, 0.77))
        )
        if noise or b - a <= max(NARROW * max(abs(a), abs(b)), 1e-15):
            self.rough.append((a, b, UNKNOWN))
            return UNDEFINED
        return UNKNOWN

    def rest(self, boxes: list[tuple[float, float]]) -> None:
        """Shorten the reach to boxes that are left, unless f and f′ keep their signs at samples of a side."""
        for side in (-1, 1):
            outer = sorted(box for box in boxes if sum(box) * side > 0)
            chosen = [outer[i] for i in np.unique(np.linspace(0, len(outer) - 1, 24).astype(int))] if outer else []
            at = [a + (b - a) * math.modf(i * 0.618034)[0] for i, (a, b) in enumerate(chosen)]
            for expr in (self.derivative, self.expr):
                values = [value(expr, point, 15) for point in at]
                signs = {UNKNOWN if number.is_nan() else sign_of(number) for number in values if number != 0}
                if len(signs) > 1:
                    self.reach = min(self.reach, *(_nearest(*box) for box in outer))
                    break
            else:
                sign = signs.pop() if signs else TINY
                self.signs += [(a, b, sign) for a, b in outer]

    def merged(self) -> list[Part]:
        """Join adjacent boxes; leave out those in which the formula fades away toward an end of the domain."""
        runs: list[Part] = []
        for a, b, sign in sorted(self.rough):
            if _nearest(a, b) < self.reach:
                if runs and runs[-1][1] == a:
                    a, _, before = runs.pop()
                    sign = TINY if sign == before == TINY else UNKNOWN
                runs.append((a, b, sign))
        tails = [(a, b, sign) for a, b, sign in runs if sign == TINY and (a == self.low) != (b == self.high)]
        self.signs += tails
        return [run for run in runs if run not in tails]

    def judge(self, a: float, b: float, nothing: int) -> None:
        """Decide by exact values what a run of boxes contains, where enclosures cannot; `nothing` if all are 0."""
        if b - a < 1e-3 * max(abs(a), abs(b)):
            at = a + (b - a) * np.array([0.0, 0.2307, 0.4871, 0.7533, 1.0])
        else:
            grid = 0.0587 * 1.2 ** np.arange(3890)
            grid = np.concatenate([-1.0173 * grid[::-1], grid])
            grid = grid[(grid > a) & (grid < b)]
            at = np.unique([a, *grid[:: 1 + grid.size // 32], *(a + (b - a) * np.array([0.31, 0.69])), b])
        values = [value(self.expr, point, 20) for point in at.tolist()]
        signs = [UNDEFINED if number.is_nan() else sign_of(number) for number in values]
        if not any(signs):
            self.signs.append((a, b, nothing))
            return
        # a single 0 is a root; several, or one at an end, are where the formula fades away
        beside = zip([0, *signs[:-1]], [*signs[1:], 0], strict=True)
        fades = [s == 0 and 0 in pair for s, pair in zip(signs, beside, strict=True)]
        for i in range(len(at) - 1):
            p, q, s, t = float(at[i]), float(at[i + 1]), signs[i], signs[i + 1]
            if UNDEFINED in (s, t):
                continue
            if fades[i] or fades[i + 1]:
                self.signs.append((p, q, TINY))
            elif s == 0 or t == 0:
                if s == 0:
                    self.point(arb(p))
                self.signs.append((p, q, s or t))
            elif s != t:
                self.crossing(p, q, s)
            elif s * value(self.derivative, p, 20) < 0 and s * value(self.derivative, q, 20) > 0:
                self.touching(p, q, s, min(abs(values[i]), abs(values[i + 1])))
            else:
                self.signs.append((p, q, s))

    def crossing(self, a: float, b: float, sign: int) -> None:
        """Record the root in (a, b), where the sign changes from `sign`."""
        at = _root(self.expr, a, b, sign)
        self.signs += [(a, float(at), sign), (float(at), b, -sign)]
        self.point(at)

    def touching(self, a: float, b: float, sign: int, size: Number) -> None:
        """Record what the extremum in (a, b), which points toward 0, brings: two crossings, a root, or nothing."""
        at = _root(self.derivative, a, b, -sign)
        at_point = value(self.expr, at, 20)
        point = float(at)
        if abs(at_point) <= size * arb("1e-25"):
            self.point(at)
            self.signs += [(a, point, sign), (point, b, sign)]
        elif at_point * sign < 0 and a < point < b:
            self.crossing(a, point, sign)
            self.crossing(point, b, -sign)
        else:
            self.signs.append((a, b, sign))

    def point(self, at: Number) -> None:
        """Record a root if it lies inside the interval."""
        if self.low < at < self.high:
            self.points[float(at)] = at

    def whole(self) -> list[Part]:
        """Return the signs put together, and record the roots at breaks."""
        reach = self.reach
        names = {at: point for point in self.cuts for at in (point - gap(point), point + gap(point))}
        parts = sorted((max(a, -reach), min(b, reach), sign) for a, b, sign in self.signs if a < b)
        parts = _filled([part for part in parts if part[0] < part[1]])
        parts = [(names.get(a, a), names.get(b, b), sign) for a, b, sign in parts]
        ending = {b: sign for _, b, sign in parts}
        starting = {a: sign for a, _, sign in parts}
        for point, exact in self.cuts.items():
            below, above = ending.get(point, 0), starting.get(point, 0)
            if below * above < 0 or (
                below * above > 0 and any(order(self.expr, exact, side) > LEAST_ORDER for side in (-1, 1))
            ):
                self.points[point] = exact
        joined: list[Part] = []
        for a, b, sign in parts:
            if joined and joined[-1][1:] == (a, sign):
                joined[-1] = (joined[-1][0], b, sign)
            elif sign != TINY:
                joined.append((a, b, sign))
        return joined


def _filled(parts: list[Part]) -> list[Part]:
    """Give each part without a sign the sign of its neighbour; if it has two, of the one nearer to 0."""
    for step, first in ((1, True), (-1, False), (1, False)):
        for i in range(len(parts))[::step]:
            a, b, sign = parts[i]
            j = i - step
            if sign != TINY or not 0 <= j < len(parts) or (first and a < 0):
                continue
            beside = parts[j]
            if beside[1 if step > 0 else 0] == (a if step > 0 else b):
                parts[i] = (a, b, beside[2])
    return parts


def _root(expr: Expr, a: float, b: float, side: int) -> Number:
    """Return the root of a formula in (a, b), to 25 digits or more; `side` is its sign at a, which differs at b.

    Each step is the secant's, or halves the bracket where that is not half as long as the step before. None is
    shorter than the error that is allowed, so that two points are soon around the root.
    """
    with ctx.workprec(200):
        low, high = arb(a), arb(b)
        before, size = low, value(expr, low, 40)
        at, last = _middle(low, high), high - low
        while True:
            at_point = value(expr, at, 40)
            if at_point == 0:
                return at
            low, high = (at, high) if sign_of(at_point) == side else (low, at)
            close = (arb("1e-28") * abs(at)).max(arb("1e-340"))  # a root nearer to 0 is 0 as a float64
            step = (at_point * (at - before) / (at_point - size)).mid()
            if high - low <= 2 * close:
                return (at - step).mid() if low < at - step < high else at
            before, size = at, at_point
            if abs(step) < close:
                step = close if at == high else -close
            if low < at - step < high and 2 * abs(step) <= abs(last):
                at, last = (at - step).mid(), step
            else:
                at, last = _middle(low, high), (high - low) / 2


def _middle(low: Number, high: Number) -> Number:
    """Return where a bracket is halved: in the middle of its logarithms if it spans magnitudes."""
    if low < 0:
        return ZERO if high > 0 else -_middle(-high, -low)
    return ((low + high) / 2 if high <= 4 * low else (low.max(arb("1e-345")) * high).sqrt()).mid()


def _sign(enclosed: Interval) -> int:
    """Return the sign that an enclosure proves."""
    low, high = enclosed
    if low > 0 or high < 0:
        return 1 if low > 0 else -1
    if low.is_nan():
        return UNDEFINED
    if low == 0 and high == 0:
        return FLAT
    return TINY if low >= -UNDERFLOW and high <= UNDERFLOW else UNKNOWN


def _nearest(low: float, high: float) -> float:
    """Return the least |x| of a box."""
    return 0.0 if low <= 0 <= high else min(abs(low), abs(high))


def _between(low: float, high: float) -> float:
    """Return where a box is cut: in the middle, of its logarithms if it is wide."""
    if (low > 0 and high > 4 * low) or (high < 0 and low < 4 * high):
        return math.copysign(math.sqrt(low / high) * abs(high), low)
    return low + (high - low) * 0.4871
