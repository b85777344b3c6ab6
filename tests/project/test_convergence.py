"""benchmarks/convergence: its quantiser, its statistics, and that every task trains with every method."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from benchmarks.convergence import plot, run, statistics, summary, tasks, training
from benchmarks.convergence.methods import METHODS, methods_of
from benchmarks.convergence.quantised import GROUP, QuantisedGelu, quantise, restore
from benchmarks.convergence.tasks import LEARNED_PARTS, PATCHES, TASKS, Recipe, Setting
from benchmarks.convergence.training import Run
from fitact.base import UsageError
from fitact.runtime.measure.saved import count_saved
from tests.conftest import ROOT

RESULTS = ROOT / "benchmarks" / "results"
BITS = pytest.mark.parametrize("bits", [1, 2, 3, 4])
TINY = Setting(
    "tiny",
    "cpu",
    False,
    {
        "characters": Recipe(16, 2, 1, 12, 4, 1, 1e-3, 8),
        "digits": Recipe(16, 2, 1, PATCHES, 4, 1, 1e-3, 8),
        "lora": Recipe(16, 2, 1, 12, 4, 1, 1e-3, 8, rank=2),
        **dict.fromkeys(("gated", *LEARNED_PARTS), Recipe(16, 2, 1, 12, 4, 1, 1e-3, 8)),
    },
)
THREE_STEPS = dataclasses.replace(
    TINY, recipes={name: dataclasses.replace(recipe, steps=3) for name, recipe in TINY.recipes.items()}
)


# The quantiser


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
    assert bool(((reached - reached.round()).abs() <= rounding).all())
    assert bool((reached >= place.floor() - rounding).all())
    assert bool((reached <= place.ceil() + rounding).all())
    assert bool(((restored.double() - x.double()).abs() <= step * (1 + rounding)).all())


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


# The statistics


def test_paired_against_scipy() -> None:
    random_numbers = np.random.default_rng(0)
    for n in (2, 3, 5, 20):
        a, b = random_numbers.normal(size=(2, n))
        result = statistics.paired(a - b)
        expected = stats.ttest_rel(a, b)
        low, high = expected.confidence_interval(0.95)
        assert result.p == pytest.approx(expected.pvalue, rel=1e-9)
        assert (result.mean - result.half, result.mean + result.half) == pytest.approx((low, high), rel=1e-9)


def test_holm_rejects_what_the_procedure_rejects() -> None:
    """Holm's procedure as he states it: go up from the smallest p, stop at the first above level / (m − i)."""
    random_numbers = np.random.default_rng(1)
    for _ in range(200):
        ps = random_numbers.uniform(size=random_numbers.integers(1, 13)) ** 4
        adjusted = statistics.holm(list(ps))
        for level in (0.01, 0.05, 0.3):
            rejected = set()
            for rank, i in enumerate(np.argsort(ps)):
                if ps[i] > level / (len(ps) - rank):
                    break
                rejected.add(int(i))
            assert {i for i, p in enumerate(adjusted) if p <= level} == rejected


# Tasks, methods, training


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.mark.parametrize("task", sorted(tasks.SMALL.recipes))
def test_steps(task: str, store: Path) -> None:
    """With each method, from the same weights and the same first batch; the same seed gives the same numbers."""

    def steps(method: str, seed: int = 0, folder: str = "3") -> Run:
        result = training.train(TASKS[task], METHODS[method], THREE_STEPS, seed, store / folder)
        return dataclasses.replace(result, seconds=0.0)

    exact = steps("exact")
    for method in methods_of("small"):
        one = steps(method)
        assert (one.task, one.method, one.seed, one.diverged, len(one.curve)) == (task, method, 0, None, 3)
        assert one.loss is not None and one.accuracy is not None and None not in one.curve
        assert 0 < one.loss < 10 and 0 <= one.accuracy <= 1 and one.saved_bytes > 0
        assert one.curve[0] == pytest.approx(exact.curve[0], rel=2e-5)
        if method == "exact" or (task == "digits" and method in ("fewbit3", "stochastic2", "norms")):
            assert steps(method, folder="3 again") == one
            other = steps(method, seed=1)
            assert one.curve != other.curve and one.loss != other.loss


