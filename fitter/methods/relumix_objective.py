"""Mixtures of ReLUs, and ∫ (h − h̃)² as a function of the knots."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fitact.fitter.analysis.activation import Activation
from fitact.fitter.analysis.roots import REALS, roots
from fitact.fitter.analysis.shape import Asymptote
from fitact.fitter.expr.wide import Array, geometric
from fitact.fitter.numerics.moments import nodes, running

REACH = 1e5  # of the table of integrals; beyond it, tails follow their power law
INNER = 12.0  # up to here its cells are even, then they grow
HALF_WIDTH = 40.0  # of the search for knots


@dataclass(frozen=True)
class Mixture:
    """A mixture of ReLUs in float64.

    Attributes:
        knots: c, (2^k − 1,), increasing.
        slopes: of h̃ between them, (2^k,); the weights a are their differences.
        objective: what was minimised.

    """

    knots: Array
    slopes: Array
    objective: float

    @property
    def weights(self) -> Array:
        """The weights a, (2^k − 1,)."""
        return np.diff(self.slopes)


@dataclass(frozen=True)
class Frame:
    """Units in which an activation bends near 0, and by about one: x = center + scale·u, h = size·g.

    The literature's activations do so as they are, and keep their own units: center 0, scale 1 and size 1.
    """

    center: float
    scale: float
    size: float

    @classmethod
    def of(cls, activation: Activation, left: Asymptote, right: Asymptote) -> Frame:
        """Return the units for an activation with these asymptotes."""
        bends = roots(activation.second_derivative_formula, -REALS, REALS).at
        marks = np.concatenate([[0.0], bends, activation.switch_points(-REALS, REALS)])
        marks = marks[np.abs(marks) < REACH]
        steps = geometric(1e-9, REACH, 2000)
        x = np.unique(np.concatenate([marks, *(mark + side * steps for mark in marks for side in (-1, 1))]))
        lines = [line.slope * x + line.intercept for line in (left, right)]
        off = np.min([np.abs(activation.value(x) - line) for line in lines], axis=0)
        off[off < 1e-12 * np.abs(lines[0])] = 0.0  # rounding
        share = np.cumsum(off[1:] ** 4 * np.diff(x))  # with this power slow tails do not count
        if not share[-1] > 0:
            return cls(0.0, 1.0, 1.0)
        low, middle, high = np.interp([0.1, 0.5, 0.9], share / share[-1], x[1:])
        size = 2.0 ** np.round(np.log2(off.max()))
        scale = 2.0 ** np.round(np.log2(high - low))
        corners = [point.at for point in activation.breakpoints() if abs(point.at) < REACH]
        apart = any(abs(corner - middle) > scale * HALF_WIDTH / 8 for corner in corners)
        near = apart or (abs(middle) < 6.0 and 2.0**-3 <= scale <= 2.0**6)
        size = 1.0 if 2**-6 <= size <= 2**6 else float(size)
        return cls(0.0, 1.0, size) if near else cls(float(middle), float(scale) / 4, size)

    def line(self, end: Asymptote) -> Asymptote:
        """Return an asymptote in these units."""
        slope = end.slope * self.scale / self.size
        return Asymptote("line", slope, (end.intercept + end.slope * self.center) / self.size)

    def undone(self, found: Mixture) -> Mixture:
        """Return a mixture in the units of the activation."""
        return Mixture(
            self.center + self.scale * found.knots,
            found.slopes * self.size / self.scale,
            found.objective * self.size**2 * self.scale,
        )


class Primitive:
    """∫ (h − h̃)² over all x as a function of the knots.

    Below 0, h̃ and h are counted from the left asymptote, above 0 from the right one: g is what is left of h. Where
    it vanishes, nothing large cancels, however far out the knots are.

    A table holds the integrals of g, x g and g² from 0, and of the squared distances from the asymptotes, on cells
    whose ends include 0 and every break of h; a knot adds the integral over part of a cell. Beyond ±1e5 a distance
    counts as a power of x, with the exponent seen there.

    Args:
        activation: h.
        left, right: its asymptotes.
        frame: the units of everything else here.

    """

    def __init__(
        self, activation: Activation, left: Asymptote, right: Asymptote, frame: Frame = Frame(0.0, 1.0, 1.0)
    ) -> None:
        def h(u: Array) -> Array:
            return activation.value(frame.center + frame.scale * u) / frame.size

        self.h = h
        self.frame = frame
        self.left, self.right = frame.line(left), frame.line(right)
        cells = 240
        outer = geometric(INNER, REACH, cells)
        spaced = np.concatenate([-outer, np.linspace(-INNER, INNER, 2 * cells + 1), outer])
        switches = (activation.switch_points(-REALS, REALS) - frame.center) / frame.scale
        self.edges = np.union1d(spaced, np.append(0.0, switches[np.abs(switches) < REACH]))
        rows = self._rows(self.edges[:-1], self.edges[1:])
        middle = int(np.searchsorted(self.edges, 0.0))
        # outward from 0, so that small integrals near 0 are not differences of large ones
        above = running(rows[:3, middle:])
        below = -running(rows[:3, :middle][:, ::-1])[:, ::-1]
        central = np.concatenate([below, above[:, 1:]], axis=1)
        # and the distances inward from where they vanish; the second is minus the rest to the right
        self.sums = np.concatenate([central, running(rows[3:4]), -running(rows[4:, ::-1])[:, ::-1]])
        self.tails = tuple(self._tail(end, side) for side, end in ((-1, self.left), (1, self.right)))

    def _rows(self, starts: Array, ends: Array) -> Array:
        x, weights = nodes(starts, ends)
        return np.asarray((self._integrands(x) * weights).sum(axis=2))

    def _integrands(self, x: Array) -> Array:
        h = self.h(x)
        found = np.empty((5, *x.shape))  # filled in place: a search calls this thousands of times
        off = [h - (line.slope * x + line.intercept) for line in (self.left, self.right)]
        found[0] = np.where(x < 0, *off)
        np.multiply(x, found[0], out=found[1])
        np.square(found[0], out=found[2])
        np.square(off, out=found[3:])
        return found

    def _tail(self, line: Asymptote, side: int) -> float:
        x = side * REACH * np.array([1.0, 2.0])
        near, far = np.abs(self.h(x) - line.slope * x - line.intercept)
        if near <= 1e-11 or far <= 1e-11 * abs(line.slope):  # rounding
            return 0.0
        power = math.log2(near / far)
        return float(near * near * REACH / (2 * power - 1)) if power > 0.5 else 0.0

    def at(self, knots: Array) -> Array:
        """Return the running integrals at the knots, (5, knots)."""
        cell = self.edges[1:-1].searchsorted(knots, side="right")
        return np.asarray(self.sums[:, cell] + self._rows(self.edges[cell], knots))

    def __call__(self, knots: Array) -> tuple[float, Array, Array]:
        """Return the objective with the best values at the knots, its gradient, (knots,), slopes, (knots + 1,)."""
        objective, gradient, slopes = self._solved(knots, self.at(knots))
        return float(objective), gradient, slopes

    def hessian(self, knots: Array) -> Array:
        """Return the second derivatives by the knots, (knots, knots), by central differences.

        Integrals up to a knot change with it by their integrands, so only the algebra after them is repeated.
        """
        count = len(knots)
        gaps = np.diff(knots, prepend=-np.inf, append=np.inf)
        steps = 1e-4 * np.minimum(gaps[:-1], gaps[1:])
        shifts = np.concatenate([np.diag(steps), np.diag(-steps)])
        moved = self.at(knots)[:, None] + self._integrands(knots)[:, None] * shifts
        _, gradients, _ = self._solved(knots + shifts, moved)
        columns = (gradients[:count] - gradients[count:]) / (2 * steps[:, None])
        return np.asarray((columns + columns.T) / 2)

    def _solved(self, knots: Array, moments: Array) -> tuple[Array, Array, Array]:
        """Return what a call returns, of one set of knots or of many, (…, knots), and their running integrals.

        A knot that moves while its value stays changes h̃ on either side by minus the slope there times the knot's
        hat function; the inner values are optimal, so their change does not count.
        """
        left, right = self.left, self.right
        g0, g1, g2 = moments[:3, ..., 1:] - moments[:3, ..., :-1]
        gap = knots[..., 1:] - knots[..., :-1]
        below = knots < 0
        slopes = np.empty((*knots.shape[:-1], knots.shape[-1] + 1))
        slopes[..., 0], slopes[..., -1] = left.slope, right.slope
        slopes[..., 1:-1] = np.where(below[..., :-1], left.slope, right.slope)
        across = np.nonzero(below[..., :-1] & ~below[..., 1:])
        if across[0].size:  # there g is counted from the chord
            start, end = knots[..., :-1][across], np.maximum(knots[..., 1:][across], np.finfo(float).tiny)
            low, high = left.slope * start + left.intercept, right.slope * end + right.intercept
            chord = (high - low) / gap[across]
            slopes[..., 1:-1][across] = chord
            zero = low - chord * start
            # the chord is off the asymptotes by straight lines from 0 at the knots to these at x = 0
            low, high = left.intercept - zero, right.intercept - zero
            g0[across] += (high * end - low * start) / 2
            g1[across] += (high * end**2 - low * start**2) / 6
            (before0, after0), (before1, after1) = (
                (row[..., :-1][across], row[..., 1:][across]) for row in moments[:2]
            )
            g2[across] += 2 * low * (before1 / start - before0) + 2 * high * (after0 - after1 / end)
            g2[across] += (high**2 * end - low**2 * start) / 3
        falling = (knots[..., 1:] * g0 - g1) / gap  # ∫ g times the hat function of a segment's left end
        rising = (g1 - knots[..., :-1] * g0) / gap  # and of its right end
        values = np.empty_like(knots)
        bend, shift = right.slope - left.slope, right.intercept - left.intercept
        values[..., 0] = np.where(below[..., 0], 0.0, -bend * knots[..., 0] - shift)
        values[..., -1] = np.where(below[..., -1], bend * knots[..., -1] + shift, 0.0)
        if knots.shape[-1] > 2:
            target = rising[..., :-1] + falling[..., 1:]
            target[..., 0] -= gap[..., 0] / 6 * values[..., 0]
            target[..., -1] -= gap[..., -1] / 6 * values[..., -1]
            values[..., 1:-1] = _tridiagonal((gap[..., :-1] + gap[..., 1:]) / 3, gap[..., 1:-1] / 6, target)
        first, last = values[..., :-1], values[..., 1:]
        inside = g2 - 2 * (first * falling + last * rising) + gap / 3 * (first**2 + first * last + last**2)
        before = moments[3, ..., 0] + self.tails[0]
        after = self.tails[1] - moments[4, ..., -1]
        slopes[..., 1:-1] += (last - first) / gap
        off_rising = rising - gap * (first / 6 + last / 3)
        off_falling = falling - gap * (first / 3 + last / 6)
        gradient = np.empty_like(knots)
        gradient[..., 1:-1] = 2 * (
            slopes[..., 1:-2] * off_rising[..., :-1] + slopes[..., 2:-1] * off_falling[..., 1:]
        )
        # the outer knots move along the asymptotes
        gradient[..., 0] = 2 * (slopes[..., 1] - left.slope) * off_falling[..., 0]
        gradient[..., -1] = 2 * (slopes[..., -2] - right.slope) * off_rising[..., -1]
        return inside.sum(axis=-1) + before + after, gradient, slopes


def _tridiagonal(diagonal: Array, beside: Array, target: Array) -> Array:
    """Solve symmetric, positive definite systems of three diagonals; LAPACK's rounding depends on the CPU."""
    # floats of Python where there is one system: NumPy's take several times as long
    pivots, off, rest = (rows.tolist() if rows.ndim == 1 else list(rows.T) for rows in (diagonal, beside, target))
    for i, entry in enumerate(off):
        factor = entry / pivots[i]
        pivots[i + 1] = pivots[i + 1] - factor * entry
        rest[i + 1] = rest[i + 1] - factor * rest[i]
    rest[-1] = rest[-1] / pivots[-1]
    for i in reversed(range(len(off))):
        rest[i] = (rest[i] - off[i] * rest[i + 1]) / pivots[i]
    return np.array(rest).T


def single(problem: Primitive) -> Mixture:
    """Return the one mixture of a single ReLU: its knot is where the asymptotes meet."""
    bend = problem.right.slope - problem.left.slope
    knot = np.array([(problem.left.intercept - problem.right.intercept) / bend])
    moments = problem.at(knot)[:, 0]
    objective = moments[3] + problem.tails[0] - moments[4] + problem.tails[1]
    return Mixture(knot, np.array([problem.left.slope, problem.right.slope]), float(objective))
