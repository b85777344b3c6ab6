"""Plans with and without offloading, beside checkpointing: peak and time of a step, by the model.

    python -m benchmarks.budgets

Models are built without memory, in their published sizes; the tokens are 8 rows of 2048. *Offloaded
checkpointing* is what transformers and unsloth offer: each block is checkpointed, and its input, in 16 bits, is
on the host. All peaks are measured with fake tensors, as a plan's.
"""

from __future__ import annotations

import json
from copy import copy
from pathlib import Path
from typing import Any

from fitact.planning.make import Planner
from fitact.runtime.choose import BASELINE, FULL, MOVED, SELECTIVE, step
from fitact.runtime.measure import DEVICES, Training, hugging_face, prepare
from fitact.runtime.saving import ERRORS

RESULTS = Path(__file__).parent / "results" / "budgets.json"
BATCH, SEQ = 8, 2048
HOST = 64.0  # GiB
DEVICE = DEVICES["rtx4090"]
TINY = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22}
TINY |= {"num_attention_heads": 32, "num_key_value_heads": 4}
ALIKE = {
    "baseline": BASELINE,
    "checkpointing": FULL,
    "selective checkpointing": SELECTIVE,
    "offloaded checkpointing": MOVED,
}
# The sizes that differ from LLaMA-7B's, what is trained, and memories in GiB.
MODELS: dict[str, tuple[dict[str, Any], Training, tuple[float, ...]]] = {
    "LLaMA-7B, LoRA": ({}, Training(("all",)), (24, 16, 12)),
    "TinyLlama 1.1B, everything": (TINY, Training(), (16,)),
}


def planned(sizes: dict[str, Any], training: Training, memories: tuple[float, ...]) -> list[dict[str, Any]]:
    """Return a row for each way to train a model."""
    prepared, inputs = prepare(hugging_face("llama", sizes), training, batch=BATCH, seq=SEQ)
    subject = prepared.subject(inputs)
    planner = Planner(subject, "adamw", DEVICE, host_gib=HOST)
    without = copy(planner)
    without.host = 0
    rows = []
    for name, policy in ALIKE.items():
        blocks = [policy for run in planner.costs.runs for _ in run.blocks]
        done = step(subject, DEVICE, planner.costs.runs, blocks)
        rows.append({"name": name, "gib": None, "peak": planner.fixed + done.peak, "host": done.host})
        rows[-1]["seconds"] = done.work.seconds
        print(rows[-1], flush=True)
    for gib in memories:
        for error in ERRORS:
            for one, name in ((without, "plan"), (planner, "plan, offloading")):
                plan = one.plan(gib, error)
                row = {"name": f"{name}, {error}", "gib": gib, "peak": plan.peak, "host": plan.host}
                row["seconds"] = plan.seconds if plan.fits else None
                row["policies"] = {group.policy: len(group.blocks) for group in plan.groups}
                rows.append(row)
                print(row, flush=True)
    baseline = rows[0]["seconds"]
    return [row | {"time": row["seconds"] and round(row["seconds"] / baseline, 4)} for row in rows]


def main() -> None:
    """Plan, print and write."""
    results: dict[str, Any] = {"device": DEVICE.name, "batch": BATCH, "seq": SEQ, "host_gib": HOST}
    for name, (sizes, training, memories) in MODELS.items():
        print(name, flush=True)
        results[name] = planned(sizes, training, memories)
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
