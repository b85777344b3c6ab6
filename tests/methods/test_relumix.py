"""Mixtures of ReLUs against published figures, a long search, brute force and quadrature by SciPy."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from scipy import special

from fitact.fitter.analysis.activation import Activation
from fitact.fitter.methods import relumix
from tests.support.curves import ALPHA, CURVES, LAMBDA, quad
from tests.support.refusals import refused
from tests.support.rows import full

# Few-Bit fits on odd domains warn; what of is in tests/fitter/test_catalog.py.
pytestmark = pytest.mark.filterwarnings("ignore::fitact.FitWarning")

REFERENCE = json.loads((Path(__file__).parents[1] / "reference" / "relumix.json").read_text())
BEST, PUBLISHED = REFERENCE["best"], REFERENCE["published"]
EDGE = 38.2277  # the paper's half-width
OBJECTIVES = ("primitive", "derivative")


# --- the oracle: f and f′ in NumPy and SciPy, and how far f is from the line on either side


@dataclass(frozen=True)
class Oracle:
    """The fitter's formula; f and f′; the lines (slope, intercept); f minus either line, accurate on its side."""

    text: str
    value: Callable
    derivative: Callable
    left: tuple[float, float]
    right: tuple[float, float]
    off_left: Callable
    off_right: Callable
    breaks: tuple = ()


def plain(text, value, derivative, left, right, breaks=(), off_left=None, off_right=None):
    """An oracle; by default it subtracts the lines as they are, good to 1e-15 of them."""
    return Oracle(
        text,
        value,
        derivative,
        left,
        right,
        off_left or (lambda x: value(x) - left[0] * x - left[1]),
        off_right or (lambda x: value(x) - right[0] * x - right[1]),
        breaks,
    )


def known(name, left, right, off_right=None, off_left=None, text=None):
    """The oracle of a curve; where it ends in 0 on the left, its value is the distance from there."""
    curve = CURVES[name]
    return plain(
        text or name, curve.value, curve.derivative, left, right, curve.jumps + curve.corners, off_left, off_right
    )


def elu(name, scale, alpha):
    return known(
        name,
        (0.0, -scale * alpha),
        (scale, 0.0),
        lambda x: scale * np.where(x > 0, 0.0, alpha * np.expm1(np.minimum(x, 0)) - x),
        lambda x: scale * np.where(x > 0, x + alpha, alpha * np.exp(np.minimum(x, 0))),
    )


RAMP = (0.0, 0.0), (1.0, 0.0)
ORACLES = {
    "elu": elu("elu", 1.0, 1.0),
    "selu": elu("selu", LAMBDA, ALPHA),
    "gelu": known("gelu", *RAMP, lambda x: -x * special.ndtr(-x)),
    "silu": known("silu", *RAMP, lambda x: -x * special.expit(-x)),
    "mish": known("mish", *RAMP, lambda x: -2 * x * special.expit(-2 * np.logaddexp(0, x))),
    "tanh": known(
        "tanh", (0.0, -1.0), (0.0, 1.0), lambda x: -2 * special.expit(-2 * x), lambda x: 2 * special.expit(2 * x)
    ),
    "sigmoid": known("sigmoid", (0.0, 0.0), (0.0, 1.0), lambda x: -special.expit(-x)),
    "softplus": known("softplus", *RAMP, lambda x: np.logaddexp(0, -x)),
    "hardswish": known("hardswish", *RAMP),
    # algebraic tails
    "softsign": known(
        "softsign",
        (0.0, -1.0),
        (0.0, 1.0),
        lambda x: -np.where(x > 0, 1 / (1 + np.abs(x)), 1 - x / (1 + np.abs(x))),
        lambda x: np.where(x < 0, 1 / (1 + np.abs(x)), 1 + x / (1 + np.abs(x))),
    ),
    "atan": known(
        "atan",
        (0.0, -np.pi / 2),
        (0.0, np.pi / 2),
        lambda x: -np.arctan2(1.0, x),
        lambda x: np.arctan2(1.0, -x),
        "atan(x)",
    ),
    "squareplus": known(
        "squareplus",
        *RAMP,
        lambda x: np.where(x > 0, 2 / (np.hypot(x, 2) + np.abs(x)), (np.hypot(x, 2) - x) / 2),
        lambda x: np.where(x < 0, 2 / (np.hypot(x, 2) + np.abs(x)), (x + np.hypot(x, 2)) / 2),
        "squareplus(x)",
    ),
}
SEARCHED = tuple(sorted(BEST))
ALGEBRAIC = ("atan", "softsign", "squareplus")
SMOOTH = ("gelu", "silu", "mish", "tanh", "sigmoid", "softplus", "elu")
QUICK = ("gelu", "tanh", "elu")


