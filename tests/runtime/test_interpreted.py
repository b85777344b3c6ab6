"""Runs tests/interpreted and test_gpu.py, each file in a process where Triton's interpreter replaces the GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import INTERPRETED, ROOT

TESTS = [*sorted((ROOT / "tests" / "interpreted").glob("test_*.py")), ROOT / "tests" / "runtime" / "test_gpu.py"]

pytestmark = [pytest.mark.long, pytest.mark.skipif(INTERPRETED, reason="this is the process of its own")]


@pytest.mark.parametrize("part", ["not full", pytest.param("full", marks=pytest.mark.full)])
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_interpreted_kernels(path: Path, part: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", part, str(path)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    none = part == "full" and done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert done.returncode == 0 or none, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout or none
