"""Few-Bit fits against published figures, quadrature by SciPy and random restarts."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scipy import optimize, special, stats

from fitact.fitter.analysis import Activation
from fitact.fitter.methods import relumix
from fitact.fitter.methods.fewbit import fit
from fitact.fitter.numerics import Weight
from tests.support.curves import CURVES, Curve, step_errors
from tests.support.inverses import chain
from tests.support.refusals import refused, within
from tests.support.rows import full

# Fits on odd domains, and of few levels, warn: tests/fitter/test_catalog.py has what they say.
pytestmark = pytest.mark.filterwarnings("ignore::fitact.FitWarning")

REFERENCE = Path(__file__).parents[1] / "reference"
TABLE1 = json.loads((REFERENCE / "fewbit_table1.json").read_text())
OPTIMUM = json.loads((REFERENCE / "fewbit_optimum.json").read_text())
BITS = (1, 2, 3, 4)
DOMAIN = (-10.0, 10.0)
# beyond the catalog: f′ with two minima, and f′ that jumps between two curved pieces
OWN = {"bump": "x*exp(-x*x)", "bend": "where(x > 1, x + sigmoid(x) - sigmoid(1), x*x)"}
ORACLES = CURVES | {
    "bump": Curve(lambda x: x * np.exp(-x * x), lambda x: (1 - 2 * x * x) * np.exp(-x * x)),
    "bend": Curve(
        lambda x: np.where(x > 1, x + special.expit(x) - special.expit(1), x * x),
        lambda x: np.where(x > 1, 1 + special.expit(x) * special.expit(-x), 2 * x),
        jumps=(1.0,),
    ),
}
EVEN = ("sigmoid", "softsign", "tanh", "tanhshrink")
# f′ of relu is a step function already; other tests have the rest of these
SMOOTH = sorted(ORACLES.keys() - {"relu", "atan", "gelu_tanh", "quick_gelu", "serf", "squareplus"})


def _normal(mean, deviation):
    return stats.norm(mean, deviation).pdf, mean + deviation * np.array([-12.0, -6, -3, -1, 0, 1, 3, 6, 12])


# weight as the fitter reads it → (w, where its quadrature has to break)
WEIGHTS = {
    "uniform": (np.ones_like, ()),
    "normal(0,1)": _normal(0, 1),
    "normal(3,0.01)": _normal(3, 0.01),
    "normal(0.0012,0.0001)": _normal(0.0012, 0.0001),
    "exp(x/4)": (lambda x: np.exp(x / 4), ()),
    "where(x > 0, 1, 0)": (lambda x: np.where(x > 0, 1.0, 0.0), (0.0,)),
    "where(abs(x) > 1, 1, 0)": (lambda x: np.where(np.abs(x) > 1, 1.0, 0.0), (-1.0, 1.0)),
}
QUICK = ("bend", "gelu", "hardswish", "relu", "selu", "tanh")


def cases(rows):
    """Rows that begin with a name; those of other names belong to the full product."""
    return full(map(tuple, rows), lambda row: row[0] in QUICK)


@cache
def fitted(name, bits, domain=DOMAIN, weight="uniform"):
    return fit(Activation.of(OWN.get(name, name)), bits, "a_fit", domain=domain, weight=Weight(weight))


_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(24)
_GRADED = 2.0 ** np.arange(-3, 18)  # pieces in proportion to their distance from 0 suit any domain
_GRADED = np.concatenate([-_GRADED, [0.0], _GRADED])


@cache
def cuts(name, weight, low, high):
    oracle = ORACLES[name]
    points = np.unique(np.concatenate([_GRADED, oracle.jumps, oracle.corners, WEIGHTS[weight][1]]))
    return points[(low < points) & (points < high)]


def best_loss(name, edges, weight="uniform"):
    """∫ (f′ − its weighted mean between the edges)² w, and the means."""
    cells = np.union1d(edges, cuts(name, weight, edges[0], edges[-1]))
    half = np.diff(cells)[:, None] / 2
    at = cells[:-1, None] + half * (_NODES + 1)
    mass = WEIGHTS[weight][0](at) * half * _NODE_WEIGHTS
    derivative = ORACLES[name].derivative(at)
    owner = np.searchsorted(edges, cells[:-1], side="right") - 1
    total, first = (
        np.bincount(owner, row.sum(axis=1), minlength=len(edges) - 1) for row in (mass, mass * derivative)
    )
    means = np.divide(first, total, out=np.zeros_like(total), where=total > 0)
    return float((mass * (derivative - means[owner, None]) ** 2).sum()), means


def stated_errors(name, a_fit):
    """The errors on the whole domain from the fit's borders and levels and the closed forms of f and f′ alone."""
    (low, high), borders, levels = a_fit.domain, np.array(a_fit.borders), np.array(a_fit.levels)
    if a_fit.even:
        borders, levels = np.concatenate([-borders[::-1], borders]), np.concatenate([levels[:0:-1], levels])
    first, last = np.searchsorted(borders, [low, high])  # the knots of a mixture may lie beyond
    edges, weight = np.array([low, *borders[first:last], high]), a_fit.weight.text
    for jump in ORACLES[name].jumps:  # no float32 lies between a jump and the float32 beside it
        edges[np.abs(edges - jump) < 1.5 * np.spacing(np.float32(abs(jump)))] = jump
    inside = cuts(name, weight, low, high)
    return step_errors(ORACLES[name], edges, levels[first : last + 1], inside, WEIGHTS[weight][0])


