"""A plan's promises against real training on this CPU: peak by the allocator, and time of a step.

    python -m benchmarks.planning

A GPT-like model is trained as planned at three budgets, in processes of their own. The peak is the most memory
that the process has in its steps, as the kernel counts it, less what it has before them. Times are the least CPU
time of a step in four turns, on one thread, as ratios to the first budget's, which the baseline fits.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fitact
from fitact.planning import GIB, Planner
from fitact.runtime.measure import Block, copied, measured

RESULTS = Path(__file__).parent / "results" / "planning_cpu.json"
BLOCKS, HIDDEN, BATCH, SEQ = 6, 256, 4, 512
STEPS = 6
TURNS = 4
SHARES = (1.0, 0.55, 0.1)  # of the way from the least memory to the baseline's
MIB = 2**20


class Model(nn.Module):
    """Blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(nn.GELU(), 4, HIDDEN) for _ in range(BLOCKS))
        self.head = nn.Linear(HIDDEN, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss."""
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).square().mean()
        return loss


def made() -> tuple[Model, Tensor]:
    """Return the model and its input."""
    torch.manual_seed(0)
    return Model(), torch.randn(BATCH, SEQ, HIDDEN)


def in_process(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def trained(path: str | None) -> tuple[int, list[float]]:
    """Train as a plan says; return the peak in bytes above the model, and seconds of steps."""
    torch.set_num_threads(1)
    model, x = made()
    if path is not None:
        fitact.load_plan(path).apply(model)
    small = x[:1, :8]
    model(small).backward()  # loads what the first call loads
    model.zero_grad(set_to_none=True)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = status("VmRSS")
    times = []
    for _ in range(STEPS):
        start = time.process_time()
        model(x).backward()
        model.zero_grad(set_to_none=True)
        times.append(time.process_time() - start)
    return status("VmHWM") - before, times


def status(name: str) -> int:
    """Return a number of bytes that the kernel knows of this process: VmRSS now, VmHWM at its peak."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Plan, train, print and write."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)  # for the processes: what is freed goes back at once
    torch.set_num_threads(1)
    model, x = made()
    device = measured("cpu")
    planner = Planner(copied(model, x, None, "cpu"), "none", device)
    baseline, low = (planner.plan(gib, "exact") for gib in (64, 1e-9))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for share in SHARES:
            gib = (low.peak + share * (baseline.baseline_peak - low.peak)) * 1.0001 / GIB
            plan = planner.plan(gib, "exact")
            plan.save(Path(folder) / f"{share}.json")
            row = {
                "budget_mib": round(gib * 1024, 1),
                "ways": {group.policy: len(group.blocks) for group in plan.groups},
                "foretold_peak_mib": round((plan.peak - plan.fixed) / MIB, 1),
                "foretold_seconds": plan.seconds,
            }
            rows.append(row)
        # in turns, so that what else the machine does meets all of them
        turns = [
            [in_process(trained, str(Path(folder) / f"{share}.json")) for share in SHARES] for _ in range(TURNS)
        ]
    for row, results in zip(rows, zip(*turns, strict=True), strict=True):
        row["peak_mib"] = round(min(peak for peak, _ in results) / MIB, 1)
        row["seconds"] = min(second for _, times in results for second in times)
    first = rows[0]
    for row in rows:
        row["foretold_time"] = round(row.pop("foretold_seconds") / baseline.baseline_seconds, 3)
        row["seconds"] = round(row["seconds"], 3)
        row["time"] = round(row["seconds"] / first["seconds"], 3)
        print(row)
    ordered = {
        name: sorted(rows, key=lambda row: row[name]) == sorted(rows, key=lambda row: row[f"foretold_{name}"])
        for name in ("peak_mib", "time")
    }
    RESULTS.write_text(json.dumps({"device": device.name, "rows": rows, "in_order": ordered}, indent=2) + "\n")
    print("in the order foretold:", ordered)


if __name__ == "__main__":
    main()
