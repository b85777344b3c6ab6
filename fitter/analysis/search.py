"""A search for all roots of a formula and its sign between them, by bisecting boxes with enclosures."""

from __future__ import annotations

import math
import operator
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fitact.fitter.expr.atoms import Expr, differentiated
from fitact.fitter.expr.evaluate import Array
from fitact.fitter.expr.multiprecision import LEAST_ORDER, MP, Number, evaluate_multiprecision, order

from .intervals import enclose

Boxes = tuple[Array, Array, Any]  # low, high, sign
Part = tuple[float, float, int]  # the same for one interval
Point = tuple[Number, int, int]  # a root: the exact point, the sign below, the sign above
Found = tuple[list[Part], dict[float, Point], float]  # signs, roots, reach

POSITIVE, NEGATIVE, FLAT, UNKNOWN, TINY, UNDEFINED = 1, -1, 0, 2, 3, 4
UNDERFLOW = 1e-290  # a smaller value has no sign of its own: the formula fades away there
NARROW = 2.0**-40  # relative width of a box that is not cut further; 1e-15 near 0
MAX_BOXES = 2048  # alive at once
MAX_WORK = 200_000  # boxes altogether
NOISE = 100  # a value less than this many times its rounding is left to exact arithmetic


def gap(point: float) -> float:
    """Return half the width of the hole that the search leaves around a break."""
    return max(8 * float(np.spacing(abs(point))), 1e-300)


def grid(low: float, high: float) -> Array:
    """Return points from low to high, both included: a few in [−1, 1], a factor of 1.2 apart beyond; never 0."""
    steps = 0.0587 * 1.2 ** np.arange(3890)
    points = np.concatenate([-1.0173 * steps[::-1], steps])
    return np.concatenate([[low], points[(points > low) & (points < high)], [high]])


