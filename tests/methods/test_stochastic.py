"""Nodes of codes drawn at random: against brute force, plain sums over samples, and least squares by NumPy."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
import pytest
from scipy import special, stats

from fitact.fitter.analysis.activation import Activation
from fitact.fitter.methods import coded
from fitact.fitter.methods.table import again
from fitact.fitter.numerics.coding import Objective
from fitact.fitter.numerics.stochastic import Programme
from fitact.fitter.numerics.weight import Weight
from fitact.fitter.records.coded import DEVIATIONS
from fitact.fitter.records.reading import from_json
from fitact.fitter.records.stochastic import StochasticFit
from tests.support.refusals import refused
from tests.support.shared import shared

pytestmark = pytest.mark.filterwarnings("ignore::fitact.errors.FitWarning")

DOMAIN = (-64.0, 64.0)


def silu(x: np.ndarray) -> np.ndarray:
    return x * special.expit(x)


def slope(x: np.ndarray) -> np.ndarray:
    return special.expit(x) * (1 + x * special.expit(-x))


@shared
def made(bits: int) -> str:
    return coded.fit_stochastic(Activation.of("silu"), bits, "a_fit").to_json()


def fitted(bits: int) -> StochasticFit:
    found = from_json(made(bits))
    assert isinstance(found, StochasticFit)
    return found


@cache
def samples() -> tuple[np.ndarray, np.ndarray]:
    """Midpoints from −64 to 64, denser near 0, and their widths."""
    edges = np.sinh(np.linspace(-np.arcsinh(256), np.arcsinh(256), 400_001)) / 4
    return (edges[:-1] + edges[1:]) / 2, np.diff(edges)


def chances(x: np.ndarray, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lower node of each x, and how likely the upper one is, by the formula."""
    cell = np.clip(np.searchsorted(nodes, x, side="right") - 1, 0, len(nodes) - 2)
    low, high = silu(nodes[cell]), silu(nodes[cell + 1])
    return cell, np.clip((silu(x) - low) / (high - low), 0, 1)


def loss(nodes: np.ndarray, slopes: np.ndarray, weight: np.ndarray) -> float:
    """J: the mean over the samples, and over both codes, of the squares."""
    x, widths = samples()
    mass = weight * widths / (weight * widths).sum()
    f, g = silu(x), slope(x)
    of_value, of_slope = (mass * f**2).sum(), (mass * g**2).sum()
    cell, share = chances(x, nodes)
    total = 0.0
    for code, chance in ((cell, 1 - share), (cell + 1, share)):
        off = (f - silu(nodes)[code]) ** 2 / (of_value + f**2) + (g - slopes[code]) ** 2 / (2 * of_slope)
        total += float((mass * chance * off).sum())
    return total


def test_the_programme_equals_brute_force() -> None:
    """Among few candidates all choices of nodes are tried."""
    weight = stats.t(3).pdf(samples()[0])
    programme = Programme(Objective(Activation.of("silu"), Weight("student(3)"), DOMAIN, 400))
    turn = programme.fixed[1]
    keep = np.unique([0, *np.linspace(1, len(programme.at) - 2, 9).astype(int), turn, len(programme.at) - 1])
    for rows in ("at", "value", "slope"):
        setattr(programme, rows, getattr(programme, rows)[keep])
    programme.sums = type(programme.sums)(*(rows[:, keep] for rows in programme.sums))
    programme.fixed = np.searchsorted(keep, programme.fixed)
    for count in (3, 4, 6, 8):
        found = {
            chosen: loss(programme.at[list(chosen)], slope(programme.at[list(chosen)]), weight)
            for inner in combinations(range(1, len(keep) - 1), count - 2)
            if programme.fixed[1] in (chosen := (0, *inner, len(keep) - 1))
        }
        best = tuple(programme.best(count).tolist())
        assert found[best] == pytest.approx(min(found.values()), rel=1e-5)
        assert programme.total(np.array(best)) == pytest.approx(found[best], rel=1e-4)


@pytest.mark.parametrize("bits", [4, pytest.param(6, marks=pytest.mark.full)])
def test_no_node_can_be_moved_to_gain(bits: int) -> None:
    """To a neighbouring number of bfloat16, with D_i = f′(x_i); but for the one where SiLU turns, and the ends."""
    weight = stats.t(3).pdf(samples()[0])
    nodes = np.array(fitted(bits).nodes)
    least = loss(nodes, slope(nodes), weight)
    for i in range(1, len(nodes) - 1):
        if abs(nodes[i] + 1.2785) < 0.01:
            continue
        for step in (-1, 1):
            other = nodes.copy()
            number = np.float32(other[i]).view(np.int32)
            other[i] = np.int32(number + step * 65536).view(np.float32)
            assert loss(other, slope(other), weight) >= least * (1 - 1e-5)


def test_nodes_and_values() -> None:
    fit = fitted(6)
    nodes, values = np.array(fit.nodes), np.array(fit.values)
    assert (nodes[0], nodes[-1]) == DOMAIN
    assert np.abs(nodes + 1.278464542761074).min() < 2**-7  # SiLU's minimum, to the nearest bfloat16
    np.testing.assert_allclose(values, silu(nodes), rtol=1e-7)
    assert again(fit).to_json() == fit.to_json()


