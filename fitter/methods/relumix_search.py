"""The search for the knots of a mixture of ReLUs: where it starts, and how it descends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fitact.fitter.analysis.activation import Activation
from fitact.fitter.analysis.roots import roots
from fitact.fitter.expr.evaluate import Array

from .relumix_objective import HALF_WIDTH, REACH, Frame, Mixture, Primitive

ANNEALING_STEPS = 40
NEWTON_STEPS = 20
NEIGHBOURS = 2  # gaps, and knots, that are tried near the best, in all pairs
STARTS = 40  # distributions of the knots that are tried before annealing
POWERS = (0.4, 0.5)  # of |h″|: the square root spaces many knots best, the power 0.4 few
TIE = 1e-8  # relative difference of objectives that count as equal
OUTSIDE = 1e9  # the objective of knots that are no mixture's, or too far out, or too near each other
DIGITS = 10  # after the point, of knots in the units of the search; Newton finds them to 12
Progress = Callable[[float], None]


def search(
    problem: Primitive, activation: Activation, count: int, restarts: int, seed: int, progress: Progress
) -> Mixture:
    """Follow every start to the bottom of its valley and return the deepest."""
    stretches = _stretches(activation, count, problem.frame)
    starts = list(itertools.islice(_distributions(stretches, count), STARTS))
    work = len(starts) + restarts + NEIGHBOURS**2
    done = 0
    found: list[tuple[float, Array]] = []

    def follow(knots: Array) -> None:
        nonlocal done
        bottom = _descend(problem, knots)
        if bottom is not None:
            found.append(bottom)
        done += 1
        progress(done / work)

    for start in starts:
        follow(start)
    for restart in range(restarts):
        follow(_anneal(problem, count, np.random.default_rng([seed, restart])))
    for start in _neighbours(_deepest(found)):
        follow(start)
    knots = newton(lambda c: problem(c)[1], _deepest(found), np.ones(count, dtype=bool))
    knots = np.round(knots, DIGITS)  # so that the way to them, which differs from CPU to CPU, is not seen
    objective, _, slopes = problem(knots)
    return Mixture(knots, slopes, objective)


def _deepest(found: Sequence[tuple[float, Array]]) -> Array:
    """Return the knots of the least objective; mirror images differ by rounding, and always the same one wins."""
    least = min(value for value, _ in found)
    equal = [knots for value, knots in found if value <= least + TIE * abs(least)]
    return min(equal, key=lambda knots: [round(knot, 3) for knot in knots.tolist()])


@dataclass(frozen=True)
class _Stretch:
    """An interval on which h″ keeps its sign: points in it, and the running share of |h″|^p up to each, by p."""

    points: Array
    share: dict[float, Array]

    def place(self, count: int, power: float) -> Array:
        """Return that many knots in it, each in the middle of an equal share."""
        return np.interp((np.arange(count) + 0.5) / max(count, 1), self.share[power], self.points)


def _stretches(activation: Activation, count: int, frame: Frame) -> list[tuple[_Stretch, float]]:
    """Return the stretches between the roots of h″ and the breaks of h′, each with its share of ∫ |h″|^0.4."""
    low, high = frame.center - frame.scale * HALF_WIDTH, frame.center + frame.scale * HALF_WIDTH
    inner = np.union1d(
        roots(activation.second_derivative_formula, low, high).at, activation.switch_points(low, high)
    )
    found = []
    for start, end in itertools.pairwise([low, *inner, high]):
        points = np.linspace(start, end, 2001)[1:-1]
        bend = np.abs(activation.second_derivative(points)) * frame.scale**2 / frame.size
        bend = np.where(np.isfinite(bend), bend, 0.0)
        width = (end - start) / frame.scale
        if width < 1e-6 or bend.max() < 1e-12:
            continue
        share = {power: np.cumsum(bend**power) for power in POWERS}
        mass = float(share[POWERS[0]][-1] * width)
        places = (points - frame.center) / frame.scale
        found.append((_Stretch(places, {p: s / s[-1] for p, s in share.items()}), mass))
    total = sum(mass for _, mass in found) or 1.0
    # a corner needs a knot somewhere in its neighbourhood
    for corner in activation.breakpoints(low, high):
        points = (corner.at - frame.center) / frame.scale + np.linspace(-0.5, 0.5, 101)
        found.append((_Stretch(points, {power: np.linspace(0, 1, 101) for power in POWERS}), total / count))
    if not found:
        points = np.linspace(-1, 1, 101)
        found.append((_Stretch(points, {power: np.linspace(0, 1, 101) for power in POWERS}), 1.0))
    return [(stretch, mass / sum(mass for _, mass in found)) for stretch, mass in found]


def _distributions(stretches: Sequence[tuple[_Stretch, float]], count: int) -> Iterator[Array]:
    """Yield starts: by the shares of the stretches, then ways to share the knots among them, likely ones first."""
    ends = np.cumsum([0.0, *(mass for _, mass in stretches)])
    for power in POWERS:  # all together by their shares
        quantiles = (np.arange(count) + 0.5) / count
        which = np.minimum(np.searchsorted(ends, quantiles, side="right") - 1, len(stretches) - 1)
        chosen = [(q - ends[i], *stretches[i]) for q, i in zip(quantiles, which, strict=True)]
        yield np.sort([np.interp(q / mass, part.share[power], part.points) for q, part, mass in chosen])
    likely = np.array([mass * count for _, mass in stretches])
    spread = 3 if len(stretches) <= 4 else 1 if len(stretches) <= 7 else 0
    ways = sorted(_ways(len(stretches), count, likely, spread), key=lambda way: float(np.sum((way - likely) ** 2)))
    for way in ways:
        for power in POWERS:
            knots = np.concatenate([s.place(n, power) for (s, _), n in zip(stretches, way, strict=True)])
            yield np.sort(knots)


def _ways(parts: int, count: int, likely: Array, spread: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write count as a sum of numbers, all but the last within spread of the likely ones."""
    if parts == 1:
        yield (count,)
        return
    low, high = max(0, round(likely[0]) - spread), min(count, round(likely[0]) + spread)
    for first in range(low, high + 1):
        for rest in _ways(parts - 1, count - first, likely[1:], spread):
            yield (first, *rest)


