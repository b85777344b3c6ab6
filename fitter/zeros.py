"""All zeros of a formula, all its breaks, and its sign between them, by bisecting boxes with enclosures."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import sympy
from numpy.typing import NDArray

from . import expression as ex
from .expression import SWITCHES, Array, Expr, x
from .intervals import enclose
from .precise import MP, Number, exactly, order

Boxes = tuple[Array, Array, Any]  # low, high, sign
Part = tuple[float, float, int]  # the same of one interval

REALS = float(np.finfo(np.float32).max)  # the end of the default domain
POSITIVE, NEGATIVE, FLAT, UNKNOWN, TINY, UNDEFINED = 1, -1, 0, 2, 3, 4
UNDERFLOW = 1e-290  # a value below it has no sign of its own where it fades away
NARROW = 2.0**-40  # relative width of a box that is not cut further; 1e-15 near 0
MAX_BOXES = 2048  # alive at once
MAX_WORK = 200_000  # boxes altogether
MAX_SWITCHES = 256
NOISE = 100  # a value less than this many times its rounding is left to exact arithmetic
LEAST_ORDER = 0.03  # of a zero: below it, a limit that is not 0


@dataclass(frozen=True)
class Zeros:
    """The zeros of a formula in an open interval, and its signs between them.

    Attributes:
        at: where it is zero or jumps from one sign to the other, float64, increasing.
        exact: the same points to 25 digits or more.
        below, above: the sign of the formula just below and just above each point, −1 or 1.
        flats: the intervals on which it is identically 0.
        signs: (low, high, sign) of all intervals on which the sign is −1, 0 or 1 but for isolated zeros,
            increasing; they leave out where the formula is undefined.
        complete: whether these are all.
        reach: the |x| up to which they are all; infinite where complete.

    """

    at: Array
    exact: tuple[Number, ...]
    below: NDArray[np.int8]
    above: NDArray[np.int8]
    flats: tuple[tuple[float, float], ...]
    signs: tuple[Part, ...]
    complete: bool
    reach: float


def zeros(expr: Expr, low: float, high: float, limit: int = 64) -> Zeros:
    """Find all zeros of a formula in (low, high), outward from 0.

    Where it fades below 1e-290 toward an end of the interval, it keeps the sign that it had before.

    Args:
        expr: the formula.
        low: the interval's lower end, at least −1.7e308.
        high: its upper end, at most 1.7e308.
        limit: the search stops when it has found more zeros than this.

    Returns:
        The zeros: exact where the formula is linear, otherwise correct to the last bit of float64.

    """
    return _zeros(expr, float(low), float(high), limit)


@lru_cache(maxsize=512)
def _zeros(expr: Expr, low: float, high: float, limit: int) -> Zeros:
    if x not in expr.free_symbols:
        value = exactly(expr, 0)
        signs = () if MP.isnan(value) else ((low, high, int(MP.sign(value))),)
        return _assembled(signs, {}, math.inf)
    cuts, reach = breaks(expr, low, high)
    return _Search(expr, low, high, limit, cuts, reach).run()


def _assembled(signs: Sequence[Part], points: dict[float, tuple[Number, int, int]], reach: float) -> Zeros:
    """Return the record of signs and of zeros (exact point, sign below, sign above)."""
    at = sorted(points)
    return Zeros(
        np.array(at, dtype=np.float64),
        tuple(points[point][0] for point in at),
        np.array([points[point][1] for point in at], dtype=np.int8),
        np.array([points[point][2] for point in at], dtype=np.int8),
        tuple((a, b) for a, b, sign in signs if sign == 0),
        tuple(signs),
        math.isinf(reach),
        reach,
    )


def breaks(
    expr: Expr, low: float, high: float, *, switches_only: bool = False
) -> tuple[dict[float, Number], float]:
    """Return the points inside (low, high) where a formula may not be smooth, and up to which |x| these are all.

    They are the zeros of the arguments of `where`, `relu`, `abs` and `sign` and, unless `switches_only`, of
    denominators, of what is raised to a fractional power, and the ends of domains.

    Returns:
        Point in float64 → the same point to 25 digits or more, increasing; and the reach, infinite if whole.

    """
    found: dict[float, Number] = {}
    reach = math.inf
    for u in _arguments(expr, switches_only):
        result = zeros(u, low, high, MAX_SWITCHES)
        found.update(zip(result.at.tolist(), result.exact, strict=True))
        ends = {end for flat in result.flats for end in flat if low < end < high}
        found.update({end: MP.mpf(end) for end in ends - set(found)})
        reach = min(reach, result.reach)
    kept: dict[float, Number] = {}
    last = -math.inf
    for point in sorted(found):
        if point - last > 4 * _gap(point) and abs(point) < reach:
            kept[point] = found[point]
            last = point
    return kept, reach


def _arguments(expr: Expr, switches_only: bool) -> list[Expr]:
    arguments: dict[Expr, None] = {}
    for node in sympy.preorder_traversal(expr):
        u = None
        if isinstance(node, SWITCHES):
            u = node.args[0]
        elif switches_only:
            continue
        elif node.is_Pow and not (node.exp.is_Integer and node.exp.p > 0):
            u = node.base
        elif isinstance(node, ex.log):
            u = node.args[0]
        elif isinstance(node, ex.log1p):
            u = 1 + node.args[0]
        elif isinstance(node, ex.tan):
            u = ex.cos(node.args[0])
        if u is not None and x in u.free_symbols:
            arguments[u] = None
    return list(arguments)


def _gap(point: float) -> float:
    """Return half the width of the hole that the search leaves around a break."""
    return max(8 * float(np.spacing(abs(point))), 1e-300)


def grid(low: float, high: float) -> Array:
    """Return points from low to high, both included: a few in [−1, 1], a factor of 1.2 apart beyond; never 0."""
    steps = 0.0587 * 1.2 ** np.arange(3890)
    points = np.concatenate([-1.0173 * steps[::-1], steps])
    return np.concatenate([[low], points[(points > low) & (points < high)], [high]])


class _Search:
    """One search for the zeros of one formula."""

    def __init__(
        self, expr: Expr, low: float, high: float, limit: int, cuts: dict[float, Number], reach: float
    ) -> None:
        self.expr, self.low, self.high, self.limit = expr, low, high, limit
        self.cuts, self.reach, self.restless = cuts, reach, 0
        self.slope = expr.diff(x)
        self.names = {p: point for point in cuts for p in (point - _gap(point), point + _gap(point))}
        self.signs: list[Part] = []
        self.points: dict[float, tuple[Number, int, int]] = {}

    @cached_property
    def curve(self) -> Expr:
        return self.slope.diff(x)

    def run(self) -> Zeros:
        decided, isolated, rough = self.subdivided()
        self.signs += [(a, b, sign) for a, b, sign in decided if sign != UNDEFINED]
        work = [(_near(a, b), a, b, sign) for a, b, sign in isolated]
        work += [(_near(a, b), a, b, None) for a, b in rough]
        for near, a, b, sign in sorted(work, key=operator.itemgetter(0)):
            if near >= self.reach:
                break
            if len(self.points) > self.limit:
                self.reach = near
                break
            if sign is None:
                self.judge(a, b)
            else:
                self.crossing(a, b, -sign)
        return self.whole()

    def subdivided(self) -> tuple[Any, Any, Any]:
        """Cut boxes until each is decided, has one crossing, or is beyond what float64 can tell."""
        bounds = grid(self.low, self.high)
        for point in self.cuts:
            a, b = point - _gap(point), point + _gap(point)
            bounds = np.concatenate([bounds[(bounds < a) | (bounds > b)], [a, b]])
        bounds = np.unique(np.clip(bounds, self.low, self.high))
        low, high = bounds[:-1], bounds[1:]
        hole = np.isin(low, [point - _gap(point) for point in self.cuts])
        low, high = low[~hole], high[~hole]
        decided: list[Boxes] = []
        isolated: list[Boxes] = []
        rough: list[Boxes] = []
        work = 0
        while low.size:
            low, high = self.kept(low, high, decided, isolated)
            work += low.size
            bottom, top = enclose(self.expr, low, high)
            sign = _sign(bottom, top)
            open_ = sign == UNKNOWN
            known = ~open_ & (sign != TINY)
            decided.append((low[known], high[known], sign[known]))
            tiny = sign == TINY
            rough.append((low[tiny], high[tiny], sign[tiny]))
            low, high = low[open_], high[open_]
            finite = np.isfinite(bottom[open_]) & np.isfinite(top[open_])
            if not low.size:
                break
            slope = enclose(self.slope, low, high)
            monotone = finite & np.isfinite(slope[0]) & np.isfinite(slope[1]) & ((slope[0] >= 0) | (slope[1] <= 0))
            inner = low + (high - low) * np.array([0.23, 0.4871, 0.77])[:, None]
            at = np.concatenate([low[None], inner, high[None]])
            points = [part.reshape(at.shape) for part in enclose(self.expr, at.ravel(), at.ravel())]
            ends = _sign(*points)
            same = monotone & (np.abs(ends[0]) == 1) & (ends[0] == ends[-1])
            one = monotone & (np.abs(ends[0]) == 1) & (ends[0] == -ends[-1])
            decided.append((low[same], high[same], ends[0][same]))
            isolated.append((low[one], high[one], ends[-1][one]))
            # where rounding is more than a hundredth of the value, smaller boxes would hardly tell more
            rounding = points[1][1:-1] - points[0][1:-1]
            vague = ~(rounding * NOISE < np.abs(points[0][1:-1]))
            noise = (vague & (ends[1:-1] != FLAT) & (ends[1:-1] != TINY)).all(0)
            width, size = high - low, np.maximum(np.abs(low), np.abs(high))
            narrow = width <= np.maximum(NARROW * size, 1e-15)
            stuck = ~same & ~one & (noise | narrow | (work > MAX_WORK))
            rough.append((low[stuck], high[stuck], ends[0][stuck]))
            go = ~same & ~one & ~stuck
            low, high, middle = low[go], high[go], inner[1][go]
            low, high = np.concatenate([low, middle]), np.concatenate([middle, high])
        return self.rows(decided), self.rows(isolated), self.merged(self.rows(rough))

    def kept(self, low: Array, high: Array, decided: list[Boxes], isolated: list[Boxes]) -> tuple[Array, Array]:
        """Drop the outermost boxes where there are too many zeros or boxes, and shorten the reach to the rest."""
        near = _nearest(low, high)
        if low.size > MAX_BOXES:
            bound = np.partition(near, MAX_BOXES)[MAX_BOXES]
            for side in (low < 0, low >= 0):
                outer = side & (near >= bound)
                if not outer.any():
                    continue
                sign = self.calm(low[outer], high[outer])
                if sign == UNKNOWN:
                    self.reach = min(self.reach, float(near[outer].min()))
                else:
                    decided.append((low[outer], high[outer], np.full(np.count_nonzero(outer), sign)))
                    near[outer] = math.inf
        clusters = np.sort(near[~np.isin(low, high)])  # boxes that continue no other
        if clusters.size > 4 * self.limit:
            self.reach = min(self.reach, float(clusters[4 * self.limit]))
        if isolated:
            found = np.sort(np.concatenate([_nearest(a, b) for a, b, _ in isolated]))
            if found.size > self.limit + 1:
                self.reach = min(self.reach, float(found[self.limit + 1]))
        inside = near < self.reach
        return low[inside], high[inside]

    def calm(self, low: Array, high: Array) -> int:
        """Return the one sign that a formula has at samples of boxes, if f′ too has one there: else UNKNOWN.

        After a few failures the answer is UNKNOWN without a look.
        """
        if self.restless > 3:
            return UNKNOWN
        chosen = np.unique(np.linspace(0, low.size - 1, 24).astype(int))
        at = low[chosen] + (high - low)[chosen] * np.modf(np.arange(chosen.size) * 0.618034)[0]
        for expr in (self.slope, self.expr):
            values = [exactly(expr, point, 15) for point in at]
            signs = {UNKNOWN if MP.isnan(value) else int(MP.sign(value)) for value in values if value}
            if len(signs) > 1:
                self.restless += 1
                return UNKNOWN
        return signs.pop() if signs else TINY

    def rows(self, parts: list[Boxes]) -> list[Part]:
        """Return boxes within the reach as a list (low, high, sign), increasing."""
        if not parts:
            return []
        low, high, sign = (np.concatenate([part[i] for part in parts]) for i in range(3))
        inside = _nearest(low, high) < self.reach
        ordered = np.argsort(low[inside], kind="stable")
        return list(zip(*(column[inside][ordered].tolist() for column in (low, high, sign)), strict=True))

    def merged(self, rows: list[Part]) -> list[tuple[float, float]]:
        """Join adjacent boxes; leave out those in which the formula fades away toward an end of the domain."""
        runs: list[tuple[float, float, bool]] = []
        for a, b, sign in rows:
            tiny = sign == TINY
            if runs and runs[-1][1] == a:
                a, tiny = runs[-1][0], tiny and runs[-1][2]
                runs.pop()
            runs.append((a, b, tiny))
        tails = {(a, b) for a, b, tiny in runs if tiny and (a == self.low) != (b == self.high)}
        self.signs += [(a, b, TINY) for a, b in tails]
        return [(a, b) for a, b, _ in runs if (a, b) not in tails]

    def judge(self, a: float, b: float) -> None:
        """Decide by exact values what a run of boxes contains that float64 cannot tell."""
        if b - a < 1e-3 * max(abs(a), abs(b)):
            at = a + (b - a) * np.array([0.0, 0.2307, 0.4871, 0.7533, 1.0])
        else:
            at = grid(a, b)
            at = np.concatenate([at[:: 1 + at.size // 32], a + (b - a) * np.array([0.31, 0.69]), [a, b]])
            at = np.unique(at)
        values = [exactly(self.expr, point, 20) for point in at]
        signs = [UNDEFINED if MP.isnan(value) else int(MP.sign(value)) for value in values]
        if not any(signs):
            self.signs.append((a, b, FLAT))
            return
        # a single 0 is a zero; several, or one at an end, are where the formula fades away
        beside = zip([0, *signs[:-1]], [*signs[1:], 0], strict=True)
        fades = [s == 0 and 0 in pair for s, pair in zip(signs, beside, strict=True)]
        for i in range(len(at) - 1):
            p, q, s, t = float(at[i]), float(at[i + 1]), signs[i], signs[i + 1]
            if UNDEFINED in (s, t):
                continue
            if fades[i] or fades[i + 1]:
                self.signs.append((p, q, TINY))
                continue
            if s == 0 or t == 0:
                if s == 0:
                    self.point(MP.mpf(p), signs[i - 1], t)
                self.signs.append((p, q, s or t))
            elif s != t:
                self.crossing(p, q, s)
            elif s * exactly(self.slope, p, 20) < 0 < s * exactly(self.slope, q, 20):
                self.touching(p, q, s, min(abs(values[i]), abs(values[i + 1])))
            else:
                self.signs.append((p, q, s))

    def crossing(self, a: float, b: float, sign: int) -> None:
        """Record the zero in (a, b), where the sign changes from `sign`."""
        at = _root((self.expr, self.slope, self.curve), a, b, sign)
        self.signs += [(a, float(at), sign), (float(at), b, -sign)]
        self.point(at, sign, -sign)

    def touching(self, a: float, b: float, sign: int, size: Number) -> None:
        """Record what is at the extremum in (a, b), toward 0: two crossings, a zero, or nothing."""
        at = _root((self.slope, self.curve, self.curve.diff(x)), a, b, -sign)
        value = exactly(self.expr, at, 20)
        point = float(at)
        if abs(value) <= size * MP.mpf("1e-25"):
            self.point(at, sign, sign)
            self.signs += [(a, point, sign), (point, b, sign)]
        elif value * sign < 0 and a < point < b:
            self.crossing(a, point, sign)
            self.crossing(point, b, -sign)
        else:
            self.signs.append((a, b, sign))

    def point(self, at: Number, below: int, above: int) -> None:
        if self.low < at < self.high:
            self.points[float(at)] = at, below, above

    def whole(self) -> Zeros:
        """Put together the signs and the zeros, those at breaks included."""
        reach = self.reach
        parts = sorted((max(a, -reach), min(b, reach), sign) for a, b, sign in self.signs if a < b)
        parts = _filled([part for part in parts if part[0] < part[1]])
        parts = [(self.names.get(a, a), self.names.get(b, b), sign) for a, b, sign in parts]
        ending = {b: sign for _, b, sign in parts}
        starting = {a: sign for a, _, sign in parts}
        for point, exact in self.cuts.items():
            below, above = ending.get(point, 0), starting.get(point, 0)
            if below * above < 0 or (
                below * above > 0 and any(order(self.expr, exact, side) > LEAST_ORDER for side in (-1, 1))
            ):
                self.points[point] = exact, below, above
        joined: list[Part] = []
        for a, b, sign in parts:
            if joined and joined[-1][1:] == (a, sign):
                joined[-1] = (joined[-1][0], b, sign)
            elif sign != TINY:
                joined.append((a, b, sign))
        return _assembled(joined, {p: self.points[p] for p in self.points if abs(p) < reach}, reach)


def _filled(parts: list[Part]) -> list[Part]:
    """Give the parts of no sign that of the part beside them, the one nearer to 0 where there are two."""
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


def _root(exprs: tuple[Expr, Expr, Expr], a: float, b: float, sign: int) -> Number:
    """Return the zero of the first formula in (a, b), to 25 digits or more.

    `exprs` are the formula and its first two derivatives; `sign` is its sign at a, and not that at b. Each step is
    Newton's for f/f′, which converges fast to multiple zeros too, or halves the bracket.
    """
    with MP.workdps(60):
        low, high = MP.mpf(a), MP.mpf(b)
        if low < 0 < high and exactly(exprs[0], 0, 20) == 0:
            return MP.zero
        at = (low + high) / 2
        for _ in range(200):
            value, slope, curve = (exactly(expr, at, 40) for expr in exprs)
            if value == 0:
                return at
            if MP.sign(value) == sign:
                low = at
            else:
                high = at
            scale = slope * slope - value * curve
            step = value * slope / scale if scale else MP.nan
            if abs(step) <= MP.mpf("1e-28") * abs(at) or high - low <= MP.mpf("1e-28") * abs(at):
                return at
            at = at - step if low < at - step < high else (low + high) / 2
        return at


def _sign(bottom: Array, top: Array) -> NDArray[np.int8]:
    """Return what enclosures say of a sign."""
    sign = np.full(np.shape(bottom), UNKNOWN, dtype=np.int8)
    sign[(bottom >= -UNDERFLOW) & (top <= UNDERFLOW)] = TINY
    sign[bottom > 0] = POSITIVE
    sign[top < 0] = NEGATIVE
    sign[(bottom == 0) & (top == 0)] = FLAT
    sign[np.isnan(bottom)] = UNDEFINED
    return sign


def _nearest(low: Array, high: Array) -> Array:
    """Return the least |x| of boxes."""
    return np.where((low <= 0) & (high >= 0), 0.0, np.minimum(np.abs(low), np.abs(high)))


def _near(low: float, high: float) -> float:
    return 0.0 if low <= 0 <= high else min(abs(low), abs(high))