def cases(names, widths, quick):
    """Pairs of them; of the quick ones, GELU at 3 bits and more belongs to the full product too."""
    rows = ((name, bits) for name in names for bits in widths if bits > 1 or bridged(name))
    return full(rows, lambda row: row[0] in quick and not (row[0] == "gelu" and row[1] > 2))


def bridged(name):
    """Whether one ReLU can lead from one asymptote to the other: they are not parallel."""
    return ORACLES[name].left[0] != ORACLES[name].right[0]


@cache
def activation(name):
    return Activation.of(ORACLES[name].text if name in ORACLES else name)


@cache
def mixed(name, bits, objective="primitive", restarts=relumix.RESTARTS, seed=0):
    return relumix.mixture(activation(name), bits, objective, restarts, seed, float)


def line_through(oracle, knots, slopes):
    """The broken line that leaves the left asymptote at the first knot."""
    m, b = oracle.left
    weights = np.diff(slopes)
    return lambda x: m * x + b + np.maximum(np.asarray(x)[..., None] - knots, 0) @ weights


_STEPS = np.array([0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 1024])


def over_reals(oracle, knots, before, between, after):
    """∫ of three functions: before the first knot, after the last, and between, given the middle of the piece."""
    first, last = knots[0], knots[-1]
    cuts = np.array(oracle.breaks)
    left = [-np.inf, *np.union1d(first - _STEPS, cuts[cuts < first]), first]
    right = [last, *np.union1d(last + _STEPS, cuts[cuts > last]), np.inf]
    inside = np.union1d(knots, cuts[(first < cuts) & (cuts < last)])
    middle = sum(quad(between((a + b) / 2), [a, b]) for a, b in pairwise(inside))
    return quad(before, left) + middle + quad(after, right)


def distance(oracle, knots, slopes):
    """∫ (f − h̃)² over the reals."""
    line = line_through(oracle, knots, slopes)
    return over_reals(
        oracle,
        knots,
        lambda x: oracle.off_left(x) ** 2,
        lambda middle: lambda x: (oracle.value(x) - line(x)) ** 2,
        lambda x: oracle.off_right(x) ** 2,
    )


def derivative_distance(oracle, knots, slopes):
    """∫ (f′ − h̃′)² over the reals."""
    return over_reals(
        oracle,
        knots,
        lambda x: (oracle.derivative(x) - slopes[0]) ** 2,
        lambda middle: lambda x: (oracle.derivative(x) - slopes[np.searchsorted(knots, middle)]) ** 2,
        lambda x: (oracle.derivative(x) - slopes[-1]) ** 2,
    )


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)


# --- published figures and the long search


@pytest.mark.parametrize(
    ("name", "objective", "most"),
    [("gelu", "primitive", 0.0095070), ("silu", "primitive", 0.0399415), ("gelu", "derivative", 0.0451895)],
)
def test_reaches_the_known_optimum(name, objective, most):
    published = [
        row["value"] for row in PUBLISHED.values() if (row["activation"], row["objective"]) == (name, objective)
    ]
    assert mixed(name, 2, objective).objective <= min(most, *published)