def _neighbours(knots: Array) -> Iterator[Array]:
    """Yield starts near a solution: a knot with a close neighbour taken away, one put into a wide gap."""
    gaps = np.argsort(-np.diff(knots))[:NEIGHBOURS]
    weakest = np.argsort(np.minimum(np.diff(knots, prepend=-np.inf), np.diff(knots, append=np.inf)))[:NEIGHBOURS]
    for gap, gone in itertools.product(gaps, weakest):
        middle = (knots[gap] + knots[gap + 1]) / 2
        yield np.sort(np.append(np.delete(knots, gone), middle))


def _descend(problem: Primitive, start: Array) -> tuple[float, Array] | None:
    """Return the bottom of the valley and its knots: a trust region of the middle knot and the gaps' logarithms.

    So knots far out, where the tails of some functions draw them, take steps of their own size.
    """
    from scipy.optimize import minimize

    count = len(start)
    middle = count // 2
    ways = np.tril(np.ones((count, count)))  # how a knot moves, by the middle and by each gap
    ways[:, 1 : middle + 1] -= 1.0

    def moves(z: Array) -> Array:
        return np.asarray(ways * np.exp(np.minimum(np.append(0.0, z[1:]), 10.0)))

    def knots_of(z: Array) -> Array:
        return np.asarray(z[0] + moves(z)[:, 1:].sum(axis=1))

    def function(z: Array) -> tuple[float, Array]:
        knots = knots_of(z)
        largest = max(abs(knots[0]), abs(knots[-1]))
        if not (largest < REACH / 10 and np.diff(knots).min() > 1e-7 * max(1.0, largest)):
            return OUTSIDE, np.zeros_like(z)
        value, gradient, _ = problem(knots)
        return (value, gradient @ moves(z)) if value >= 0 else (OUTSIDE, np.zeros_like(z))  # all digits cancel

    def hessian(z: Array) -> Array:
        found = moves(z).T @ problem.hessian(knots_of(z)) @ moves(z)
        found[np.diag_indices(count)] += np.append(0.0, function(z)[1][1:])
        return np.asarray(found)

    if np.min(np.diff(start)) <= 0:
        start = start + np.arange(count) * 1e-3
    z = np.append(start[middle], np.log(np.diff(start)))
    if function(z)[0] == OUTSIDE:
        return None
    options = {"gtol": 1e-9, "maxiter": 100, "initial_trust_radius": 0.5, "max_trust_radius": 2.0}
    result = minimize(function, z, jac=True, hess=hessian, method="trust-exact", options=options)
    return float(result.fun), knots_of(result.x)


def _anneal(problem: Primitive, count: int, random: np.random.Generator) -> Array:
    """Return the knots that SciPy's dual annealing ends with, not yet polished."""
    from scipy.optimize import dual_annealing

    def function(z: Array) -> float:
        knots = np.sort(z)
        return problem(knots)[0] if np.diff(knots).min() > 1e-6 else OUTSIDE

    bounds = [(-HALF_WIDTH / 4, HALF_WIDTH / 4)] * count
    result = dual_annealing(function, bounds, maxiter=ANNEALING_STEPS, no_local_search=True, rng=random)
    return np.sort(result.x)


def newton(gradient: Callable[[Array], Array], knots: Array, free: NDArray[np.bool_]) -> Array:
    """Return the knots after Newton's method on the gradient of the free ones: the last digits.

    Its Jacobian is taken by central differences. It stops where a step would not make the gradient smaller, or is
    no small part of the least gap.
    """
    for _ in range(NEWTON_STEPS):
        gap = np.min(np.diff(knots), initial=1.0)
        shifts = np.eye(len(knots))[free] * min(1e-5, gap / 100)
        columns = [(gradient(knots + d) - gradient(knots - d))[free] / (2 * d.sum()) for d in shifts]
        before = gradient(knots)[free]
        try:
            move = np.linalg.solve(np.stack(columns, axis=1), -before) if columns else np.empty(0)
        except np.linalg.LinAlgError:
            break
        moved = knots.copy()
        moved[free] += move
        if not np.max(np.abs(move), initial=0.0) < gap / 10:
            break
        if np.linalg.norm(gradient(moved)[free]) >= np.linalg.norm(before):
            break
        knots = moved
    return knots
