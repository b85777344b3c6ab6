"""How long the command line takes, interpreter's start included, the dynamic programme alone, and all that ships.

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
import warnings
from datetime import date
from pathlib import Path

from fitact import FitWarning

REPEATS = 5
RESULTS = Path(__file__).parent / "results" / "commands.json"
LINES = {
    "fit --fn gelu --bits 3": 2.0,
    "fit --fn gelu --bits 2 --method relumix": 10.0,
    "fit --fn gelu --bits 4 --method relumix": 60.0,
    "fit --fn tanh --method output": 5.0,
    "show gelu": 5.0,
}
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "fitact --help": [sys.executable, "-m", "fitact", "--help"],
    **{f"fitact {line}": [sys.executable, "-m", "fitact", *line.split()] for line in LINES},
}
DP_BORDERS = "dynamic programme, n = 4000, K = 16"
SHIPPED = "every shipped fit and module"
LIMITS = {  # seconds
    "fitact --help": 0.3,
    **{f"fitact {line}": limit for line, limit in LINES.items()},
    DP_BORDERS: 0.3,
    SHIPPED: 60.0,
}


def seconds(command: list[str]) -> float:
    """Return the median time of a command in an empty folder."""
    times = []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def dp_borders_time() -> float:
    """Return the median time of the dynamic programme with 4000 cells and 16 levels."""
    import numpy as np

    from fitact.fitter.analysis import Activation
    from fitact.fitter.numerics import Moments, Weight, dp_borders

    moments = Moments(Activation.of("gelu").derivative, Weight(), -10.0, 10.0, np.empty(0), 4000)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        dp_borders(moments, 16)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def shipped() -> float:
    """Return the time to fit and to generate, once each, all that the package ships."""
    from importlib.resources import files

    from fitact.codegen import plan
    from fitact.fitter.methods import again
    from fitact.fitter.records import from_json

    fits = [from_json(path.read_text()) for path in (files("fitact.generated") / "fits").iterdir()]
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FitWarning)
        made = [again(fit) for fit in fits]
    plan(made)
    return time.perf_counter() - start


def main() -> None:
    """Measure, print a table, write the numbers."""
    rows = {name: seconds(command) for name, command in COMMANDS.items()}
    bare = rows["python -c pass"]
    rows[DP_BORDERS] = dp_borders_time()
    rows[SHIPPED] = shipped()
    for name, taken in rows.items():
        limit = f"   limit {LIMITS[name]} s" if name in LIMITS else ""
        print(f"{name:48} {taken:7.3f} s  {taken / bare:6.1f} x bare interpreter{limit}")
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
