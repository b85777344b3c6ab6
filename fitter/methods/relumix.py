"""ReLU mixtures: the broken line nearest to f, whose slopes take the place of f′.

Yang et al., *Reducing Fine-Tuning Memory Overhead by Approximate and Memory-Sharing Backpropagation*, ICML 2024,
arXiv 2406.16282 (Approx-BP; ReGELU2 and ReSiLU2 are its mixtures for GELU and SiLU at 2 bits). Over knots c and
weights a of

    h̃(x) = b₋ + m₋ x + Σ a_i ReLU(x − c_i),    i = 1 … 2^k − 1,

minimise ∫ (h − h̃)² over all x (eq. 14). The integral is finite only if h̃ has the asymptotes m± x + b± of h on both
sides (eq. 13 for GELU). So h̃ is a broken line that leaves the left asymptote at the first knot and joins the right
one at the last; in between, its values at the knots are a linear least-squares problem, and the search is over
knots only. The derivative h̃′ is a step function with the knots as borders.

The valleys of that search differ in how many knots lie on each stretch of one curvature, between the roots of h″.
So it starts from knots spaced by |h″|^p. Then simulated annealing shifts each knot by up to its distance from the
next, and p. Newton steps within a trust region follow each start down to the bottom of its valley, and Newton's
method finds the last digits of the deepest. No start is sure to find the deepest valley.

The other objective, ∫ (h′ − h̃′)² (the paper's appendix I), leaves the outer levels at m₋ and m₊; Few-Bit's dynamic
programme solves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from flint import arb, ctx

from fitact.base import UsageError, integer, quote
from fitact.fitter.analysis import REALS, Activation, Asymptote, float_check, gap, roots
from fitact.fitter.expr import Array, geometric, value
from fitact.fitter.numerics import (
    Moments,
    Weight,
    about,
    dp_borders,
    newton,
    nodes,
    quadrature,
    running,
    step_errors,
)
from fitact.fitter.records import StepFit, check_bits

from .fewbit import DOMAIN, best_levels, refine, without_noise

METHOD = "relumix"
RESTARTS = 4  # by default
ANNEALED = 10  # starts of each
LEAST_POWER = 0.52  # of x in a tail whose square has an integral: 1/2, and a margin for the test
CELLS = 4000
REACH = 1e5  # of the table of integrals; beyond it, tails follow their power law
INNER = 12.0  # up to here its cells are even, then they grow
HALF_WIDTH = 40.0  # of the search for knots
SEEN = 32.0  # within that, where the slope has to change
STEP = 0.05  # between the places where it is seen
POWERS = (0.35, 0.4, 0.45, 0.5, 0.55)  # of |h″|: the square root spaces many knots best, a smaller power few
TIE = 1e-8  # relative difference of objectives that count as equal
OUTSIDE = 1e9  # the objective of knots that are no mixture's, or too far out, or too near each other
DIGITS = 10  # after the point, of knots; Newton finds them to 12
UNSEEN = 0.1  # of the changes of f′: what the search may overlook
Progress = Callable[[float], None]

# The coefficients of the paper's text: free weights (the last one follows) and knots.
PUBLISHED: dict[str, tuple[str, str, tuple[float, ...], tuple[float, ...]]] = {
    "gelu_regelu2_published": (
        "gelu",
        "primitive",
        (-0.04922261145617846, 1.0979632065417297),
        (-3.1858810036855245, -0.001178821281161997, 3.190832613414926),
    ),
    "silu_resilu2_published": (
        "silu",
        "primitive",
        (-0.04060357190528599, 1.080925428529668),
        (-6.3050461001646445, -0.0008684942046214787, 6.325815242089708),
    ),
    "gelu_regelu2d_published": (
        "gelu",
        "derivative",
        (0.32465931184406527, 0.34812875668739607),
        (-0.4535743722857079, -0.0010587205574873046, 0.4487575313884231),
    ),
}


def fit(
    activation: Activation,
    bits: int,
    name: str,
    *,
    objective: str = "primitive",
    restarts: int = RESTARTS,
    seed: int = 0,
    progress: Progress = lambda share: None,
) -> StepFit:
    """Fit a mixture of 2^bits − 1 ReLUs to f, and keep its slopes as the step function.

    Knots and slopes are rounded to float32, and the errors over [−10, 10] are those of the rounded numbers; the
    objective, an integral over all x that is infinite for any rounded slope, is that of the mixture in float64.

    Args:
        activation: f.
        bits: 1 to 4.
        name: the fit's name, a Python identifier.
        objective: `primitive`, ∫ (h − h̃)², or `derivative`, ∫ (h′ − h̃′)².
        restarts: of the annealing, ten starts each.
        seed: of the annealing: the same seed gives the same fit.
        progress: called with the share of the work that is done, 0 to 1.

    Returns:
        The fit.

    Raises:
        UsageError: an argument is out of range, or f has no such mixture, or one that the search would not find.

    Warns:
        FitWarning: floating point fails on the formula, see `float_check.problem`.

    """
    if objective not in ("primitive", "derivative"):
        raise UsageError(f"objective: expected primitive or derivative, got {quote(objective)}")
    restarts, seed = integer("restarts", restarts, 0), integer("seed", seed, 0)
    best = mixture(activation, bits, objective, restarts, seed, progress)
    float_check.warn(activation)
    options: dict[str, float | str] = {"objective": objective, "restarts": restarts, "seed": seed}
    return _record(activation, best, name, options)


def published(name: str) -> StepFit:
    """Return the mixture whose coefficients the paper prints, one of `PUBLISHED`.

    Its objective is the integral over ±38.2277, the paper's half-width (appendix E); the rest is below 1e-8.
    """
    function, objective, free, knots = PUBLISHED[name]
    activation = Activation.of(function)
    weights = np.array([*free, 1.0 - sum(free)])
    slopes = np.concatenate([[0.0], np.cumsum(weights)])
    edge = -2 * math.log(1e-8 / 2)

    def wrong(at: Array) -> Array:
        if objective == "derivative":
            return np.asarray(activation.derivative(at) - slopes[np.searchsorted(knots, at)])
        return np.asarray(activation.value(at) - np.maximum(at[..., None] - knots, 0.0) @ weights)

    total = quadrature(lambda at: wrong(at) ** 2, np.union1d(np.linspace(-edge, edge, 4001), knots)).sum()
    best = Mixture(np.array(knots), slopes, float(total))
    return _record(activation, best, name, {"objective": objective, "source": "arXiv 2406.16282"})


def _record(activation: Activation, best: Mixture, name: str, options: dict[str, float | str]) -> StepFit:
    borders = without_noise(best.knots, np.max(np.abs(best.knots))).astype(np.float32).astype(np.float64)
    levels = best.slopes.astype(np.float32).astype(np.float64)
    errors = step_errors(activation, Weight(), DOMAIN, borders, levels, even=False)
    return StepFit(
        name=name,
        method=METHOD,
        activation=activation,
        bits=(len(levels) - 1).bit_length(),
        domain=DOMAIN,
        weight=Weight(),
        even=False,
        borders=tuple(borders.tolist()),
        levels=tuple(levels.tolist()),
        error={**errors, "objective": float(f"{best.objective:.10g}")},
        options=options,
    )


def mixture(
    activation: Activation, bits: int, objective: str, restarts: int, seed: int, progress: Progress
) -> Mixture:
    """Return the best mixture found, in float64; for arguments and errors see `fit`."""
    check_bits(bits, StepFit.BITS)
    left, right = asymptotes(activation)
    count = 2**bits - 1
    jumps = [point.at for point in activation.breakpoints() if point.kind == "jump"]
    if jumps and count > 1 and objective == "primitive":
        raise UsageError(
            f"{activation}: it jumps at x = {jumps[0]:g}, where a steeper mixture is always better, so no mixture "
            "is best; use --objective derivative or --method fewbit"
        )
    linear = None if jumps and objective == "primitive" else _broken_line(activation, count, right)
    if linear is not None:
        return linear
    if count == 1 and abs(right.slope - left.slope) < 1e-9:
        raise UsageError(
            f"{activation}: its asymptotes are parallel, and one ReLU cannot lead "
            "from one to the other: use --bits 2 or more"
        )
    if objective == "derivative":
        return _derivative_optimum(activation, count, left, right)
    if count > 1 and (steps := activation.steps()) is not None and np.abs(steps).max() > SEEN:
        raise _unseen(activation)
    problem = Primitive(activation, left, right)
    return single(problem) if count == 1 else search(problem, activation, count, restarts, seed, progress)


@np.errstate(invalid="ignore")  # what is not finite is refused
def asymptotes(activation: Activation) -> tuple[Asymptote, Asymptote]:
    """Return the lines that f tends to on both sides.

    Raise UsageError if one side has none, or f tends to it too slowly for an integral of the squared distance, or
    the search would not see nearly all changes of f′, which are those between its extrema and at its jumps.
    """
    for side, end in zip((-1, 1), activation.asymptotes, strict=True):
        toward = f"as x tends to {'+' if side > 0 else '-'}infinity"
        if end.kind != "line":
            raise UsageError(
                f"{activation}: a mixture of ReLUs is a straight line {toward}, and this activation tends to "
                "none; use --method fewbit"
            )
        with ctx.workprec(200):
            off = (
                value(activation.formula, at, 40) - arb(end.slope) * at - end.intercept
                for at in (side * 1e8, side * 1e10)
            )
            near, far = map(float, map(abs, off))
        rounding = 1e-9 + 2.0**-50 * abs(end.slope) * 1e10
        if far > rounding and far > near * 10.0 ** (-2 * LEAST_POWER):
            raise UsageError(
                f"{activation}: {toward} it nears its asymptote too slowly for the squared distance to have an "
                "integral; use --method fewbit"
            )
    left, right = activation.asymptotes
    places = np.arange(-SEEN, SEEN, STEP) + STEP / 2
    jumps = np.array([(p.at - gap(p.at), p.at + gap(p.at)) for p in activation.breakpoints()]).reshape(-1, 2)
    bends = roots(activation.second_derivative_formula, -REALS, REALS).at
    slopes = activation.derivative(np.sort(np.concatenate([places, bends, jumps.ravel()])))
    if not np.isfinite(slopes).all():
        raise UsageError(f"{activation}: its derivative is not finite everywhere, as a mixture's is")
    total = np.abs(np.diff([left.slope, *slopes, right.slope])).sum()
    below, above = activation.derivative(jumps[np.abs(jumps).max(1) < SEEN]).T
    seen = np.abs(activation.second_derivative(places)).sum() * STEP + np.abs(above - below).sum()
    if activation.steps() is None and not abs(seen / total - 1) <= UNSEEN:
        raise _unseen(activation)
    return left, right


def _unseen(activation: Activation) -> UsageError:
    return UsageError(
        f"{activation}: its slope changes too far from 0, or too suddenly, for the search, which has "
        f"x from -{SEEN:g} to {SEEN:g} in steps of {STEP:g}: shift and scale its x, or use --method fewbit"
    )


def _broken_line(activation: Activation, count: int, right: Asymptote) -> Mixture | None:
    """Return f itself if f′ is a step function with at most `count` borders, else None; spare knots do nothing."""
    steps = activation.steps()
    if steps is None or len(steps) > count:
        return None
    corners = steps.tolist() or [0.0]
    edge = 1 + max(map(abs, corners))
    ends = np.array([corners[0] - 1, *corners, corners[-1] + 1])
    middles = activation.derivative((ends[:-1] + ends[1:]) / 2)
    spare = count - len(corners)
    knots = np.concatenate([corners, corners[-1] + edge * np.arange(1, spare + 1)])
    return Mixture(knots, np.concatenate([middles, np.full(spare, right.slope)]), 0.0)


def _derivative_optimum(activation: Activation, count: int, left: Asymptote, right: Asymptote) -> Mixture:
    """Return the best step function for h′ with outer levels m±: Few-Bit's programme, then Newton's method."""
    ends = (left.slope, right.slope)
    switches = activation.switch_points(-REACH, REACH)
    marks = np.union1d(switches, roots(activation.second_derivative_formula, -REACH, REACH).at)
    width = max(HALF_WIDTH, 2 * np.max(np.abs(marks), initial=0.0))
    while width < REACH and width * np.max((activation.derivative(np.array([-width, width])) - ends) ** 2) > 1e-12:
        width *= 2
    moments = Moments(activation.derivative, np.ones_like, -width, width, marks, CELLS)
    knots = refine(moments, activation, dp_borders(moments, count + 1, ends), switches, ends)
    slopes = best_levels(moments, knots, ends)
    return Mixture(knots, slopes, float(about(moments.between(knots), slopes).sum()))


# --- the objective


@dataclass(frozen=True)
class Mixture:
    """A mixture of ReLUs in float64."""

    knots: Array  # c, (2^k − 1,), increasing
    slopes: Array  # of h̃ between them, (2^k,); the weights a are their differences
    objective: float  # what was minimised


class Primitive:
    """∫ (h − h̃)² over all x as a function of the knots.

    Below 0, h̃ and h are counted from the left asymptote, above 0 from the right one: g is what is left of h. Where
    it vanishes, nothing large cancels, however far out the knots are.

    A table holds the integrals of g, x g and g² from 0, and of the squared distances from the asymptotes, on cells
    whose ends include 0 and every break of h; a knot adds the integral over part of a cell. Beyond ±1e5 a distance
    counts as a power of x, with the exponent seen there.
    """

    def __init__(self, activation: Activation, left: Asymptote, right: Asymptote) -> None:
        self.h = activation.value
        self.left, self.right = left, right
        cells = 240
        outer = geometric(INNER, REACH, cells)
        spaced = np.concatenate([-outer, np.linspace(-INNER, INNER, 2 * cells + 1), outer])
        self.edges = np.union1d(spaced, np.append(0.0, activation.switch_points(-REACH, REACH)))
        rows = self._rows(self.edges[:-1], self.edges[1:])
        middle = int(np.searchsorted(self.edges, 0.0))
        # outward from 0, so that small integrals near 0 are not differences of large ones
        above = running(rows[:3, middle:])
        below = -running(rows[:3, :middle][:, ::-1])[:, ::-1]
        central = np.concatenate([below, above[:, 1:]], axis=1)
        # and the distances inward from where they vanish; the second is minus the rest to the right
        self.sums = np.concatenate([central, running(rows[3:4]), -running(rows[4:, ::-1])[:, ::-1]])
        if not np.isfinite(self.sums).all():
            raise UsageError(f"{activation}: {float_check.problem(activation)}")
        self.tails = tuple(self._tail(end, side) for side, end in ((-1, self.left), (1, self.right)))

    def _rows(self, starts: Array, ends: Array) -> Array:
        x, weights = nodes(starts, ends)
        return np.asarray((self._integrands(x) * weights).sum(axis=2))

    def _integrands(self, x: Array) -> Array:
        h = self.h(x)
        integrands = np.empty((5, *x.shape))  # filled in place: a search calls this thousands of times
        off = [h - (line.slope * x + line.intercept) for line in (self.left, self.right)]
        integrands[0] = np.where(x < 0, *off)
        np.multiply(x, integrands[0], out=integrands[1])
        np.square(integrands[0], out=integrands[2])
        np.square(off, out=integrands[3:])
        return integrands

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


# --- the search


def search(
    problem: Primitive, activation: Activation, count: int, restarts: int, seed: int, progress: Progress
) -> Mixture:
    """Follow every start to the bottom of its valley and return the deepest."""
    from scipy.optimize import dual_annealing

    minima: list[tuple[float, Array]] = []
    places = np.linspace(-HALF_WIDTH, HALF_WIDTH, 16001)
    bend = np.abs(activation.second_derivative(places))
    bend = np.where(np.isfinite(bend), bend, 0.0)
    corners = [corner.at for corner in activation.breakpoints(-HALF_WIDTH, HALF_WIDTH)]

    def bottom(start: Array) -> float:
        """Return the objective at the bottom of a valley, by the shift of each knot and the power."""
        shares = np.sort(np.arange(count) + 0.5 + start[:-1]).clip(0.1, count - 0.1) / count
        found = _descend(problem, _spaced(places, bend ** start[-1], corners, shares))
        if found is not None:
            minima.append(found)
        return OUTSIDE if found is None else found[0]

    for i in range(len(POWERS) + restarts):
        if i < len(POWERS):
            bottom(np.append(np.zeros(count), POWERS[i]))
        else:
            bounds = [(-1.0, 1.0)] * count + [(POWERS[0], POWERS[-1])]
            random = np.random.default_rng([seed, i - len(POWERS)])
            dual_annealing(bottom, bounds, maxfun=ANNEALED, no_local_search=True, rng=random)
        progress((i + 1) / (len(POWERS) + restarts))
    least = min(value for value, _ in minima)
    # mirror images differ by rounding, and always the same one wins
    equal = [knots for value, knots in minima if value <= least + TIE * abs(least)]
    knots = min(equal, key=lambda knots: [round(knot, 3) for knot in knots.tolist()])
    knots = newton(lambda c: problem(c)[1], knots, np.ones(count, dtype=bool), np.empty(0))
    knots = np.round(knots, DIGITS)  # so that the way to them, which differs from CPU to CPU, is not seen
    objective, _, slopes = problem(knots)
    return Mixture(knots, slopes, objective)


def _spaced(places: Array, density: Array, corners: Sequence[float], shares: Array) -> Array:
    """Return the knots below which these shares of a density lie, where each corner has a knot's share."""
    mass = density.sum() or 1.0
    for corner in corners:
        near = np.abs(places - corner) <= 0.5
        density[near] += mass / len(shares) / np.count_nonzero(near)
    if not density.any():
        density[np.abs(places) <= 1] = 1.0
    sums = np.cumsum(density)
    return np.asarray(np.interp(shares * sums[-1], sums, places))


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
        matrix = moves(z).T @ problem.hessian(knots_of(z)) @ moves(z)
        matrix[np.diag_indices(count)] += np.append(0.0, function(z)[1][1:])
        return np.asarray(matrix)

    if np.min(np.diff(start)) <= 0:
        start = start + np.arange(count) * 1e-3
    z = np.append(start[middle], np.log(np.diff(start)))
    if function(z)[0] == OUTSIDE:
        return None
    options = {"gtol": 1e-9, "maxiter": 100, "initial_trust_radius": 0.5, "max_trust_radius": 2.0}
    result = minimize(function, z, jac=True, hess=hessian, method="trust-exact", options=options)
    return float(result.fun), knots_of(result.x)
