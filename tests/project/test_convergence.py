"""benchmarks/convergence: its quantiser, its statistics, and that every task trains with every method."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn

from benchmarks.convergence import plot, run, statistics, summary, tasks, training
from benchmarks.convergence.methods import EXACT, LEARNED, METHODS, STORED, methods_of
from benchmarks.convergence.models import Transformer
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
PAIRS = sorted((task, method) for task in tasks.SMALL.recipes for method in methods_of("small"))


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
def test_rounding_is_unbiased(bits: int) -> None:
    """The mean of many draws is x: within five standard errors, for all of 256 numbers; and with the variance
    p(1 − p) steps² that rounding up with the probability p of the fraction has."""
    x = torch.randn(GROUP)
    draws = 4000
    restored = restore(*quantise(x.repeat(draws), bits), bits).double()
    step = (x.double().max() - x.double().min()) / (2**bits - 1)
    fraction = ((x.double() - x.double().min()) / step).remainder(1.0)
    deviation = step * (fraction * (1 - fraction)).sqrt()
    assert bool(((restored.mean(0) - x).abs() <= 5 * deviation / math.sqrt(draws) + 1e-6).all())
    inner = (fraction > 0.05) & (fraction < 0.95)
    np.testing.assert_allclose(restored.std(0)[inner], deviation[inner], rtol=0.15)


@BITS
def test_packing_against_integers(bits: int) -> None:
    """Eight codes make one number in base 2^bits, whose bytes are kept from the lowest on."""
    codes = [random.Random(bits).randrange(2**bits) for _ in range(GROUP)]
    codes[:2] = 0, 2**bits - 1
    packed, least, spread = quantise(torch.tensor(codes, dtype=torch.float32), bits)
    words = [sum(code << bits * i for i, code in enumerate(codes[j : j + 8])) for j in range(0, GROUP, 8)]
    expected = b"".join(word.to_bytes(bits, "little") for word in words)
    assert (bytes(packed.flatten().tolist()), least.item(), spread.item()) == (expected, 0.0, 2**bits - 1)


@BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_is_exact_at_the_restored_input(bits: int, dtype: torch.dtype) -> None:
    """And the codes, with two numbers a group, are all that is kept."""
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


def test_equal_elements_are_restored_exactly() -> None:
    for value in (0.0, -2.5, 1e-40):
        assert bool((restore(*quantise(torch.full((GROUP + 1,), value), 4), 4) == value).all())


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


def test_no_spread_and_too_little_to_compare() -> None:
    assert statistics.paired([0.0, 0.0, 0.0]) == statistics.Paired(0.0, 0.0, 0.0, 1.0, 3)
    assert statistics.paired([0.5] * 4) == statistics.Paired(0.5, 0.0, 0.0, stats.binomtest(4, 4).pvalue, 4)
    for differences in ([], [1.0], [1.0, math.nan]):
        with pytest.raises(ValueError, match="expected at least two finite differences"):
            statistics.paired(differences)


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


@pytest.mark.parametrize(("pairs", "tests"), [(3, 1), (5, 12), (20, 4)])
def test_detectable_is_detected(pairs: int, tests: int) -> None:
    """Of 20000 simulated experiments with that difference, scipy's test finds it in four of five."""
    size = statistics.detectable(2.0, pairs, tests)
    samples = np.random.default_rng(2).normal(size, 2.0, (20_000, pairs))
    found = np.mean(stats.ttest_1samp(samples, 0.0, axis=1).pvalue < statistics.LEVEL / tests)
    assert found == pytest.approx(statistics.POWER, abs=5 * math.sqrt(0.8 * 0.2 / 20_000))


# Tasks, methods, training


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


def test_every_task_and_every_method_is_in_a_setting() -> None:
    assert {task for task, _ in PAIRS} == TASKS.keys() - LEARNED_PARTS.keys() - {"gated"}
    assert tasks.STORED.recipes.keys() == {task for task, _ in PAIRS} | {"gated"}
    stored, learned = (
        {name for name, method in METHODS.items() if method.family == family} for family in (STORED, LEARNED)
    )
    assert {method for _, method in PAIRS} == METHODS.keys() - stored - learned
    assert {*methods_of("stored")} == {EXACT.name, *stored}
    assert tasks.LEARNED.recipes.keys() == LEARNED_PARTS.keys()
    assert {*methods_of("learned")} == {EXACT.name, *learned} == {"exact", "rebuild"}


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
        assert 0 < one.loss < 10 and 0 <= one.accuracy <= 1 and one.kept_bytes > 0
        assert one.curve[0] == pytest.approx(exact.curve[0], rel=2e-5)
        if method in ("exact", "fewbit3", "stochastic2", "norms"):
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
    assert four.kept_bytes < six.kept_bytes < eight.kept_bytes < 0.5 * exact.kept_bytes
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
    assert converted.kept_bytes < exact.kept_bytes


