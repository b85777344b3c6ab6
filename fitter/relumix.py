"""ReLU mixtures: the broken line nearest to f, whose slopes stand for f′.

Yang et al., *Reducing Fine-Tuning Memory Overhead by Approximate and Memory-Sharing Backpropagation*, ICML 2024,
arXiv 2406.16282 (Approx-BP; ReGELU2 and ReSiLU2 are its mixtures for GELU and SiLU at 2 bits). Over knots c and
weights a of

    h̃(x) = b₋ + m₋ x + Σ a_i ReLU(x − c_i),    i = 1 … 2^k − 1,

minimise ∫ (h − h̃)² over all x (eq. 14). For the integral to be finite h̃ must have the asymptotes m± x + b± of h on
both sides, which for GELU is eq. 13. So h̃ is a broken line that leaves the left asymptote at the first knot and
joins the right one at the last; in between, its values at the knots are a linear least-squares problem, and the
search is over knots only. The derivative h̃′ is a step function with the knots as borders.

The valleys of that search differ in how many knots lie on each stretch of one curvature, between the zeros of h″.
So it starts from many such distributions, likely ones first, with the knots of a stretch spaced by |h″|^p; then
from what simulated annealing finds; and each start is followed down to its valley's bottom, by BFGS and at last by
Newton's method.

The other objective, ∫ (h′ − h̃′)² (the paper's appendix I), leaves the outer levels at m₋ and m₊ and is solved by
Few-Bit's dynamic programme.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fitact.errors import UsageError, quote

from . import check
from .accuracy import step_errors
from .activation import Activation
from .analysis import Asymptote
from .expression import Array
from .fewbit import DOMAIN, programme, without_noise
from .fit import StepFit
from .moments import Moments, nodes, quadrature, running
from .precise import MP, exactly
from .weight import Weight
from .zeros import REALS, breaks, zeros

METHOD = "relumix"
OBJECTIVES = ("primitive", "derivative")
RESTARTS = 4  # of the annealing, by default
ANNEALING_STEPS = 40
NEWTON_STEPS = 20
NEIGHBOURS = 2  # gaps, and knots, that are tried near the best: each with each
STARTS = 40  # distributions of the knots that are tried before annealing
POWERS = (0.4, 0.5)  # of |h″|: knots spaced by its square root are best for many, those of its 0.4th for few
REACH = 1e5  # of the table of integrals; beyond it, tails follow their power law
LEAST_POWER = 0.52  # of a tail whose square has an integral, 1/2 and something for the test
INNER = 12.0  # up to here its cells are even, then they grow
HALF_WIDTH = 40.0  # of the search
CELLS = 4000
TIE = 1e-8  # relative difference of objectives that are taken as equal
SIDES = np.array([-1.0, 1.0])

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
Progress = Callable[[float], None]


@dataclass(frozen=True)
class Mixture:
    """A mixture of ReLUs in float64.

    Attributes:
        knots: c, (2^k − 1,), increasing.
        slopes: of h̃ between them, (2^k,); the weights a are their differences.
        objective: what was minimised.

    """

    knots: Array
    slopes: Array
    objective: float

    @property
    def weights(self) -> Array:
        """The weights a, (2^k − 1,)."""
        return np.diff(self.slopes)


def fit(
    activation: Activation,
    bits: int,
    name: str,
    *,
    objective: str = "primitive",
    restarts: int = RESTARTS,
    seed: int = 0,
    progress: Progress | None = None,
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
        FitWarning: floating point fails on the formula, see `check.problem`.

    """
    found = mixture(activation, bits, objective=objective, restarts=restarts, seed=seed, progress=progress)
    check.warn(activation)
    options: dict[str, float | str] = {"objective": objective, "restarts": restarts, "seed": seed}
    return _record(activation, found, name, options)


