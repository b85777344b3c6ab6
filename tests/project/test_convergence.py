"""benchmarks/convergence: its quantiser, its statistics, and that every task trains with every method."""

import dataclasses
import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from benchmarks.convergence import statistics, summary, tasks, training
from benchmarks.convergence.methods import METHODS, methods_of
from benchmarks.convergence.quantised import GROUP, QuantisedGelu, quantise, restore
from benchmarks.convergence.tasks import LEARNED_PARTS, PATCHES, TASKS, Recipe, Setting
from benchmarks.convergence.training import Run
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
