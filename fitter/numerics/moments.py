"""Integrals of w, w·g and w·g² over any interval, to float64 accuracy; g is f′."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fitact.base import UsageError
from fitact.fitter.expr import Array

Function = Callable[[Array], Array]

# Ten Gauss–Legendre nodes integrate polynomials of degree 19 exactly: on cells this narrow, float64 exactly.
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(10)
_NODES, _WEIGHTS = (_NODES + 1) / 2, _WEIGHTS / 2

NARROWEST = 2.0**-40  # of the domain: a cell that must be halved further holds a pole


def nodes(starts: Array, ends: Array) -> tuple[Array, Array]:
    """Return quadrature nodes and weights, both (cells, 10), for cells from `starts` to `ends`."""
    width = (ends - starts)[:, None]
    return starts[:, None] + width * _NODES, width * _WEIGHTS


def quadrature(function: Function, edges: Array) -> Array:
    """Integrate over each cell between consecutive edges: (cells,)."""
    at, weights = nodes(edges[:-1], edges[1:])
    return np.asarray((function(at) * weights).sum(axis=1))


class Moments:
    """The running integrals W = ∫w, F = ∫w·g and S = ∫w·g² from the left end of the domain.

    The function g and the weight w ≥ 0 are smooth between the breakpoints, which are always on the grid. This has
    about `cells` cells: it starts with even steps, with extra points around 0 and the breakpoints in case the
    domain is wide, and is refined where g varies most. `grid` are its points, (n + 1,), increasing, and `sums` W,
    F and S there, (3, n + 1).

    Raises:
        UsageError: g is unbounded somewhere, has a jump that is no breakpoint, or is too steep to be integrated.

    """

    def __init__(
        self, function: Function, weight: Function, low: float, high: float, breakpoints: Array, cells: int
    ) -> None:
        self.function = function
        self.weight = weight
        octaves = (high - low) * 0.5 ** np.arange(1, min(cells // 100, 38))
        round_each = np.union1d(breakpoints, 0.0)[:, None] + np.concatenate([-octaves, octaves])
        first = np.union1d(np.linspace(low, high, cells // 4 + 1), round_each)
        first = first[(low <= first) & (first <= high)]
        # a cell a few roundings wide at a jump would have nodes on both sides of it
        apart = np.abs(first[:, None] - breakpoints).min(axis=1, initial=np.inf) > NARROWEST * (high - low)
        self.grid = np.union1d(first[apart], np.concatenate([[low, high], breakpoints]))
        self._rows = self._integrate(self.grid[:-1], self.grid[1:])
        while len(self.grid) <= cells:
            self._split(cells)
        self._refuse(np.asarray(~np.isfinite(self._rows).all(axis=0)))
        self.sums = running(self._rows)

    def _integrate(self, starts: Array, ends: Array) -> Array:
        at, weights = nodes(starts, ends)
        g = self.function(at)
        w = self.weight(at) * weights
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused
            return np.stack([w.sum(axis=-1), (w * g).sum(axis=-1), (w * g * g).sum(axis=-1)])

    def _split(self, cells: int) -> None:
        """Halve the cells over which g varies most, or the widest where it varies no more."""
        error = spread(self._rows)
        varies = error > 1e-15 * self._rows[2].sum()  # the rest is rounding
        error = np.where(varies, error, 0.0) if varies.any() else np.diff(self.grid)
        # halving a cell on which g is straight divides its error by 8: all cells within that factor may be next
        count = min(np.count_nonzero(error >= error.max() / 8), cells + 1 - len(self.grid))
        worst = np.sort(np.argsort(-error, kind="stable")[:count])
        starts, ends = self.grid[worst], self.grid[worst + 1]
        narrow = np.zeros(len(error), dtype=bool)
        narrow[worst] = varies[worst] & (ends - starts < NARROWEST * (self.grid[-1] - self.grid[0]))
        self._refuse(narrow)
        middle = (starts + ends) / 2
        self.grid = np.insert(self.grid, worst + 1, middle)
        self._rows[:, worst] = self._integrate(starts, middle)
        self._rows = np.insert(self._rows, worst + 1, self._integrate(middle, ends), axis=1)

    def _refuse(self, cells: NDArray[np.bool_]) -> None:
        """Raise if there are cells over which g cannot be integrated."""
        if cells.any():
            near = self.grid[:-1][cells][0]
            raise UsageError(f"the derivative is unbounded, or jumps or is too steep, near x = {near:g}")

    def at(self, points: Array) -> Array:
        """Return W, F and S at any points of the domain: (3, points)."""
        cell = np.clip(np.searchsorted(self.grid, points, side="right") - 1, 0, len(self.grid) - 2)
        return np.asarray(self.sums[:, cell] + self._integrate(self.grid[cell], points))

    def between(self, borders: Array) -> Array:
        """Return W, F and S of the intervals into which borders cut the domain: (3, borders + 1)."""
        return np.diff(self.at(np.concatenate([self.grid[:1], borders, self.grid[-1:]])), axis=-1)


def running(rows: Array) -> Array:
    """Return the running sums of each row from 0, (rows, n + 1), each rounded once.

    A cumulative sum in float64 drifts by a rounding per term, and the last digits of a border depend on it.
    """
    sums = np.cumsum(rows, axis=1, dtype=np.longdouble)
    return np.pad(sums.astype(np.float64), ((0, 0), (1, 0)))


def spread(moments: Array) -> Array:
    """Return ∫w·(g − mean)² from the moments W, F, S of intervals, (3, …): (…).

    An interval of mass 0 adds nothing.
    """
    mass, first, second = moments
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        return np.asarray(np.maximum(np.where(mass > 0, second - first * first / mass, 0.0), 0.0))


def about(moments: Array, level: float | Array) -> Array:
    """Return ∫w·(g − level)² from the moments W, F, S of intervals, (3, …): (…)."""
    mass, first, second = moments
    return np.asarray(np.maximum(second - 2 * level * first + level * level * mass, 0.0))