def polish(name, borders, pinned=(), domain=DOMAIN, weight="uniform", *, rough=False):
    """Return the loss and the free borders that L-BFGS reaches with those in `pinned` held."""
    low, high = domain
    count = len(borders)

    def loss(free):
        borders = np.concatenate([free, pinned])
        order = np.argsort(borders, kind="stable")
        s = borders[order]
        edges = np.unique(np.concatenate([[low], s, [high]]))
        total, means = best_loss(name, edges, weight)
        gradient = np.zeros_like(borders)
        if len(means) == len(s) + 1:
            gap = 2 * ORACLES[name].derivative(s) - means[1:] - means[:-1]
            gradient[order] = gap * np.diff(means) * WEIGHTS[weight][0](s)
        return total, gradient[:count]

    options = {"maxiter": 300} | ({"ftol": 1e-8, "gtol": 1e-7} if rough else {"ftol": 1e-14, "gtol": 1e-11})
    bounds = [(low, high)] * count
    actual = optimize.minimize(loss, borders, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return actual.fun, actual.x


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", cases([name] for name in sorted({*TABLE1["rows"], *OPTIMUM["rows"]})))
def test_no_worse_than_published_and_than_the_optimum_on_8000_cells(name, bits):
    actual = fitted(name, bits)
    if name in TABLE1["rows"]:
        assert actual.error["objective"] <= (TABLE1["rows"][name][bits - 1] or 0.0) + 0.5e-4
    if row := OPTIMUM["rows"].get(name):
        assert actual.even == (row["optimum_even"] is not None)
        assert actual.error["objective"] <= (row["optimum_even"] or row["optimum"])[bits - 1] * (1 + 1e-6)
    if bits == 3 and name in OPTIMUM["continuous_optimum_3bit"]:
        assert actual.error["objective"] == pytest.approx(OPTIMUM["continuous_optimum_3bit"][name], rel=1e-9)


@pytest.mark.parametrize(
    ("name", "bits", "domain", "weight"),
    [
        *cases((name, bits, DOMAIN, "uniform") for name in SMOOTH for bits in (1, 3)),
        *((name, bits, DOMAIN, "uniform") for name, bits in (("hardswish", 2), ("tanh", 4))),
        *(("gelu", 3, DOMAIN, weight) for weight in WEIGHTS),
        ("tanh", 2, DOMAIN, "normal(0,1)"),
        ("tanh", 3, DOMAIN, "where(abs(x) > 1, 1, 0)"),
        ("selu", 3, DOMAIN, "exp(x/4)"),
        ("gelu", 3, (0.0, 5.0), "uniform"),
        ("gelu", 2, (-0.5, 0.25), "uniform"),
        ("gelu", 2, (1.0, 1.001), "uniform"),
        *((name, 3, (-size, size), "uniform") for name, size in (("gelu", 1e3), ("tanh", 1e4), ("selu", 1e5))),
    ],
)
def test_states_the_error_of_its_numbers(name, bits, domain, weight):
    a_fit = fitted(name, bits, domain, weight)
    assert a_fit.error == pytest.approx(stated_errors(name, a_fit), rel=1e-8, abs=1e-17)


@pytest.mark.parametrize("objective", ["primitive", "derivative"])
@pytest.mark.parametrize("name", ["tanh", "elu", "softsign"])
def test_a_mixture_states_the_errors_of_its_numbers(name, objective):
    """Over the domain; its objective, over the reals, is in test_relumix.py."""
    mixture = relumix.fit(Activation.of(name), 2, "a_fit", objective=objective)
    expected = stated_errors(name, mixture) | {"objective": mixture.error["objective"]}
    assert mixture.error == pytest.approx(expected, rel=1e-7)


NARROW = {"normal(3,0.01)": (3, 0.005), "normal(0.0012,0.0001)": (0.0012, 5e-5)}  # where they are, and how wide
RESTARTED = [
    *(("gelu", 3, DOMAIN, "normal(0,1)"), ("gelu", 2, (0.0, 5.0), "uniform"), ("mish", 2, DOMAIN, "exp(x/4)")),
    *(("softplus", 2, DOMAIN, "uniform"), ("selu", 2, DOMAIN, "uniform"), ("hardswish", 2, DOMAIN, "uniform")),
    *(("bump", 2, DOMAIN, "uniform"), ("bend", 2, (-2.0, 3.0), "uniform"), ("tanh", 3, DOMAIN, "uniform")),
    *(("gelu", 3, DOMAIN, weight) for weight in NARROW),
    *(("silu", 2, (-size, 1.1 * size), "uniform") for size in (1e4, 1e3, 1e5)),
]


@pytest.mark.parametrize(("name", "bits", "domain", "weight"), full(RESTARTED, RESTARTED[:-2:2]))
def test_no_random_restart_is_better(name, bits, domain, weight):
    a_fit = fitted(name, bits, domain, weight)
    low, high = domain = (0.0 if a_fit.even else domain[0], domain[1])
    centre, unit = NARROW.get(weight, (0, 1))
    rng = np.random.default_rng(bits)
    results = []
    for i in range(60):
        pinned = [jump for k, jump in enumerate(ORACLES[name].jumps) if i >> k & 1]
        reach = unit * (10.0, 4.0, 1.5)[i % 3]
        # a window, either way round
        left, right = rng.uniform(max(low, centre - reach), min(high, centre + reach), 2)
        start = left + (right - left) * rng.random(2**bits - 1 - len(pinned))
        results.append((*polish(name, start, pinned, domain, weight, rough=True), pinned))
    results.sort(key=lambda each: each[0])
    least = min(polish(name, free, pinned, domain, weight)[0] for _, free, pinned in results[:4])
    least *= 1 + a_fit.even
    stated = a_fit.error["objective"]
    slack = 1e-5 if weight in NARROW else 1e-9 if high - low < 100 else 1e-6  # borders are float32 numbers
    assert stated <= least * (1 + slack)
    assert stated == pytest.approx(least, rel=max(slack, 1e-6))  # the restarts do find the optimum


@pytest.mark.parametrize(
    ("name", "domain", "weight", "even"),
    [
        *((name, DOMAIN, "uniform", True) for name in (*EVEN, "bump")),
        *(("tanh", DOMAIN, weight, True) for weight in WEIGHTS if weight != "normal(0.0012,0.0001)"),
        *(("tanh", domain, "uniform", False) for domain in ((-10.0, 10.5), (0.0, 10.0))),
        *((name, DOMAIN, "uniform", False) for name in ("gelu", "relu", "softplus", "hardswish")),
    ],
)
def test_even_needs_a_symmetric_derivative_and_domain(name, domain, weight, even):
    a_fit = fitted(name, 2, domain, weight)
    assert (a_fit.even, len(a_fit.borders)) == (even, 3)
    at = np.linspace(-12, 12, 1001)
    assert np.array_equal(a_fit(at), a_fit(-at)) == even
    assert min(a_fit.borders) >= 0 or not even
    if weight == "uniform" and name in EVEN and even:
        assert a_fit.error["objective"] < OPTIMUM["rows"][name]["optimum"][1]


@pytest.mark.parametrize("bits", BITS)
def test_a_weight_that_is_not_symmetric_counts_on_both_sides(bits):
    """An error of a function of |x| counts w(x) + w(-x)."""
    each, folded = (fitted("tanh", bits, DOMAIN, weight) for weight in ("exp(x/4)", "(exp(x/4) + exp(-x/4))/2"))
    assert each.even
    np.testing.assert_allclose(each.borders, folded.borders, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(each.levels, folded.levels, rtol=1e-6, atol=1e-6)
    assert each.error["objective"] == pytest.approx(folded.error["objective"], rel=1e-8)


def test_a_step_function_of_x_is_taken_where_it_is_better():
    """The derivative is near 1 where there is weight below 0, and near -1 where there is above."""
    left = "where(abs(x + 2*pi) < 0.5, 1, where(abs(x + 0.3) < 0.3, 1, 0))"
    a_fit = fitted("sin(x)", 1, (-8.0, 8.0), f"{left} + where(abs(x - pi) < 0.5, 1, 0)")
    assert not a_fit.even
    assert -0.01 <= a_fit.borders[0] <= np.pi - 0.49
    cosine = [np.sin(0.5) * 2, np.sin(0.6)]  # integrals over the parts of mass 1, and 0.6
    squares = [0.5 + np.sin(1.0) / 2, 0.3 + np.sin(1.2) / 4]
    loss = squares[0] - cosine[0] ** 2 + sum(squares) - sum(cosine) ** 2 / 1.6
    assert a_fit.error["objective"] == pytest.approx(loss, rel=1e-6)


# formula, bits, the levels of f′ from left to right, its breakpoints and the side each belongs to; min and max
# with a number are clamps, whose gradient PyTorch passes at the bound too
THREE = "where(x > 0, x, where(x > -2, 0.1*x, -0.2))"
STEPS = [
    ("relu", 1, [0, 1], {0: "lower"}),
    ("where(x<0, 0.1*x-1, 2*x+3)", 1, [0.1, 2], {0: "upper"}),
    ("where(x<=0, 0.1*x-1, 2*x+3)", 1, [0.1, 2], {0: "lower"}),
    ("max(min(x,1),-1)", 2, [0, 1, 0], {-1: "upper", 1: "lower"}),
    ("min(relu(x), 6)", 2, [0, 1, 0], {0: "lower", 6: "lower"}),
    ("where(abs(x) > 0.5, x, 0)", 1, [1, 0, 1], {-0.5: "upper", 0.5: "lower"}),
    ("abs(x - 1)", 1, [-1, 1], {1: "between"}),
    *((THREE, bits, [0, 0.1, 1], {-2: "lower", 0: "lower"}) for bits in (2, 3)),
    *((f"where(x > {c}, x, 0)", 1, [0, 1], {c: "between"}) for c in (0.1, 0.2, -1.3)),
    ("max(min(x, 0.1), -0.3)", 2, [0, 1, 0], {-0.3: "between", 0.1: "between"}),
]


@pytest.mark.parametrize(("formula", "bits", "levels", "breaks"), STEPS)
def test_a_step_derivative_is_exact_for_every_float32(formula, bits, levels, breaks):
    with within(60):
        a_fit = fit(Activation.of(formula), bits, "a_fit")
    edges, singles = np.array([-10.0, *breaks, 10.0]), np.float32(levels)
    np.testing.assert_array_equal(a_fit((edges[1:] + edges[:-1]) / 2), singles)
    for i, (point, side) in enumerate(breaks.items()):
        around = np.unique(chain(point, 2, np.float32))
        expected = singles[[i, i, i + (side == "upper"), i + 1, i + 1]]
        known = [0, 4] if side == "between" else slice(None)
        np.testing.assert_array_equal(a_fit(around[known]), expected[known])
    # between a breakpoint and the float32 beside it there is no input, so no error either
    rounding = max(abs(level - float(np.float32(level))) for level in levels)
    assert a_fit.error["max"] <= rounding * (1 + 1e-9)
    assert a_fit.error["objective"] <= 20 * rounding**2 * (1 + 1e-9)
    assert a_fit.error["primitive_max"] <= 20 * rounding * (1 + 1e-9)


REFUSED = [
    ("gelu", DOMAIN, "where(x > 20, 1, 0)", "weight 'where(x > 20, 1, 0)'"),
    *(("gelu", domain, "uniform", "domain") for domain in ((1.0, 1.0), (2.0, 1.0), (0.0, np.inf), (np.nan, 1.0))),
    ("gelu", (1.0, 1.0000001), "uniform", "domain"),  # narrower than eight float32
    ("gelu", (-1e200, 1e200), "uniform", "domain"),  # beyond float32
    *((text, DOMAIN, "uniform", f"'{text}'") for text in ("log(x)", "1/x", "exp(100*x)", "1e30*x**2")),
    # a pole that is not on an even grid
    *((text, (-1.0, 2.7), "uniform", f"'{text}'") for text in ("1/x", "log(abs(x))", "sqrt(abs(x))")),
    ("abs(x - pi)**0.999", DOMAIN, "uniform", "infinite at x = 3.14159"),  # and its integral is finite
    ("x + abs(x - 1/3)**0.99", DOMAIN, "uniform", "infinite at x = 0.333333"),
    # narrower than what a grid on the domain can see, or than float64 itself
    ("tanh", (-1e30, 1e30), "uniform", "domain: expected numbers of at most 1e+12"),
    # bumps narrower than any cell, which end where they began
    ("exp(-(1e12*(x - 0.1234567))**2)", DOMAIN, "uniform", "is too steep, near x = 0.123457"),
    ("tanh(1e16*(x - 0.1234567))", DOMAIN, "uniform", "between x = 0.12"),
]


@pytest.mark.parametrize(("formula", "domain", "weight", "culprit"), REFUSED)
def test_refuses_in_one_line(formula, domain, weight, culprit):
    with within(60):
        assert culprit in refused(fit, Activation.of(formula), 2, "a_fit", domain=domain, weight=Weight(weight))


@pytest.mark.parametrize("at", [7.123, -3.3])
def test_a_narrow_feature_is_not_missed(at: float) -> None:
    """f′ = 1 but for a wave 1e-4 wide, which costs 1.2533e-4 = √(π/8) / 1e4 · 2 if it is not seen."""
    narrow = Activation.of(f"x + exp(-((x - ({at}))*1e4)**2)/1e4")
    made = fit(narrow, 3, "a_fit")
    assert not made.even
    assert made.error["objective"] < 6e-6
    x = np.linspace(at - 5e-4, at + 5e-4, 1_000_001)
    error = narrow.derivative(x) - made(x)
    assert made.error["objective"] == pytest.approx(np.mean(error**2) * 1e-3, rel=1e-4)
    assert made.error["max"] == pytest.approx(np.abs(error).max(), rel=1e-3)
