"""Codes drawn at random such that the value looked up is f(x) in the mean, and the best nodes for them.

Code i stands for the node x_i, with F_i = f(x_i). Between neighbouring nodes f is monotone, so F_i and F_{i+1}
bracket f(x); code i + 1 is drawn with the probability p = (f(x) − F_i) / (F_{i+1} − F_i), else code i. Then
E F = f(x), with the variance (f − F_i)(F_{i+1} − f). The *position* i + p rises by 1 from node to node; adding a
random number from [0, 1) and rounding down draws the code.

Nodes are numbers of bfloat16. A position is a whole number of 1/65536, known for each number of bfloat16. Between
neighbouring ones, which a float32 may lie between, it is interpolated. So all arithmetic on a position is that of
whole numbers, the same on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solveh_banded

from fitact.errors import UsageError
from fitact.fitter.expr.evaluate import Array

from .coding import Objective, normal, vanishing
from .dtypes import halves
from .moments import nodes as quadrature_nodes
from .moments import running

ONE = 1 << 16  # of a position
PATTERNS = 1 << 16  # numbers of bfloat16, NaN among them
NEAREST = 2.0**-12  # the least node but 0: others would be closer than inputs need
FLAT = 1e-7  # of the root mean square of f: where f grows by less, float32 does not show how p grows
SLACK = 1.5  # of the bound on J: nodes beyond are left out of the search
RIDGE = 1e-12  # of the largest share: D is f′ where the weight tells nothing


def candidates(domain: tuple[float, float]) -> Array:
    """Return the numbers that may be nodes, increasing; the first and the last are nodes."""
    found: Array = np.unique(halves("bfloat16"))
    low, high = domain
    inside: Array = found[(low <= found) & (found <= high) & ((np.abs(found) >= NEAREST) | (found == 0))]
    return inside


def turns(values: Array) -> NDArray[np.intp]:
    """Return the indices at which a sequence has its ends, and begins to fall or to rise."""
    moves = np.flatnonzero(np.diff(values))
    up = np.diff(values)[moves] > 0
    return np.concatenate([[0], moves[1:][up[1:] != up[:-1]], [len(values) - 1]]).astype(np.intp)


class _Sums(NamedTuple):
    """Running integrals up to each candidate, all (candidates,).

    Attributes:
        value: of v, v·f and v·f², with the weight v of f in J, (3, candidates).
        slope: of v, v·f′ and v·f′², with the weight v of f′.
        cross: of v·f and v·f·f′, with the weight v of f′.

    """

    value: Array
    slope: Array
    cross: Array


class Programme:
    """The best nodes among the candidates, where D_i = f′(x_i).

    Args:
        objective: J.

    Attributes:
        at: the candidates.
        value, slope: f and f′ there.
        fixed: indices of those that must be nodes: the ends, and where f turns.

    Raises:
        UsageError: the domain has no candidates.

    """

    def __init__(self, objective: Objective) -> None:
        low, high = objective.domain
        self.objective, self.at = objective, candidates(objective.domain)
        if len(self.at) < 2:
            raise UsageError(f"domain: {low:g} {high:g} has no two numbers of bfloat16: expected a wider one")
        self.value, self.slope = objective.both(self.at)
        self.fixed = turns(self.value.astype(np.float32))
        edges = np.union1d(objective.moments.grid, self.at)
        points, widths = quadrature_nodes(edges[:-1], edges[1:])
        value, slope = objective.both(points)
        of_value, of_slope = objective.weight(points) * objective.shares(np.stack([value, slope])) * widths
        rows = [of_value * value**k for k in range(3)] + [of_slope * slope**k for k in range(3)]
        rows += [of_slope * value, of_slope * value * slope]
        sums = running(np.stack(rows).sum(axis=-1))[:, np.searchsorted(edges, self.at)]
        self.sums = _Sums(sums[:3], sums[3:6], sums[6:])

    def costs(self, start: NDArray[np.intp] | int, stop: int) -> tuple[Array, Array]:
        """Return what intervals from candidates `start` on to `stop` add to J: of f, and of f′."""
        starts = np.arange(start, stop) if isinstance(start, int) else start
        f, g = self.value[starts], self.value[stop]
        d, e = self.slope[starts], self.slope[stop]
        mass, first, second = self.sums.value[:, stop, None] - self.sums.value[:, starts]
        of_value = np.maximum((f + g) * first - f * g * mass - second, 0.0)
        mass, first, second = self.sums.slope[:, stop, None] - self.sums.slope[:, starts]
        crossed, both = self.sums.cross[:, stop, None] - self.sums.cross[:, starts]
        gap = g - f
        flat = np.abs(gap) <= FLAT * np.sqrt(self.objective.mean_squares[0])
        safe = np.where(flat, 1.0, gap)
        share = np.where(flat, mass / 2, np.clip((crossed - f * mass) / safe, 0.0, mass))  # ∫ v·p
        sloped = np.where(flat, first / 2, (both - f * first) / safe)  # ∫ v·p·f′
        # (f′ − d)² + p·((f′ − e)² − (f′ − d)²)
        of_slope = second - 2 * d * first + d * d * mass + (e * e - d * d) * share - 2 * (e - d) * sloped
        return of_value, np.maximum(of_slope, 0.0)

    def best(self, count: int) -> NDArray[np.intp]:
        """Return the indices of the best nodes, (count,): the plain recursion over the last interval.

        Raises:
            UsageError: f turns too often for so many nodes, or there are too few candidates.

        """
        n, low, high = len(self.at), *self.objective.domain
        if count < len(self.fixed):
            raise UsageError(
                f"{self.objective.activation}: it turns {len(self.fixed) - 2} times from {low:g} to {high:g}: "
                f"expected at most {count - 2} for {count} codes; choose more bits, or a narrower domain"
            )
        if count > n:
            raise UsageError(
                f"domain: {low:g} {high:g} has {n} numbers of bfloat16 for {count} codes: choose a wider one, "
                "or fewer bits"
            )
        most = SLACK * self._bound(count)
        best = np.full((count, n), np.inf)
        best[0, 0] = 0.0
        last = np.zeros((count, n), dtype=np.intp)
        fence = start = 0
        for stop in range(1, n):
            of_value, of_slope = self.costs(start, stop)
            # the cost of f grows with an interval, so what is too wide here is too wide for all that follow
            wide = min(int(np.argmax(of_value <= most)), stop - 1 - start)
            start, cost = start + wide, (of_value + of_slope)[wide:]
            sums = best[:-1, start:stop] + cost
            chosen = sums.argmin(axis=1)
            last[1:, stop] = start + chosen
            best[1:, stop] = sums[np.arange(count - 1), chosen]
            if stop == self.fixed[fence + 1]:  # no interval passes over it
                fence, start = min(fence + 1, len(self.fixed) - 2), stop
        found = np.full(count, n - 1, dtype=np.intp)
        for k in range(count - 1, 0, -1):
            found[k - 1] = last[k, found[k]]
        return found

    def total(self, chosen: NDArray[np.intp]) -> float:
        """Return J of nodes, by their indices, with D_i = f′(x_i)."""
        return math.fsum(self._cost(int(i), int(j)) for i, j in pairwise(chosen))

    def _cost(self, start: int, stop: int) -> float:
        """Return what the interval between two candidates adds to J."""
        of_value, of_slope = self.costs(np.array([start]), stop)
        return float(of_value[0] + of_slope[0])

    def _bound(self, count: int) -> float:
        """Return J of some nodes: they share out the cube roots of the costs between neighbours evenly."""
        steps = [self._cost(i, i + 1) for i in range(len(self.at) - 1)]
        shares = np.cumsum(np.cbrt(steps))
        free = count - len(self.fixed)
        chosen = 1 + np.searchsorted(shares, shares[-1] * np.arange(1, free + 1) / (free + 1))
        return self.total(np.union1d(chosen, self.fixed))


def derivatives(objective: Objective, nodes: Array, values: Array) -> Array:
    """Return D, (nodes,): E D = D_i + p·(D_{i+1} − D_i) is nearest to f′, in the mean square under w."""
    edges = np.union1d(objective.moments.grid, nodes)
    points, widths = quadrature_nodes(edges[:-1], edges[1:])
    inside = (nodes[0] <= points) & (points <= nodes[-1])
    cell, share = shares(points, nodes, values, objective.activation.value(points))
    weight = np.where(inside, objective.weight(points) * widths, 0.0)
    target = objective.activation.derivative(points)
    bands, right = np.zeros((2, len(nodes))), np.zeros(len(nodes))
    for part, other in ((0, 1 - share), (1, share)):
        np.add.at(bands[1], cell + part, weight * other**2)
        np.add.at(right, cell + part, weight * other * target)
    np.add.at(bands[0], cell + 1, weight * share * (1 - share))
    ridge = RIDGE * bands[1].max()
    right += ridge * objective.activation.derivative(nodes)
    bands[1] += ridge
    return np.asarray(solveh_banded(bands, right))


def shares(x: Array, nodes: Array, values: Array, f: Array) -> tuple[NDArray[np.intp], Array]:
    """Return the index of the last node up to x, at most the last but one, and p from 0 to 1; both of x's shape.

    Args:
        x: numbers; beyond the nodes the outer nodes hold.
        nodes: increasing.
        values: F.
        f: f(x).

    """
    cell = np.clip(np.searchsorted(nodes, x, side="right") - 1, 0, len(nodes) - 2)
    gap = values[cell + 1] - values[cell]
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(gap == 0, 0.0, np.clip((f - values[cell]) / gap, 0.0, 1.0))
    share = np.where(x <= nodes[0], 0.0, np.where(x >= nodes[-1], 1.0, share))
    return cell, share


def positions(nodes: Array, values: Array, function: Callable[[Array], Array]) -> NDArray[np.int64]:
    """Return the positions of all numbers of bfloat16 by their bits, (PATTERNS,), in 1/65536; 0 for NaN."""
    with np.errstate(invalid="ignore"):
        numbers = (np.arange(PATTERNS, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
    x = np.clip(np.where(np.isnan(numbers), nodes[0], numbers), nodes[0], nodes[-1])
    cell, share = shares(x, nodes, values, function(x))
    return np.asarray(cell * ONE + np.rint(share * ONE).astype(np.int64))


def position(x: Array, table: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions of float32 numbers: of the shape of x, those of `positions` interpolated."""
    with np.errstate(over="ignore"):
        single = np.asarray(x).astype(np.float32)
    bits = single.view(np.uint32).astype(np.int64)
    upper, lower = bits >> 16, bits & 0xFFFF
    first, after = table[upper], table[(upper + 1) % PATTERNS]
    found = first + ((after - first) * (lower >> 1) >> 15)
    return np.asarray(np.where(np.isnan(single), 0, found))


