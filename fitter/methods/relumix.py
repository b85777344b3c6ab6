"""ReLU mixtures: the broken line nearest to f, whose slopes stand for f′.

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

import numpy as np
from flint import arb, ctx

from fitact.errors import UsageError, quote
from fitact.fitter.analysis import float_check
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.analysis.roots import REALS, breaks, roots
from fitact.fitter.analysis.shape import Asymptote
from fitact.fitter.expr.exact import shifted, value
from fitact.fitter.expr.wide import Array
from fitact.fitter.numerics.errors import step_errors
from fitact.fitter.numerics.moments import Moments, quadrature
from fitact.fitter.numerics.partition import dp_borders
from fitact.fitter.numerics.weight import Weight
from fitact.fitter.records.fit import StepFit
from fitact.fitter.records.validate import check_bits

from .fewbit import DOMAIN, without_noise
from .relumix_objective import HALF_WIDTH, REACH, Frame, Mixture, Primitive, single
from .relumix_search import Progress, newton, search

METHOD = "relumix"
OBJECTIVES = ("primitive", "derivative")
RESTARTS = 4  # of the annealing, by default
LEAST_POWER = 0.52  # of x in a tail whose square has an integral: 1/2, and a margin for the test
CELLS = 4000
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
    found = mixture(activation, bits, objective=objective, restarts=restarts, seed=seed, progress=progress)
    float_check.warn(activation)
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
    progress: Progress = lambda share: None,
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


def _refuse_poles(activation: Activation) -> None:
    for point in breaks(activation.formula, -REACH, REACH)[0].values():
        for side in (-1, 1):
            beside = value(activation.formula, shifted(point, side, "1e-12"), 15)
            if not abs(beside) < 1e9 * (1 + abs(point)):
                raise UsageError(
                    f"{activation}: it is not finite near x = {float(point):.6g}, "
                    "and a mixture of ReLUs is; use --method fewbit on a domain without that point"
                )


def asymptotes(activation: Activation) -> tuple[Asymptote, Asymptote]:
    """Return the lines that f tends to on both sides.

    Raises:
        UsageError: one side has none, or f tends to it so slowly that the square of the distance has no integral,
            or f is not finite somewhere.

    """
    for side, end in zip((-1, 1), activation.asymptotes, strict=True):
        toward = f"as x tends to {'+' if side > 0 else '-'}infinity"
        if end.kind != "line":
            raise UsageError(
                f"{activation}: a mixture of ReLUs is a straight line {toward}, and this activation tends to "
                "none; use --method fewbit"
            )
        near, far = (abs(_distance(activation, end, side * 10.0**k)) for k in (8, 10))
        rounding = 1e-9 + 2.0**-50 * abs(end.slope) * 1e10
        if far > rounding and far > near * 10.0 ** (-2 * LEAST_POWER):
            raise UsageError(
                f"{activation}: {toward} it nears its asymptote too slowly for the squared distance to have an "
                "integral; use --method fewbit"
            )
    _refuse_poles(activation)
    return activation.asymptotes


def _distance(activation: Activation, line: Asymptote, at: float) -> float:
    with ctx.workprec(200):
        return float(value(activation.formula, at, 40) - arb(line.slope) * at - line.intercept)


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
    if len(corners) > count or not bends.complete or any(sign for *_, sign in bends.signs):
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
    while width < REACH and np.max(np.abs(activation.derivative(width * SIDES) - ends) ** 2) * width > 1e-12:
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

    knots = newton(gradient, knots, ~np.isin(knots, switches))
    return Mixture(knots, levels(knots), max(total(knots), 0.0))