def published(name: str) -> StepFit:
    """Return the mixture whose coefficients the paper prints, one of `PUBLISHED`."""
    function, objective, free, knots = PUBLISHED[name]
    activation = Activation.of(function)
    slopes = np.cumsum([0.0, *free, 1.0 - sum(free)])
    found = Mixture(np.array(knots), slopes, math.nan)
    found = Mixture(found.knots, found.slopes, evaluated(activation, found, objective))
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
    activation: Activation,
    bits: int,
    *,
    objective: str = "primitive",
    restarts: int = RESTARTS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Mixture:
    """Return the best mixture found, in float64; for arguments and errors see `fit`."""
    if isinstance(bits, bool) or bits not in (1, 2, 3, 4):
        raise UsageError(f"bits: expected 1, 2, 3 or 4, got {quote(bits)}")
    if objective not in OBJECTIVES:
        raise UsageError(f"objective: expected {' or '.join(OBJECTIVES)}, got {quote(objective)}")
    if not 0 <= restarts <= 1000:
        raise UsageError(f"restarts: expected 0 to 1000, got {quote(restarts)}")
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed: expected 0 to 4294967295, got {quote(seed)}")
    left, right = asymptotes(activation)
    count = 2**bits - 1
    told = progress or (lambda share: None)
    jumps = [point.at for point in activation.breakpoints() if point.kind == "jump"]
    if jumps and count > 1 and objective == "primitive":
        raise UsageError(
            f"activation {quote(activation.expression)}: it jumps at x = {jumps[0]:g}, where the steeper of two "
            "mixtures is the better one, so none is best; use --objective derivative or --method fewbit"
        )
    linear = None if jumps and objective == "primitive" else _broken_line(activation, count, right)
    if linear is not None:
        return linear
    if count == 1 and abs(right.slope - left.slope) < 1e-9:
        raise UsageError(
            f"activation {quote(activation.expression)}: its asymptotes are parallel, and one ReLU cannot lead "
            "from one to the other: use --bits 2 or more"
        )
    if objective == "derivative":
        return _derivative_optimum(activation, count, left, right)
    frame = _Frame.of(activation, left, right)
    problem = Primitive(activation, left, right, frame)
    found = _single(problem) if count == 1 else _search(problem, activation, count, restarts, seed, told)
    return frame.undone(found)


def _refuse_poles(activation: Activation) -> None:
    for point in breaks(activation.formula, -REACH, REACH)[0].values():
        for side in (-1, 1):
            value = exactly(activation.formula, point + side * MP.mpf("1e-12"), 15)
            if not abs(value) < 1e9 * (1 + abs(point)):
                raise UsageError(
                    f"activation {quote(activation.expression)}: it is not finite near x = {float(point):.6g}, "
                    "and a mixture of ReLUs is; use --method fewbit on a domain without that point"
                )


@dataclass(frozen=True)
class _Frame:
    """Units in which an activation bends within a few of 0, by about one: x = center + scale·u, h = size·g.

    Those of the literature do so as they are, and keep their own: then center is 0, and the others are 1.
    """

    center: float
    scale: float
    size: float

    @classmethod
    def of(cls, activation: Activation, left: Asymptote, right: Asymptote) -> _Frame:
        bends = zeros(activation.curvature, -REALS, REALS).at
        marks = np.concatenate([[0.0], bends, activation.switch_points(-REALS, REALS)])
        marks = marks[np.abs(marks) < REACH]
        steps = np.geomspace(1e-9, REACH, 2000)
        x = np.unique(np.concatenate([marks, *(mark + side * steps for mark in marks for side in (-1, 1))]))
        lines = [line.slope * x + line.intercept for line in (left, right)]
        off = np.min([np.abs(activation.value(x) - line) for line in lines], axis=0)
        off[off < 1e-12 * np.abs(lines[0])] = 0.0  # rounding
        share = np.cumsum(off[1:] ** 4 * np.diff(x))  # a power that slow tails do not count in
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


