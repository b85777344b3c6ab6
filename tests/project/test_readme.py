"""The README and its pages: numbers are those that fits, counts and committed tables give; the Python runs."""

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN

import fitact
from benchmarks import saved as counts
from fitact.fitter.numerics import rounded
from fitact.planning import GIB
from fitact.planning.make import Planner, allowed, every
from fitact.planning.programme import peak
from fitact.runtime.choose import BASELINE, FULL, measure
from fitact.runtime.measure import USUAL, Training, device_of, hugging_face, prepare
from fitact.runtime.measure.reference import gelu_mlp
from fitact.runtime.saving.modules import Attached
from tests.codegen.test_standalone import shipped
from tests.conftest import ROOT
from tests.support.generated import HALVES, patterns

README = (ROOT / "README.md").read_text("utf-8")
PAGES = ("converting", "evidence", "measuring", "methods", "saving", "speed")
TEXT = "\n".join([README, *((ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in PAGES)])
FLAT = " ".join(TEXT.split())
COUNTED = json.loads(counts.RESULTS.read_text("utf-8"))["rows"]


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def numbers(pattern: str) -> tuple[str, ...]:
    """Return the numbers that the pages state, as texts, in the groups of a pattern."""
    actual = re.search(pattern, FLAT)
    assert actual is not None, pattern
    return actual.groups()


def stated_as(text: str, number: float) -> str:
    """Return a number with as many digits after the point as a text has."""
    return f"{number:.{len(text.partition('.')[2])}f}"


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
    actual = re.findall(r"^\| ([^|]+) \| ([\d,]+) \| ([\d.]+) % \|$", README, re.MULTILINE)
    assert [name for name, _, _ in actual] == list(names)
    for name, count, share in actual:
        saved = rows[names[name]]
        assert (f"{saved:,}", f"{100 * saved / rows['baseline']:.1f}") == (count, share)


def test_python_runs() -> None:
    """The first block of Python, as a reader would paste it."""
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0], names)
    assert isinstance(names["model"], Attached) and names["model"][0].weight.grad.any()


def test_the_first_screen() -> None:
    """The README is short, and its picture is drawn from the committed counts, with every way for every model."""
    assert README.count("\n") < 300
    assert [row["model"] for row in COUNTED] == list(counts.MODELS)
    above, less, gained = set(), [], []
    for row in COUNTED:
        ways = row["ways"]
        assert list(ways) == list(counts.WAYS)
        exact, rounding, coarse, codes = (ways[label]["share"] for label in list(counts.WAYS)[2:])
        compiler = ways["compiler, budget 0.9"]["share"]
        assert coarse < rounding < exact < min(1, ways["selective checkpointing"]["share"])
        assert exact < 1.00015 * compiler and codes < compiler
        above |= {row["model"].partition("-")[0]} if exact > compiler else set()
        less.append(100 * (1 - codes / compiler))
        gained.append((100 - 100 * exact, 100 - 100 * rounding))
        assert all(each["share"] == each["bytes"] / row["baseline"] for each in ways.values())
        assert all(each["again"] < 0.005 for each in ways.values())  # so the README says of products
    assert above == {"LLaMA"}
    spans = [f"{min(each):.0f} to {max(each):.0f} %" for each in zip(*gained, strict=True)]
    table = re.findall(r"^\| .* \| ([\d,]+) \| [\d.]+ % \|$", README, re.MULTILINE)
    *_, compiler, codes = (int(text.replace(",", "")) for text in table)
    of_mlp = 100 * (1 - codes / compiler)
    llama, bert = (
        100 - 100 * row["ways"][list(counts.WAYS)[2]]["share"]
        for name in ("LLaMA-7B, LoRA", "BERT-base")
        for row in COUNTED
        if row["model"] == name
    )
    for said in (
        f"LLaMA-7B with LoRA saves {llama:.0f} % less and BERT {bert:.0f} % less",
        "{} of the bytes that autograd saves, with gradients that are PyTorch's **bit for bit**, and {} with",
        "for every model of the picture, and no more than the compiler saves, except for 0.01 % in LLaMA",
        f"saves {of_mlp:.0f} % of it in the MLP below, and {min(less):.0f} to {max(less):.0f} %",
    ):
        assert said.format(*spans) in FLAT