def of_published(row):
    knots, free = np.array(row["knots"]), row["weights"]
    return knots, np.cumsum([0.0, *free, 1 - sum(free)])


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_coefficients_evaluate_to_the_published_figure(name):
    row = PUBLISHED[name]
    knots, slopes = of_published(row)
    oracle = ORACLES[row["activation"]]
    line = line_through(oracle, knots, slopes)
    edges = np.union1d(np.linspace(-EDGE, EDGE, 21), knots)
    if row["objective"] == "primitive":
        expected = quad(lambda x: (oracle.value(x) - line(x)) ** 2, edges)
    else:
        expected = 0.0
        for a, b in pairwise(edges):
            level = slopes[np.searchsorted(knots, (a + b) / 2)]
            expected += quad(lambda x, level=level: (oracle.derivative(x) - level) ** 2, [a, b])
    assert expected == pytest.approx(row["value"], rel=2e-6 if row["objective"] == "derivative" else 1e-9)
    assert relumix.published(name).error["objective"] == pytest.approx(expected, rel=1e-9)


# bits → how near the result comes, and for which activations every run looks
LONG = {2: (1e-4, (*QUICK, "silu")), 3: (1e-3, ("tanh", "elu")), 4: (1e-3, ("elu",))}
LONGER = [
    *product(SEARCHED, [2]),
    *product(("gelu", "tanh", "elu", "softsign", "squareplus"), [3]),
    ("elu", 4),
    ("silu", 4),
]


@pytest.mark.parametrize(("name", "bits"), full(LONGER, lambda row: row[0] in LONG[row[1]][1]))
def test_as_good_as_a_long_search(name, bits):
    assert mixed(name, bits).objective <= BEST[name][str(bits)] * (1 + LONG[bits][0])


@pytest.mark.full
@pytest.mark.parametrize(("name", "bits"), [*product(("gelu", "hardswish", "softsign", "selu"), [2]), ("gelu", 3)])
def test_any_seed_finds_the_optimum(name, bits):
    worst = max(mixed(name, bits, restarts=1, seed=seed).objective for seed in range(1, 4))
    assert worst <= BEST[name][str(bits)] * (1 + LONG[bits][0])


# --- the objective


@pytest.mark.parametrize(("name", "bits"), cases(sorted(ORACLES), [1, 2, 3], (*QUICK, *ALGEBRAIC[1:])))
def test_states_the_distance_over_all_reals_and_ends_on_both_asymptotes(name, bits):
    """One ReLU bends where they meet."""
    oracle, found = ORACLES[name], mixed(name, bits)
    assert found.objective == pytest.approx(distance(oracle, found.knots, found.slopes), rel=1e-8)
    (m0, b0), (m1, b1) = oracle.left, oracle.right
    weights = np.diff(found.slopes)
    assert found.knots.shape == weights.shape == (2**bits - 1,)
    assert np.all(np.diff(found.knots) > 0)
    assert found.slopes[0] == pytest.approx(m0, abs=1e-12)
    assert weights.sum() == pytest.approx(m1 - m0, abs=1e-12)
    assert -(weights @ found.knots) == pytest.approx(b1 - b0, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        *cases(sorted(ORACLES), [1, 2, 3], (*QUICK, *ALGEBRAIC)),
        *cases([*SMOOTH, "squareplus"], [4], (*QUICK, "squareplus")),
    ],
)
def test_states_the_distance_of_derivatives_with_levels_that_are_means(name, bits):
    """Few-Bit's equations 4 and 5, the outer levels pinned to the slopes of the asymptotes."""
    oracle, found = ORACLES[name], mixed(name, bits, "derivative")
    if bits < 4:
        exact = derivative_distance(oracle, found.knots, found.slopes)
        assert found.objective == pytest.approx(exact, rel=1e-8)
    assert np.all(np.diff(found.knots) > 0)
    assert found.slopes[[0, -1]].tolist() == [oracle.left[0], oracle.right[0]]
    means = [(oracle.value(b) - oracle.value(a)) / (b - a) for a, b in pairwise(found.knots)]
    assert found.slopes[1:-1] == pytest.approx(means, rel=1e-9, abs=1e-10)
    smooth = np.abs(found.knots[:, None] - np.array([*oracle.breaks, np.inf])).min(axis=1) > 1e-6
    middle = (found.slopes[1:] + found.slopes[:-1]) / 2
    assert oracle.derivative(found.knots)[smooth] == pytest.approx(middle[smooth], rel=0, abs=2.0**-24)


