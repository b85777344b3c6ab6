"""Scripts in two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(script: str, folder: Path, *arguments: str, warnings: str = "error", seconds: int = 240) -> None:
    """Run a script in two processes; its first arguments are the rank and a file for the two to meet."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", warnings, "-c", script, str(rank), str(folder / "store"), *arguments],
            env=os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=seconds)[1] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(errors)
