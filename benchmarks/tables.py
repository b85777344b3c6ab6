"""The tables of the documents, each from a record in `results`, by the names of the marks around them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import floor, log10
from pathlib import Path
from typing import Any

from benchmarks import budgets, layers
from benchmarks.evidence import blocks, checkpoints, convolutions
from benchmarks.evidence.run import tables as antibody
from benchmarks.gpu import tables as gpu
from benchmarks.gpu.tables import table

RESULTS = Path(__file__).parent / "results"
MARKED = re.compile(r"(<!-- table: ([\w ,-]+) -->).*?(<!-- end -->)", re.DOTALL)
Rows = Sequence[Sequence[str]]


@cache
def record(name: str) -> Any:
    """Return what a benchmark measured."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def filled(text: str) -> str:
    """Return a page with the tables between its marks, `<!-- table: NAME -->` and `<!-- end -->`."""
    text = gpu.filled(text, gpu.results())
    return MARKED.sub(lambda match: "\n\n".join([match[1], TABLES[match[2]](), match[3]]), text)


def of_rows(name: str, module: Any) -> str:
    """Return the table that a benchmark makes of its rows."""
    return "\n".join(module.table(record(name)["rows"]))


def kernels() -> str:
    """Return what the time of kernels on a GPU is of PyTorch's."""
    times = {
        (row["function"], row["variant"]): row["forward_ms"] + row["backward_ms"]
        for row in record("gpu/kernels")["rows"]
        if row.get("dtype") == "bfloat16"
    }
    rows = [
        [words, *(f"{times[name, f'{name}_{variant}'] / times[name, 'eager']:.2f}" for name in ("gelu", "silu"))]
        for words, variant in (("Few-Bit, 3 bits", "fewbit3"), ("inverted, 1 bit", "inverted1"))
    ]
    return table(["", "`gelu`", "`silu`"], rows)


def cpu() -> str:
    """Return what the time of kernels on a CPU is of PyTorch's."""
    groups = record("activations_cpu")["groups"]
    ratios = {(row["label"], group["dtype"]): row["ratio"] for group in groups for row in group["rows"]}
    dtypes, names = ("float32", "bfloat16"), ("gelu_fewbit3", "silu_fewbit3", "gelu_inverted1")
    rows = [[f"`{name}`", *(f"{ratios[name, dtype]:.1f}" for dtype in dtypes)] for name in names]
    return table(["times PyTorch's own", *dtypes], rows)


def contexts() -> str:
    """Return what the time in a context is of the baseline's, and what is saved."""
    names = {"llama": "LLaMA", "gpt2": "GPT-2 without dropout"}
    ways = ("exact", "rounding", "coarse", "selective checkpointing")
    rows = [
        [f"{names[layer['model']]}, {layer['dtype']}"]
        + [
            text
            for variant in ways
            for text in (f"{layer['time'][variant]:.2f}", f"{100 * layer['saved'][variant]:.0f} %")
        ]
        for layer in record("saving_cpu")["layers"]
    ]
    return table(["times the baseline's", *(text for variant in ways for text in (variant, "saves"))], rows)


def conversion() -> str:
    """Return how many per cent less is saved, beside the papers' figures."""

    def less(model: str, setting: str, *what: str) -> str:
        rows_of = {
            row["what"]: row
            for row in record("conversion")["rows"]
            if row["model"] == model and setting in row["setting"]
        }
        pairs = [
            (row["baseline"], row["saved"]) if row["of"] == "saved" else (row["whole_baseline"], row["whole"])
            for row in map(rows_of.__getitem__, what)
        ]
        return " / ".join(f"{100 - 100 * after / before:.1f}" for before, after in pairs)

    vit, llama = ("ReGELU2", "MS-LN", "ReGELU2 and MS-LN"), ("ReSiLU2", "MS-RMSNorm", "ReSiLU2 and MS-RMSNorm")
    exact = "saving, exact"
    rows = [
        ("ViT-B, LoRA: ReGELU2 / norms / both", "15 / 16 / 30", "ViT-B/16", "LoRA", vit, True),
        ("ViT-B, full tuning: both", "27", "ViT-B/16", "full", vit[2:], True),
        ("LLaMA-7B, QLoRA: ReSiLU2 / norms / both", "8 / 12 / 29", "LLaMA-7B", "", llama, True),
        ("BERT-base: Inverted", "23.1", "BERT-base", "full", ("Inverted",), False),
        ("Mistral-7B: Inverted", "15.7", "Mistral-7B", "LoRA", ("Inverted",), False),
    ]
    return table(
        ["", "published", "here", "saving, exact"],
        [
            [label, published, less(model, setting, *what), less(model, setting, exact) if beside else ""]
            for label, published, model, setting, what, beside in rows
        ],
    )


