"""Weights from data: histograms, their texts, and the file that `fitact calibrate` writes; fits with them."""

import math
import re
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fitact.fitter.analysis import Activation
from fitact.fitter.methods import again, fewbit
from fitact.fitter.numerics import Weight
from fitact.fitter.numerics.histogram import MOST_CELLS, of_counts, parsed
from fitact.fitter.records import read, read_weights
from fitact.fitter.records.weights import Calibration, Site, from_json, site
from tests.conftest import Command
from tests.support.commands import FITS
from tests.support.refusals import refused, within
from tests.support.rows import full

THREE = "histogram(-2, -0.5, 0.25, 3; 1, 4, 3)"
MIXED = f"0.95*{THREE} + 0.05*student(3, 0.5, 2)"

EDGES = [-2, -0.5, 0.25, 3]
POINTS = np.array([-29.3, -11.7, -4.25, -1.3, -0.37, -1e-3, 1e-3, 0.41, 1.9, 5.3, 12.6, 28.9, *EDGES])
BARS, TAIL = stats.rv_histogram(([1, 4, 3], EDGES), density=False), stats.t(3, 0.5, 2)
ORACLES = {
    THREE: BARS.pdf,
    MIXED: lambda t: 0.95 * BARS.pdf(t) + 0.05 * TAIL.pdf(t),
    "uniform": np.ones_like,
    "normal": stats.norm.pdf,
    "normal( -1.5 ,5e-1)": stats.norm(-1.5, 0.5).pdf,
    "normal(+.5, 3.)": stats.norm(0.5, 3).pdf,
    "student": stats.t(3).pdf,
    "student( 1.5 )": stats.t(1.5).pdf,
    "student(4.5 ,-1.2, 3e-3)": stats.t(4.5, -1.2, 0.003).pdf,
    "student(1000,0,2)": stats.t(1000, 0, 2).pdf,
    "exp(-abs(x))": lambda t: np.exp(-abs(t)),
}


@pytest.mark.parametrize("text", ORACLES)
def test_weight(text):
    np.testing.assert_allclose(Weight(text)(POINTS), ORACLES[text](POINTS), rtol=1e-11, atol=1e-300)


def test_mass() -> None:
    for freedom, (mean, scale) in product((0.5, 3, 40), ((0, 1), (-1.3, 0.01), (5, 1e-6), (63, 30))):
        expected = np.diff(stats.t(freedom, mean, scale).cdf((-64, 64)))[0]
        actual = Weight(f"student({freedom}, {mean}, {scale})").mass(-64.0, 64.0)
        assert actual == pytest.approx(expected, rel=1e-9)
    for domain in ((-10.0, 10.0), (-1.0, 0.5), (-64.0, 64.0), (0.25, 5.0)):
        expected = 0.95 * np.diff(BARS.cdf(domain))[0] + 0.05 * np.diff(TAIL.cdf(domain))[0]
        assert Weight(MIXED).mass(*domain) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("text", [THREE, "histogram(-1e-05, 0.1, 12345.678; 0.5, 2)", "histogram(0, 1e+30; 1)"])
def test_a_text_is_read_as_what_was_written(text: str) -> None:
    assert parsed(text).text == text


# the reason → texts, three spaces apart
REFUSED: dict[str, str] = {
    "unknown name": "gauss   Normal   uniform(0, 1)",
    "normal(mean, deviation)": "normal(0)   normal(0, 1, 2)   normal(x, 1)   normal()   normal + 1",
    "deviation above 0": "normal(0, 0)   normal(0, -1)",
    "student(freedom, mean, scale)": "student()   student(3, 0)   student(3, 0, 1, 2)   student(x)   student + 1",
    "degrees of freedom above 0 and up to 1000, a finite mean and a scale above 0": (
        "student(0)   student(1001)   student(1e999)   student(3, 0, 0)   student(3, 1e999, 1)"
        "   0.9*histogram(0, 1; 1) + 0.1*student(0)"
    ),
    "out of range": "normal(0, 1e308)",
    "expected histogram(edges; masses)": "histogram   histogram()   histogram(0, 1, 2)   histogram(0, 1; 1; 2)",
    "expected a number": "histogram(;)   histogram(0, 1; )   histogram(nan, 1; 1)   histogram(0, 1_0; 1)",
    "edges one more, got 2 masses and 2 edges": "histogram(0, 1; 1, 2)",
    "edge 1: expected more than edge 0, 0.0, got 0.0": "histogram(0, 0; 1)",
    "expected a mass above 0": "histogram(0, 1; 0)",
    "mass 0: expected a number, 0 to 1e+30, got -1.0": "histogram(0, 1; -1)",
    "edge 1: expected a number, at most 1e+30 in size": "histogram(0, 1e31; 1)",
    "expected histogram(edges; masses) or": "histogram(0, __import__('os'); 1)",
    "or A*histogram(...) + B*student(...)": "histogram(0, 1; 1) + 1   histogram(0, 1; 1) + 0.05*normal",
    "expected shares above 0 and up to 1, got 2.0": "2*histogram(0, 1; 1)",
    "expected shares above 0 and up to 1, got 0.9 and inf": "0.9*histogram(0, 1; 1) + 1e999*student",
}
ODD: dict[str, list[str]] = {
    "empty": [""],
    "too many": ["normal(" + "1" * 100_000, "normal(" + "1" * 1_000_000 + ", 1)"],
    "expected a number": ["histogram(0, 1\n; 1)", "histogram(0, ٣; 1)"],
    "expected histogram(edges; masses) or": ["histogram(0, 1; 1)\n"],
    "expected at most": ["histogram(" + "0, " * 5000 + "; 1)"],
    "expected 1 to 256": [f"histogram({', '.join(map(str, range(MOST_CELLS + 2)))}; {'1, ' * MOST_CELLS}1)"],
}
TEXTS = [(text, reason) for reason, texts in REFUSED.items() for text in texts.split("   ")]
TEXTS += [(text, reason) for reason, texts in ODD.items() for text in texts]


