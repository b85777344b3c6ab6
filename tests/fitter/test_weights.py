"""Weights from data: histograms, their texts, and the file of a calibration."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fitact.errors import UsageError
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.methods import fewbit
from fitact.fitter.methods.table import again
from fitact.fitter.numerics.histogram import MOST_CELLS, of_counts, parsed
from fitact.fitter.numerics.weight import Weight
from fitact.fitter.records.reading import from_json as fit_from_json
from fitact.fitter.records.weights import Calibration, Site, from_json, read, site
from tests.support.refusals import GONE, changed, refused, within

THREE = "histogram(-2, -0.5, 0.25, 3; 1, 4, 3)"
MIXED = f"0.95*{THREE} + 0.05*student(3, 0.5, 2)"

# --- histograms


def test_density() -> None:
    at = np.array([[-9, -2.1, -2, -1], [-0.5, 0, 0.25, 2.9], [3, 3.1, 1e9, -1e9]])
    heights = [[0, 0, 1 / 12, 1 / 12], [2 / 3, 2 / 3, 3 / 22, 3 / 22], [0, 0, 0, 0]]
    np.testing.assert_allclose(Weight(THREE)(at), heights, rtol=1e-15)
    mixed = 0.95 * np.array(heights) + 0.05 * stats.t(3, 0.5, 2).pdf(at)
    np.testing.assert_allclose(Weight(MIXED)(at), mixed, rtol=1e-12)


@pytest.mark.parametrize("domain", [(-10.0, 10.0), (-1.0, 0.5), (-64.0, 64.0), (0.25, 5.0)])
def test_mass(domain: tuple[float, float]) -> None:
    edges, masses = [-2, -0.5, 0.25, 3], [0, 1 / 8, 5 / 8, 1]
    inner = np.interp(domain[1], edges, masses) - np.interp(domain[0], edges, masses)
    tail = stats.t(3, 0.5, 2)
    expected = 0.95 * inner + 0.05 * (tail.cdf(domain[1]) - tail.cdf(domain[0]))
    assert Weight(MIXED).mass(*domain) == pytest.approx(expected, rel=1e-9)


def test_breakpoints_are_on_the_grid() -> None:
    assert Weight(THREE).breakpoints(-1, 3).tolist() == [-0.5, 0.25]
    assert set(Weight(MIXED).breakpoints(-64, 64)) >= {-2, -0.5, 0.25, 3, 0.5, 2.5}


@pytest.mark.parametrize("text", [THREE, "histogram(-1e-05, 0.1, 12345.678; 0.5, 2)", "histogram(0, 1e+30; 1)"])
def test_a_text_is_read_as_what_was_written(text: str) -> None:
    assert parsed(text).text == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("histogram", "expected histogram(edges; masses)"),
        ("histogram()", "expected histogram(edges; masses)"),
        ("histogram(0, 1, 2)", "expected histogram(edges; masses)"),
        ("histogram(;)", "expected a number, got ''"),
        ("histogram(0, 1; )", "expected a number, got ''"),
        ("histogram(0, 1; 1; 2)", "expected histogram(edges; masses)"),
        ("histogram(0, 1; 1, 2)", "edges one more, got 2 masses and 2 edges"),
        ("histogram(0, 1, 2; 1)", "edges one more, got 1 masses and 3 edges"),
        ("histogram(0, 0; 1)", "edge 1: expected more than edge 0, 0.0, got 0.0"),
        ("histogram(0, 2, 1; 1, 1)", "edge 2: expected more than edge 1"),
        ("histogram(nan, 1; 1)", "expected a number, got 'nan'"),
        ("histogram(-inf, 1; 1)", "expected a number, got '-inf'"),
        ("histogram(0, 1; 0)", "expected a mass above 0"),
        ("histogram(0, 1; -1)", "mass 0: expected a number, 0 to 1e+30, got -1.0"),
        ("histogram(0, 1; 1e999)", "mass 0: expected a number, 0 to 1e+30, got inf"),
        ("histogram(0, 1e31; 1)", "edge 1: expected a number, at most 1e+30 in size"),
        ("histogram(0, 1_0; 1)", "expected a number, got '1_0'"),
        ("histogram(0, ٣; 1)", "expected a number, got '٣'"),
        ("histogram(0, 1\n; 1)", "expected a number"),
        ("histogram(0, 1; 1)\n", "expected histogram(edges; masses) or"),
        ("histogram(0, x; 1)", "expected a number, got 'x'"),
        ("histogram(0, __import__('os'); 1)", "expected histogram(edges; masses) or"),
        ("histogram(0, 1; 1) + 1", "or A*histogram(...) + B*student(...)"),
        ("histogram(0, 1; 1) + 0.05*normal", "or A*histogram(...) + B*student(...)"),
        ("1 + histogram(0, 1; 1)", "or A*histogram(...) + B*student(...)"),
        ("0*histogram(0, 1; 1)", "expected shares above 0 and up to 1, got 0.0"),
        ("2*histogram(0, 1; 1)", "expected shares above 0 and up to 1, got 2.0"),
        ("0.9*histogram(0, 1; 1) + 1e999*student", "expected shares above 0 and up to 1, got 0.9 and inf"),
        ("0.9*histogram(0, 1; 1) + 0.1*student(0)", "degrees of freedom above 0"),
        ("histogram(" + "0, " * 5000 + "; 1)", "expected at most"),
        (f"histogram({', '.join(map(str, range(MOST_CELLS + 2)))}; {'1, ' * MOST_CELLS}1)", "expected 1 to 256"),
    ],
    ids=lambda text: text[:40],
)
def test_refused(text: str, reason: str) -> None:
    with within(5):
        message = refused(Weight, text)
    assert message.startswith("weight ")
    assert reason in message


# --- from counts


def fine(x: np.ndarray[Any, Any], width: float = 1 / 64) -> tuple[list[float], list[int]]:
    """Even cells and the counts of numbers in them."""
    low = math.floor(x.min() / width)
    edges = width * np.arange(low, math.floor(x.max() / width) + 2)
    return edges.tolist(), np.histogram(x, edges)[0].tolist()


@pytest.mark.parametrize(
    "density", [stats.norm(0.3, 2), stats.t(4, -1, 0.5), stats.gamma(3)], ids=["normal", "student", "gamma"]
)
def test_a_coarse_histogram_has_the_datas_distribution(density: Any) -> None:
    x = density.ppf((np.arange(100_000) + 0.5) / 100_000)
    found = of_counts(*fine(x))
    assert len(found.masses) <= 128
    assert sum(found.masses) == 100_000
    sums = np.concatenate([[0], np.cumsum(found.masses)]) / 100_000
    np.testing.assert_allclose(sums, density.cdf(found.edges), atol=2e-5)  # at the edges it is exact
    at = np.linspace(density.ppf(1e-4), density.ppf(1 - 1e-4), 500)
    np.testing.assert_allclose(np.interp(at, found.edges, sums), density.cdf(at), atol=2e-3)
    assert found.masses[0] < 1e-3 * sum(found.masses)  # the tails have cells of their own


@pytest.mark.parametrize(("count", "cells"), [(1, 1), (8, 4), (1000, 20), (262_144, 128), (10_000_000, 128)])
def test_few_numbers_make_few_cells(count: int, cells: int) -> None:
    edges = np.linspace(0, 1, 4001)
    counts = np.full(4000, count // 4000)
    counts[: count % 4000] += 1
    found = of_counts(edges, counts.tolist())
    assert len(found.masses) <= 2 * cells + 1
    assert len(found.masses) >= min(cells, 4) // 2
    assert sum(found.masses) == count


def test_one_value_that_is_frequent_has_a_cell_of_its_own() -> None:
    """Zeros of padding."""
    x = np.concatenate([np.zeros(3000), np.random.default_rng(0).normal(0, 1, 7000)])
    edges, counts = fine(x, 1e-3)
    found = of_counts(edges, counts)
    i = found.edges.index(0.0)
    assert found.edges[i + 1] == pytest.approx(1e-3)
    assert 3000 <= found.masses[i] < 3010


@pytest.mark.parametrize("light", [1, 100, 3000])
@pytest.mark.parametrize("values", [1, 2, 16, 60, 64, 65, 110, 128, 500])
def test_discrete_values_are_not_too_many(values: int, light: int) -> None:
    """Some are frequent, others on both sides of them are not."""
    counts = np.ones(2000 + 3 * values, dtype=np.int64)
    counts[1000 : 1000 + 3 * values : 3] = light
    found = of_counts(np.arange(len(counts) + 1).tolist(), counts.tolist())
    assert sum(found.masses) == counts.sum()
    assert len(found.masses) <= 200
    shares = np.array(found.masses) / np.diff(found.edges)
    if values < 60 and light == 3000:
        assert np.count_nonzero(shares == 3000) == values


# --- fits


def calibrated(x: np.ndarray[Any, Any]) -> Site:
    return site(
        "act",
        "gelu",
        left_out=0,
        mean=float(x.mean()),
        deviation=float(x.std()),
        extremes=(float(x.min()), float(x.max())),
        cells=fine(x, 1 / 128),
    )


SAMPLE = np.random.default_rng(1).normal(-0.7, 1.3, 200_000)


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("name", ["gelu", "tanh", "hardswish"])
def test_a_few_bit_fit_is_nearly_that_of_the_density(name: str, bits: int) -> None:
    """And better on the sample than that of the uniform weight."""
    f = Activation.of(name)
    data, normal = (
        fewbit.fit(f, bits, "a", weight=weight)
        for weight in (calibrated(SAMPLE).weight, Weight("normal(-0.7, 1.3)"))
    )
    default = fewbit.fit(f, bits, "a")

    def error(fit: Any) -> float:
        return float(np.sqrt(np.mean((f.derivative(SAMPLE) - fit(SAMPLE)) ** 2)))

    assert error(data) < 1.02 * error(normal)
    assert error(data) < 0.97 * error(default)
    # 5 % of the weight is a tail: it moves the outer border most
    np.testing.assert_allclose(data.borders, normal.borders, atol=0.3)
    np.testing.assert_allclose(data.levels, normal.levels, atol=0.1)
    assert data.even == (name == "tanh")


def test_a_fit_is_made_again_from_its_record_alone() -> None:
    fit = fewbit.fit(Activation.of("gelu"), 3, "a", weight=calibrated(SAMPLE[:5000]).weight)
    record = fit.to_json()
    assert json.loads(record)["weight"].startswith("0.95*histogram(")
    assert fit_from_json(record).to_json() == record
    assert again(fit_from_json(record)).to_json() == record


@pytest.mark.parametrize("x", [np.full(10, 0.3), np.zeros(10), np.array([5.0])], ids=["0.3", "0", "one"])
def test_one_value_can_be_fitted(x: np.ndarray[Any, Any]) -> None:
    fit = fewbit.fit(Activation.of("gelu"), 2, "a", weight=calibrated(x).weight)
    expected = float(Activation.of("gelu").derivative(x[:1])[0])
    assert fit(x[:1])[0] == pytest.approx(expected, abs=0.01)


# --- the file

GOOD = json.loads(Calibration((calibrated(SAMPLE[:100]),)).to_json())
WRONG: list[tuple[str, Any, str]] = [
    ("schema", "fitact.fit/1", "schema: expected fitact.weights/1, got 'fitact.fit/1': this is not a file of"),
    ("schema", "fitact.weights/2", "upgrade fitact"),
    ("schema", 1, "schema: expected"),
    ("more", 1, "the record: expected schema, sites"),
    ("sites", GONE, "the record: expected schema, sites"),
    ("sites", {}, "sites: expected a list of objects"),
    ("sites", [], "sites: expected at least one activation"),
    ("sites", [1], "sites[0]: expected an object"),
    ("sites", GOOD["sites"] * 2, "sites[1].path: 'act' appears twice"),
    ("sites.0.more", 1, "sites[0]: expected activation"),
    ("sites.0.weight", GONE, "sites[0]: expected activation"),
    ("sites.0.path", 1, "sites[0].path: expected text"),
    ("sites.0.path", "", "sites[0].path: expected 1 to 500 printable characters"),
    ("sites.0.path", "a\x1b[2J", "sites[0].path: expected 1 to 500 printable characters"),
    ("sites.0.path", "a" * 501, "sites[0].path: expected 1 to 500 printable characters"),
    ("sites.0.activation", "a\nb", "sites[0].activation: expected 1 to 500 printable characters"),
    ("sites.0.count", 0, "sites[0].count: expected 1 or more"),
    ("sites.0.count", 1.5, "sites[0].count: expected an integer"),
    ("sites.0.count", True, "sites[0].count: expected an integer"),
    ("sites.0.left_out", -1, "sites[0].left_out: expected 0 or more"),
    ("sites.0.mean", "0", "sites[0].mean: expected a number"),
    ("sites.0.mean", float("nan"), "not JSON: NaN"),
    ("sites.0.mean", 10**400, "sites[0].mean: expected a number in the range"),
    ("sites.0.deviation", -1.0, "sites[0].deviation: expected no negative number"),
    ("sites.0.least", 1e6, "sites[0].least, quantiles: expected no more than largest"),
    ("sites.0.quantiles", [0.0], "sites[0].quantiles: expected 2 numbers"),
    ("sites.0.quantiles", [1.0, 0.0], "lesser quantile first"),
    ("sites.0.weight", 1, "weight: expected text"),
    ("sites.0.weight", "histogram(0, 0; 1)", "sites[0].weight 'histogram(0, 0; 1)': edge 1: expected more"),
    ("sites.0.weight", "__import__('os')", "sites[0].weight"),
    ("sites.0.weight", "x\x00", "sites[0].weight"),
]


@pytest.mark.parametrize(("path", "value", "reason"), WRONG, ids=lambda part: str(part)[:40])
def test_wrong(path: str, value: object, reason: str) -> None:
    assert reason in refused(from_json, changed(GOOD, path, value))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "expected a JSON object"),
        (b'{"schema": 1, "schema": 2}', "schema: appears twice"),
        (b"\xff", "expected UTF-8"),
        (b" " * (1 << 25) + b"{}", "larger than"),
    ],
    ids=lambda content: str(content[:20]),
)
def test_a_file_that_is_none(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "w.json").write_bytes(content)
    message = refused(read, tmp_path / "w.json")
    assert reason in message
    assert message.startswith(str(tmp_path / "w.json"))


def test_read_and_written_again() -> None:
    text = json.dumps(GOOD, indent=2, sort_keys=True) + "\n"
    found = from_json(text)
    assert found.to_json() == text
    assert found == Calibration((calibrated(SAMPLE[:100]),))


def test_the_weight_of_a_site() -> None:
    two = json.loads(json.dumps(GOOD))
    two["sites"].append(two["sites"][0] | {"path": "b", "weight": "normal"})
    found = from_json(json.dumps(two))
    assert found.weight("b") == Weight("normal")
    assert found.weight("act") == from_json(json.dumps(GOOD)).weight() == calibrated(SAMPLE[:100]).weight
    assert "it has 2 sites, choose one: 'act', 'b'" in refused(found.weight)
    assert "it has no site 'c': there are 'act', 'b'" in refused(found.weight, "c")


def test_what_is_stated() -> None:
    one = calibrated(SAMPLE)
    assert (one.mean, one.deviation) == (pytest.approx(SAMPLE.mean()), pytest.approx(SAMPLE.std()))
    assert (one.least, one.largest) == (pytest.approx(SAMPLE.min()), pytest.approx(SAMPLE.max()))
    assert one.quantiles == pytest.approx(np.quantile(SAMPLE, [0.001, 0.999]), abs=1 / 128)
    with pytest.raises(UsageError, match="sites: expected at least one"):
        Calibration(())
