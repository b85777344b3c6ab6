"""The search for the knots of a mixture of ReLUs: where it starts, and how it descends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from fitact.fitter.analysis.activation import Activation
from fitact.fitter.expr.wide import Array

from .relumix_objective import HALF_WIDTH, REACH, Mixture, Primitive

ANNEALING_STEPS = 40
NEWTON_STEPS = 20
POWERS = (0.35, 0.4, 0.45, 0.5, 0.55)  # of |h″|: the square root spaces many knots best, a smaller power few
TIE = 1e-8  # relative difference of objectives that count as equal
OUTSIDE = 1e9  # the objective of knots that are no mixture's, or too far out, or too near each other
DIGITS = 10  # after the point, of knots in the units of the search; Newton finds them to 12
Progress = Callable[[float], None]


def search(
    problem: Primitive, activation: Activation, count: int, restarts: int, seed: int, progress: Progress
) -> Mixture:
    """Follow every start to the bottom of its valley and return the deepest."""
    found: list[tuple[float, Array]] = []
    spaced = [*_spaced(problem, activation, count)]
    for i in range(len(spaced) + restarts):
        restart = np.random.default_rng([seed, i - len(spaced)]) if i >= len(spaced) else None
        bottom = _descend(problem, spaced[i] if restart is None else _anneal(problem, count, restart))
        if bottom is not None:
            found.append(bottom)
        progress((i + 1) / (len(spaced) + restarts))
    least = min(value for value, _ in found)
    # mirror images differ by rounding, and always the same one wins
    equal = [knots for value, knots in found if value <= least + TIE * abs(least)]
    knots = min(equal, key=lambda knots: [round(knot, 3) for knot in knots.tolist()])
    knots = newton(lambda c: problem(c)[1], knots, np.ones(count, dtype=bool))
    knots = np.round(knots, DIGITS)  # so that the way to them, which differs from CPU to CPU, is not seen
    objective, _, slopes = problem(knots)
    return Mixture(knots, slopes, objective)


def _spaced(problem: Primitive, activation: Activation, count: int) -> Iterator[Array]:
    """Yield knots spaced by the densities |h″|^p, where each corner has a knot's share, and evenly among these."""
    frame = problem.frame
    places = np.linspace(-HALF_WIDTH, HALF_WIDTH, 16001)
    bend = np.abs(activation.second_derivative(frame.center + frame.scale * places)) * frame.scale**2 / frame.size
    bend = np.where(np.isfinite(bend), bend, 0.0)
    reach = frame.scale * HALF_WIDTH
    corners = [
        (corner.at - frame.center) / frame.scale
        for corner in activation.breakpoints(frame.center - reach, frame.center + reach)
    ]
    for power in POWERS:
        density = bend**power
        mass = density.sum() or 1.0
        for corner in corners:
            near = np.abs(places - corner) <= 0.5
            density[near] += mass / count / np.count_nonzero(near)
        if not density.any():
            density[np.abs(places) <= 1] = 1.0
        share = np.cumsum(density)
        yield np.interp((np.arange(count) + 0.5) / count * share[-1], share, places)


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
