"""What whole models save for backward, as shares of what PyTorch saves: the picture of the README.

    python -m benchmarks.saved

Models have their published sizes and random weights. They are measured without memory, as `fitact memory` does,
and nothing is timed. Writes results/saved.json and docs/saved.png.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import torch

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from fitact.runtime.choose import measure
from fitact.runtime.measure import Source, Training, hugging_face, timm_model

RESULTS = Path(__file__).parent / "results" / "saved.json"
PICTURE = Path(__file__).parents[1] / "docs" / "saved.png"
LORA = Training(lora=("all",))
# By name: the model, what is trained, sizes, and the command of the same rows.
MODELS: dict[str, tuple[Source, Training, dict[str, int], str]] = {
    "BERT-base": (hugging_face("bert"), Training(), {"batch": 8}, "--hf bert --batch 8"),
    "GPT-2": (hugging_face("gpt2"), Training(), {"batch": 8}, "--hf gpt2 --batch 8"),
    "ViT-B/16": (
        timm_model("vit_base_patch16_224"),
        Training(),
        {"batch": 8},
        "--timm vit_base_patch16_224 --batch 8",
    ),
    "LLaMA-7B": (hugging_face("llama"), Training(), {"seq": 2048}, "--hf llama --seq 2048"),
    "LLaMA-7B, LoRA": (hugging_face("llama"), LORA, {"seq": 2048}, "--hf llama --seq 2048 --lora all"),
}
# By label: the row of the report, and its colour.
WAYS = {
    "selective checkpointing": ("checkpointing, selective", "#b8b8b8"),
    "compiler, budget 0.9": ("compiler, budget 0.9", "#888888"),
    "fitact, exact": ("saving, exact", "#9ecae1"),
    "fitact, rounding: 8 bits": ("saving, rounding", "#4292c6"),
    "fitact, coarse: 4 bits": ("saving, coarse", "#08519c"),
    "fitact.compile, 8 bits": ("compiler, 0.9 and codes", "#e6a04a"),
}


def counted(name: str) -> dict[str, Any]:
    """Return what a model saves, in bytes and as shares of the baseline's, and what is recomputed."""
    source, training, sizes, command = MODELS[name]
    report = measure(source, training=training, budgets=(0.9,), **sizes)
    rows = {row.name: row for row in report.rows}
    baseline = report.rows[0].bytes
    ways = {}
    for label, (row, _) in WAYS.items():
        measured = rows.get(row)
        if measured is not None:
            ways[label] = {"bytes": measured.bytes, "share": measured.bytes / baseline, "again": measured.flops}
    return {"model": name, "command": f"fitact memory {command} --budget 0.9", "baseline": baseline, "ways": ways}


def draw(rows: list[dict[str, Any]]) -> None:
    """Draw shares by model; a star marks where products of matrices are recomputed."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    width = 0.8 / len(WAYS)
    for i, (label, (_, colour)) in enumerate(WAYS.items()):
        for j, row in enumerate(rows):
            if label not in row["ways"]:
                continue
            variant = row["ways"][label]
            x, share = j + (i - (len(WAYS) - 1) / 2) * width, 100 * variant["share"]
            axes.bar(x, share, width * 0.92, color=colour, label=label if j == 0 else None)
            star = "*" if variant["again"] > 0.005 else ""
            axes.text(x, share + 1, f"{share:.0f}{star}", ha="center", va="bottom", fontsize=7)
    axes.axhline(100, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(rows)), [row["model"] for row in rows])
    axes.set_ylabel("saved for backward, % of PyTorch's bytes")
    axes.set_ylim(0, 120)
    axes.text(-0.55, 101, "PyTorch as it is", fontsize=8, va="bottom")
    figure.legend(
        ncols=3, loc="outside upper center", fontsize=8, frameon=False, handlelength=1, columnspacing=1.2
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=150)
    plt.close(figure)


def main() -> None:
    """Count, print, write and draw."""
    rows = []
    for name in MODELS:
        rows.append(counted(name))
        shares = ", ".join(
            f"{label} {100 * variant['share']:.1f} % ({100 * variant['again']:.1f} % again)"
            for label, variant in rows[-1]["ways"].items()
        )
        print(f"{name}: {shares}", flush=True)
    RESULTS.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n", "utf-8")
    draw(rows)


if __name__ == "__main__":
    main()
