"""benchmarks/convergence: its quantiser, its statistics, and that every task trains with every method.

benchmarks/evidence: that a run resumes, and the numbers of docs/antibody.md.
"""

import dataclasses
import json
import math
import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from benchmarks.convergence import run, statistics, summary, tasks, training
from benchmarks.convergence.methods import METHODS, methods_of
from benchmarks.convergence.quantised import GROUP, QuantisedGelu, quantise, restore
from benchmarks.convergence.tasks import LEARNED_PARTS, PATCHES, TASKS, Recipe, Setting
from benchmarks.convergence.training import Run
from benchmarks.evidence import antibodies, gradients
from benchmarks.evidence import run as evidence
from fitact.base import UsageError
from fitact.runtime.measure import count_saved
from tests.conftest import ROOT

BITS = pytest.mark.parametrize("bits", [1, 2, 3, 4])
RECIPE = Recipe(16, 2, 1, 12, 4, 3, 1e-3, 8)
RECIPES = {
    **dict.fromkeys(("characters", *LEARNED_PARTS), RECIPE),
    "digits": Recipe(16, 2, 1, PATCHES, 4, 3, 1e-3, 8),
    "lora": Recipe(16, 2, 1, 12, 4, 3, 1e-3, 8, rank=2),
    "gated": Recipe(32, 2, 1, 16, 4, 3, 0.05, 8),
}