@pytest.mark.parametrize("name", [pytest.param("BERT-base", marks=pytest.mark.full), "ViT-B/16"])
def test_the_picture_again(name: str) -> None:
    source, training, sizes, _ = counts.MODELS[name]
    rows = {row.name: row.bytes for row in measure(source, training=training, budgets=(), **sizes).rows}
    (row,) = (row for row in COUNTED if row["model"] == name)
    assert rows["baseline"] == row["baseline"]
    for label in ("selective checkpointing", *list(counts.WAYS)[2:5]):
        assert rows[counts.WAYS[label][0]] == row["ways"][label]["bytes"]


def test_errors_of_the_step_function_and_of_the_mixture() -> None:
    """The distances from f and from f', by quadrature on a fine grid."""
    error = shipped("gelu_fewbit3").error
    assert f"error is {error['rms']:.3f} (root mean square on [−10, 10]) and at most {error['max']:.2f}." in FLAT
    x = np.linspace(-10, 10, 2_000_001)
    said = r"distance from `f` is ([\d.]+) \(Few-Bit: ([\d.]+)\), that from `f′` ([\d.]+) \(Few-Bit: ([\d.]+)\)"
    stated = [float(text) for text in numbers(said)]
    for name, *of_f_and_derivative in zip(("relumix", "fewbit"), stated[:2], stated[2:], strict=True):
        fit = shipped(f"gelu_{name}2")
        level, value = fit(x), fit.activation.value(x)
        area = np.concatenate([[0.0], np.cumsum((level[1:] + level[:-1]) / 2 * np.diff(x))])
        off = value - value[0] - area, fit.activation.derivative(x) - level
        distances = [np.sqrt(np.trapezoid(each**2, x)) for each in off]
        assert distances == pytest.approx(of_f_and_derivative, abs=0.006)


def test_errors_of_inverted_fits() -> None:
    rows = re.findall(
        r"^\| `(\w+)`(?:, (\d) bits?)? \| ([\d.]+) \(([\d.]+)\) \| ([\d.]+) \(([\d.]+)\) \| ([\d.]+) \|$",
        TEXT,
        re.MULTILINE,
    )
    assert len(rows) == 6
    for name, bits, *stated in rows:
        fit = shipped(f"{name}_inverted{bits}" if bits else name)
        errors = [each[dtype] for dtype in ("bfloat16", "float16") for each in (fit.error, fit.floor)]
        assert [*map(stated_as, stated, [*errors, fit.error["float32"]])] == stated, name


def test_values_of_composed_activations() -> None:
    """How far the values of a half-precision model move, over all inputs."""
    said = numbers(r"by up to ([\d.]+) in bfloat16 and ([\d.]+) in float16 for inputs from -8 to 8")
    composed = {"gelu_new": "gelu_tanh", "quick_gelu": "quick_gelu"}
    for dtype, stated in zip(HALVES, said, strict=True):
        x = patterns(dtype)
        x = x[x.abs() <= 8]
        far = [ACT2FN[theirs](x) - fitact.activation(ours, bits=3)(x) for theirs, ours in composed.items()]
        assert stated_as(stated, max(float(each.abs().max()) for each in far)) == stated


def test_errors_of_inverted_fits_under_autocast() -> None:
    """Of x in float32, of which more share one output in half precision."""
    said = r"are up to (\d+) % larger: in bfloat16 ([\d.]+) for `gelu` with 1 bit and ([\d.]+) with 2, "
    larger, *errors = numbers(said + r"([\d.]+) and ([\d.]+) for `silu`")
    x = np.concatenate([np.linspace(-20, 20, 400_001), np.linspace(-4, 4, 2_000_001)])
    x = x.astype(np.float32).astype(np.float64)
    shares, stated = [], dict(zip(("gelu1", "gelu2", "silu1", "silu2"), errors, strict=True))
    for path in sorted((ROOT / "generated" / "fits").glob("*_inverted[0-9].json")):
        fit = shipped(path.stem)
        derivative = fit.activation.derivative(x)
        for dtype in ("bfloat16", "float16"):
            y = rounded(fit.activation.value(x), dtype)
            off = np.abs(fit.evaluate(y, fit.code(x, dtype), dtype) - derivative)
            worst = float((off / np.maximum(1, np.abs(derivative))).max())
            shares.append(worst / fit.error[dtype] - 1)
            if dtype == "bfloat16" and (name := path.stem.replace("_inverted", "")) in stated:
                assert f"{worst:.4f}" == stated[name]
    assert f"{100 * max(shares):.0f}" == larger