@pytest.mark.parametrize(("text", "reason"), TEXTS, ids=[text[:40] for text, _ in TEXTS])
def test_refused(text: str, reason: str) -> None:
    with within(5):
        message = refused(Weight, text)
    assert message.startswith("weight") and reason in message


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
    actual = of_counts(*fine(x))
    assert len(actual.masses) <= 128 and sum(actual.masses) == 100_000
    sums = np.concatenate([[0], np.cumsum(actual.masses)]) / 100_000
    np.testing.assert_allclose(sums, density.cdf(actual.edges), atol=2e-5)  # at the edges it is exact
    at = np.linspace(density.ppf(1e-4), density.ppf(1 - 1e-4), 500)
    np.testing.assert_allclose(np.interp(at, actual.edges, sums), density.cdf(at), atol=2e-3)
    assert actual.masses[0] < 1e-3 * sum(actual.masses)  # the tails have cells of their own


@pytest.mark.parametrize("light", [1, 100, 3000])
@pytest.mark.parametrize("values", [1, 2, 16, 60, 64, 65, 110, 128, 500])
def test_discrete_values_are_not_too_many(values: int, light: int) -> None:
    counts = np.ones(2000 + 3 * values, dtype=np.int64)
    counts[1000 : 1000 + 3 * values : 3] = light
    actual = of_counts(np.arange(len(counts) + 1).tolist(), counts.tolist())
    assert sum(actual.masses) == counts.sum() and len(actual.masses) <= 200
    if values < 60 and light == 3000:
        assert np.count_nonzero(np.array(actual.masses) / np.diff(actual.edges) == 3000) == values


def calibrated(x: np.ndarray[Any, Any]) -> Site:
    extremes = float(x.min()), float(x.max())
    moments = {"mean": float(x.mean()), "deviation": float(x.std())}
    return site("act", "gelu", left_out=0, extremes=extremes, cells=fine(x, 1 / 128), **moments)


SAMPLE = np.random.default_rng(1).normal(-0.7, 1.3, 200_000)
FITTED = [(name, bits) for name in ("gelu", "tanh", "hardswish") for bits in (2, 3)]


@pytest.mark.parametrize(("name", "bits"), full(FITTED, [("gelu", 3), ("tanh", 2), ("hardswish", 2)]))
def test_a_few_bit_fit_is_nearly_that_of_the_density(name: str, bits: int) -> None:
    """And better on the sample than that of the uniform weight."""
    f = Activation.of(name)
    weights = calibrated(SAMPLE).weight, Weight("normal(-0.7, 1.3)"), None
    data, normal, default = (fewbit.fit(f, bits, "a", weight=weight) for weight in weights)
    errors = [np.sqrt(np.mean((f.derivative(SAMPLE) - fit(SAMPLE)) ** 2)) for fit in (data, normal, default)]
    assert errors[0] < min(1.02 * errors[1], 0.97 * errors[2])
    # 5 % of the weight is a tail: it moves the outer border most
    np.testing.assert_allclose(data.borders, normal.borders, atol=0.3)
    np.testing.assert_allclose(data.levels, normal.levels, atol=0.1)
    assert data.even == (name == "tanh")


@pytest.mark.parametrize("x", [np.full(10, 0.3), np.zeros(10), np.array([5.0])], ids=["0.3", "0", "one"])
def test_one_value_can_be_fitted(x: np.ndarray[Any, Any]) -> None:
    fit = fewbit.fit(Activation.of("gelu"), 2, "a", weight=calibrated(x).weight)
    assert fit(x[:1]) == pytest.approx(fit.activation.derivative(x[:1]), abs=0.01)


