"""The samples that a fit on a cell has to meet: x, stored y, and f′; and cuts of cells that lower the floor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fitact.errors import UsageError
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.analysis.roots import REALS
from fitact.fitter.expr.wide import Array, geometric
from fitact.fitter.numerics.dtypes import halves, rounded, stored
from fitact.fitter.records.approximants import Floats, Single, codes

from .inverted_cells import BESIDE, CORNER, LARGEST, Cell, cell_borders

SMALL = 1e35  # |f| below which a derivative that is too large is refused; beyond, f itself leaves the range


@dataclass(frozen=True)
class Samples:
    """The samples that a fit on one cell has to meet.

    Attributes:
        cell: the cell.
        x, y, derivative: x, increasing, y rounded to the dtype, (n,) float32, and f′(x).
        kept: y as a module computes it; for a formula it is off by some roundings of float32.
        floor: half the spread of f′ over the x of one y, relative, at its largest.
        half: whether the dtype is one of half precision.

    """

    cell: Cell
    x: Array
    y: Single
    derivative: Array
    kept: Single
    floor: float
    half: bool


def samples_of(activation: Activation, cell: Cell, dtype: str, borders: Sequence[float], s: int) -> Samples:
    """Return the samples of cell s."""
    x, y, derivative = points_of(activation, cell, dtype, borders, s)
    kept = stored(activation, x, dtype).astype(np.float32)
    return Samples(cell, x, y, derivative, kept, floor_of(y, derivative), dtype != "float32")


def floor_of(y: Floats, derivative: Array) -> float:
    """Return half the largest spread of f′ over the x of one y, relative to max(1, |f′|)."""
    low, high, _ = grouped(y, derivative)
    size = np.maximum(1.0, np.maximum(np.abs(low), np.abs(high)))
    return float(((high - low) / size).max(initial=0.0)) / 2


def points_of(
    activation: Activation, cell: Cell, dtype: str, borders: Sequence[float], s: int, inputs: str | None = None
) -> tuple[Array, Single, Array]:
    """Return x of the dtype `inputs`, y rounded to `dtype`, and f′, of a cell.

    They are all x of a half-precision dtype, or a sample of float32; `inputs` is `dtype` by default.
    """
    x = _singles(cell) if (inputs or dtype) == "float32" else halves(inputs or dtype)
    x = np.unique(x[(x >= cell.low) & (x <= cell.high)])
    x = x[codes(borders, x) == s]
    with np.errstate(all="ignore"):
        y = rounded(activation.value(x), dtype)
        derivative = activation.derivative(x)
        valid = (np.abs(y) < LARGEST) & (np.abs(derivative) < LARGEST)
        steep = ~valid & (np.abs(y) < SMALL)
        if steep.any():
            raise UsageError(
                f"{activation}: its derivative is {derivative[steep][0]:g} at "
                f"x = {x[steep][0]:g}, and at most {LARGEST:g} can be fitted: fit it on a smaller domain"
            )
        for end, side in ((cell.low, 1), (cell.high, -1)):  # a corner itself belongs to neither side
            beside = activation.derivative(np.array(end + side * BESIDE * max(1.0, abs(end))))
            valid &= ~((x == end) & (np.abs(derivative - beside) > CORNER))
    return x[valid], y[valid].astype(np.float32), derivative[valid]


def _singles(cell: Cell) -> Array:
    """Return a sample of float32 numbers: even near the middle, geometric beyond, and dense toward the ends."""
    low, high = cell.low, cell.high
    outer = geometric(1e-6, REALS, 3000)
    parts = [np.linspace(max(low, -25.0), min(high, 25.0), 20001), -outer, outer, np.array([low, high])]
    if high - low < REALS:
        parts.append(np.linspace(low, high, 20001))
    for end in (low, high):
        if abs(end) < REALS:
            near = np.concatenate([geometric(1e-9, 1.0, 4000), np.linspace(0.0, 4e-3, 8001)])
            near = np.concatenate([near * max(abs(end), 1e-3), np.arange(256) * np.spacing(np.float32(abs(end)))])
            parts += [end + near, end - near]
    return np.concatenate(parts).astype(np.float32).astype(np.float64)


def grouped(key: Floats, derivative: Array) -> tuple[Array, Array, Array]:
    """Return the least and the largest derivative for each distinct key, and the keys, increasing."""
    if not key.size:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    at = np.argsort(key, kind="stable")
    key, derivative = key[at], derivative[at]
    first = np.concatenate([[0], np.flatnonzero(np.diff(key)) + 1])
    return np.minimum.reduceat(derivative, first), np.maximum.reduceat(derivative, first), key[first]


def refined(activation: Activation, parts: tuple[Cell, ...], count: int, dtype: str) -> tuple[Cell, ...]:
    """Cut the given cells into up to `count`, so that the floor of the dtype is least.

    In a cell all x of one y lie side by side. For a given floor, every such run whose derivatives spread wider has
    to be cut, as far on as the floor allows. Bisection finds the floor.
    """
    borders = cell_borders(activation, parts)
    points = [points_of(activation, cell, dtype, borders, s) for s, cell in enumerate(parts)]
    x, y, derivative = (np.concatenate(one) for one in zip(*points, strict=True))
    of = np.repeat(np.arange(len(parts)), [len(one[0]) for one in points])
    first = np.flatnonzero((np.diff(y, prepend=np.nan) != 0) | (np.diff(of, prepend=-1) != 0))
    runs = [slice(a, b) for a, b in itertools.pairwise([*first.tolist(), len(x)])]
    size = np.maximum(1.0, np.maximum.reduceat(np.abs(derivative), first))
    derivative = derivative / np.repeat(size, np.diff(first, append=len(x)))
    spread = (np.maximum.reduceat(derivative, first) - np.minimum.reduceat(derivative, first)) / 2
    low, high = 0.0, float(spread.max(initial=0.0))
    cuts: list[tuple[int, float]] = []
    while high - low > 1e-4 * high:
        floor = (low + high) / 2
        trial: list[tuple[int, float]] = []
        for i in np.flatnonzero(spread > floor):
            trial += _cuts(int(of[first[i]]), x[runs[i]], derivative[runs[i]], floor, count)
            if len(trial) + len(parts) > count:
                break
        if len(trial) + len(parts) > count:
            low = floor
        else:
            high, cuts = floor, trial
    refined = []
    for s, cell in enumerate(parts):
        edges = [cell.low, *sorted(at for i, at in cuts if i == s), cell.high]
        refined += [replace(cell, low=a, high=b) for a, b in itertools.pairwise(edges)]
    return tuple(refined)


def _cuts(s: int, x: Array, derivative: Array, floor: float, count: int) -> list[tuple[int, float]]:
    """Return the cuts of a run of x, at most `count`, after which no part spreads wider than twice the floor."""
    found: list[tuple[int, float]] = []
    start = 0
    while len(found) < count:
        wide = np.maximum.accumulate(derivative[start:]) - np.minimum.accumulate(derivative[start:]) > 2 * floor
        if not wide.any():
            break
        start += int(np.argmax(wide))
        middle = float(np.float32((x[start - 1] + x[start]) / 2))
        found.append((s, middle if middle < x[start] else float(x[start - 1])))
    return found