class Brute:
    """All triples of knots on a grid, with the best values; then finer grids about the best triple."""

    def __init__(self, name, objective):
        self.oracle, self.objective = ORACLES[name], objective
        (self.m0, self.b0), (self.m1, self.b1) = self.oracle.left, self.oracle.right

    def moments(self, points):
        """Integrals up to each point of what is needed, (5, points); the last one to the right of it."""
        edges = np.unique(np.concatenate([np.linspace(-48, 48, 193), points, self.oracle.breaks]))
        half = np.diff(edges)[:, None] / 2
        x, w = edges[:-1, None] + half * (_NODES + 1), half * _WEIGHTS
        if self.objective == "primitive":
            f = self.oracle.value(x)
            rows = [f, x * f, f * f, self.oracle.off_left(x) ** 2, self.oracle.off_right(x) ** 2]
        else:
            f = self.oracle.derivative(x)
            rows = [f, np.ones_like(x), f * f, (f - self.m0) ** 2, (f - self.m1) ** 2]
        sums = np.stack([np.concatenate([[0.0], np.cumsum((row * w).sum(axis=1))]) for row in rows])
        sums[4] = sums[4, -1] - sums[4]
        return sums[:, np.searchsorted(edges, points)]

    def total(self, a, b, c):
        """The objective of triples of equal shape; infinite where they do not increase."""
        points, index = np.unique(np.concatenate([a.ravel(), b.ravel(), c.ravel()]), return_inverse=True)
        at = self.moments(points)[:, index].reshape(5, 3, *a.shape)
        (f1, x1, s1), (f2, x2, s2) = (at[:3, i + 1] - at[:3, i] for i in range(2))
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.objective == "primitive":
                g1, g2 = b - a, c - b
                u, v = self.m0 * a + self.b0, self.m1 * c + self.b1
                up1, down1 = (x1 - a * f1) / g1, (b * f1 - x1) / g1
                up2, down2 = (x2 - b * f2) / g2, (c * f2 - x2) / g2
                square = (g1 + g2) / 3
                linear = up1 + down2 - (g1 * u + g2 * v) / 6
                rest = s1 + s2 - 2 * (u * down1 + v * up2) + (g1 * u * u + g2 * v * v) / 3
                inside = rest - linear**2 / square
            else:
                inside = s1 - f1 * f1 / x1 + s2 - f2 * f2 / x2
        return np.where((a + 1e-9 < b) & (b + 1e-9 < c), at[3, 0] + inside + at[4, 2], np.inf)

    def least(self):
        grids, step = [np.linspace(-8, 8, 81)] * 3, 0.2
        for _ in range(60):
            a, b, c = np.meshgrid(*grids, indexing="ij")
            total = self.total(a, b, c)
            best = np.unravel_index(np.argmin(total), total.shape)
            knots = [float(axis[best]) for axis in (a, b, c)]
            if len(grids[0]) == 81 or all(0 < i < 8 for i in best):  # else the grid follows the valley first
                step /= 2
            grids = [np.linspace(knot - 4 * step, knot + 4 * step, 9) for knot in knots]
            if step < 1e-5:
                break
        return float(total[best]), np.array(knots)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", full([name for name in SEARCHED if name not in ALGEBRAIC], ("gelu", "elu")))
