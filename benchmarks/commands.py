"""How long the command line takes, interpreter's start included, and the dynamic programme alone.

Ratios are to the bare start of the interpreter, measured in the same run. Run by `make bench`; writes
benchmarks/results/commands.json.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

REPEATS = 5
RESULTS = Path(__file__).parent / "results" / "commands.json"
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "fitact --help": [sys.executable, "-m", "fitact", "--help"],
    "fitact fit --fn gelu --bits 3": [sys.executable, "-m", "fitact", "fit", "--fn", "gelu", "--bits", "3"],
}
LIMITS = {"fitact --help": 0.3, "fitact fit --fn gelu --bits 3": 2.0}  # seconds


def seconds(command: list[str]) -> float:
    """Return the median time of a command in an empty folder."""
    times = []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def programme() -> float:
    """Return the median time of the dynamic programme with 4000 cells and 16 levels."""
    import numpy as np

    from fitact.fitter.activation import Activation
    from fitact.fitter.fewbit import programme
    from fitact.fitter.moments import Moments
    from fitact.fitter.weight import Weight

    moments = Moments(Activation.of("gelu").derivative, Weight(), -10.0, 10.0, np.empty(0), 4000)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        programme(moments, 16)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Measure, print a table, write the numbers."""
    bare = seconds(COMMANDS["python -c pass"])
    rows = {name: seconds(command) for name, command in COMMANDS.items()}
    rows["dynamic programme, n = 4000, K = 16"] = programme()
    for name, taken in rows.items():
        limit = f"   limit {LIMITS[name]} s" if name in LIMITS else ""
        print(f"{name:38} {taken:7.3f} s  {taken / bare:6.1f} x bare interpreter{limit}")
    record = {
        "machine": f"{platform.processor() or platform.machine()}, {platform.system()}",
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        "seconds": {name: round(taken, 4) for name, taken in rows.items()},
        "ratio_to_bare_interpreter": {name: round(taken / bare, 2) for name, taken in rows.items()},
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