def test_derivatives_are_least_squares() -> None:
    fit = fitted(4)
    x, widths = samples()
    cell, share = chances(x, np.array(fit.nodes))
    root = np.sqrt(stats.t(3).pdf(x) * widths)
    matrix = np.zeros((len(x), 16))
    matrix[np.arange(len(x)), cell] = root * (1 - share)
    matrix[np.arange(len(x)), cell + 1] += root * share
    expected = np.linalg.lstsq(matrix, root * slope(x), rcond=None)[0]
    np.testing.assert_allclose(fit.derivatives, expected, atol=2e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_states_its_errors_and_biases(bits: int) -> None:
    """Those of the value by the formula for the variance; its bias is of rounding, and at most what is stated."""
    fit = fitted(bits)
    x, widths = samples()
    nodes, slopes = np.array(fit.nodes), np.array(fit.derivatives)
    cell, share = chances(x, nodes)
    f, g = silu(x), slope(x)
    for deviation in DEVIATIONS:
        density = np.exp(-((x / deviation) ** 2) / 2) * widths
        variance = np.maximum((f - silu(nodes)[cell]) * (silu(nodes)[cell + 1] - f), 0)
        found = np.sqrt((density * variance).sum() / (density * f**2).sum())
        assert fit.error[f"value_{deviation:g}"] == pytest.approx(found, rel=1e-3)
        assert 0 < fit.error[f"value_bias_{deviation:g}"] < 1e-5
        mean = slopes[cell] + share * (slopes[cell + 1] - slopes[cell])
        spread = share * (1 - share) * (slopes[cell + 1] - slopes[cell]) ** 2
        whole = (density * g**2).sum()
        bias = np.sqrt((density * (mean - g) ** 2).sum() / whole)
        # beside the turn of SiLU a position is a root of x, and interpolated: there the mean is a bit nearer
        assert fit.error[f"derivative_bias_{deviation:g}"] == pytest.approx(bias, rel=0.03)
        drawn = (
            fit.looked_up(x)[0] - [f, g]
        ) ** 2 @ density  # by positions, which are compared with whole numbers
        assert fit.error[f"derivative_bias_{deviation:g}"] == pytest.approx(np.sqrt(drawn[1] / whole), rel=1e-3)
        # that of the value is a saw of roundings, which the fit samples at a tenth as many points
        value_bias = np.sqrt(drawn[0] / (density * f**2).sum())
        assert fit.error[f"value_bias_{deviation:g}"] == pytest.approx(value_bias, rel=0.05)
        error = np.sqrt((density * ((mean - g) ** 2 + spread)).sum() / whole)
        assert fit.error[f"derivative_{deviation:g}"] == pytest.approx(error, rel=1e-3)


def test_costs_a_root_of_two_beside_the_nearest_code() -> None:
    """Of evenly spaced values, rounding at random has twice the mean square of rounding to the nearest."""
    nearest = coded.fit(Activation.of("silu"), 6, "a_fit")
    for deviation in DEVIATIONS:
        ratio = fitted(6).error[f"value_{deviation:g}"] / nearest.error[f"value_{deviation:g}"]
        assert 1.3 < ratio < 1.6


def test_what_is_looked_up_in_the_mean() -> None:
    fit = fitted(4)
    x = np.array([-64.0, -1.0, 0.0, 0.3, 5.0, 64.0])
    means, variances = fit.looked_up(x)
    np.testing.assert_allclose(means[0], silu(x), atol=3e-4)
    assert variances[0][0] == variances[0][-1] == 0
    beyond = fit.looked_up(np.array([np.nan, -np.inf, np.inf, 70.0]))[0][0]
    np.testing.assert_array_equal(beyond, np.array(fit.values)[[0, 0, -1, -1]])


@pytest.mark.parametrize(
    ("expression", "options", "reason"),
    [
        ("sin(3*x)", {}, r"it turns 122 times from -64 to 64: expected at most 6 for 8 codes"),
        ("silu", {"domain": (0.25, 0.2578125)}, "has 5 numbers of bfloat16 for 8 codes: choose a wider one"),
        ("silu", {"domain": (0.2501, 0.2502)}, "has no two numbers of bfloat16: expected a wider one"),
        ("log(x)", {}, "is nan at x = -64"),
        ("silu", {"domain": (-65505.0, 1.0)}, "at most 65504 in size"),
    ],
)
def test_refuses(expression: str, options: dict[str, tuple[float, float]], reason: str) -> None:
    assert reason in refused(coded.fit_stochastic, Activation.of(expression), 3, "a_fit", **options)


def test_a_function_with_a_flat_part_and_a_jump() -> None:
    """Where f does not grow the lower code is kept; over a jump that goes the way of f all is as elsewhere."""
    fit = coded.fit_stochastic(Activation.of("where(x > 0, x*x + 1, 0)"), 4, "a_fit", domain=(-8, 8))
    x = np.array([-7.0, -1.0, 0.5, 2.0, 7.0])
    means = fit.looked_up(x)[0][0]
    np.testing.assert_allclose(means, np.where(x > 0, x * x + 1, 0), atol=2e-3)
