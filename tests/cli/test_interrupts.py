"""Ctrl-C, a kill or a full disk: one line, status 130 or 1, no half-written file, and the next run does it all."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fitact.base.files import PREFIX
from fitact.cli import main
from tests.conftest import ROOT
from tests.support.commands import put, tree

COMMANDS = ("fit --fn tanh --bits 1 --bits 2", "codegen", "codegen --standalone", "plot -o picture.svg")


@pytest.fixture(scope="module", autouse=True)
def _not_ignored() -> Iterator[None]:
    """Let commands hear Ctrl-C even where a shell has started the tests in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def prepared(folder: Path) -> Path:
    """Return a folder with three fits."""
    for name in ("gelu_fewbit3", "silu_fewbit2", "tanh_output"):
        path = Path("generated", "fits", f"{name}.json")
        shutil.copy(ROOT / path, put(folder / path))
    return folder


def run(
    command: str, folder: Path, stop: tuple[float, int] = (0, 0), largest: int | None = None
) -> tuple[int, str]:
    """Return the status and errors of a command that a signal stops after some seconds, or a limit of bytes."""
    limited = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (largest, largest)) if largest else None
    # without files of bytecode: Python itself may leave one half-written
    arguments = [sys.executable, "-B", "-m", "fitact", *command.split()]
    with subprocess.Popen(arguments, cwd=folder, stderr=subprocess.PIPE, text=True, preexec_fn=limited) as process:
        if stop[1]:
            time.sleep(stop[0])
            process.send_signal(stop[1])
        _, err = process.communicate(timeout=300)
    return process.returncode, err


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_at_a_random_moment(command: str, tmp_path: Path) -> None:
    """Interrupted or killed, the next run leaves what one leaves that was not disturbed."""
    undisturbed, *folders = (prepared(tmp_path / name) for name in "abc")
    began = time.monotonic()
    assert run(command, undisturbed) == (0, "")
    seconds = time.monotonic() - began
    chance = random.Random(command)
    signals = chance.sample([signal.SIGINT, signal.SIGKILL], 2)
    for after, sign, folder in zip((chance.uniform(0, seconds), 0.8 * seconds), signals, folders, strict=True):
        run(command, folder, (after, sign))
        for path in folder.rglob(f"{PREFIX}*"):
            assert sign == signal.SIGKILL
            path.unlink()
        assert tree(folder).items() <= tree(undisturbed).items(), "no file is half-written"
        assert run(command, folder) == (0, "")
        assert tree(folder) == tree(undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_no_room(command: str, tmp_path: Path) -> None:
    status, err = run(command, prepared(tmp_path), largest=100)
    assert status == 1 and err.startswith("fitact: ") and err.count("\n") == 1
    assert not [*tmp_path.rglob(f"{PREFIX}*")]
    assert run(command, tmp_path) == (0, "")


def test_in_the_middle_of_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Of files that are there already, each is the old one or the new one, and none is half-written."""
    monkeypatch.chdir(prepared(tmp_path))
    replace, replaced = os.replace, []

    def stop(*paths: str) -> None:
        replaced.append(paths)
        if len(replaced) > 1:
            raise KeyboardInterrupt
        replace(*paths)

    monkeypatch.setattr(os, "replace", stop)
    assert main(["codegen"]) == 130
    assert capfd.readouterr() == ("", "\nfitact: interrupted\n")  # a terminal shows ^C in the line before
    made = [path for path in tree(tmp_path) if path.endswith(".py")]
    assert len(made) == 1 and len(replaced) == 2


def test_while_it_is_imported(tmp_path: Path) -> None:
    """Ctrl-C before the command line is there."""
    put(tmp_path / "click.py", "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    assert run("codegen", tmp_path) == (130, "fitact: interrupted\n")
