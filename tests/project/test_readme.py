"""The README and its pages: numbers are those that fits, counts and committed tables give; the Python runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN

import fitact
from benchmarks import saved as counts
from fitact.fitter.numerics.dtypes import rounded
from fitact.fitter.records.fit import InvertedFit, StepFit
from fitact.fitter.records.reading import read
from fitact.planning.make import Planner, Problem
from fitact.planning.programme import peak
from fitact.planning.record import GIB
from fitact.runtime.choose.compare import measure
from fitact.runtime.choose.policies import BASELINE, FULL
from fitact.runtime.measure.devices import USUAL, device_of
from fitact.runtime.measure.prepare import Training, prepare
from fitact.runtime.measure.reference import gelu_mlp
from fitact.runtime.measure.sources import hugging_face
from fitact.runtime.saving.modules import Attached

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
PAGES = ("converting", "evidence", "measuring", "methods", "saving", "speed")
TEXT = "\n".join([README, *((ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in PAGES)])


def shipped(name: str) -> Any:
    return read(ROOT / "generated" / "fits" / f"{name}.json")


def flat(text: str = TEXT) -> str:
    return re.sub(r"\s+", " ", text)


def test_saved_bytes() -> None:
    """The table of the first screen is what the command above it counts."""
    rows = {row.name: row.bytes for row in measure(gelu_mlp, batch=2, seq=4096).rows}
    names = {
        "PyTorch as it is": "baseline",
        "Few-Bit, 3 bits": "fewbit, 3 bits",
        "ReLU mixture, 2 bits": "relumix, 2 bits",
        "Inverted, output and 1 bit": "inverted",
        "Saving, exact": "saving, exact",
        "Saving, rounding: 8 bits": "saving, rounding",
        "Saving, coarse: 4 bits": "saving, coarse",
        "PyTorch's compiler with a memory budget of 0.9, exact gradients": "compiler, budget 0.9",
        "The same with `fitact.compile`, codes of 8 bits": "compiler, 0.9 and codes",
    }
    found = re.findall(r"^\| ([^|]+) \| ([\d,]+) \| ([\d.]+) % \|$", README, re.MULTILINE)
    assert [name for name, _, _ in found] == list(names)
    for name, count, share in found:
        saved = rows[names[name]]
        assert (f"{saved:,}", f"{100 * saved / rows['baseline']:.1f}") == (count, share)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "training", "sizes", "said"),
    [
        (
            "llama",
            Training(lora=("q_proj", "v_proj")),
            {"seq": 2048},
            r"LLaMA-7B with LoRA on q and v saves (\d+) % less .* alone save (\d+) to (\d+) % and \d+ to ",
        ),
        (
            "bert",
            Training(),
            {"batch": 8},
            r"and BERT (\d+) % less.* alone save \d+ to \d+ % and (\d+) to (\d+) % less",
        ),
    ],
    ids=["llama", "bert"],
)
def test_saved_shares(model: str, training: Training, sizes: dict[str, int], said: str) -> None:
    rows = measure(hugging_face(model), training=training, budgets=(), **sizes).rows
    saved = {row.name: 100 - 100 * row.bytes / rows[0].bytes for row in rows}
    found = re.search(said, flat())
    assert found is not None
    assert (
        tuple(f"{saved[name]:.0f}" for name in ("saving, exact", "fewbit, 3 bits", "inverted")) == found.groups()
    )


def test_python_runs() -> None:
    """The first block of Python, as a reader would paste it."""
    block = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(block, names)
    assert isinstance(names["model"], Attached)
    assert names["model"][0].weight.grad.abs().sum() > 0


def test_the_first_screen() -> None:
    """The README is short, and its picture is drawn from the committed counts, with every way for every model."""
    assert README.count("\n") < 300
    rows = json.loads(counts.RESULTS.read_text("utf-8"))["rows"]
    assert [row["model"] for row in rows] == list(counts.MODELS)
    above, less, gained = set(), [], []
    for row in rows:
        ways = row["ways"]
        assert list(ways) == list(counts.WAYS)
        exact, rounding, coarse, codes = (ways[label]["share"] for label in list(counts.WAYS)[2:])
        compiler = ways["compiler, budget 0.9"]["share"]
        assert coarse < rounding < exact < min(1, ways["selective checkpointing"]["share"])
        assert exact < 1.00015 * compiler and codes < compiler
        above |= {row["model"].partition("-")[0]} if exact > compiler else set()
        less.append(100 * (1 - codes / compiler))
        gained.append((100 - 100 * exact, 100 - 100 * rounding))
        assert all(way["share"] == way["bytes"] / row["baseline"] for way in ways.values())
        assert all(way["again"] < 0.005 for way in ways.values())  # so the README says of products
    assert above == {"LLaMA"}
    spans = [f"{min(each):.0f} to {max(each):.0f} %" for each in zip(*gained, strict=True)]
    said = "{} of the bytes that autograd saves, with gradients that are PyTorch's **bit for bit**, and {} with"
    assert said.format(*spans) in flat()
    said = "for every model of the picture, and no more than the compiler saves, except for 0.01 % in LLaMA"
    assert said in flat()
    table = re.findall(r"^\| .* \| ([\d,]+) \| [\d.]+ % \|$", README, re.MULTILINE)
    bytes_of = [int(text.replace(",", "")) for text in table]
    of_mlp = 100 * (1 - bytes_of[-1] / bytes_of[-2])
    assert f"saves {of_mlp:.0f} % of it in the MLP below, and {min(less):.0f} to {max(less):.0f} %" in flat()


@pytest.mark.parametrize("name", [pytest.param("BERT-base", marks=pytest.mark.full), "ViT-B/16"])
def test_the_picture_again(name: str) -> None:
    source, training, sizes, _ = counts.MODELS[name]
    rows = {row.name: row.bytes for row in measure(source, training=training, budgets=(), **sizes).rows}
    (row,) = (row for row in json.loads(counts.RESULTS.read_text("utf-8"))["rows"] if row["model"] == name)
    assert rows["baseline"] == row["baseline"]
    for label in ("selective checkpointing", *list(counts.WAYS)[2:5]):
        assert rows[counts.WAYS[label][0]] == row["ways"][label]["bytes"]


def test_errors_of_the_step_function() -> None:
    fit = shipped("gelu_fewbit3")
    assert (
        f"its error is {fit.error['rms']:.3f} (root mean square on [−10, 10]) and at most {fit.error['max']:.2f}."
        in flat()
    )


def test_errors_of_the_mixture() -> None:
    """The distances from f and from f', by quadrature on a fine grid."""
    x = np.linspace(-10, 10, 2_000_001)
    found = re.search(
        r"distance from `f` is ([\d.]+) \(Few-Bit: ([\d.]+)\), that from `f′` ([\d.]+) \(Few-Bit: ([\d.]+)\)",
        flat(),
    )
    assert found is not None
    stated = [float(text) for text in found.groups()]
    mixture, steps = shipped("gelu_relumix2"), shipped("gelu_fewbit2")
    for fit, of_f, of_derivative in ((mixture, stated[0], stated[2]), (steps, stated[1], stated[3])):
        assert isinstance(fit, StepFit)
        level = fit(x)
        derivative = np.sqrt(np.trapezoid((fit.activation.derivative(x) - level) ** 2, x))
        area = np.concatenate([[0.0], np.cumsum((level[1:] + level[:-1]) / 2 * np.diff(x))])
        value = fit.activation.value(x)
        distance = np.sqrt(np.trapezoid((value - value[0] - area) ** 2, x))
        assert derivative == pytest.approx(of_derivative, abs=0.006)
        assert distance == pytest.approx(of_f, abs=0.006)


