"""Plans with and without offloading, beside checkpointing: peak and time of a step, by the model.

    python -m benchmarks.budgets

Models are built without memory, in their published sizes; the tokens are 8 rows of 2048. *Offloaded
checkpointing* is what transformers and unsloth offer: each block is checkpointed, and its input, in 16 bits, is
on the host. All peaks are measured with fake tensors, as a plan's.

*Compiled* is `torch.compile` with a memory budget: what its partitioner passes from forward to backward, and the
FLOPs of both graphs, in models of 2 and 4 blocks, continued in a straight line. Its peak is at least that, with
weights and optimizer. Its time is by FLOPs alone, beside those at budget 1.
"""

from __future__ import annotations

import json
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fitact.planning import GIB
from fitact.planning.make import Planner
from fitact.runtime.choose import BASELINE, FULL, MOVED, SELECTIVE, compiled, step
from fitact.runtime.measure import DEVICES, Training, hugging_face, prepare
from fitact.runtime.saving import ERRORS

RESULTS = Path(__file__).parent / "results" / "budgets.json"
BATCH, SEQ = 8, 2048
HOST = 64.0  # GiB
DEVICE = DEVICES["rtx4090"]
LAYERS = "num_hidden_layers"
TINY = {"hidden_size": 2048, "intermediate_size": 5632, LAYERS: 22}
TINY |= {"num_attention_heads": 32, "num_key_value_heads": 4}
EVERY_BLOCK = {
    "baseline": BASELINE,
    "checkpointing": FULL,
    "selective checkpointing": SELECTIVE,
    "offloaded checkpointing": MOVED,
}
BUDGETS = (1.0, 0.7, 0.5, 0.3, 0.1)  # of activation_memory_budget
FEW = (2, 4)  # blocks
# The sizes that differ from LLaMA-7B's, what is trained, and memories in GiB.
MODELS: dict[str, tuple[dict[str, Any], Training, tuple[float, ...]]] = {
    "LLaMA-7B, LoRA": ({}, Training(("all",)), (24, 16, 12)),
    "TinyLlama 1.1B, everything": (TINY, Training(), (16,)),
}


@dataclass(frozen=True)
class Row:
    """A way to train a model: its name, the memory it was planned for, and what a step takes."""

    name: str
    peak: int
    host: int = 0
    gib: float | None = None
    seconds: float | None = None
    time: float | None = None
    policies: dict[str, int] | None = None


def planned(sizes: dict[str, Any], training: Training, memories: tuple[float, ...]) -> list[Row]:
    """Return a row for each way to train a model."""
    subject = prepare(hugging_face("llama", sizes), training, batch=BATCH, seq=SEQ)
    planner = Planner(subject, "adamw", DEVICE, host_gib=HOST)
    without = copy(planner)
    without.host = 0
    baseline = planner.costs.baseline.work.seconds
    rows = []
    for name, policy in EVERY_BLOCK.items():
        blocks = [policy for run in planner.costs.runs for _ in run.blocks]
        done = step(subject, DEVICE, planner.costs.runs, blocks)
        seconds = done.work.seconds
        rows.append(Row(name, planner.fixed + done.peak, done.host, seconds=seconds, time=seconds / baseline))
        print(rows[-1], flush=True)
    rows += partitioned(sizes, training, planner.fixed, sum(len(run.blocks) for run in planner.costs.runs))
    for gib in memories:
        for error in ERRORS:
            for chooser, name in ((without, "plan"), (planner, "plan, offloading")):
                plan = chooser.plan(gib, error)
                policies = {group.policy: len(group.blocks) for group in plan.groups}
                row = Row(f"{name}, {error}", plan.peak, plan.host, gib)
                if plan.fits:
                    row = replace(row, seconds=plan.seconds, time=plan.seconds / baseline, policies=policies)
                rows.append(row)
                print(row, flush=True)
    return rows


def partitioned(sizes: dict[str, Any], training: Training, fixed: int, blocks: int) -> list[Row]:
    """Return a row for each budget of the compiler: the least of its peak, its FLOPs beside those at budget 1."""
    measured = []
    for few in FEW:
        subject = prepare(hugging_face("llama", {**sizes, LAYERS: few}), training, batch=BATCH, seq=SEQ)
        measured.append(compiled(subject, BUDGETS))
    rows = []
    for small, large in zip(*measured, strict=True):
        saved, flops = (
            a + (b - a) * (blocks - FEW[0]) // (FEW[1] - FEW[0])
            for a, b in ((small.saved.bytes, large.saved.bytes), (small.flops, large.flops))
        )
        rows.append((Row(f"compiled, budget {small.budget:g}", fixed + saved), flops))
        print(rows[-1], flush=True)
    return [replace(row, time=flops / rows[0][1]) for row, flops in rows]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of docs/plan.md, without memories in which nothing fits."""
    fit = {row["gib"] for row in rows if "gib" in row and "time" in row}
    lines = ["| memory | | peak, GiB | on the host, GiB | time, of the baseline's |", "|---|---|---:|---:|---:|"]
    for row in rows:
        gib, time = row.get("gib"), row.get("time")
        if gib is None or gib in fit:
            least = "at least " if time is None or row["name"].startswith("compiled") else ""
            cells = [f"{gib:g} GiB" if gib else "", row["name"], f"{least}{row['peak'] / GIB:.3g}"]
            cells.append(f"{row['host'] / GIB:.3g}" if row["host"] and time else "")
            cells.append("does not fit" if time is None else f"{100 * time:.0f} %")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Plan, print and write."""
    results: dict[str, Any] = {"device": DEVICE.name, "batch": BATCH, "seq": SEQ, "host_gib": HOST}
    for name, (sizes, training, memories) in MODELS.items():
        print(name, flush=True)
        rows = planned(sizes, training, memories)
        results[name] = [{key: value for key, value in asdict(row).items() if value is not None} for row in rows]
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