def asymptotes(activation: Activation) -> tuple[Asymptote, Asymptote]:
    """Return the lines that f tends to on both sides.

    Raises:
        UsageError: there is none on one side, or f tends to it so slowly that the square of the distance has no
            integral, or f is not finite somewhere.

    """
    what = f"activation {quote(activation.expression)}"
    for side, end in zip((-1, 1), activation.asymptotes, strict=True):
        toward = f"as x tends to {'+' if side > 0 else '-'}infinity"
        if end.kind != "line":
            raise UsageError(
                f"{what}: a mixture of ReLUs is a straight line {toward}, and this activation tends to none; use "
                "--method fewbit"
            )
        near, far = (abs(_distance(activation, end, side * 10.0**k)) for k in (8, 10))
        rounding = 1e-9 + 2.0**-50 * abs(end.slope) * 1e10
        if far > rounding and far > near * 10.0 ** (-2 * LEAST_POWER):
            raise UsageError(
                f"{what}: {toward} it nears its asymptote too slowly for the squared distance to have an "
                "integral; use --method fewbit"
            )
    _refuse_poles(activation)
    return activation.asymptotes


def _distance(activation: Activation, line: Asymptote, at: float) -> float:
    return float(exactly(activation.formula, at, 40) - MP.mpf(line.slope) * MP.mpf(at) - line.intercept)


