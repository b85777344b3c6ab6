"""The README: its numbers are those that the fits, the counts and the committed tables give; its Python runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fitact.fitter.fit import InvertedFit, StepFit, read
from fitact.runtime.memory_report import measure
from fitact.runtime.models import Training
from fitact.runtime.models_reference import gelu_mlp
from fitact.runtime.models_sources import hugging_face

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text("utf-8")


def shipped(name: str) -> Any:
    return read(ROOT / "generated" / "fits" / f"{name}.json")


def flat(text: str = TEXT) -> str:
    return re.sub(r"\s+", " ", text)


def test_saved_bytes() -> None:
    """The table of the first screen is what the command above it counts."""
    rows = {row.name: row.bytes for row in measure(gelu_mlp, batch=2, seq=4096).rows}
    names = {
        "stock": "stock",
        "Few-Bit, 3 bits": "fewbit, 3 bits",
        "ReLU mixture, 2 bits": "relumix, 2 bits",
        "Inverted, output and 1 bit": "inverted",
        "PyTorch's compiler with a memory budget of 0.7, exact gradients": "compiler, budget 0.7",
    }
    found = re.findall(r"^\| ([^|]+) \| ([\d,]+) \| ([\d.]+) % \|$", TEXT, re.MULTILINE)
    assert [name for name, _, _ in found] == list(names)
    for name, count, share in found:
        kept = rows[names[name]]
        assert (f"{kept:,}", f"{100 * kept / rows['stock']:.1f}") == (count, share)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "training", "sizes", "said"),
    [
        (
            "llama",
            Training(lora=("q_proj", "v_proj")),
            {"seq": 2048},
            r"LLaMA-7B with LoRA keeps (\d+) to (\d+) % less",
        ),
        ("bert", Training(), {"batch": 8}, r"BERT (\d+) to (\d+) %"),
    ],
    ids=["llama", "bert"],
)
def test_saved_shares(model: str, training: Training, sizes: dict[str, int], said: str) -> None:
    rows = measure(hugging_face(model), training=training, budgets=(), **sizes).rows
    kept = {row.name: 100 - 100 * row.bytes / rows[0].bytes for row in rows}
    found = re.search(said, flat())
    assert found is not None
    assert (f"{kept['fewbit, 3 bits']:.0f}", f"{kept['inverted']:.0f}") == found.groups()


def test_python_runs() -> None:
    """The first block of Python, as a reader would paste it."""
    block = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(block, names)
    assert type(names["model"][1]).__name__ == "GeluFewbit3"
    assert names["model"][0].weight.grad.abs().sum() > 0


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
    for fit, of_f, of_slope in ((mixture, stated[0], stated[2]), (steps, stated[1], stated[3])):
        assert isinstance(fit, StepFit)
        level = fit(x)
        slope = np.sqrt(np.trapezoid((fit.activation.derivative(x) - level) ** 2, x))
        area = np.concatenate([[0.0], np.cumsum((level[1:] + level[:-1]) / 2 * np.diff(x))])
        value = fit.activation.value(x)
        distance = np.sqrt(np.trapezoid((value - value[0] - area) ** 2, x))
        assert slope == pytest.approx(of_slope, abs=0.006)
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


def test_instructions() -> None:
    table = json.loads((ROOT / "benchmarks" / "results" / "instructions.json").read_text())
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \|$", TEXT, re.MULTILINE)
    assert len(rows) == 3
    for name, *stated in rows:
        found = [table["kernels"][f"{name} {part} bf16 sm_90"]["instructions"] for part in ("forward", "backward")]
        assert [f"{number:.0f}" for number in found] == stated


def test_conversion() -> None:
    """The table beside the papers' figures is that of the committed counts."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "conversion.json").read_text())["rows"]

    def saved(model: str, setting: str, what: str) -> str:
        row = next(
            row
            for row in rows
            if (row["model"], row["what"]) == (model, what) and row["setting"].startswith(setting)
        )
        before, after = (row["stock"], row["kept"]) if row["of"] == "kept" else (row["whole_stock"], row["whole"])
        return f"{100 - 100 * after / before:.1f}"

    methods = {
        "ViT-B/16": ("ReGELU2", "MS-LN", "ReGELU2 and MS-LN"),
        "LLaMA-7B": ("ReSiLU2", "MS-RMSNorm", "ReSiLU2 and MS-RMSNorm"),
    }
    expected = {
        "ViT-B, LoRA: ReGELU2 / norms / both": [saved("ViT-B/16", "LoRA", what) for what in methods["ViT-B/16"]],
        "ViT-B, full tuning: both": [saved("ViT-B/16", "full", "ReGELU2 and MS-LN")],
        "LLaMA-7B, QLoRA: ReSiLU2 / norms / both": [saved("LLaMA-7B", "", what) for what in methods["LLaMA-7B"]],
        "BERT-base: Inverted": [saved("BERT-base", "full", "Inverted")],
        "Mistral-7B: Inverted": [saved("Mistral-7B", "LoRA", "Inverted")],
    }
    for label, numbers in expected.items():
        assert f"| {label} |" in TEXT
        row = next(line for line in TEXT.splitlines() if line.startswith(f"| {label} |"))
        assert row.split(" | ")[-1].removesuffix(" |") == " / ".join(numbers)
    kept = next(row for row in rows if row["setting"].startswith("LoRA") and row["what"] == "ReGELU2 and MS-LN")
    share = 100 - 100 * kept["kept"] / kept["stock"]
    assert f"ViT-B with LoRA and [shared norms](#memory-sharing-norms) {share:.0f} %" in flat()