def test_errors_of_inverted_fits() -> None:
    rows = re.findall(
        r"^\| `(\w+)`(?:, (\d) bits?)? \| ([\d.]+) \(([\d.]+)\) \| ([\d.]+) \(([\d.]+)\) \| ([\d.]+) \|$",
        TEXT,
        re.MULTILINE,
    )
    assert len(rows) == 6
    for name, bits, *stated in rows:
        fit = shipped(f"{name}_inverted{bits}" if bits else name)
        assert isinstance(fit, InvertedFit)
        numbers = [
            number for dtype in ("bfloat16", "float16") for number in (fit.error[dtype], fit.floor[dtype])
        ] + [fit.error["float32"]]
        for text, number in zip(stated, numbers, strict=True):
            assert f"{number:.{len(text.partition('.')[2])}f}" == text, (name, text, number)


def test_values_of_composed_activations() -> None:
    """How far the values of a half-precision model move, over all inputs."""
    found = re.search(r"by up to ([\d.]+) in bfloat16 and ([\d.]+) in float16 for inputs from -8 to 8", flat())
    assert found is not None
    composed = {"gelu_new": "gelu_tanh", "quick_gelu": "quick_gelu"}
    for dtype, stated in zip((torch.bfloat16, torch.float16), found.groups(), strict=True):
        x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        x = x[x.abs() <= 8]
        far = [ACT2FN[theirs](x) - fitact.activation(ours, bits=3)(x) for theirs, ours in composed.items()]
        largest = max(float(one.abs().max()) for one in far)
        assert f"{largest:.{len(stated.partition('.')[2])}f}" == stated


