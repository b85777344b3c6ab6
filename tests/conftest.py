"""Shared by all tests: a fixed seed, a command line, and the tests that run in a process of their own."""

import atexit
import gc
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[1]
# Some virtual machines announce AMX and then trap on it: a bfloat16 product would end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# Each process that compiles would start others to do it, which find no core that is free.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Each process that compiles would build and load a program for each instruction set that the CPU announces.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Results that all processes of a run share (tests/support/shared.py); the first process makes the folder.
if "FITACT_TESTS_SHARED" not in os.environ:
    os.environ["FITACT_TESTS_SHARED"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["FITACT_TESTS_SHARED"], ignore_errors=True)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The garbage collector passes over all that lives more seldom than by default; `_settle` does so after each file.
gc.set_threshold(50_000, 10, 10)

# The kernels' decorators read TRITON_INTERPRET when they are imported, so a process has one kind of kernel.
collect_ignore = [] if INTERPRETED else ["interpreted"]


def _settle() -> None:
    """Keep the garbage collector off all that lives now: a pass over it takes a second, and tests make many."""
    global _settled
    gc.collect()
    gc.freeze()
    _settled = gc.get_stats()[2]["collections"]


_settled = 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that no worker is left with it while the others have nothing to do."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    _settle()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Settle after the last test of a file, and after one that made a pass over all: the next one may, too."""
    if nextitem is not None and (nextitem.path != item.path or gc.get_stats()[2]["collections"] != _settled):
        _settle()


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    # As torch.manual_seed does, which formats the stack once for each kind of device that is not there.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command line in an empty folder; return its status and what it printed."""
    from fitact.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fitact.cli.options.EVERY", 1e6)

    def call(line: str, *more: str) -> tuple[int, str, str]:
        status = main([*shlex.split(line), *more])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Any:
    """An activation of the kind that a test is parametrised by, which may have to be fitted first."""
    from tests.support.kinds import kind

    return kind(request.param)
