"""What a coded input minimises, and the errors of its tables.

One code of x stands for a value F in place of f and for a number D in place of f′. With E the mean under the
weight w over the domain,

    J = ½ E[(f − F)² / ½(E f² + f²) + (f′ − D)² / E f′²].

The error of f counts absolutely where f is small and relatively where it is large: so a tail that grows without
bound is coded at a constant relative precision. For given borders the best F and D are means, of f under the
weight w / (E f² + f²) and of f′ under w, so that the programme of `partition` finds the best borders on a grid.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fitact.errors import UsageError
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.analysis.roots import REALS, roots
from fitact.fitter.expr.evaluate import Array, geometric, wide

from .errors import check_seen, inside, snapped
from .moments import Moments, nodes
from .weight import Weight

NEAR = 0.25  # |x| up to which the grid starts with even steps; beyond, its steps grow in proportion to |x|
LEAST = 1e-30  # root mean square of f and f′: the squares of float32 numbers that small stay in float64
NO_MASS = 1e-200  # of the whole: means under less are lost to rounding
TOLERANCE = 0.05  # of f, up to the reach of a fit

_asinh, _sinh = wide(np.arcsinh), wide(np.sinh)


class Steps(NamedTuple):
    """The best tables for given borders.

    Attributes:
        mass: the integral of the weight of f, and of that of f′, over each interval, (2, intervals).
        levels: F and D, (2, intervals).
        total: J.

    """

    mass: Array
    levels: Array
    total: float


class Objective:
    """J for an activation, a weight and a domain.

    Args:
        activation: f.
        weight: w.
        domain: [A, B].
        cells: about how many cells the grid has.

    Attributes:
        switches: the points inside the domain where f or f′ may jump or have a corner.
        mean_squares: E f² and E f′².
        moments: of f and f′ under the weights of J: the first axes of its functions count f and f′.

    Raises:
        UsageError: f or f′ is 0 all over the domain, or too steep to be integrated.

    """

    def __init__(self, activation: Activation, weight: Weight, domain: tuple[float, float], cells: int) -> None:
        self.activation, self.weight, self.domain = activation, weight, domain
        low, high = domain
        self.switches = activation.switch_points(low, high)
        breakpoints = np.union1d(self.switches, weight.breakpoints(low, high))
        # a grid that has the extrema of f and f′ misses no feature of them, however narrow
        for formula in (activation.derivative_formula, activation.second_derivative_formula):
            breakpoints = np.union1d(breakpoints, roots(formula, low, high).at)
        ends = _asinh(np.array(domain) / NEAR)
        first = NEAR * _sinh(np.linspace(ends[0], ends[1], cells // 2 + 1))
        try:
            squares = Moments(self.both, self._plain, low, high, breakpoints, cells, first).sums[:, :, -1]
            self.mass = float(squares[0, 0])
            self.mean_squares = squares[2] / self.mass
            names = ("its root mean square", "the root mean square of its derivative")
            for what, square in zip(names, self.mean_squares, strict=True):
                if not square >= LEAST**2:
                    raise UsageError(
                        f"{what} over the domain {low:g} {high:g} is {np.sqrt(square):g}: expected at least "
                        f"{LEAST:g}, there is nothing to code"
                    )
            self.moments = Moments(self.both, self.weights, low, high, breakpoints, cells, first)
        except UsageError as error:
            raise UsageError(f"{activation}: {error}") from None

    def both(self, at: Array) -> Array:
        """Return f and f′ at points of any shape: (2, …)."""
        return np.stack([self.activation.value(at), self.activation.derivative(at)])

    def _plain(self, at: Array) -> Array:
        return np.broadcast_to(self.weight(at), (2, *np.shape(at)))

    def shares(self, both: Array) -> Array:
        """Return how much an error of f and of f′ counts, without w, at given values of these: (2, …)."""
        value, derivative = both
        squares = self.mean_squares * self.mass
        return np.stack([1 / (squares[0] + self.mass * value**2), np.full_like(derivative, 0.5 / squares[1])])

    def weights(self, at: Array) -> Array:
        """Return the weights of f and of f′ in J at points of any shape: (2, …)."""
        return np.asarray(self.weight(at) * self.shares(self.both(at)))

    def steps(self, borders: Array) -> Steps:
        """Return the best tables for inner borders, increasing, and their J.

        It sums over the cells of each interval: differences of running integrals would lose digits on narrow ones.
        """
        edges = np.union1d(self.moments.grid, borders)
        owner = np.searchsorted(borders, edges[:-1], side="right")
        first = np.searchsorted(owner, np.arange(len(borders) + 1))
        at, widths = nodes(edges[:-1], edges[1:])
        both = self.both(at)
        weights = self.weight(at) * self.shares(both) * widths
        mass = np.add.reduceat(weights.sum(axis=-1), first, axis=-1)
        # where there is no weight, the plain mean
        means = np.where((mass > NO_MASS)[:, owner, None], weights, widths)
        sums = np.add.reduceat((means * both).sum(axis=-1), first, axis=-1)
        levels = sums / np.add.reduceat(means.sum(axis=-1), first, axis=-1)
        return Steps(mass, levels, float((weights * (both - levels[:, owner, None]) ** 2).sum()))

    @cached_property
    def extrema(self) -> Array:
        """The points of the reals where f turns, jumps or may have a corner, increasing."""
        turns = roots(self.activation.derivative_formula, -REALS, REALS).at
        return np.union1d(turns, self.activation.switch_points(-REALS, REALS))


def errors(objective: Objective, borders: Array, tables: Array, deviations: tuple[float, ...]) -> dict[str, float]:
    """Return the errors of tables F and D, by name, each to ten significant digits; see `CodedFit`.

    Args:
        objective: J.
        borders: inner borders, increasing.
        tables: F and D, (2, borders + 1).
        deviations: of normal densities.

    Raises:
        UsageError: f has features too narrow to be integrated, or vanishes where such a density has its mass.

    """
    activation, (low, high) = objective.activation, objective.domain
    borders = snapped(borders, objective.switches)
    edges = np.union1d(objective.moments.grid, borders[(low < borders) & (borders < high)])
    check_seen(activation, edges, objective.switches)
    at, widths = nodes(edges[:-1], edges[1:])
    both = objective.both(at)
    off = (both - tables[:, np.searchsorted(borders, at)]) ** 2
    found = {"objective": float((objective.weight(at) * objective.shares(both) * off * widths).sum())}
    for deviation in deviations:
        density = _normal(objective, at, deviation) * widths
        for what, error, square in zip(("value", "derivative"), off, both**2, strict=True):
            missed, whole = float((density * error).sum()), float((density * square).sum())
            if missed and not whole:
                raise _vanishing(objective, what, deviation)
            found[f"{what}_{deviation:g}"] = np.sqrt(missed / whole) if missed else 0.0
    return {key: float(f"{value:.10g}") for key, value in found.items()}


def _normal(objective: Objective, at: Array, deviation: float) -> Array:
    """Return a normal density, relative to its height where the domain is nearest to 0: so nothing underflows."""
    nearest = min(max(objective.domain[0], 0.0), objective.domain[1])
    return np.asarray(np.exp((nearest**2 - at**2) / (2 * deviation**2)))


def _vanishing(objective: Objective, what: str, deviation: float) -> UsageError:
    """Return the error that f or its derivative is 0 where a normal density has its mass."""
    return UsageError(
        f"{objective.activation}: its {what} is 0 for x normal with deviation {deviation:g}: no error is relative "
        "to that, choose a domain where it is not"
    )


def reach(objective: Objective, borders: Array, values: Array) -> float:
    """Return the largest r such that |f − F| ≤ 5 % of max(|f|, √(E f²)) for all |x| ≤ r, to ten digits.

    It is 0 if there is no such r, and the largest float32 if there is no largest.
    """
    value = objective.activation.value
    floor = TOLERANCE * np.sqrt(objective.mean_squares[0])
    # the values that f may have on each interval: both conditions hold on an interval round F
    ends = np.stack([values - floor, values + floor, values / (1 - TOLERANCE), values / (1 + TOLERANCE)])
    least, most = ends.min(axis=0), ends.max(axis=0)

    def holds(x: Array, cell: NDArray[np.intp]) -> NDArray[np.bool_]:
        found = value(x)
        return np.asarray((least[cell] <= found) & (found <= most[cell]))

    zero = np.zeros(1)
    if not holds(zero, np.searchsorted(borders, zero)).all():
        return 0.0
    borders = snapped(borders, objective.switches)
    marks = np.concatenate([borders, objective.extrema, objective.moments.grid])
    far = geometric(1e-3, REALS, 2000)  # where f has more extrema than are known
    nearest = REALS
    for side in (1.0, -1.0):
        # f is monotone between consecutive marks, so that it leaves [least, most] at most once in each
        edges = np.unique(np.concatenate([[0.0], (side * marks)[side * marks > 0], far]))
        cell = np.searchsorted(borders, side * (edges[:-1] + np.diff(edges) / 2))
        starts, stops = inside(edges)
        enters, leaves = holds(side * starts, cell), holds(side * stops, cell)
        bad = np.flatnonzero(~(enters & leaves))
        if not len(bad):
            continue
        i = bad[0]
        good, wrong = (starts[i], stops[i]) if enters[i] else (edges[i], edges[i])
        while good < (middle := good + (wrong - good) / 2) < wrong:
            if holds(np.array([side * middle]), cell[i : i + 1]).all():
                good = middle
            else:
                wrong = middle
        nearest = min(nearest, good)
    return float(f"{nearest:.10g}") if nearest < REALS else REALS