def test_gradients_that_exact_loses_under_autocast() -> None:
    assert "about one in a thousand of normal inputs" in FLAT
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = fitact.activation("hardtanh", method="output")(x)
    (actual,) = torch.autograd.grad(y, x, torch.ones_like(y))
    (expected,) = torch.autograd.grad(torch.nn.functional.hardtanh(x).sum(), x)
    lost = actual != expected
    assert 0.0008 < lost.float().mean() < 0.0012
    assert not actual[lost].any() and (x[lost].abs() > 0.998).all()


def test_times() -> None:
    """Of kernels on a GPU, of calls on a CPU, and of layers in the context."""
    rows = [row for row in result("gpu/kernels")["rows"] if row["dtype"] == "bfloat16"]
    times = {(row["function"], row["variant"]): row["backward_ms"] for row in rows}
    for name, words in (("gelu", "backward of `gelu` takes"), ("silu", "For `silu` these are")):
        ratios = [times[name, f"{name}_inverted{of}"] / times[name, "eager"] for of in ("1", "_published")]
        fitted, published = (f"{ratio:.2f}" for ratio in ratios)
        assert f"{words} {fitted}" in FLAT and (f"{published} (" in FLAT or f" {published}. " in FLAT)
    ours = [ratio for name, ratio in result("overhead_cpu")["ratio"].items() if name not in ("nothing", "F.gelu")]
    assert f"a call costs {min(ours):.1f} to {max(ours):.1f} times one whose kernels do nothing" in FLAT
    results = result("saving_cpu")
    assert {(part["width"], part["tokens"], results["threads"]) for part in results["layers"]} == {(512, 1024, 1)}
    longer, coded = ([100 * part["time"][of] - 100 for part in results["layers"]] for of in ("exact", "rounding"))
    said = "takes {:.0f} to {:.0f} % longer, with 8 bits {:.0f} to {:.0f} %"
    assert said.format(min(longer), max(longer), min(coded), max(coded)) in FLAT
    gated, linear = (results["microseconds"][label]["ratio"] for label in ("LayerNorm, SwiGLU", "linear"))
    for said in (f"takes {gated:.1f} times as long with it", f"where nothing can be saved, {linear:.1f} times"):
        assert said in FLAT


@pytest.mark.full
def test_the_plan() -> None:
    """What is recomputed beyond the baseline, beside checkpointing of all blocks; and the least memory."""
    subject = prepare(hugging_face("llama"), Training(lora=("all",)), batch=8, seq=2048)
    planner = Planner(subject, "adamw", device_of(USUAL), error="rounding")
    segments = allowed(planner.costs, "exact")
    full = sum(
        segment.count * (segment.costs[FULL].work.flops - segment.costs[BASELINE].work.flops)
        for segment in planner.costs.segments
        if segment.paths
    )
    plans = [planner.plan(24, error) for error in ("rounding", "exact")]
    less = [100 - 100 * plan.flops_again / full for plan in plans]
    bytes_of = (
        planner.fixed + planner.costs.baseline.peak,
        24 * GIB - planner.fixed - peak(segments, every(segments, FULL)),
        planner.least("exact"),
        planner.fixed + peak(segments, every(segments, FULL)),
    )
    baseline, left, rounding, exact, least, checkpointed = numbers(
        r"needs (\d+) GiB as it is. In 24 GiB, where full checkpointing leaves ([\d.]+) GiB, the plan recomputes "
        r"(\d+) % less .* exact` (\d+) %. And (\d+) GiB .* needs ([\d.]+) GiB"
    )
    assert (rounding, exact) == tuple(f"{each:.0f}" for each in less)
    stated = [float(each) for each in (baseline, left, least, checkpointed)]
    assert stated == pytest.approx([each / GIB for each in bytes_of], rel=0.02)
