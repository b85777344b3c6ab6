"""Densities from data: a histogram of cells that the data chose, and its text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from fitact.base import UsageError, quote
from fitact.fitter.expr import Array

MOST_CELLS = 256
LARGEST = 1e30  # of an edge and of a mass
LONGEST = 52 * MOST_CELLS  # characters of a text: of its numbers, each has 24 at most
DIGITS = 7  # of an edge that is written here
NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_TEXT = re.compile(r"histogram\(([^();]*);([^();]*)\)")


@dataclass(frozen=True)
class Histogram:
    """A density that is constant on each of some cells and zero beyond them; its integral is 1.

    Raises:
        UsageError: the edges do not increase, a number is not finite or too large, there are no cells or too many,
            or no cell has a mass.

    """

    edges: tuple[float, ...]  # of the cells, increasing, one more than there are cells
    masses: tuple[float, ...]  # of the cells, none negative; only their ratios matter

    def __post_init__(self) -> None:
        if not 1 <= len(self.masses) <= MOST_CELLS or len(self.edges) != len(self.masses) + 1:
            raise UsageError(
                f"expected 1 to {MOST_CELLS} masses, and edges one more, got {len(self.masses)} masses and "
                f"{len(self.edges)} edges"
            )
        for what, numbers in (("edge", self.edges), ("mass", self.masses)):
            for i, number in enumerate(numbers):
                if not abs(number) <= LARGEST or (what == "mass" and number < 0):
                    expected = f"0 to {LARGEST:g}" if what == "mass" else f"at most {LARGEST:g} in size"
                    raise UsageError(f"{what} {i}: expected a number, {expected}, got {number!r}")
        for i, (a, b) in enumerate(pairwise(self.edges)):
            if a >= b:
                raise UsageError(f"edge {i + 1}: expected more than edge {i}, {a!r}, got {b!r}")
        if not any(self.masses):
            raise UsageError("expected a mass above 0, got none")

    @cached_property
    def heights(self) -> Array:
        """The density on each cell, with the zeros before and after: (cells + 2,)."""
        heights = np.array(self.masses) / math.fsum(self.masses) / np.diff(self.edges)
        return np.concatenate([[0.0], heights, [0.0]])

    def __call__(self, at: Array) -> Array:
        """Return the density at the points, float64 of any shape; at an edge, that of the cell above."""
        return np.asarray(self.heights[np.searchsorted(self.edges, at, side="right")])

    def breakpoints(self, low: float, high: float) -> Array:
        """Return the edges inside (low, high)."""
        edges = np.array(self.edges)
        return edges[(low < edges) & (edges < high)]

    @property
    def text(self) -> str:
        """The text that `parsed` reads: `histogram(edges; masses)`."""
        edges, masses = (", ".join(map(_plain, numbers)) for numbers in (self.edges, self.masses))
        return f"histogram({edges}; {masses})"


def _plain(number: float) -> str:
    """Return a number as a short text that is read as the same number."""
    return str(int(number)) if number == int(number) and abs(number) < 2**53 else repr(number)


def parsed(text: str) -> Histogram:
    """Return the histogram of a text; UsageError if there is none."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise UsageError("expected histogram(edges; masses)")
    edges, masses = ([part.strip(" ") for part in numbers.split(",")] for numbers in match.groups())
    for part in (*edges, *masses):
        if not re.fullmatch(NUMBER, part, re.ASCII):
            raise UsageError(f"expected a number, got {quote(part)}")
    return Histogram(tuple(map(float, edges)), tuple(map(float, masses)))


def of_counts(edges: Sequence[float], counts: Sequence[int]) -> Histogram:
    """Return a histogram with few cells from one with many.

    With n values, N is 2 n^(1/3) (Rice's rule) and at most half of MOST_CELLS. The edges are those of the fine
    histogram, whose counts are not all zero, near the quantiles (1 - cos(πi/N))/2, which lie closer in the tails,
    and those of its cells that hold 2/N of the values or more.
    """
    fine = np.asarray(edges, dtype=np.float64)
    sums = np.concatenate([[0], np.cumsum(np.asarray(counts, dtype=np.int64))])
    total = int(sums[-1])
    cells = max(1, min(MOST_CELLS // 2, math.floor(2 * total ** (1 / 3) + 1e-9)))
    wanted = (1 - np.cos(np.pi * np.arange(cells + 1) / cells)) / 2 * total
    first = int(np.flatnonzero(sums == 0)[-1])  # the edge below the least value
    last = int(np.searchsorted(sums, total))  # and the one above the largest
    near = np.unique(np.clip(np.searchsorted(sums, wanted), first, last))
    near = np.union1d(near, [first, last])
    # a cell of the fine histogram with that share of the values stands alone: they may be one value
    heavy = np.flatnonzero(np.diff(sums) * cells >= 2 * total)
    near = np.union1d(near, np.concatenate([heavy, heavy + 1]))
    rounded = [float(f"{edge:.{DIGITS}g}") for edge in fine[near]]
    return Histogram(tuple(rounded), tuple(map(float, np.diff(sums[near]))))
