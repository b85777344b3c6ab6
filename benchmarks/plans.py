"""What plans of full-size models take: seconds of CPU and memory of the process, each in a process of its own.

    python -m benchmarks.plans

Models are built without memory, in their published sizes. Seconds are CPU time of the command, imports included,
on one thread; memory is the most that the process has, PyTorch and transformers included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "plans.json"
PLANS = (
    "--hf llama --lora all --batch 8 --seq 2048 --gib 24",
    "--timm vit_base_patch16_224 --batch 128 --gib 8",
    "--hf gpt2 --batch 16 --seq 1024 --gib 12",
    "--hf bert --batch 32 --seq 512 --gib 8",
    "--hf qwen2_moe --lora all --batch 8 --seq 1024 --gib 80",
)


def planned(options: str) -> dict[str, Any]:
    """Run a command in a process; return what it takes and says."""
    command = [sys.executable, "-m", "fitact", "plan", *options.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"fitact plan {options}: it ended with status {os.waitstatus_to_exitcode(status)}")
    lines = text.splitlines()
    return {
        "command": f"fitact plan {options}",
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_mib": usage.ru_maxrss // 1024,
        "says": lines[1].rpartition(": ")[2],
        "notes": [line for line in lines if line.startswith("note: ")],
    }


def main() -> None:
    """Plan, print and write."""
    rows = []
    for options in PLANS:
        rows.append(planned(options))
        print(rows[-1], flush=True)
    RESULTS.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