def _affine(model: Transformer) -> None:
    """Give norms a scale and a shift that matter."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.5, 2.0)
            nn.init.normal_(module.bias)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", [tasks.text_model, tasks.image_model], ids=["text", "image"])
def test_methods_change_what_they_say(method: str, make: Callable[[Recipe], Transformer]) -> None:
    """And not the function; with rows of the norms that are not those of the first step."""
    model = make(dataclasses.replace(TINY.recipes["digits"], layers=2))
    _affine(model)
    text = make is tasks.text_model
    inputs = torch.randint(90, (3, PATCHES)) if text else torch.randn(3, PATCHES, tasks.PATCH**2)
    before = model(inputs)
    METHODS[method].apply(model)
    np.testing.assert_allclose(model(inputs).detach(), before.detach(), rtol=1e-4, atol=1e-4)
    kinds = [type(module).__name__ for module in model.modules()]
    baseline = 0 if method in ("norms", "norms-fewbit3") else 5
    assert (kinds.count("LayerNorm"), kinds.count("MSLayerNorm")) == (baseline, 5 - baseline)
    there = METHODS[method].activation is None
    assert kinds.count("GELU") == (2 if there else 0)
    affine = sum(isinstance(module, nn.LayerNorm) and module.elementwise_affine for module in model.modules())
    assert affine == (0 if method.startswith("norms") else 5)


def test_methods_of_one_argument_are_refused_for_gates() -> None:
    with pytest.raises(ValueError, match="fewbit3: expected an MLP with GELU, got a gated one"):
        METHODS["fewbit3"].apply(TASKS["gated"].model(TINY.recipes["gated"]))


def test_adapters_alone_are_trained(store: Path) -> None:
    model = tasks.text_model(TINY.recipes["lora"])
    inputs = torch.randint(90, (3, 12))
    before = model(inputs)
    training.add_adapters(model, 2, seed=0)
    assert torch.equal(model(inputs), before)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 4 * 2
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)


def test_autocast(store: Path) -> None:
    """The large setting's path: bfloat16 products, losses in float32."""
    half = dataclasses.replace(TINY, autocast=True)
    for method in ("exact", "fewbit3", "inverted1", "stochastic2", "norms-fewbit3"):
        result = training.train(TASKS["lora"], METHODS[method], half, 0, store / "half")
        assert result.loss is not None and 0 < result.loss < 10


def test_a_run_that_diverges(store: Path) -> None:
    recipe = dataclasses.replace(TINY.recipes["characters"], steps=4, rate=math.inf)
    setting = dataclasses.replace(TINY, recipes={"characters": recipe})
    result = training.train(TASKS["characters"], METHODS["fewbit1"], setting, 0, store / "inf")
    assert (result.diverged, result.loss, result.accuracy) == (1, None, None)
    assert result.curve[0] is not None and result.curve[1:] == [None] * 3


def test_thinned() -> None:
    """Every loss is in one mean, and the means are in order."""
    assert training.thinned([1.0, math.inf]) == [1.0, None]
    assert training.thinned([float(i) for i in range(2 * training.POINTS)])[:2] == [0.5, 2.5]
    means = training.thinned([float(i) for i in range(125)])
    assert len(means) == training.POINTS and means == sorted(means) and means[0] == 0.5 and means[-1] == 123.0


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


def test_texts_are_real_and_apart() -> None:
    """The source code is Python, the prose is not; both are of the alphabet."""
    assert tasks.code().count("\ndef ") > 500 > 50 > tasks.prose().count("\ndef ")
    assert len(tasks.prose()) > 300_000
    assert set(tasks.code()) | set(tasks.prose()) <= set(tasks.ALPHABET)


def test_text_is_followed_by_its_next_characters() -> None:
    recipe = TINY.recipes["characters"]
    text = "".join(random.Random(0).choices(tasks.ALPHABET, k=1000))
    data = tasks.text_data(lambda: text, recipe, 0, "cpu")
    for (inputs, targets), part in ((next(data.training), text[:900]), (data.validation[0], text[900:])):
        for row, following in zip(inputs.tolist(), targets.tolist(), strict=True):
            whole = "".join(tasks.ALPHABET[i] for i in [*row, following[-1]])
            assert row[1:] == following[:-1] and whole in part


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


@pytest.mark.parametrize(
    "losses",
    [{"exact": [1.0, 2.0], "fewbit1": [1.0, 2.0]}, {"fewbit1": [1.0, 2.0, 3.0]}, {}],
    ids=["two", "alone", "none"],
)
def test_too_few_runs_to_compare(losses: dict[str, list[float | None]], tmp_path: Path) -> None:
    runs = _runs(losses)
    assert summary.compare(runs) == []
    assert plot.draw(runs, [], {"characters": 2}, tmp_path / "a.json") == []


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


def test_processes(tmp_path: Path) -> None:
    """Runs of other processes are those of this one."""
    jobs = [("digits", "stochastic1", 0), ("digits", "exact", 1)]
    found = list(run.run_all(jobs, THREE_STEPS, tmp_path, workers=1))
    for one, (task, method, seed) in zip(found, jobs, strict=True):
        here = training.train(TASKS[task], METHODS[method], THREE_STEPS, seed, tmp_path)
        assert dataclasses.replace(one, seconds=0.0) == dataclasses.replace(here, seconds=0.0)


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
            exact, converted = (runs[task, method, seed] for method in ("exact", "rebuild"))
            assert all(converted[name] == exact[name] for name in ("loss", "curve"))
            assert converted["kept_bytes"] < exact["kept_bytes"]