def evaluated(activation: Activation, found: Mixture, objective: str) -> float:
    """Return the objective of any mixture with the right slopes at both ends.

    `primitive` is ∫ (h − h̃)² from −38.2277 to 38.2277, the paper's half-width (appendix E) beyond which it counts
    less than 1e-8, with h̃ on the left asymptote before the first knot; `derivative` is ∫ (h′ − h̃′)² over the same.
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
    """Return f′ itself where it is a step function of at most `count` borders; those left over do nothing."""
    corners = [point.at for point in activation.breakpoints()]
    bends = zeros(activation.curvature, -REALS, REALS)
    if len(corners) > count or not bends.complete or any(sign for *_, sign in bends.signs):
        return None
    corners = corners or [0.0]
    edge = 1 + max(map(abs, corners))
    ends = np.array([corners[0] - 1, *corners, corners[-1] + 1])
    middles = activation.derivative((ends[:-1] + ends[1:]) / 2)
    spare = count - len(corners)
    knots = np.concatenate([corners, corners[-1] + edge * np.arange(1, spare + 1)])
    return Mixture(knots, np.concatenate([middles, np.full(spare, right.slope)]), 0.0)


class Primitive:
    """∫ (h − h̃)² over all x as a function of the knots.

    Integrals of h, x h and h² from 0, and of the squared distances from the asymptotes, are tabulated on cells
    that have every break of h among their ends; a knot adds the integral over part of a cell. Beyond ±1e5 a
    distance counts as a power of x, the exponent seen there.

    Args:
        activation: h.
        left, right: its asymptotes.
        frame: the units of everything else here.

    """

    def __init__(
        self, activation: Activation, left: Asymptote, right: Asymptote, frame: _Frame = _Frame(0.0, 1.0, 1.0)
    ) -> None:
        def h(u: Array) -> Array:
            return activation.value(frame.center + frame.scale * u) / frame.size

        self.h = h
        self.frame = frame
        self.left, self.right = frame.line(left), frame.line(right)
        cells = 240
        outer = np.geomspace(INNER, REACH, cells)
        spaced = np.concatenate([-outer, np.linspace(-INNER, INNER, 2 * cells + 1), outer])
        switches = (activation.switch_points(-REALS, REALS) - frame.center) / frame.scale
        self.edges = np.union1d(spaced, switches[np.abs(switches) < REACH])
        rows = self._rows(self.edges[:-1], self.edges[1:])
        middle = int(np.searchsorted(self.edges, 0.0))
        # outward from 0, so that what is small near 0 is not the difference of what is large far away
        above = running(rows[:3, middle:])
        below = -running(rows[:3, :middle][:, ::-1])[:, ::-1]
        central = np.concatenate([below, above[:, 1:]], axis=1)
        # and the distances inward from where they vanish; the second is minus what is left to the right
        self.sums = np.concatenate([central, running(rows[3:4]), -running(rows[4:, ::-1])[:, ::-1]])
        self.tails = tuple(self._tail(end, side) for side, end in ((-1, self.left), (1, self.right)))

    def _rows(self, starts: Array, ends: Array) -> Array:
        x, weights = nodes(starts, ends)
        h = self.h(x)
        off = [h - line.slope * x - line.intercept for line in (self.left, self.right)]
        integrands = (h, x * h, h * h, off[0] ** 2, off[1] ** 2)
        return np.stack([(integrand * weights).sum(axis=1) for integrand in integrands])

    def _tail(self, line: Asymptote, side: int) -> float:
        x = side * REACH * np.array([1.0, 2.0])
        near, far = np.abs(self.h(x) - line.slope * x - line.intercept)
        if near <= 1e-11 or far <= 1e-11 * abs(line.slope):  # rounding
            return 0.0
        power = math.log2(near / far)
        return float(near * near * REACH / (2 * power - 1)) if power > 0.5 else 0.0

    def at(self, knots: Array) -> Array:
        """Return the running integrals at the knots, (5, knots)."""
        cell = np.clip(np.searchsorted(self.edges, knots, side="right") - 1, 0, len(self.edges) - 2)
        return np.asarray(self.sums[:, cell] + self._rows(self.edges[cell], knots))

    def __call__(self, knots: Array) -> tuple[float, Array, Array]:
        """Return the objective with the best values at the knots, its gradient, (knots,), slopes, (knots + 1,).

        A knot that moves at a constant value changes h̃ by minus its slope times the hat function of that knot, on
        either side; the inner values are optimal, so their answer does not count.
        """
        left, right = self.left, self.right
        moments = self.at(knots)
        h0, h1, h2 = np.diff(moments[:3], axis=1)
        gap = np.diff(knots)
        falling = (knots[1:] * h0 - h1) / gap  # ∫ h times the hat function of a segment's left end
        rising = (h1 - knots[:-1] * h0) / gap  # and of its right end
        values = np.empty_like(knots)
        values[0] = left.slope * knots[0] + left.intercept
        values[-1] = right.slope * knots[-1] + right.intercept
        if len(knots) > 2:
            target = rising[:-1] + falling[1:]
            target[0] -= gap[0] / 6 * values[0]
            target[-1] -= gap[-1] / 6 * values[-1]
            gram = np.diag((gap[:-1] + gap[1:]) / 3)
            gram += np.diag(gap[1:-1] / 6, 1) + np.diag(gap[1:-1] / 6, -1)
            values[1:-1] = np.linalg.solve(gram, target)
        first, last = values[:-1], values[1:]
        inside = h2 - 2 * (first * falling + last * rising) + gap / 3 * (first**2 + first * last + last**2)
        before = moments[3, 0] + self.tails[0]
        after = self.tails[1] - moments[4, -1]
        slopes = np.concatenate([[left.slope], np.diff(values) / gap, [right.slope]])
        off_rising = np.concatenate([[0.0], rising - gap * (first / 6 + last / 3)])
        off_falling = np.concatenate([falling - gap * (first / 3 + last / 6), [0.0]])
        gradient = 2 * (slopes[:-1] * off_rising + slopes[1:] * off_falling)
        # the outer knots move along the asymptotes
        gradient[0] = 2 * (slopes[1] - left.slope) * off_falling[0]
        gradient[-1] = 2 * (slopes[-2] - right.slope) * off_rising[-1]
        return float(inside.sum() + before + after), gradient, slopes


def _single(problem: Primitive) -> Mixture:
    """Return the one mixture of a single ReLU: its knot is where the asymptotes meet."""
    bend = problem.right.slope - problem.left.slope
    knot = np.array([(problem.left.intercept - problem.right.intercept) / bend])
    moments = problem.at(knot)[:, 0]
    objective = moments[3] + problem.tails[0] - moments[4] + problem.tails[1]
    return Mixture(knot, np.array([problem.left.slope, problem.right.slope]), float(objective))


def _search(
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
    knots = _newton(lambda c: problem(c)[1], _deepest(found), np.ones(count, dtype=bool))
    objective, _, slopes = problem(knots)
    return Mixture(knots, slopes, objective)


def _deepest(found: Sequence[tuple[float, Array]]) -> Array:
    """Return the knots of the least objective; of mirror images, which differ by rounding, always the same one."""
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


def _stretches(activation: Activation, count: int, frame: _Frame) -> list[tuple[_Stretch, float]]:
    """Return the stretches between the zeros of h″ and the breaks of h′, each with its share of ∫ |h″|^0.4."""
    low, high = frame.center - frame.scale * HALF_WIDTH, frame.center + frame.scale * HALF_WIDTH
    inner = np.union1d(zeros(activation.curvature, low, high).at, activation.switch_points(low, high))
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
    # a corner wants a knot, wherever it may be in its neighbourhood
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
        yield np.sort(
            [
                float(
                    np.interp(
                        (q - ends[i]) / stretches[i][1], stretches[i][0].share[power], stretches[i][0].points
                    )
                )
                for q, i in zip(quantiles, which, strict=True)
            ]
        )
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
    """Return the bottom of the valley and its knots: BFGS over the first knot and the logarithms of the gaps."""
    from scipy.optimize import minimize

    if np.min(np.diff(start)) <= 0:
        start = start + np.arange(len(start)) * 1e-3

    def knots_of(z: Array) -> Array:
        return np.asarray(z[0] + np.concatenate([[0.0], np.cumsum(np.exp(np.minimum(z[1:], 10.0)))]))

    def function(z: Array) -> tuple[float, Array]:
        knots = knots_of(z)
        largest = np.abs(knots).max()
        if not (largest < REACH / 10 and np.diff(knots).min() > 1e-7 * max(1.0, largest)):
            return 1e9, np.zeros_like(z)
        value, gradient, _ = problem(knots)
        if value < 0:  # all digits cancel
            return 1e9, np.zeros_like(z)
        later = np.cumsum(gradient[::-1])[::-1]
        return value, np.concatenate([later[:1], later[1:] * np.diff(knots)])

    z = np.concatenate([start[:1], np.log(np.diff(start))])
    result = minimize(function, z, jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 400})
    return (float(result.fun), knots_of(result.x)) if result.fun < 1e9 else None


def _anneal(problem: Primitive, count: int, random: np.random.Generator) -> Array:
    """Return the knots that SciPy's dual annealing ends with, not yet polished."""
    from scipy.optimize import dual_annealing

    def function(z: Array) -> float:
        knots = np.sort(z)
        return problem(knots)[0] if np.diff(knots).min() > 1e-6 else 1e9

    bounds = [(-HALF_WIDTH / 4, HALF_WIDTH / 4)] * count
    result = dual_annealing(function, bounds, maxiter=ANNEALING_STEPS, no_local_search=True, rng=random)
    return np.sort(result.x)