@BITS
def test_restored_is_a_neighbouring_point(bits: int) -> None:
    """Of the 2^bits evenly spaced points of its group, found in float64; the ends of the range are exact."""
    x = torch.randn(20, GROUP) * torch.logspace(-3, 3, 20)[:, None] + torch.randn(20, 1)
    restored = restore(*quantise(x, bits), bits)
    low, high = x.double().amin(1, keepdim=True), x.double().amax(1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    place = (x.double() - low) / step
    rounding = 4 * torch.finfo(torch.float32).eps * (x.double().abs().amax(1, keepdim=True) / step + 2**bits)
    reached = (restored.double() - low) / step
    assert ((reached - reached.round()).abs() <= rounding).all()
    assert (reached >= place.floor() - rounding).all() and (reached <= place.ceil() + rounding).all()


@BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_is_exact_at_the_restored_input(bits: int, dtype: torch.dtype) -> None:
    """And the codes, with two numbers a group, are all that is saved."""
    for size in (1, GROUP - 1, GROUP, 3 * GROUP + 7):
        x, dy = torch.randn(size).to(dtype).requires_grad_(), torch.randn(size).to(dtype)
        torch.manual_seed(1)
        with count_saved() as saved:
            y = QuantisedGelu(bits)(x)
        assert saved.bytes == math.ceil(size / GROUP) * (GROUP * bits // 8 + 2 * 4)
        y.backward(dy)
        torch.manual_seed(1)
        at = restore(*quantise(x, bits), bits).flatten()[:size].to(dtype).requires_grad_()
        F.gelu(at).backward(dy)
        assert x.grad is not None and at.grad is not None
        assert torch.equal(y, F.gelu(x)) and torch.equal(x.grad, at.grad)


def test_holm_rejects_what_the_procedure_rejects() -> None:
    """Holm's procedure as he states it: go up from the smallest p, stop at the first above level / (m − i)."""
    random_numbers = np.random.default_rng(1)
    for _ in range(200):
        ps = random_numbers.uniform(size=random_numbers.integers(1, 13)) ** 4
        adjusted = statistics.holm(list(ps))
        for level in (0.01, 0.05, 0.3):
            order, limits = np.argsort(ps), level / np.arange(len(ps), 0, -1)
            first = np.append(ps[order] > limits, True).argmax()
            assert {i for i, p in enumerate(adjusted) if p <= level} == {*order[:first].tolist()}


PAIRS = [("small", task) for task in sorted(tasks.SMALL.recipes)] + [("stored", "gated")]
PAIRS += [("learned", task) for task in LEARNED_PARTS]


@pytest.mark.parametrize(("kind", "task"), PAIRS)
def test_steps(kind: str, task: str, tmp_path: Path) -> None:
    """With each method, from the same weights and the same first batch; the same seed gives the same numbers."""

    def steps(method: str, seed: int = 0, folder: str = "3") -> Run:
        setting = Setting("tiny", "cpu", False, RECIPES)
        result = training.train(TASKS[task], METHODS[method], setting, seed, tmp_path / folder)
        return dataclasses.replace(result, seconds=0.0)

    exact = steps("exact")
    for method in methods_of(kind):
        each = steps(method)
        assert (each.task, each.method, each.seed, each.diverged, len(each.curve)) == (task, method, 0, None, 3)
        assert each.loss is not None and each.accuracy is not None and None not in each.curve
        assert 0 < each.loss < 10 and 0 <= each.accuracy <= 1 and each.saved_bytes > 0
        assert each.curve[0] == pytest.approx(exact.curve[0], rel=2e-5)
        if method == "exact" or (task == "digits" and method in ("fewbit3", "stochastic2", "norms")):
            assert steps(method, folder="3 again") == each
            other = steps(method, seed=1)
            assert each.curve != other.curve and each.loss != other.loss
        elif kind != "small":
            assert each.saved_bytes < exact.saved_bytes
            assert ((each.curve, each.loss) == (exact.curve, exact.loss)) == (kind == "learned")


LOSSES: dict[str, list[float | None]] = {
    "exact": [2.00, 2.10, 1.95, 2.05, 2.02],
    "fewbit1": [2.09, 2.20, 2.04, 2.16, 2.11],  # 0.1 worse, nearly alike
    "fewbit3": [2.01, 2.09, 1.95, 2.06, 2.02],
    "inverted1": [2.00, 2.10, 1.95, 2.05, 2.02],
    "stochastic1": [2.5, None, 2.4, 2.6, 2.5],
}
RUNS = [
    Run("characters", method, seed, [3.0, 2.0], loss, 0.5, None if loss else 1, 1000, 1.0)
    for method, losses in LOSSES.items()
    for seed, loss in enumerate(losses)
]


def test_comparisons() -> None:
    actual = {(each.family, each.method): each for each in summary.compare(RUNS)}
    assert set(actual) == {("exact", name) for name in LOSSES if name != "exact"} | {("same bits", "fewbit1")}
    few = actual["exact", "fewbit1"]
    expected = stats.ttest_rel(LOSSES["fewbit1"], LOSSES["exact"])
    low, high = expected.confidence_interval(0.95)
    assert (few.p, few.difference, few.half) == pytest.approx(
        (expected.pvalue, (low + high) / 2, (high - low) / 2)
    )
    assert few.adjusted == pytest.approx(3 * expected.pvalue)  # of three that did not diverge
    assert few.distinguishable
    assert actual["exact", "fewbit3"].distinguishable is False
    diverged = actual["exact", "stochastic1"]
    assert (diverged.diverged, diverged.difference, diverged.adjusted) == (1, None, None)


def test_sentences() -> None:
    text, _ = summary.sentences(summary.compare(RUNS))
    for part in (
        "Characters of source code, held-out loss, 5 seeds.",
        "Exact training ends at 2.024 nats, ± 0.056 from seed to seed.",
        "Distinguishable: Few-Bit, 1 bit +0.096 ± 0.011 (worse).",
        "Not distinguishable: Few-Bit, 3 bits +0.002 ± 0.010.",
        "Identical from every seed: inverted, 1 bit.",
        "Stochastic, 1 bit diverged in 1 of 5 runs.",
    ):
        assert part in text, text


def test_the_documents_learned_trainings() -> None:
    """The committed runs of converted models have the losses of exact training, bit for bit."""
    results = json.loads((ROOT / "benchmarks/results/convergence_learned.json").read_text())
    runs = {(part["task"], part["method"], part["seed"]): part for part in results["runs"]}
    assert len(runs) == 2 * 5 * len(LEARNED_PARTS)
    for task, seed in product(LEARNED_PARTS, range(5)):
        exact, converted = (runs[task, method, seed] for method in ("exact", "recompute"))
        assert (converted["loss"], converted["curve"]) == (exact["loss"], exact["curve"])
        assert converted["saved_bytes"] < exact["saved_bytes"]


TINY = {
    "vocab_size": len(antibodies.VOCABULARY),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TINY |= {"intermediate_size": 24, "max_position_embeddings": 16}
SETTING = evidence.Setting(steps=2, rank=2, validation=3, gradient_batch=2)
DRAW = random.Random(0)
SEQUENCES = ["".join(DRAW.choices("ACDEFGHIKLMNPQRSTVWY", k=DRAW.randint(6, 10))) for _ in range(12)]
GENES = antibodies.Genes(SEQUENCES[:8], SEQUENCES[8:])


def test_runs_go_on(tmp_path: Path) -> None:
    """What an interrupt leaves is neither lost nor done again, and each run is that of one go."""
    torch.manual_seed(0)
    model = antibodies.bert({**TINY, "initializer_range": 0.5}).eval()  # its activations are far from linear
    path = tmp_path / "a.json"
    interrupted = evidence.work(path, SETTING, 1, lambda: model, GENES, picture=False)
    first = [next(interrupted) for _ in range(3)]
    interrupted.close()
    rest = list(evidence.work(path, SETTING, 1, lambda: model, GENES))
    runs = run.read(path, evidence.circumstances(SETTING, GENES))
    jobs = [(each.task, each.method, each.seed) for each in [*first, *rest]]
    assert jobs == evidence.jobs_of(1) == [(*pair, 0) for pair in product(evidence.REGIMES, evidence.METHODS)]
    assert sorted(map(repr, runs)) == sorted(map(repr, [*first, *rest]))
    there = {(run.task, run.method): dataclasses.replace(run, seconds=0.0) for run in runs}
    again = evidence.train(model, GENES, ("full", "fewbit3", 0), SETTING)
    assert dataclasses.replace(again, seconds=0.0) == there["full", "fewbit3"]
    losses = {job: run.curve for job, run in there.items()}
    assert losses["lora", "baseline"][0] == losses["full", "baseline"][0]  # adapters begin with nothing
    assert losses["full", "baseline"] == losses["full", "exact"] != losses["full", "fewbit3"]
    saved = {method: next(run.saved_bytes for run in runs if run.method == method) for method in evidence.METHODS}
    assert saved["exact"] < saved["baseline"]
    written = json.loads(path.read_text(encoding="utf-8"))["gradients"]
    off = {(row["method"], row["layer"]): row["output"] for row in written}
    assert off["baseline", 1] < 1e-5 < off["inverted1", 1] < off["fewbit3", 1]
    assert path.with_name("a_gradients.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="made with other setting: remove it"):
        run.read(path, evidence.circumstances(dataclasses.replace(SETTING, steps=3), GENES))


RECORD: dict[str, Any] = json.loads((ROOT / "benchmarks/results/evidence.json").read_text(encoding="utf-8"))


def test_the_page_says_what_the_record_says() -> None:
    words = " ".join((ROOT / "docs" / "antibody.md").read_text(encoding="utf-8").split())
    setting, sequences, versions = RECORD["setting"], RECORD["sequences"], RECORD["versions"]
    for part in (
        *evidence.sentences(RECORD),
        f"{setting['steps']} steps of {setting['batch']} sequence",
        f"{100 * setting['share']:.0f} % of its residues",
        f"{sequences['training']} sequences to train on, {sequences['held_out']} held out",
        f"PyTorch {versions['torch'].partition('+')[0]}",
        *(f"{name} {versions[name]}" for name in ("transformers", "peft")),
        RECORD["date"],
    ):
        assert part in words, part


def test_exact_changes_no_bit_and_calibrated_fits_are_nearer() -> None:
    rows = json.loads((ROOT / "benchmarks/results/calibration.json").read_text(encoding="utf-8"))["rows"]
    assert all(row["calibrated"] < row["shipped"] for row in rows)
    runs = {(each["task"], each["method"], each["seed"]): each for each in RECORD["runs"]}
    for regime in evidence.REGIMES:
        baseline, exact = (runs[regime, method, 0] for method in ("baseline", "exact"))
        assert (exact["curve"], exact["loss"]) == (baseline["curve"], baseline["loss"])
        assert len(baseline["curve"]) == RECORD["setting"]["steps"]
    bits = [row["bits"] for row in RECORD["gradients"] if row["method"] == "exact"]
    assert all(bits) and len(bits) == 8


def test_what_the_page_tells() -> None:
    """The ranges of its last list."""
    errors: dict[str, list[float]] = {}
    for row in RECORD["gradients"]:
        errors.setdefault(row["method"], []).extend(row[part] for part in gradients.PARTS)
    layers = {(row["method"], row["layer"]): row for row in RECORD["gradients"]}
    inexact = errors.keys() - {"baseline", "exact"}
    growth = [layers[method, 1][part] / layers[method, 8][part] for method in inexact for part in gradients.PARTS]
    assert round(max(growth), 1) == 2.5
    for method, digits, *ends in (
        ("rounding", 1, 0.6, 1.3),
        ("bits8", 1, 0.7, 2.0),
        ("coarse", 0, 10, 19),
        ("fewbit3", 0, 12, 20),
        ("inverted1", 2, 0.01, 0.02),
    ):
        assert [round(100 * each(errors[method]), digits) for each in (min, max)] == ends
    deviations = [row["deviation"] for row in RECORD["pre_activations"]]
    assert [round(x, 1) for x in (min(deviations), max(deviations))] == [1.1, 1.4]
    gains = [RECORD["before"]["loss"] - each["loss"] for each in RECORD["runs"] if each["method"] == "baseline"]
    assert [round(x, 1) for x in (min(gains), max(gains))] == [0.7, 0.7]
    first = [each for each in RECORD["runs"] if each["seed"] == 0]
    saved = {(each["task"], each["method"]): each["saved_bytes"] for each in first}
    for regime in evidence.REGIMES:
        for method, share in (("exact", 5 / 8), ("rounding", 1 / 3), ("bits8", 1 / 6), ("coarse", 1 / 8)):
            assert abs(saved[regime, method] / saved[regime, "baseline"] - share) < 0.025
