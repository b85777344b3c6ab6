"""Integrals of w, w·f′ and w·f′² over any interval, to float64 accuracy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .expression import Array

Function = Callable[[Array], Array]

# Ten Gauss–Legendre nodes integrate polynomials of degree 19 exactly: on cells this narrow, float64 exactly.
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(10)
_NODES, _WEIGHTS = (_NODES + 1) / 2, _WEIGHTS / 2


def nodes(edges: Array) -> tuple[Array, Array]:
    """Return quadrature nodes and weights, both (cells, 10), for the cells between consecutive edges."""
    width = np.diff(edges)[:, None]
    return edges[:-1, None] + width * _NODES, width * _WEIGHTS


def quadrature(function: Function, edges: Array) -> Array:
    """Integrate over each cell between consecutive edges: (cells,)."""
    at, weights = nodes(edges)
    return np.asarray((function(at) * weights).sum(axis=1))


class Moments:
    """The running integrals W = ∫w, F = ∫w·f′ and S = ∫w·f′² from the left end of the domain.

    Args:
        derivative: f′, smooth between breakpoints.
        weight: w ≥ 0, smooth between breakpoints.
        low, high: the domain.
        breakpoints: points inside it where f′ or w jumps or has a corner: always on the grid.
        cells: how many cells the grid has, at least. It starts even and is refined where f′ varies most.

    Attributes:
        grid: the grid points, (n + 1,), increasing.
        sums: W, F and S at the grid points, (3, n + 1).

    """

    def __init__(
        self, derivative: Function, weight: Function, low: float, high: float, breakpoints: Array, cells: int
    ) -> None:
        self.derivative = derivative
        self.weight = weight
        self.grid = np.union1d(np.linspace(low, high, cells // 4 + 1), breakpoints)
        self._rows = self._integrate(self.grid)
        while len(self.grid) <= cells and self._split(cells):
            pass
        self.sums = running(self._rows)

    def _integrate(self, edges: Array) -> Array:
        at, weights = nodes(edges)
        df = self.derivative(at)
        w = self.weight(at) * weights
        return np.stack([w.sum(axis=1), (w * df).sum(axis=1), (w * df * df).sum(axis=1)])

    def _split(self, cells: int) -> bool:
        """Halve the cells over which f′ varies most, an eighth of them or more, up to `cells` in all.

        Returns whether that added any: cells a rounding wide cannot be halved.
        """
        before = len(self.grid)
        error = spread(self._rows)
        # halving a cell on which f′ is straight divides its error by 8: all within that factor may be next
        count = max(np.count_nonzero(error >= error.max() / 8), len(error) // 8)
        worst = np.argsort(-error, kind="stable")[: min(count, cells + 1 - len(self.grid))]
        middle = (self.grid[worst] + self.grid[worst + 1]) / 2
        self.grid = np.union1d(self.grid, middle)
        self._rows = self._integrate(self.grid)
        return len(self.grid) > before

    def at(self, points: Array) -> Array:
        """Return W, F and S at any points of the domain: (3, points)."""
        cell = np.clip(np.searchsorted(self.grid, points, side="right") - 1, 0, len(self.grid) - 2)
        start = self.grid[cell]
        width = (points - start)[:, None]
        at, weights = start[:, None] + width * _NODES, width * _WEIGHTS
        df = self.derivative(at)
        w = self.weight(at) * weights
        inside = np.stack([w.sum(axis=1), (w * df).sum(axis=1), (w * df * df).sum(axis=1)])
        return np.asarray(self.sums[:, cell] + inside)


def running(rows: Array) -> Array:
    """Return the running sums of each row from 0, (rows, n + 1), each rounded once.

    A plain cumulative sum drifts by a rounding a term, which is what the last digits of a border hang on.
    """
    sums = np.zeros((rows.shape[0], rows.shape[1] + 1))
    for row, out in zip(rows.tolist(), sums, strict=True):
        total = lost = 0.0
        for i, term in enumerate(row, 1):
            grown = total + term
            lost += (total - grown) + term if abs(total) >= abs(term) else (term - grown) + total
            total = grown
            out[i] = total + lost
    return sums


def spread(moments: Array) -> Array:
    """Return ∫w·(f′ − mean)² from the moments W, F, S of an interval, (3, …): 0 where the mass is 0."""
    mass, first, second = moments
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.maximum(np.where(mass > 0, second - first * first / mass, 0.0), 0.0)