def test_the_weight_of_a_site() -> None:
    each = calibrated(SAMPLE)
    actual = Calibration((each, replace(each, path="b", weight=Weight("normal"))))
    assert from_json(actual.to_json()) == actual
    assert each.quantiles == pytest.approx(np.quantile(SAMPLE, [0.001, 0.999]), abs=1 / 128)
    assert (actual.weight("b"), actual.weight("act")) == (Weight("normal"), each.weight)
    assert Calibration((each,)).weight() == each.weight
    assert "it has 2 sites, choose one: 'act', 'b'" in refused(actual.weight)
    assert "it has no site 'c': there are 'act', 'b'" in refused(actual.weight, "c")


MODEL = """
from collections import OrderedDict
import torch
from torch import nn
import torch.nn.functional as F

class Block(nn.Sequential):
    def forward(self, x):
        return F.silu(super().forward(x))[..., :8]

def tiny(batch=1, seq=3):
    torch.manual_seed(0)
    blocks = [Block(OrderedDict(up=nn.Linear(8, 16), act=nn.GELU())) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Softmax(-1)), torch.randn(batch, seq, 8)

seeds = [torch.Generator().manual_seed(i) for i in range(50)]
sample = lambda: (nn.Sequential(nn.GELU()), (torch.randn(2000, generator=seed) * 0.7 - 1 for seed in seeds))
wide = lambda: (nn.Sequential(nn.GELU()), torch.linspace(-40, 40, 1001))
named = lambda: (tiny()[0], {"input": torch.ones(2, 8)})
several = lambda: (tiny()[0], torch.utils.data.DataLoader([(torch.ones(8),)] * 5, batch_size=2))
"""


@pytest.fixture
def models(command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "calibrated_models", raising=False)
    Path("calibrated_models.py").write_text(MODEL, "utf-8")
    return command


def test_the_table_and_the_file(models: Command) -> None:
    """The same command gives the same bytes."""
    line, sites = "calibrate calibrated_models:tiny --batch 5 --seq 3", ["0.act", "1.act", "0:silu", "1:silu"]
    (status, out, err), written = models(line), Path("weights.json").read_text("utf-8")
    head, *rows, last = out.splitlines()
    assert (status, err, last) == (0, "", "wrote weights.json")
    assert " ".join(head.split()) == "site activation count mean deviation 0.1 % 99.9 % least largest"
    kinds = ["gelu", "gelu", "silu", "silu"]
    assert [row.split()[:3] for row in rows] == [[*row, "240"] for row in zip(sites, kinds, strict=True)]
    assert [site.path for site in read_weights(Path("weights.json")).sites] == sites
    assert models(line)[0] == 0 and Path("weights.json").read_text("utf-8") == written


BATCHES = {"tiny --seq 7": [112] * 4, "tiny --group --batch 2 --seq 3": [192] * 2, "named": [32] * 4}
BATCHES |= {"several": [80] * 4, "several --most 2": [64] * 4, "sample --most 3": [6000]}


@pytest.mark.parametrize(("arguments", "counts"), BATCHES.items(), ids=BATCHES)
def test_batches(arguments: str, counts: list[int], models: Command) -> None:
    assert models(f"calibrate calibrated_models:{arguments} -o folder/w.json")[0] == 0
    assert [site.count for site in read_weights(Path("folder/w.json")).sites] == counts


def test_a_fit_with_the_weight_of_a_site(models: Command) -> None:
    assert models("calibrate calibrated_models:sample -o w.json")[0] == 0
    weight = read_weights(Path("w.json")).weight()
    for name, at in (("data", "w.json#0"), ("only", "w.json")):
        assert models(f"fit --fn gelu --bits 3 --domain -8 8 --name {name} --weight {at}")[0] == 0
    Path("w.json").unlink()
    fit, record = read(FITS / "data.json"), (FITS / "data.json").read_text("utf-8")
    assert fit.weight == weight and again(fit).to_json() == record, "without the file"
    assert record == (FITS / "only.json").read_text("utf-8").replace('"only"', '"data"')
    assert models("codegen generated/fits/data.json")[0] == 0


def test_what_lies_beyond_the_domain_is_told(models: Command) -> None:
    assert models("calibrate calibrated_models:wide")[0] == 0
    status, _, err = models("fit --fn gelu --bits 2 --weight weights.json --name a")
    beyond = r"fitact: warning: 7.*% of the weight lies beyond the domain -10 10: choose one with --domain\n"
    assert status == 0 and re.match(beyond, err)
    assert models("fit --fn gelu --bits 2 --weight weights.json --name b --domain -100 100")[::2] == (0, "")