def test_training() -> None:
    """The table of final losses is that of the committed runs."""
    comparisons = json.loads((ROOT / "benchmarks" / "results" / "convergence.json").read_text())["comparisons"]
    found = {
        (one["task"], one["method"]): one
        for one in comparisons
        if (one["metric"], one["family"]) == ("loss", "exact")
    }
    methods = {
        **{f"Few-Bit, {k} bit{'s' * (k > 1)}": f"fewbit{k}" for k in (1, 2, 3, 4)},
        "ReLU mixture, 2 bits": "relumix2",
        "inverted, 1 bit": "inverted1",
        "memory-sharing norms": "norms",
        **{f"input quantised stochastically, {k} bit{'s' * (k > 1)}": f"stochastic{k}" for k in (1, 2, 3, 4)},
    }
    for label, method in methods.items():
        line = next(line for line in TEXT.splitlines() if line.startswith(f"| {label} | ") and "±" in line)
        cells = line.strip("| ").split(" | ")[1:]
        for task, digits, cell in zip(("characters", "digits", "lora"), (3, 3, 4), cells, strict=True):
            one = found[task, method]
            number = f"{one['difference']:+.{digits}f} ± {one['half']:.{digits}f}".replace("-", "−")
            assert cell == (f"**{number}**" if one["distinguishable"] else number)


def test_times_on_a_cpu() -> None:
    """The table of times is that of the committed measurements."""
    ratios = {}
    for mode in ("", "_inductor"):
        results = json.loads((ROOT / "benchmarks" / "results" / f"activations_cpu{mode}.json").read_text())
        for group in results["groups"]:
            for row in group["rows"]:
                ratios[row["label"], group["dtype"], mode] = row["ratio"]
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", TEXT, re.MULTILINE)
    assert len(rows) == 3
    for name, *stated in rows:
        found = [ratios[name, dtype, mode] for mode in ("", "_inductor") for dtype in ("float32", "bfloat16")]
        assert [f"{ratio:.1f}" for ratio in found] == stated
    overhead = json.loads((ROOT / "benchmarks" / "results" / "overhead_cpu.json").read_text())["ratio"]
    ours = [ratio for name, ratio in overhead.items() if name not in ("nothing", "F.gelu")]
    assert f"a call costs {min(ours):.1f} to {max(ours):.1f} times one whose kernels do nothing" in flat()