def test_brute_force_over_three_knots_finds_nothing_better(name, objective):
    found = mixed(name, 2, objective)
    least, knots = Brute(name, objective).least()
    assert found.objective <= least * (1 + 1e-7)
    assert found.objective == pytest.approx(least, rel=1e-4)
    # an activation with a centre has optima in pairs
    mirrored = -knots[::-1] if name in ("gelu", "silu", "tanh", "sigmoid", "softplus", "hardswish") else knots
    off = min(np.abs(found.knots - knots).max(), np.abs(found.knots - mirrored).max())
    assert off < (0.02 if objective == "primitive" else 0.05)


# --- refusals

UNSEEN = "its slope changes too far from 0, or too suddenly"
NO_LINE = "a mixture of ReLUs is a straight line"
REFUSED = [
    *((text, bits, NO_LINE) for text in ("x**2", "relu2", "sin(x)", "exp", "log(1 + x**2)") for bits in (1, 2)),
    ("x*sin(x)", 2, NO_LINE),
    ("asinh(x)", 2, NO_LINE),
    ("sqrt(x)", 2, NO_LINE),
    ("tanh", 1, "its asymptotes are parallel"),
    ("x + exp(-x**2)", 1, "its asymptotes are parallel"),
    ("hardshrink", 2, "it jumps at x = -0.5"),
    ("where(x<0, 0.1*x-1, 2*x+3)", 2, "it jumps at x = 0"),
    ("where(x > 1, silu(x), silu(x) + 0.25)", 3, "it jumps at x = 1"),
    ("x + (1 + x**2)**(-0.2)", 2, "too slowly"),
    ("relu(x) + (1 + relu(-x))**(-0.4)", 2, "as x tends to -infinity it nears its asymptote too slowly"),
    ("relu(x) + (1 + relu(x))**(-0.4)", 2, "as x tends to +infinity it nears its asymptote too slowly"),
    # too far from 0, too wide, too narrow, infinite
    *((text, 2, UNSEEN) for text in ("gelu(x - 200)", "softplus(x/100)", "tanh(1000*x)")),
    *((text, bits, UNSEEN) for text in ("exp(-x**2)/x + relu(x)", "relu(x) + 1/(x - 1)") for bits in (1, 2)),
]


@pytest.mark.parametrize(("text", "bits", "reason"), REFUSED)
def test_refused(text, bits, reason):
    message = refused(relumix.fit, Activation.of(text), bits, "a_fit")
    assert reason in message and message.startswith("activation '")


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("power", [0.6, 0.75])
def test_a_slow_tail_whose_square_has_an_integral(power, objective):
    """|x|^-0.6 squared is |x|^-1.2."""
    text = f"x + (1 + x**2)**(-{power / 2!r})"
    found = relumix.mixture(Activation.of(text), 2, objective, relumix.RESTARTS, 0, float)

    def off(x):
        return (1 + x * x) ** (-power / 2)

    def derivative(x):
        return 1 - power * x * (1 + x * x) ** (-power / 2 - 1)

    oracle = Oracle(text, lambda x: x + off(x), derivative, (1.0, 0.0), (1.0, 0.0), off, off)
    exact = (distance if objective == "primitive" else derivative_distance)(oracle, found.knots, found.slopes)
    assert found.objective == pytest.approx(exact, rel=1e-4)


