"""Coded inputs against a plain programme's figures, brute force, quadrature by SciPy, samples and scans."""

from __future__ import annotations

import json
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import integrate, special, stats

from fitact.errors import FitWarning
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.methods import coded
from fitact.fitter.methods.table import again
from fitact.fitter.numerics.coding import Objective
from fitact.fitter.numerics.partition import dp_borders
from fitact.fitter.numerics.weight import Weight
from fitact.fitter.records.coded import DEVIATIONS, CodedFit
from fitact.fitter.records.reading import from_json
from tests.support.curves import CURVES, Curve
from tests.support.refusals import refused
from tests.support.shared import shared

# Of weights that are narrow fits warn, and so they should; test_warns has what they say.
pytestmark = pytest.mark.filterwarnings("ignore::fitact.errors.FitWarning")

REFERENCE = json.loads((Path(__file__).parents[1] / "reference" / "coded.json").read_text())["rows"]
DOMAIN = (-64.0, 64.0)


# --- the oracle: f, f′ and w in NumPy and SciPy


# beyond the catalog: f jumps and f′ does, a square's upper side, sharp features
OWN = {
    "jump": "where(x >= 0.5, 1 + x, x*x)",
    "bump": "x*exp(-x*x)",
    "growing": "exp(x)",
    "hinge": "where(x >= 1, 3*x - 2, x)",
}
ORACLES = CURVES | {
    "identity": Curve(lambda x: x, np.ones_like),
    "quick_gelu": Curve(
        lambda x: x * special.expit(1.702 * x),
        lambda x: special.expit(1.702 * x) * (1 + 1.702 * x * special.expit(-1.702 * x)),
    ),
    "relu2": Curve(lambda x: np.maximum(x, 0) ** 2, lambda x: 2 * np.maximum(x, 0), corners=(0.0,)),
    "jump": Curve(
        lambda x: np.where(x >= 0.5, 1 + x, x * x), lambda x: np.where(x >= 0.5, 1.0, 2 * x), jumps=(0.5,)
    ),
    "bump": Curve(lambda x: x * np.exp(-x * x), lambda x: (1 - 2 * x * x) * np.exp(-x * x)),
    "growing": Curve(np.exp, np.exp),
    "hinge": Curve(lambda x: np.where(x >= 1, 3 * x - 2, x), lambda x: np.where(x >= 1, 3.0, 1.0), jumps=(1.0,)),
}
WEIGHTS = {
    "student(3)": stats.t(3).pdf,
    "student(3, -1.3, 1.2)": stats.t(3, -1.3, 1.2).pdf,
    "student(2,0.3,0.01)": stats.t(2, 0.3, 0.01).pdf,
    "normal": stats.norm.pdf,
    "uniform": np.ones_like,
    "where(x > 0, 1, 0)": lambda x: np.where(x > 0, 1.0, 0.0),
}
# activation, bits, domain, weight
CASES = [
    ("silu", 3, DOMAIN, "student(3)"),
    ("gelu", 5, DOMAIN, "student(3, -1.3, 1.2)"),
    ("selu", 4, DOMAIN, "student(3)"),
    ("relu2", 4, DOMAIN, "student(3)"),
    ("jump", 4, (-3.0, 5.0), "normal"),
    ("identity", 4, DOMAIN, "student(2,0.3,0.01)"),
    ("tanh", 3, DOMAIN, "student(3)"),
    ("silu", 4, DOMAIN, "where(x > 0, 1, 0)"),
    ("growing", 4, (-8.0, 8.0), "uniform"),
    ("hinge", 3, (0.0, 2.0), "uniform"),
    ("bump", 5, DOMAIN, "student(3)"),
]
QUICK = ("silu", "selu", "jump", "hinge")
EACH = pytest.mark.parametrize(
    ("name", "bits", "domain", "weight"),
    [pytest.param(*case, marks=[] if case[0] in QUICK else pytest.mark.full) for case in CASES],
)


def text(name: str) -> str:
    return OWN.get(name, name)


@shared
def made(name: str, bits: int, domain: tuple[float, float], weight: str) -> str:
    return coded.fit(Activation.of(text(name)), bits, "a_fit", domain=domain, weight=Weight(weight)).to_json()


@cache
def fitted(name: str, bits: int, domain: tuple[float, float] = DOMAIN, weight: str = "student(3)") -> CodedFit:
    found = from_json(made(name, bits, domain, weight))
    assert isinstance(found, CodedFit)
    return found