def _newton(gradient: Callable[[Array], Array], knots: Array, free: NDArray[np.bool_]) -> Array:
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


def _derivative_optimum(activation: Activation, count: int, left: Asymptote, right: Asymptote) -> Mixture:
    """Return the best step function for h′ with outer levels m±: Few-Bit's programme, then Newton's method."""
    ends = (left.slope, right.slope)
    width = HALF_WIDTH
    while width < REACH and np.max(np.abs(activation.derivative(width * SIDES) - ends) ** 2) * width > 1e-12:
        width *= 2
    switches = activation.switch_points(-width, width)
    marks = np.union1d(switches, zeros(activation.curvature, -width, width).at)
    moments = Moments(activation.derivative, np.ones_like, -width, width, marks, CELLS)
    knots = programme(moments, count + 1, ends)

    def levels(knots: Array) -> Array:
        mass, first, _ = np.diff(moments.at(knots), axis=1)
        return np.concatenate([[ends[0]], first / mass, [ends[1]]])

    def gradient(knots: Array) -> Array:
        return 2 * activation.derivative(knots) - levels(knots)[:-1] - levels(knots)[1:]

    def total(knots: Array) -> float:
        edges = np.concatenate([moments.grid[:1], knots, moments.grid[-1:]])
        parts = np.diff(moments.at(edges), axis=1)
        y = levels(knots)
        return float(np.sum(parts[2] - 2 * y * parts[1] + y * y * parts[0]))

    knots = _newton(gradient, knots, ~np.isin(knots, switches))
    return Mixture(knots, levels(knots), max(total(knots), 0.0))