def losses(
    name: str, methods: dict[str, str], tasks: dict[str, int], labels: Sequence[str], bytes_too: bool = False
) -> str:
    """Return the differences of losses from exact training; bold ones can be distinguished from zero.

    Args:
        name: of the record.
        methods: by their labels.
        tasks: with digits after the point.
        labels: of the tasks.
        bytes_too: whether to say what is saved.

    """
    comparisons = {
        (test["task"], test["method"]): test
        for test in record(name)["comparisons"]
        if (test["metric"], test["family"]) == ("loss", "exact")
    }
    saved = {(run["task"], run["method"]): run["saved_bytes"] for run in record(name)["runs"]}
    rows = []
    for label, method in methods.items():
        cells = [label]
        if bytes_too:
            shares = [100 * saved[task, method] / saved[task, "exact"] for task in tasks]
            cells.append(f"{min(shares):.0f} to {max(shares):.0f} %")
        for task, digits in tasks.items():
            test = comparisons[task, method]
            places = min(digits, 1 - floor(log10(test["half"]))) if test["half"] else digits
            number = f"{test['difference']:+.{places}f} ± {test['half']:.{places}f}".replace("-", "−")
            cells.append(f"**{number}**" if test["distinguishable"] else number)
        rows.append(cells)
    exact = {task: test["reference_mean"] for (task, _), test in comparisons.items()}
    head = [f"{label} (exact {exact[task]:.3f})" for label, task in zip(labels, tasks, strict=True)]
    return table(["", *["saved"] * bytes_too, *head], rows)


def calibration() -> str:
    """Return errors of shipped and of calibrated fits."""
    rows = record("calibration")["rows"]
    return table(
        ["bits", "shipped, for [−10, 10]", "calibrated"],
        [
            [str(row["bits"]), *(f"{100 * row[which]:.2g} %" for which in ("shipped", "calibrated"))]
            for row in rows
        ],
    )


LOSSES = {"characters": 3, "digits": 3, "lora": 4}
METHODS = {f"Few-Bit, {k} bit{'s' * (k > 1)}": f"fewbit{k}" for k in (1, 2, 3, 4)}
METHODS |= {"ReLU mixture, 2 bits": "relumix2", "inverted, 1 bit": "inverted1", "memory-sharing norms": "norms"}
METHODS |= {f"input quantised stochastically, {k} bit{'s' * (k > 1)}": f"stochastic{k}" for k in (1, 2, 3, 4)}
STORED = {"8 bits": "blocks8", "6 bits": "blocks6", "4 bits": "blocks4", "coarse": "coarse"}
LABELS = ("characters", "digits", "LoRA")
TABLES: dict[str, Callable[[], str]] = {
    "kernels": kernels,
    "cpu": cpu,
    "contexts": contexts,
    "conversion": conversion,
    "losses": partial(losses, "convergence", METHODS, LOSSES, LABELS),
    "stored": partial(losses, "convergence_stored", STORED, {**LOSSES, "gated": 3}, (*LABELS, "SwiGLU"), True),
    "calibration": calibration,
    "layers": partial(of_rows, "layers", layers),
    **{
        module.__name__.rpartition(".")[2]: partial(of_rows, module.__name__.rpartition(".")[2], module)
        for module in (blocks, checkpoints, convolutions)
    },
    **{
        f"budgets, {model}": lambda model=model: "\n".join(budgets.table(record("budgets")[model]))
        for model in budgets.MODELS
    },
    **{
        f"antibody, {name}": lambda name=name: antibody(record("evidence"))[name]
        for name in ("differences", "intermediate", "input")
    },
}
