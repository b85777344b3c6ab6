"""Runs tests/interpreted, test_gpu.py and test_values.py where Triton's interpreter replaces the GPU."""

import os
import subprocess
import sys

import pytest

from tests.conftest import INTERPRETED, ROOT

TESTS = ["tests/interpreted", "tests/runtime/test_gpu.py", "tests/runtime/test_values.py"]
pytestmark = [pytest.mark.long, pytest.mark.skipif(INTERPRETED, reason="this is the process of its own")]


@pytest.mark.parametrize("part", ["not full", pytest.param("full", marks=pytest.mark.full)])
def test_interpreted_kernels(part: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", part, *TESTS]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