def test_quantised_steps(store: Path) -> None:
    """The first loss is that of exact training, what follows is near it, and codes of fewer bits save more."""
    setting = dataclasses.replace(tasks.STORED, recipes={"gated": Recipe(32, 2, 1, 16, 4, 3, 0.05, 8)})
    runs = [training.train(TASKS["gated"], METHODS[name], setting, 0, store) for name in methods_of("stored")]
    exact, eight, six, four, _, *others = runs
    for one in runs[1:]:
        assert one.curve[0] == exact.curve[0]
        assert one.curve[1:] != exact.curve[1:] and one.curve == pytest.approx(exact.curve, rel=0.02)
    assert four.saved_bytes < six.saved_bytes < eight.saved_bytes < 0.5 * exact.saved_bytes
    assert len({tuple(one.curve) for one in (eight, four, *others)}) == 2 + len(others)


@pytest.mark.parametrize(
    ("task", "kind", "parameters"),
    [("xielu", "XIELUActivation", 2), ("dyt", "DyT", 3), ("derf", "Derf", 4), ("swish", "Swish", 1)],
)
def test_learned_numbers(task: str, kind: str, parameters: int, store: Path) -> None:
    """Converted, they keep less, and no bit of any loss changes."""
    model = TASKS[task].model(TINY.recipes[task])
    modules = [module for module in model.modules() if type(module).__name__ == kind]
    assert len(modules) == (3 if kind in ("DyT", "Derf") else 1)
    assert {len(list(module.parameters())) for module in modules} == {parameters}
    exact, converted = (
        training.train(TASKS[task], METHODS[method], THREE_STEPS, 0, store / "3")
        for method in methods_of("learned")
    )
    assert (converted.curve, converted.loss) == (exact.curve, exact.loss)
    assert converted.saved_bytes < exact.saved_bytes


def test_image_patches() -> None:
    """Held-out images are whole, unshifted, and none of them is trained on."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    recipe = dataclasses.replace(TINY.recipes["digits"], validation=1700, batch=50)
    data = tasks.image_data(recipe, 3, "cpu")
    patches, labels = (torch.cat(parts) for parts in zip(*data.validation, strict=True))
    rows = patches.view(-1, 4, 4, 2, 2).permute(0, 1, 3, 2, 4).reshape(-1, 64)
    pixels = digits.images.reshape(-1, 64)
    for row, label in zip((rows + 2) * 4, labels, strict=True):
        same = np.flatnonzero((pixels == row.numpy()).all(1))
        assert len(same) and digits.target[same[0]] == label
    held_out = {tuple(patch.flatten().tolist()) for patch in patches}
    trained = {tuple(one.flatten().tolist()) for _ in range(20) for one in next(data.training)[0]}
    assert len(held_out) == 1700 and 500 < len(trained) <= 9 * 97 and not held_out & trained


# What is written


def _runs(losses: dict[str, list[float | None]], task: str = "characters") -> list[Run]:
    return [
        Run(task, method, seed, [3.0, 2.0], loss, 0.5, None if loss else 1, 1000, 1.0)
        for method, values in losses.items()
        for seed, loss in enumerate(values)
    ]


LOSSES: dict[str, list[float | None]] = {
    "exact": [2.00, 2.10, 1.95, 2.05, 2.02],
    "fewbit1": [2.09, 2.20, 2.04, 2.16, 2.11],  # 0.1 worse, nearly alike
    "fewbit3": [2.01, 2.09, 1.95, 2.06, 2.02],
    "inverted1": [2.00, 2.10, 1.95, 2.05, 2.02],
    "stochastic1": [2.5, None, 2.4, 2.6, 2.5],
}


def test_comparisons() -> None:
    found = {(one.family, one.method): one for one in summary.compare(_runs(LOSSES))}
    assert set(found) == {("exact", name) for name in LOSSES if name != "exact"} | {("same bits", "fewbit1")}
    few = found["exact", "fewbit1"]
    expected = stats.ttest_rel(LOSSES["fewbit1"], LOSSES["exact"])
    assert few.p == pytest.approx(expected.pvalue)
    assert few.adjusted == pytest.approx(3 * expected.pvalue)  # of three that did not diverge
    assert few.distinguishable and few.difference == pytest.approx(0.096)
    assert found["exact", "fewbit3"].distinguishable is False
    diverged = found["exact", "stochastic1"]
    assert (diverged.diverged, diverged.difference, diverged.adjusted) == (1, None, None)


def test_sentences() -> None:
    text, _ = summary.sentences(summary.compare(_runs(LOSSES)))
    for part in (
        "Characters of source code, held-out loss, 5 seeds.",
        "Exact training ends at 2.024 nats, ± 0.056 from seed to seed.",
        "Distinguishable: Few-Bit, 1 bit +0.096 ± 0.011 (worse).",
        "Not distinguishable: Few-Bit, 3 bits +0.002 ± 0.010.",
        "Identical from every seed: inverted, 1 bit.",
        "Stochastic, 1 bit diverged in 1 of 5 runs.",
    ):
        assert part in text, text


def test_pictures_of_runs_that_diverged(tmp_path: Path) -> None:
    runs = _runs(LOSSES)
    runs = [dataclasses.replace(one, curve=[3.0, None]) if one.loss is None else one for one in runs]
    made = plot.draw(runs, summary.compare(runs), {"characters": 2}, tmp_path / "a.json")
    assert [path.name for path in made] == ["a_curves.png", "a_gaps.png", "a_final.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is finished is neither lost nor done again, and the result is that of one go."""
    done: list[run.Job] = []

    def inline(jobs: list[run.Job], setting: Setting, store: Path, workers: int) -> object:
        for task, method, seed in jobs:
            if len(done) == 3:
                done.append(("", "", 0))
                raise KeyboardInterrupt
            done.append((task, method, seed))
            yield training.train(TASKS[task], METHODS[method], setting, seed, tmp_path)

    monkeypatch.setattr(run, "run_all", inline)
    now, path, whole = run.circumstances(THREE_STEPS), tmp_path / "a.json", tmp_path / "b.json"
    wanted = (["digits"], ["exact", "fewbit1", "stochastic1"], 3, None)
    run._work(path, now, THREE_STEPS, *wanted)
    assert len(run.read(path, now)) == 3
    run._work(path, now, THREE_STEPS, *wanted)
    assert len(done) == 10 and len(set(done)) == 10
    run._work(whole, now, THREE_STEPS, *wanted)
    one, other = (
        [dataclasses.replace(each, seconds=0.0) for each in run.read(file, now)] for file in (path, whole)
    )
    assert one == other
    record = json.loads(path.read_text(encoding="utf-8"))
    assert len(record["runs"]) == 9 and len(record["comparisons"]) == 2 * (2 + 1) and len(record["sentences"]) == 4