class Search:
    """One search for the roots of one formula."""

    def __init__(
        self, expr: Expr, low: float, high: float, limit: int, cuts: dict[float, Number], reach: float
    ) -> None:
        self.expr, self.low, self.high, self.limit = expr, low, high, limit
        self.cuts, self.reach, self.restless = cuts, reach, 0
        self.derivative = differentiated(expr)
        self.names = {p: point for point in cuts for p in (point - gap(point), point + gap(point))}
        self.signs: list[Part] = []
        self.points: dict[float, Point] = {}

    @cached_property
    def curve(self) -> Expr:
        """The second derivative."""
        return differentiated(self.derivative)

    def run(self) -> Found:
        """Return the signs, the roots, and the |x| up to which these are all."""
        decided, isolated, rough = self.subdivided()
        self.signs += [(a, b, sign) for a, b, sign in decided if sign != UNDEFINED]
        work = [(float(_nearest(a, b)), a, b, sign) for a, b, sign in isolated]
        work += [(float(_nearest(a, b)), a, b, None) for a, b in rough]
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
            a, b = point - gap(point), point + gap(point)
            bounds = np.concatenate([bounds[(bounds < a) | (bounds > b)], [a, b]])
        bounds = np.unique(np.clip(bounds, self.low, self.high))
        low, high = bounds[:-1], bounds[1:]
        hole = np.isin(low, [point - gap(point) for point in self.cuts])
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
            derivative = enclose(self.derivative, low, high)
            monotone = (
                finite
                & np.isfinite(derivative[0])
                & np.isfinite(derivative[1])
                & ((derivative[0] >= 0) | (derivative[1] <= 0))
            )
            inner = low + (high - low) * np.array([0.23, 0.4871, 0.77])[:, None]
            at = np.concatenate([low[None], inner, high[None]])
            points = [part.reshape(at.shape) for part in enclose(self.expr, at.ravel(), at.ravel())]
            ends = _sign(*points)
            same = monotone & (np.abs(ends[0]) == 1) & (ends[0] == ends[-1])
            one = monotone & (np.abs(ends[0]) == 1) & (ends[0] == -ends[-1])
            decided.append((low[same], high[same], ends[0][same]))
            isolated.append((low[one], high[one], ends[-1][one]))
            # where rounding is more than a hundredth of the value, smaller boxes would hardly tell more
            with np.errstate(over="ignore", invalid="ignore"):
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
        """Drop the outermost boxes where there are too many roots or boxes, and shorten the reach to the rest."""
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
        """Return the sign of a formula at samples of boxes if it and f′ keep one sign there, else UNKNOWN.

        After a few failures the answer is UNKNOWN at once.
        """
        if self.restless > 3:
            return UNKNOWN
        chosen = np.unique(np.linspace(0, low.size - 1, 24).astype(int))
        at = low[chosen] + (high - low)[chosen] * np.modf(np.arange(chosen.size) * 0.618034)[0]
        for expr in (self.derivative, self.expr):
            values = [evaluate_multiprecision(expr, point, 15) for point in at]
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
        """Decide by exact values what a run of boxes contains, where float64 cannot."""
        if b - a < 1e-3 * max(abs(a), abs(b)):
            at = a + (b - a) * np.array([0.0, 0.2307, 0.4871, 0.7533, 1.0])
        else:
            at = grid(a, b)
            at = np.concatenate([at[:: 1 + at.size // 32], a + (b - a) * np.array([0.31, 0.69]), [a, b]])
            at = np.unique(at)
        values = [evaluate_multiprecision(self.expr, point, 20) for point in at]
        signs = [UNDEFINED if MP.isnan(value) else int(MP.sign(value)) for value in values]
        if not any(signs):
            self.signs.append((a, b, FLAT))
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
                continue
            if s == 0 or t == 0:
                if s == 0:
                    self.point(MP.mpf(p), signs[i - 1], t)
                self.signs.append((p, q, s or t))
            elif s != t:
                self.crossing(p, q, s)
            elif (
                s * evaluate_multiprecision(self.derivative, p, 20)
                < 0
                < s * evaluate_multiprecision(self.derivative, q, 20)
            ):
                self.touching(p, q, s, min(abs(values[i]), abs(values[i + 1])))
            else:
                self.signs.append((p, q, s))

    def crossing(self, a: float, b: float, sign: int) -> None:
        """Record the root in (a, b), where the sign changes from `sign`."""
        at = _root((self.expr, self.derivative, self.curve), a, b, sign)
        self.signs += [(a, float(at), sign), (float(at), b, -sign)]
        self.point(at, sign, -sign)

    def touching(self, a: float, b: float, sign: int, size: Number) -> None:
        """Record what the extremum in (a, b), which points toward 0, brings: two crossings, a root, or nothing."""
        at = _root((self.derivative, self.curve, differentiated(self.curve)), a, b, -sign)
        value = evaluate_multiprecision(self.expr, at, 20)
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
        """Record a root, with the signs beside it, if it lies inside the interval."""
        if self.low < at < self.high:
            self.points[float(at)] = at, below, above

    def whole(self) -> Found:
        """Put together the signs and the roots, including those at breaks."""
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
        return joined, {p: root for p, root in self.points.items() if abs(p) < reach}, reach


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


def _root(exprs: tuple[Expr, Expr, Expr], a: float, b: float, sign: int) -> Number:
    """Return the root of the first formula in (a, b), to 25 digits or more.

    `exprs` are the formula and its first two derivatives; `sign` is its sign at a, which differs from that at b.
    Each step is Newton's for f/f′, which converges fast to multiple roots too, or halves the bracket.
    """
    with MP.workdps(60):
        low, high = MP.mpf(a), MP.mpf(b)
        if low < 0 < high and evaluate_multiprecision(exprs[0], 0, 20) == 0:
            return MP.zero
        at = (low + high) / 2
        for _ in range(200):
            value, derivative, curve = (evaluate_multiprecision(expr, at, 40) for expr in exprs)
            if value == 0:
                return at
            if MP.sign(value) == sign:
                low = at
            else:
                high = at
            scale = derivative * derivative - value * curve
            step = value * derivative / scale if scale else MP.nan
            if abs(step) <= MP.mpf("1e-28") * abs(at) or high - low <= MP.mpf("1e-28") * abs(at):
                return at
            at = at - step if low < at - step < high else (low + high) / 2
        return at


def _sign(bottom: Array, top: Array) -> NDArray[np.int8]:
    """Return the signs that enclosures prove."""
    sign = np.full(np.shape(bottom), UNKNOWN, dtype=np.int8)
    sign[(bottom >= -UNDERFLOW) & (top <= UNDERFLOW)] = TINY
    sign[bottom > 0] = POSITIVE
    sign[top < 0] = NEGATIVE
    sign[(bottom == 0) & (top == 0)] = FLAT
    sign[np.isnan(bottom)] = UNDEFINED
    return sign


def _nearest(low: Any, high: Any) -> Array:
    """Return the least |x| of boxes."""
    return np.where((low <= 0) & (high >= 0), 0.0, np.minimum(np.abs(low), np.abs(high)))
