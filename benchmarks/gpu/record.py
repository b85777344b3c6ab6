"""The record of a part: its rows, on disk as soon as they are measured, and what fails with its error."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.timer import free

ROOT = Path(__file__).parents[2]
LIMIT = 150  # seconds that a row may take
PACKAGES = ("torch", "triton", "numpy", "transformers", "timm", "peft", "liger_kernel")
Row = dict[str, Any]


class Record:
    """The rows of one part, in a JSON that is whole at any moment.

    Args:
        part: the part's name.
        folder: where PART.json is written.
        seconds: no row begins later than this.
        only: measure only rows whose names contain one of these; empty for all.
        resume: whether to keep the rows that the file has, and not to measure them again.
        device: `"cuda"` or `"cpu"`.
        tiny: whether sizes are those of a rehearsal.

    """

    def __init__(
        self,
        part: str,
        folder: Path,
        *,
        seconds: float,
        only: Sequence[str],
        resume: bool,
        device: str,
        tiny: bool,
    ) -> None:
        self.path = folder / f"{part}.json"
        self.began = time.monotonic()
        self.allowed = seconds
        self.only = only
        self.head = {"part": part, "tiny": tiny, **machine(device)}
        self.rows: list[Row] = []
        if resume and self.path.exists():
            self.rows = [row for row in json.loads(self.path.read_text("utf-8"))["rows"] if "skipped" not in row]
        self._write()

    def left(self) -> float:
        """Return the seconds in which rows may still begin."""
        return self.allowed - (time.monotonic() - self.began)

    def wanted(self, name: Row) -> bool:
        """Return whether a row with this beginning is to be measured: asked for, and not there yet."""
        label = " ".join(map(str, name.values()))
        asked = not self.only or any(each in label for each in self.only)
        return asked and not any(name.items() <= row.items() for row in self.rows)

    def add(self, row: Row) -> None:
        """Add a row, write the file, print the row."""
        self.rows.append(row)
        self._write()
        print(" ".join(f"{key}={_short(value)}" for key, value in row.items()), flush=True)

    def measure(self, name: Row, call: Callable[[], Row]) -> None:
        """Add a row: `name`, then what `call` returns, or its error.

        After an error that leaves the GPU unusable, the process starts anew and goes on with the next row.
        """
        if not self.wanted(name):
            return
        if self.left() < 0:
            self.add(name | {"skipped": "no time left"})
            return
        began = time.monotonic()
        try:
            with at_most(LIMIT):
                row = call()
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"[:600]}
        self.add(name | row | {"seconds": round(time.monotonic() - began, 1)})
        try:
            free()
        except RuntimeError:  # a kernel read or wrote where it must not: every later call to CUDA fails
            options = [*sys.argv[1:], "--resume", "--seconds", str(max(0.0, self.left()))]
            os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *options])

    def _write(self) -> None:
        seconds = {"seconds": round(time.monotonic() - self.began, 1)}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.head | seconds | {"rows": self.rows}, indent=1) + "\n", "utf-8")
        os.replace(new, self.path)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace(" ", "_")


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise TimeoutError inside the context after this many seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def machine(device: str) -> Row:
    """Return what a JSON says of the device, the versions, the date and the commit."""
    about: Row = {"name": platform.machine()}
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        gib = round(gpu.total_memory / 2**30, 1)
        about = {"name": gpu.name, "gib": gib, "cuda": torch.version.cuda or torch.version.hip}
    return {
        "device": about,
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": _commit(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return what the environment says, as where files were copied; else the tree's commit."""
    try:
        command = ["git", "rev-parse", "HEAD"]
        return os.environ.get("FITACT_COMMIT") or subprocess.check_output(command, cwd=ROOT, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return None
