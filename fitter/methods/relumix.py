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
So it starts from many such distributions, likely ones first, with the knots of a stretch spaced by |h″|^p; then
from the results of simulated annealing. Newton steps within a trust region follow each start down to the bottom of
its valley, and Newton's method finds the last digits of the deepest.

The other objective, ∫ (h′ − h̃′)² (the paper's appendix I), leaves the outer levels at m₋ and m₊; Few-Bit's dynamic
programme solves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from flint import arb, ctx

from fitact.base import UsageError, quote
from fitact.fitter.analysis import REALS, Activation, Asymptote, breaks, float_check, roots
from fitact.fitter.expr import Array, geometric, shifted, value
from fitact.fitter.numerics import Moments, Weight, dp_borders, newton, nodes, quadrature, running, step_errors
from fitact.fitter.records import StepFit, check_bits

from .fewbit import DOMAIN, without_noise

METHOD = "relumix"
OBJECTIVES = ("primitive", "derivative")
RESTARTS = 4  # of the annealing, by default
LEAST_POWER = 0.52  # of x in a tail whose square has an integral: 1/2, and a margin for the test
CELLS = 4000
REACH = 1e5  # of the table of integrals; beyond it, tails follow their power law
INNER = 12.0  # up to here its cells are even, then they grow
HALF_WIDTH = 40.0  # of the search for knots
ANNEALING_STEPS = 40
POWERS = (0.35, 0.4, 0.45, 0.5, 0.55)  # of |h″|: the square root spaces many knots best, a smaller power few
TIE = 1e-8  # relative difference of objectives that count as equal
OUTSIDE = 1e9  # the objective of knots that are no mixture's, or too far out, or too near each other
DIGITS = 10  # after the point, of knots in the units of the search; Newton finds them to 12
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
        restarts: of the annealing.
        seed: of the annealing: the same seed gives the same fit.
        progress: called with the share of the work that is done, 0 to 1.

    Returns:
        The fit.

    Raises:
        UsageError: bits, objective, restarts or seed are out of range, or f has no such mixture.

    Warns:
        FitWarning: floating point fails on the formula, see `float_check.problem`.

    """
    found = mixture(activation, bits, objective, restarts, seed, progress)
    float_check.warn(activation)
    options: dict[str, float | str] = {"objective": objective, "restarts": restarts, "seed": seed}
    return _record(activation, found, name, options)


def published(name: str) -> StepFit:
    """Return the mixture whose coefficients the paper prints, one of `PUBLISHED`."""
    function, objective, free, knots = PUBLISHED[name]
    activation = Activation.of(function)
    found = Mixture(np.array(knots), np.cumsum([0.0, *free, 1.0 - sum(free)]), math.nan)
    found = replace(found, objective=evaluated(activation, found, objective))
    return _record(activation, found, name, {"objective": objective, "source": "arXiv 2406.16282"})


def _record(activation: Activation, found: Mixture, name: str, options: dict[str, float | str]) -> StepFit:
    borders = without_noise(found.knots, np.max(np.abs(found.knots))).astype(np.float32)
    levels = found.slopes.astype(np.float32).astype(np.float64)
    if np.any(np.diff(borders) <= 0):
        raise UsageError(f"bits: {len(borders)} knots coincide in float32; use fewer bits")
    weight = Weight()
    errors = step_errors(activation, weight, DOMAIN, borders.astype(np.float64), levels, even=False)
    return StepFit(
        name=name,
        method=METHOD,
        activation=activation,
        bits=(len(levels) - 1).bit_length(),
        domain=DOMAIN,
        weight=weight,
        even=False,
        borders=tuple(borders.astype(np.float64).tolist()),
        levels=tuple(levels.tolist()),
        error={**errors, "objective": float(f"{found.objective:.10g}")},
        options=options,
    )


def mixture(
    activation: Activation, bits: int, objective: str, restarts: int, seed: int, progress: Progress
) -> Mixture:
    """Return the best mixture found, in float64; for arguments and errors see `fit`."""
    check_bits(bits, StepFit.BITS)
    if objective not in OBJECTIVES:
        raise UsageError(f"objective: expected {' or '.join(OBJECTIVES)}, got {quote(objective)}")
    if not 0 <= restarts <= 1000:
        raise UsageError(f"restarts: expected 0 to 1000, got {quote(restarts)}")
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed: expected 0 to 4294967295, got {quote(seed)}")
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
    frame = Frame.of(activation, left, right)
    problem = Primitive(activation, left, right, frame)
    found = single(problem) if count == 1 else search(problem, activation, count, restarts, seed, progress)
    return frame.undone(found)


def asymptotes(activation: Activation) -> tuple[Asymptote, Asymptote]:
    """Return the lines that f tends to on both sides.

    Raise UsageError if one side has none, or f tends to it so slowly that the square of the distance has no
    integral, or f is not finite somewhere.
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
    for point in breaks(activation.formula, -REACH, REACH)[0].values():
        for side in (-1, 1):
            beside = value(activation.formula, shifted(point, side, "1e-12"), 15)
            if not abs(beside) < 1e9 * (1 + abs(point)):
                raise UsageError(
                    f"{activation}: it is not finite near x = {float(point):.6g}, "
                    "and a mixture of ReLUs is; use --method fewbit on a domain without that point"
                )
    return activation.asymptotes


def evaluated(activation: Activation, found: Mixture, objective: str) -> float:
    """Return the objective of any mixture with the right slopes at both ends.

    `primitive` is ∫ (h − h̃)² from −38.2277 to 38.2277, the paper's half-width (appendix E), with h̃ on the left
    asymptote before the first knot; the rest counts less than 1e-8. `derivative` is ∫ (h′ − h̃′)² over the same
    interval.
    """
    left, _ = asymptotes(activation)
    edge = -2 * math.log(1e-8 / 2)
    inner = np.union1d(found.knots, activation.switch_points(-edge, edge))
    edges = np.union1d(np.linspace(-edge, edge, 4001), inner)

    def wrong(at: Array) -> Array:
        if objective == "derivative":
            return activation.derivative(at) - found.slopes[np.searchsorted(found.knots, at)]
        hinges = np.maximum(at[..., None] - found.knots, 0.0) @ found.weights
        return activation.value(at) - (left.intercept + left.slope * at) - hinges

    return float(quadrature(lambda at: wrong(at) ** 2, edges).sum())


def _broken_line(activation: Activation, count: int, right: Asymptote) -> Mixture | None:
    """Return f itself if f′ is a step function with at most `count` borders, else None; spare knots do nothing."""
    corners = [point.at for point in activation.breakpoints()]
    bends = roots(activation.second_derivative_formula, -REALS, REALS)
    if len(corners) > count or bends.reach < math.inf or any(sign for *_, sign in bends.signs):
        return None
    corners = corners or [0.0]
    edge = 1 + max(map(abs, corners))
    ends = np.array([corners[0] - 1, *corners, corners[-1] + 1])
    middles = activation.derivative((ends[:-1] + ends[1:]) / 2)
    spare = count - len(corners)
    knots = np.concatenate([corners, corners[-1] + edge * np.arange(1, spare + 1)])
    return Mixture(knots, np.concatenate([middles, np.full(spare, right.slope)]), 0.0)


def _derivative_optimum(activation: Activation, count: int, left: Asymptote, right: Asymptote) -> Mixture:
    """Return the best step function for h′ with outer levels m±: Few-Bit's programme, then Newton's method."""
    ends = (left.slope, right.slope)
    width = HALF_WIDTH
    while width < REACH and width * np.max((activation.derivative(np.array([-width, width])) - ends) ** 2) > 1e-12:
        width *= 2
    switches = activation.switch_points(-width, width)
    marks = np.union1d(switches, roots(activation.second_derivative_formula, -width, width).at)
    moments = Moments(activation.derivative, np.ones_like, -width, width, marks, CELLS)
    knots = dp_borders(moments, count + 1, ends)

    def levels(knots: Array) -> Array:
        mass, first, _ = np.diff(moments.at(knots), axis=1)
        return np.concatenate([[ends[0]], first / mass, [ends[1]]])

    def gradient(knots: Array) -> Array:
        return 2 * activation.derivative(knots) - levels(knots)[:-1] - levels(knots)[1:]

    def total(knots: Array) -> float:
        parts = moments.between(knots)
        y = levels(knots)
        return float(np.sum(parts[2] - 2 * y * parts[1] + y * y * parts[0]))

    knots = newton(gradient, knots, ~np.isin(knots, switches), switches)
    return Mixture(knots, levels(knots), max(total(knots), 0.0))


# --- the objective


@dataclass(frozen=True)
class Mixture:
    """A mixture of ReLUs in float64."""

    knots: Array  # c, (2^k − 1,), increasing
    slopes: Array  # of h̃ between them, (2^k,); the weights a are their differences
    objective: float  # what was minimised

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
    counts as a power of x, with the exponent seen there. Everything here is in the units of the frame.
    """

    def __init__(self, activation: Activation, left: Asymptote, right: Asymptote, frame: Frame) -> None:
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


# --- the search


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
    knots = newton(lambda c: problem(c)[1], knots, np.ones(count, dtype=bool), np.empty(0))
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