# text, bits, knots, slopes
LINEAR = [
    ("relu", 1, [0.0], [0, 1]),
    ("leaky_relu", 1, [0.0], [0.01, 1]),
    ("abs(x)", 1, [0.0], [-1, 1]),
    ("relu", 2, [0.0], [0, 1]),
    ("leaky_relu", 3, [0.0], [0.01, 1]),
    ("hardtanh", 2, [-1.0, 1.0], [0, 1, 0]),
    ("relu6", 2, [0.0, 6.0], [0, 1, 0]),
    ("hardsigmoid", 2, [-3.0, 3.0], [0, 1 / 6, 0]),
    ("softshrink", 2, [-0.5, 0.5], [1, 0, 1]),
    ("hardtanh", 4, [-1.0, 1.0], [0, 1, 0]),
    ("min(max(x, -1000), 1000)", 2, [-1000.0, 1000.0], [0, 1, 0]),
    ("relu(x) - relu(x - 1) + relu(x - 3)", 2, [0.0, 1.0, 3.0], [0, 1, 0, 1]),
    ("gelu(x) - gelu(x) + relu(x)", 1, [0.0], [0, 1]),
]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("text", "bits", "knots", "slopes"), LINEAR)
def test_broken_lines_are_exact(text, bits, knots, slopes, objective):
    fit = relumix.fit(Activation.of(text), bits, "a_fit", objective=objective)
    assert fit.error["objective"] == 0
    assert fit.error["primitive_max"] <= 1e-6
    x = np.concatenate([np.linspace(-20, 20, 1001), np.linspace(-2000, 2000, 1001)]) + 0.00317
    expected = np.array(slopes, dtype=float)[np.searchsorted(knots, x)]
    assert fit(x) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("text", "jumps", "slopes"), [("hardshrink", [-0.5, 0.5], [1, 0, 1]), ("threshold", [1.0], [0, 1])]
)
def test_a_jump_is_no_matter_to_the_derivative(text, jumps, slopes):
    fit = relumix.fit(Activation.of(text), 2, "a_fit", objective="derivative")
    assert fit.error["objective"] == 0
    x = np.linspace(-9, 9, 1000)
    assert fit(x).tolist() == [float(slopes[i]) for i in np.searchsorted(jumps, x)]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    "text", ["relu(x) + exp(-(x - 9)**2)", "abs(x) + 0.5*exp(-20*(x + 7)**2)", "relu(x) + 0.1*tanh(x - 20)"]
)
def test_what_bends_far_from_its_corners_is_no_broken_line(text, objective):
    found = relumix.mixture(Activation.of(text), 2, objective, relumix.RESTARTS, 0, float)
    assert found.objective > 1e-4


# --- an optimum moves and grows as f does

GELU = 0.009506935047567, 0.0451892048645  # by the tests above
# formula; what stretches x, and what f: ∫ (f − h̃)² grows by both, ∫ (f′ − h̃′)² by height² / width
SIMILAR = [
    pytest.param("gelu(-x)", 1, 1, marks=pytest.mark.full),
    ("-gelu(x)", 1, 1),
    pytest.param("gelu(x) + x/2 + 3", 1, 1, marks=pytest.mark.full),
    pytest.param("gelu(x - 5)", 1, 1, marks=pytest.mark.full),
    ("gelu(x - 30)", 1, 1),
    pytest.param("gelu(x/5)*5", 5, 5, marks=pytest.mark.full),
    ("gelu(x/10)*10", 10, 10),
    pytest.param("gelu(10*x)/10", 0.1, 0.1, marks=pytest.mark.full),
    ("gelu(30*x)/30", 1 / 30, 1 / 30),
    pytest.param("100*gelu(x)", 1, 100, marks=pytest.mark.full),
    ("gelu(x)/1000000", 1, 1e-6),
    ("1000000*gelu(x)", 1, 1e6),
]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("text", "width", "height"), SIMILAR)
def test_the_optimum_of_a_similar_function_is_similar(text, width, height, objective):
    found = relumix.mixture(Activation.of(text), 2, objective, 1, 0, float)
    primitive = objective == "primitive"
    expected = GELU[0] * width * height**2 if primitive else GELU[1] * height**2 / width
    assert found.objective == pytest.approx(expected, rel=1e-6, abs=0)


# --- the record


def test_progress_reaches_the_end_and_never_turns_back():
    shares = []
    relumix.mixture(Activation.of("tanh"), 2, "primitive", 1, 0, shares.append)
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.5
    assert shares[-1] == 1