def looked_up(x: Array, table: NDArray[np.int64], tables: Array) -> tuple[Array, Array]:
    """Return mean and variance, over the random numbers, of what is looked up.

    Args:
        x: numbers.
        table: from `positions`.
        tables: numbers by code, (…, nodes).

    Returns:
        Two arrays, (…, *shape of x).

    """
    found = position(x, table)
    cell = np.minimum(found // ONE, tables.shape[-1] - 2)
    share = (found - cell * ONE) / ONE
    below, above = tables[..., cell], tables[..., cell + 1]
    return np.asarray(below + share * (above - below)), np.asarray(share * (1 - share) * (above - below) ** 2)


def errors(
    objective: Objective, table: NDArray[np.int64], tables: Array, edges: Array, deviations: tuple[float, ...]
) -> dict[str, float]:
    """Return the errors of tables F and D, by name, to six significant digits; see `StochasticFit`.

    The bias of F is one of rounding, a saw that is sampled: it is good to some 5 %.

    Args:
        objective: J.
        table: from `positions`.
        tables: F and D, (2, nodes).
        edges: between which f is smooth and a position is linear, but for its rounding.
        deviations: of normal densities.

    Raises:
        UsageError: f or f′ vanishes where such a density has its mass.

    """
    at, widths = quadrature_nodes(edges[:-1], edges[1:])
    both = objective.both(at)
    means, variance = looked_up(at, table, tables)
    bias = means - both
    cost = (objective.shares(both) * (variance + bias**2)).sum(axis=0)
    result = {"objective": float((objective.weight(at) * cost * widths).sum())}
    for deviation in deviations:
        density = normal(objective, at, deviation) * widths
        for i, what in enumerate(("value", "derivative")):
            whole = float((density * both[i] ** 2).sum())
            if not whole:
                raise vanishing(objective, what, deviation)
            off, spread = float((density * bias[i] ** 2).sum()), float((density * variance[i]).sum())
            result[f"{what}_{deviation:g}"] = np.sqrt((off + spread) / whole)
            result[f"{what}_bias_{deviation:g}"] = np.sqrt(off / whole)
    return {key: float(f"{value:.6g}") for key, value in result.items()}
