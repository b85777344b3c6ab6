"""Shared by all tests: a fixed seed, and the tests that run in a process of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Some virtual machines announce AMX and then trap on it: a bfloat16 product would end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# The kernels' decorators read TRITON_INTERPRET when they are imported, so a process has one kind of kernel.
collect_ignore = [] if INTERPRETED else ["interpreted"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)