def test_errors_of_inverted_fits_under_autocast() -> None:
    """Of x in float32, of which more share one output in half precision."""
    found = re.search(
        r"are up to (\d+) % larger: in bfloat16 ([\d.]+) for `gelu` with 1 bit and ([\d.]+) with 2, ([\d.]+) and "
        r"([\d.]+) for `silu`",
        flat(),
    )
    assert found is not None
    x = np.concatenate([np.linspace(-20, 20, 400_001), np.linspace(-4, 4, 2_000_001)])
    x = x.astype(np.float32).astype(np.float64)
    shares, stated = [], dict(zip(("gelu1", "gelu2", "silu1", "silu2"), found.groups()[1:], strict=True))
    for path in sorted((ROOT / "generated" / "fits").glob("*_inverted[0-9].json")):
        fit = shipped(path.stem)
        assert isinstance(fit, InvertedFit)
        derivative = fit.activation.derivative(x)
        for dtype in ("bfloat16", "float16"):
            y = rounded(fit.activation.value(x), dtype)
            off = np.abs(fit.evaluate(y, fit.code(x, dtype), dtype) - derivative)
            worst = float((off / np.maximum(1, np.abs(derivative))).max())
            shares.append(worst / fit.error[dtype] - 1)
            if dtype == "bfloat16" and (name := path.stem.replace("_inverted", "")) in stated:
                assert f"{worst:.4f}" == stated[name]
    assert f"{100 * max(shares):.0f}" == found[1]


def test_gradients_that_exact_loses_under_autocast() -> None:
    assert "about one in a thousand of normal inputs" in flat()
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = fitact.activation("hardtanh", method="output")(x)
    (found,) = torch.autograd.grad(y, x, torch.ones_like(y))
    (expected,) = torch.autograd.grad(torch.nn.functional.hardtanh(x).sum(), x)
    lost = found != expected
    assert 0.0008 < lost.float().mean() < 0.0012
    assert (found[lost] == 0).all()
    assert (x[lost].abs() > 0.998).all()


def test_times_of_kernels() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "gpu" / "kernels.json").read_text())["rows"]
    times = {
        (row["function"], row["variant"]): (row["forward_ms"], row["backward_ms"])
        for row in rows
        if row["function"] in ("gelu", "silu") and row["dtype"] == "bfloat16"
    }

    def ratios(variant: str, of: Any) -> list[float]:
        return [of(times[name, f"{name}_{variant}"]) / of(times[name, "eager"]) for name in ("gelu", "silu")]

    fitted, published = (ratios(variant, lambda both: both[1]) for variant in ("inverted1", "inverted_published"))
    for at, words in enumerate(("backward of `gelu` takes", "For `silu` these are")):
        assert f"{words} {fitted[at]:.2f}" in flat()
        assert f"{published[at]:.2f} (" in flat() or f" {published[at]:.2f}. " in flat()


def test_times_on_a_cpu() -> None:
    overhead = json.loads((ROOT / "benchmarks" / "results" / "overhead_cpu.json").read_text())["ratio"]
    ours = [ratio for name, ratio in overhead.items() if name not in ("nothing", "F.gelu")]
    assert f"a call costs {min(ours):.1f} to {max(ours):.1f} times one whose kernels do nothing" in flat()


def test_times_in_the_context() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "saving_cpu.json").read_text())
    assert {(one["width"], one["tokens"], results["threads"]) for one in results["layers"]} == {(512, 1024, 1)}
    longer = [100 * one["time"]["exact"] - 100 for one in results["layers"]]
    coded = [100 * one["time"]["rounding"] - 100 for one in results["layers"]]
    said = "takes {:.0f} to {:.0f} % longer, with 8 bits {:.0f} to {:.0f} %"
    assert said.format(min(longer), max(longer), min(coded), max(coded)) in flat()
    gated, linear = (results["microseconds"][label]["ratio"] for label in ("LayerNorm, SwiGLU", "linear"))
    assert f"takes {gated:.1f} times as long with it" in flat()
    assert f"where nothing can be saved, {linear:.1f} times" in flat()


@pytest.mark.full
def test_the_plan() -> None:
    """What is recomputed beyond the baseline, beside checkpointing of all blocks; and the least memory."""
    subject = prepare(hugging_face("llama"), Training(lora=("all",)), batch=8, seq=2048)
    planner = Planner(subject, "adamw", device_of(USUAL))
    problem = Problem(planner.costs, "exact")
    segments = planner.costs.segments
    full = sum(
        one.count * (one.costs[FULL].work.flops - one.costs[BASELINE].work.flops) for one in segments if one.paths
    )
    plans = [planner.plan(24, error) for error in ("rounding", "exact")]
    less = [100 - 100 * plan.flops_again / full for plan in plans]
    bytes_of = (
        planner.fixed + planner.costs.baseline.peak,
        24 * GIB - planner.fixed - peak(problem.stages, problem.every(FULL)),
        planner.least("exact"),
        planner.fixed + peak(problem.stages, problem.every(FULL)),
    )
    found = re.search(
        r"needs (\d+) GiB as it is. In 24 GiB, where full checkpointing leaves ([\d.]+) GiB, the plan recomputes "
        r"(\d+) % less .* exact` (\d+) %. And (\d+) GiB .* needs ([\d.]+) GiB",
        flat(),
    )
    assert found is not None
    baseline, left, rounding, exact, least, checkpointed = found.groups()
    assert (rounding, exact) == tuple(f"{one:.0f}" for one in less)
    stated = [float(one) for one in (baseline, left, least, checkpointed)]
    assert stated == pytest.approx([one / GIB for one in bytes_of], rel=0.02)