def edges_of(fit: CodedFit, name: str) -> np.ndarray:
    """The borders inside the domain with its ends; those beside a jump, where no float32 lies between, on it."""
    edges = np.array([fit.domain[0], *fit.borders, fit.domain[1]])
    for jump in ORACLES[name].jumps:
        edges[np.abs(edges - jump) < 1.5 * np.spacing(np.float32(abs(jump)))] = jump
    return edges


_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(24)
_GRADED = np.concatenate([[0.0], *(side * 2.0 ** np.arange(-12.0, 7.0, 0.5) for side in (-1, 1))])


def cells(name: str, edges: np.ndarray, *more: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quadrature over the intervals between edges, cut further: nodes, their widths, and the interval of each."""
    oracle = ORACLES[name]
    around = np.concatenate([centre + _GRADED / 16 for centre in more]) if more else np.empty(0)
    cuts = np.unique(np.concatenate([edges, _GRADED, around, oracle.jumps, oracle.corners]))
    cuts = cuts[(edges[0] <= cuts) & (cuts <= edges[-1])]
    half = np.diff(cuts)[:, None] / 2
    at = cuts[:-1, None] + half * (_NODES + 1)
    owner = np.searchsorted(edges, cuts[:-1], side="right") - 1
    return at, half * _NODE_WEIGHTS, np.broadcast_to(owner[:, None], at.shape)


@cache
def squares(name: str, domain: tuple[float, float], weight: str) -> tuple[float, float, float]:
    """∫w, E f² and E f′²."""
    at, widths, _ = cells(name, np.array(domain), 0.3)
    mass = WEIGHTS[weight](at) * widths
    total = mass.sum()
    oracle = ORACLES[name]
    return total, (mass * oracle.value(at) ** 2).sum() / total, (mass * oracle.derivative(at) ** 2).sum() / total


def loss(
    name: str, edges: np.ndarray, domain: tuple[float, float], weight: str, tables: Any = None
) -> tuple[float, np.ndarray]:
    """J of tables between the edges, of the best ones by default, with the parts of each interval; the tables."""
    oracle = ORACLES[name]
    total, of_value, of_derivative = squares(name, domain, weight)
    at, widths, owner = cells(name, edges, 0.3)
    mass = WEIGHTS[weight](at) * widths / total
    value, derivative = oracle.value(at), oracle.derivative(at)
    parts = ((value, mass / (of_value + value**2)), (derivative, mass / (2 * of_derivative)))
    count = len(edges) - 1
    found, cost = np.zeros((2, count)), 0.0
    for row, (function, share) in enumerate(parts):
        if tables is None:
            whole = np.bincount(owner.ravel(), share.ravel(), count)
            first = np.bincount(owner.ravel(), (share * function).ravel(), count)
            found[row] = np.divide(first, whole, out=np.zeros(count), where=whole > 0)
        else:
            found[row] = tables[row]
        cost += float((share * (function - found[row][owner]) ** 2).sum())
    return cost, found


# --- the figures of a plain programme


ROWS = [
    pytest.param(
        name, int(bits), marks=[] if (name, bits) in (("silu", "3"), ("relu2", "4")) else pytest.mark.full
    )
    for name, row in REFERENCE.items()
    for bits in row
]


@pytest.mark.parametrize(("name", "bits"), ROWS)
def test_no_worse_than_a_plain_programme(name: str, bits: int) -> None:
    """Summed over midpoints, the figure leaves out what varies within the 3000 cells: some (K/3000)² of it."""
    row = REFERENCE[name][str(bits)]
    fit = fitted(name, bits)
    assert fit.error["objective"] <= row["integral"] * (1 + 1e-6)
    assert fit.error["objective"] <= row["midpoints"] * (1 + 5 * (2**bits / 3000) ** 2)
    for deviation, stated in row["rms"].items():
        found = [fit.error[f"{what}_{float(deviation):g}"] for what in ("value", "derivative")]
        # the samples are 400 000, and another border is as good
        assert found == pytest.approx(stated, rel=0.1, abs=1e-4)


def test_eight_bits_are_nearer_than_float8() -> None:
    fit = fitted("silu", 8)
    assert fit.error["value_1"] < 0.032 / 4
    assert fit.error["derivative_1"] < 0.009 / 2
    assert fit.reach > 16


# --- the programme


@pytest.mark.parametrize("levels", [2, *(pytest.param(k, marks=pytest.mark.full) for k in (3, 4)), 5])
@pytest.mark.parametrize(("name", "domain", "weight"), sorted({(name, *rest) for name, _, *rest in CASES}))
def test_the_programme_equals_brute_force(
    name: str, domain: tuple[float, float], weight: str, levels: int
) -> None:
    """On a grid of few cells all choices of borders are tried."""
    objective = Objective(Activation.of(text(name)), Weight(weight), domain, 12)
    grid = objective.moments.grid
    if len(grid) > 20:  # marks of a weight and extrema count too: leave some out
        keep = np.unique(np.concatenate([[0, len(grid) - 1], np.linspace(0, len(grid) - 1, 16).astype(int)]))
        objective.moments.grid, objective.moments.sums = grid[keep], objective.moments.sums[..., keep]
        grid = grid[keep]
    n = len(grid) - 1
    cost = {(j, i): loss(name, grid[[j, i]], domain, weight)[0] for i in range(n + 1) for j in range(i)}

    def total(inner: Any) -> float:
        return sum(cost[pair] for pair in pairwise([0, *inner, n]))

    borders = dp_borders(objective.moments, levels)
    chosen = np.searchsorted(grid, borders)
    np.testing.assert_array_equal(grid[chosen], borders)
    assert total(chosen) == pytest.approx(min(map(total, combinations(range(1, n), levels - 1))), rel=1e-9)


@pytest.mark.parametrize("levels", [8, 64, 256])
@pytest.mark.parametrize("name", ["silu", pytest.param("hardswish", marks=pytest.mark.full), "relu2"])
def test_leaving_out_costly_intervals_loses_nothing(name: str, levels: int) -> None:
    """The plain recursion over all intervals, one number of levels at a time."""
    objective = Objective(Activation.of(name), Weight("student(3)"), DOMAIN, 600)
    sums = objective.moments.sums
    n = sums.shape[-1] - 1
    mass, first, second = sums[..., None, :] - sums[..., :, None]  # from row to column
    with np.errstate(divide="ignore", invalid="ignore"):
        cost = np.where(mass > 0, second - first**2 / mass, 0.0).sum(axis=0)
    cost[np.tril_indices(n + 1)] = np.inf
    best = cost[0]
    for _ in range(levels - 1):
        best = (best[:, None] + cost).min(axis=0)
    borders = dp_borders(objective.moments, levels)
    at = np.concatenate([[0], np.searchsorted(objective.moments.grid, borders), [n]])
    assert cost[at[:-1], at[1:]].sum() == pytest.approx(best[n], rel=1e-9)


# --- the refinement


@EACH
def test_the_stated_numbers_are_the_optimum_for_their_borders(
    name: str, bits: int, domain: tuple[float, float], weight: str
) -> None:
    fit = fitted(name, bits, domain, weight)
    best, tables = loss(name, edges_of(fit, name), domain, weight)
    assert fit.error["objective"] == pytest.approx(best, rel=1e-8)
    mass = np.array(
        [WEIGHTS[weight](np.linspace(*ends, 33)[1:-1]).any() for ends in pairwise(edges_of(fit, name))]
    )
    for stated, found in zip((fit.values, fit.derivatives), tables, strict=True):
        np.testing.assert_allclose(np.array(stated)[mass], found[mass], rtol=1e-6, atol=1e-7 * np.ptp(found))


@EACH
def test_no_border_can_be_moved_to_gain(name: str, bits: int, domain: tuple[float, float], weight: str) -> None:
    """Each border by itself, little and much, and all of them at random."""
    fit = fitted(name, bits, domain, weight)
    edges = edges_of(fit, name)
    least = loss(name, edges, domain, weight)[0]
    rng = np.random.default_rng(0)
    widths = np.diff(edges)
    for i in range(1, len(edges) - 1):
        for share in (1e-3, 0.1, 0.5):
            for moved in (edges[i] - share * widths[i - 1], edges[i] + share * widths[i]):
                other = edges.copy()
                other[i] = moved
                assert loss(name, other, domain, weight)[0] >= least * (1 - 1e-9)
    for size in (1e-3, 1e-2, 0.1, 0.4):
        other = edges.copy()
        other[1:-1] += size * rng.uniform(-1, 1, len(edges) - 2) * np.minimum(widths[:-1], widths[1:])
        assert loss(name, other, domain, weight)[0] >= least * (1 - 1e-9)


@pytest.mark.parametrize("levels", [8, 32, 100])
@pytest.mark.parametrize("cells", [120, pytest.param(400, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["silu", "selu", "relu2", "jump", "hinge"])
def test_refinement_is_never_worse(name: str, cells: int, levels: int) -> None:
    objective = Objective(Activation.of(text(name)), Weight("student(3)"), DOMAIN, cells)
    before = dp_borders(objective.moments, levels)
    after = coded.refine(objective, before)
    worse, better = (
        loss(name, np.array([-64.0, *borders, 64.0]), DOMAIN, "student(3)")[0] for borders in (before, after)
    )
    assert better <= worse * (1 + 1e-11)


def test_the_optimum_of_the_identity_is_symmetric() -> None:
    fit = fitted("identity", 4, DOMAIN, "student(3)")
    borders, values = np.array(fit.borders), np.array(fit.values)
    np.testing.assert_array_equal(borders, -borders[::-1])
    np.testing.assert_array_equal(values, -values[::-1])
    assert borders[7] == 0
    assert set(fit.derivatives) == {1.0}
    assert fit.error["derivative_1"] == 0


# --- errors of the rounded numbers


@EACH
def test_states_the_errors_of_its_numbers(name: str, bits: int, domain: tuple[float, float], weight: str) -> None:
    fit = fitted(name, bits, domain, weight)
    edges, tables = edges_of(fit, name), (np.array(fit.values), np.array(fit.derivatives))
    assert fit.error["objective"] == pytest.approx(loss(name, edges, domain, weight, tables)[0], rel=1e-9)
    oracle = ORACLES[name]
    at, widths, owner = cells(name, edges)
    for deviation in DEVIATIONS:
        density = np.exp(-((at / deviation) ** 2) / 2) * widths
        for what, function, table in zip(
            ("value", "derivative"), (oracle.value, oracle.derivative), tables, strict=True
        ):
            error = (density * (function(at) - table[owner]) ** 2).sum() / (density * function(at) ** 2).sum()
            assert fit.error[f"{what}_{deviation:g}"] == pytest.approx(np.sqrt(error), rel=1e-8, abs=1e-15)


def test_states_the_error_that_scipy_integrates() -> None:
    """Adaptive quadrature, cell by cell."""
    fit, (total, square, slope) = fitted("silu", 3), squares("silu", DOMAIN, "student(3)")
    value, derivative = (lambda x: x * special.expit(x)), CURVES["silu"].derivative
    found = error = norm = 0.0
    for i, (left, right) in enumerate(pairwise([-64.0, *fit.borders, 64.0])):

        def cost(x: float, i: int = i) -> float:
            off = (value(x) - fit.values[i]) ** 2 / (square + value(x) ** 2)
            return stats.t.pdf(x, 3) / total * (off + (derivative(x) - fit.derivatives[i]) ** 2 / (2 * slope))

        def missed(x: float, i: int = i) -> float:
            return stats.norm.pdf(x, 0, 2) * (value(x) - fit.values[i]) ** 2

        options: dict[str, Any] = {"limit": 500, "epsabs": 1e-16, "epsrel": 1e-11}
        found += integrate.quad(cost, left, right, **options)[0]
        error += integrate.quad(missed, max(left, -30), min(right, 30), **options)[0]
        norm += integrate.quad(lambda x: stats.norm.pdf(x, 0, 2) * value(x) ** 2, max(left, -30), min(right, 30))[
            0
        ]
    assert fit.error["objective"] == pytest.approx(found, rel=1e-9)
    assert fit.error["value_2"] == pytest.approx(np.sqrt(error / norm), rel=1e-8)


@EACH
def test_reach_by_a_scan(name: str, bits: int, domain: tuple[float, float], weight: str) -> None:
    fit = fitted(name, bits, domain, weight)
    _, square, _ = squares(name, domain, weight)
    value = ORACLES[name].value

    def bad(size: np.ndarray) -> np.ndarray:
        x = np.stack([size, -size])
        with np.errstate(over="ignore", invalid="ignore"):
            f = value(x)
            off = np.abs(f - np.asarray(fit.values)[fit.code(x)])
            return ~(off <= 0.05 * np.maximum(np.abs(f), np.sqrt(square))).all(axis=0)

    if fit.reach == 0:
        assert bad(np.zeros(1))[0]
        return
    assert not bad(np.linspace(0, fit.reach * (1 - 1e-9), 400_001)).any()
    if fit.reach < 3.4e38:
        assert bad(fit.reach * (1 + np.geomspace(1e-10, 1e-7, 50))).any()
    else:
        assert fit.reach == np.finfo(np.float32).max
        assert not bad(np.geomspace(1e-3, 3e38, 100_000)).any()


def test_codes_count_the_borders_below() -> None:
    fit = fitted("silu", 3)
    x = np.concatenate([fit.borders, np.nextafter(fit.borders, 99), [np.nan, -np.inf, np.inf]])
    assert fit.code(x).tolist() == [*range(7), *range(1, 8), 0, 0, 7]


@pytest.mark.parametrize(("name", "domain"), [("jump", (-3.0, 5.0)), ("hinge", (0.0, 2.0))])
def test_a_border_on_a_jump_leaves_the_upper_side_its_value(name: str, domain: tuple[float, float]) -> None:
    """`>=` gives the jump itself to the upper side, so the border is the float32 below it."""
    fit = fitted(name, 4, domain, "normal") if name == "jump" else fitted(name, 3, domain, "uniform")
    jump = ORACLES[name].jumps[0]
    assert np.nextafter(np.float32(jump), np.float32(-9)) in fit.borders
    code = int(fit.code(np.array(jump)))
    assert fit.derivatives[code] == pytest.approx(ORACLES[name].derivative(np.array(jump)), rel=0.2)


# --- records, options, refusals


@EACH
def test_read_and_made_again(name: str, bits: int, domain: tuple[float, float], weight: str) -> None:
    fit = fitted(name, bits, domain, weight)
    assert from_json(fit.to_json()) == fit
    assert fit.weight == Weight(weight)
    assert fit.domain == domain
    if bits == 3:
        assert again(fit).to_json() == fit.to_json()


@pytest.mark.full
@pytest.mark.parametrize("name", ["mish", "gelu_tanh", "tanh", "softplus", "elu", "hardswish"])
def test_error_falls_with_bits(name: str) -> None:
    errors = [fitted(name, bits).error["objective"] for bits in CodedFit.BITS]
    assert all(3 * less < more for more, less in pairwise(errors))


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("silu", {"bits": 2}, "bits: expected 3, 4, 5, 6, 7 or 8, got 2"),
        ("silu", {"bits": 9}, "got 9"),
        ("silu", {"domain": (-65505.0, 64.0)}, "of at most 65504 in size"),
        ("silu", {"domain": (1.0, 1.0)}, "expected two numbers A < B"),
        ("silu", {"domain": (1.0, 1.0001)}, "too narrow"),
        ("silu", {"domain": (1.0, 1.001), "bits": 8, "cells": 300}, None),
        ("silu", {"weight": Weight("-1")}, "weight '-1' is -1"),
        ("silu", {"weight": Weight("where(x > 70, 1, 0)")}, "zero all over the domain -64 64"),
        ("silu", {"bits": 6, "cells": 4, "domain": (2.0, 5.0), "weight": Weight()}, "are too few for 64 levels"),
        ("sign(x)", {}, "the root mean square of its derivative over the domain -64 64 is 0"),
        ("relu", {"domain": (-9.0, -1.0)}, "its root mean square over the domain -9 -1 is 0"),
        ("1e-32*x", {}, "expected at least 1e-30"),
        ("exp(x*x)", {}, "is inf at x = -64: choose a domain on which it is at most 1e+30 in size"),
        ("x**20", {}, "choose a domain on which"),
        ("log(x)", {}, "is nan at x = -64"),
        ("sqrt(abs(x))", {}, "is infinite at x = 0"),
        ("where(x > 30, exp(x - 60), 0)", {}, "is 0 for x normal with deviation 0.5"),
    ],
)
def test_refused(name: str, options: dict[str, Any], reason: str | None) -> None:
    options = {"bits": 3, "cells": 400, **options}
    bits = options.pop("bits")
    if reason is None:
        assert len(coded.fit(Activation.of(name), bits, "a", **options).borders) == 255
    else:
        assert reason in refused(coded.fit, Activation.of(name), bits, "a", **options)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("exp(x)", {}, "for x normal with deviation 1 the table of 'exp(x)' is off by"),
        (
            "silu",
            {"weight": Weight("normal(0, 1e-4)")},
            "for x normal with deviation 1 the table of silu is off by",
        ),
        ("(x**3 + 1)**2 - x**6 - 2*x**3 + x", {"domain": (-4.0, 4.0)}, "in float32"),
    ],
)
def test_warns(name: str, options: dict[str, Any], reason: str) -> None:
    with pytest.warns(FitWarning) as caught:
        coded.fit(Activation.of(name), 3, "a", cells=400, **options)
    assert len(caught) == 1
    assert reason in str(caught[0].message)
    assert "\n" not in str(caught[0].message)
