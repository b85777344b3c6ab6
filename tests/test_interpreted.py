"""Runs tests/interpreted in a process of its own, where Triton's interpreter takes the place of the GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .conftest import INTERPRETED, ROOT

pytestmark = pytest.mark.skipif(INTERPRETED, reason="this is the process of its own")


@pytest.mark.parametrize("part", ["not full", pytest.param("full", marks=pytest.mark.full)])
def test_interpreted_kernels(part: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", part, "tests/interpreted"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