def test_results_that_are_none_or_made_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in ("", "[]", "{}", '{"runs": [{}]}', '{"runs": 3}'):
        path.write_text(text)
        with pytest.raises(UsageError, match="expected results of this benchmark"):
            run.read(path, {"setting": {}})
    path.write_text(run.document(run.circumstances(TINY), []))
    assert run.read(path, run.circumstances(TINY)) == []
    with pytest.raises(UsageError, match="made with other setting: remove it"):
        run.read(path, run.circumstances(THREE_STEPS))


# What is committed


def test_the_documents_learned_trainings() -> None:
    """The committed runs of converted models have the losses of exact training, bit for bit."""
    results = json.loads((RESULTS / "convergence_learned.json").read_text())
    runs = {(one["task"], one["method"], one["seed"]): one for one in results["runs"]}
    assert len(runs) == 2 * 5 * len(LEARNED_PARTS)
    for task in LEARNED_PARTS:
        for seed in range(5):
            exact, converted = (runs[task, method, seed] for method in ("exact", "recompute"))
            assert all(converted[name] == exact[name] for name in ("loss", "curve"))
            assert converted["saved_bytes"] < exact["saved_bytes"]


def test_the_table_of_block_codes() -> None:
    """Each cell is the committed comparison, rounded as it is written; what is bold can be distinguished."""
    results = json.loads((RESULTS / "convergence_stored.json").read_text())
    page = (ROOT / "docs" / "evidence.md").read_text("utf-8")
    found = {(one["task"], one["method"]): one for one in results["comparisons"] if one["metric"] == "loss"}
    for method, label in {
        "blocks8": "8 bits",
        "blocks6": "6 bits",
        "blocks4": "4 bits",
        "coarse": "coarse",
    }.items():
        (row,) = re.findall(rf"^\| {label} \| [^|]* % \|(.*)\|$", page, re.MULTILINE)
        for task, cell in zip(("characters", "digits", "lora", "gated"), row.split("|"), strict=True):
            one = found[task, method]
            assert ("**" in cell) == one["distinguishable"] and one["pairs"] == 5
            for text, value in zip(
                re.findall(r"[\d.]+", cell), (abs(one["difference"]), one["half"]), strict=True
            ):
                assert abs(float(text) - value) <= 0.5001 * 10.0 ** -len(text.partition(".")[2])
