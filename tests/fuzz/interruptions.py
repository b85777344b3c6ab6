"""Commands that are interrupted or killed at random moments, that find no room, or that run side by side."""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from fitact.base.files import PREFIX

SHIPPED = Path(__file__).parents[2] / "generated" / "fits"
FITS = ("gelu_fewbit3", "silu_fewbit2", "tanh_output")
DROP, OVERRIDE = 24, 1  # prctl: give up the capability to override permissions, at the next exec
COMMANDS = {
    "fit": ["fit", "--fn", "tanh", "--bits", "1", "--bits", "2"],
    "codegen": ["codegen"],
    "codegen --standalone": ["codegen", "--standalone"],
    "plot": ["plot", "-o", "picture.svg"],
    "show": ["show", "gelu"],
    "plan": ["plan", "mine:mine", "--gib", "1", "-o", "plan.json"],
}
WRITING = tuple(command for command in COMMANDS if command != "show")
MINE = """
import torch

def mine(batch=1, seq=8):
    block = lambda: torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
    return torch.nn.Sequential(block(), block()), torch.randn(batch, seq, 16)
"""


def prepared(folder: Path) -> Path:
    """Return a new folder with three fits and a model."""
    (folder / "mine.py").write_text(MINE)
    fits = folder / "generated" / "fits"
    fits.mkdir(parents=True)
    for name in FITS:
        shutil.copyfile(SHIPPED / f"{name}.json", fits / f"{name}.json")
    return folder


def start(
    command: str, folder: Path, largest: int | None = None, *, obedient: bool = False
) -> subprocess.Popen[str]:
    """Start a command in a folder.

    Args:
        command: one of COMMANDS.
        folder: where.
        largest: no file of it may have more bytes.
        obedient: whether it runs as a user whom permissions bind, even if this process is the administrator's.

    """

    def limited() -> None:
        if largest is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
        if obedient and os.geteuid() == 0:
            ctypes.CDLL(None).prctl(DROP, OVERRIDE)

    # without files of bytecode: Python itself may leave one half-written
    arguments = [sys.executable, "-B", "-m", "fitact", *COMMANDS[command]]
    return subprocess.Popen(
        arguments, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=limited
    )


def check_whole(folder: Path, *, killed: bool = False) -> None:
    """Check that every file is whole, and that none is unfinished, unless a process was killed."""
    for path in folder.rglob("*"):
        unfinished = any(part.startswith(PREFIX) for part in path.relative_to(folder).parts)
        assert killed or not unfinished, path
        if unfinished or not path.is_file():
            continue
        text = path.read_text("utf-8")
        if path.suffix == ".json":
            json.loads(text)
        elif path.suffix == ".py":
            compile(text, path.name, "exec")
        elif path.suffix == ".svg":
            assert text.endswith("</svg>\n"), path


def check_run(command: str, folder: Path) -> None:
    """Check that a command does its work, or finds it done, whatever happened in the folder, and tidies up."""
    with start(command, folder) as process:
        out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, ""), (process.returncode, err)
    assert command not in WRITING or out.splitlines()[-1].startswith("wrote ") or "nothing to do" in out, out
    check_whole(folder)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@cache
def undisturbed(command: str) -> tuple[dict[str, bytes], float]:
    """Return what a command leaves in a new folder, and how many seconds it takes."""
    with tempfile.TemporaryDirectory() as place:
        folder = prepared(Path(place))
        began = time.monotonic()
        check_run(command, folder)
        return contents(folder), time.monotonic() - began


def check_interrupted(command: str, sign: signal.Signals, after: float) -> str:
    """Check a command that gets a signal after some seconds, and its next run; return what happened."""
    with tempfile.TemporaryDirectory() as place:
        folder = prepared(Path(place))
        with start(command, folder) as process:
            time.sleep(after)
            process.send_signal(sign)
            _, err = process.communicate(timeout=300)
        status = process.returncode
        if sign == signal.SIGINT:
            # before the first line of fitact has run, Python ends itself, and tells how
            early = status == -signal.SIGINT or (status in (1, 130) and "KeyboardInterrupt" in err)
            assert early or (status, err) in ((130, "fitact: interrupted\n"), (0, "")), (status, err)
        else:
            assert status in (-sign, 0), status
        check_whole(folder, killed=sign == signal.SIGKILL)
        for path in folder.rglob(f"{PREFIX}*"):  # what a killed process was writing, beside the file
            path.unlink()
        check_run(command, folder)
        assert contents(folder) == undisturbed(command)[0]
        return (
            "done" if status == 0 else "ended by Python" if "KeyboardInterrupt" in err or status == -2 else "ended"
        )


def check_no_room(command: str, largest: int = 100) -> None:
    """Check a command that cannot write more than some bytes into a file, and its next run.

    Each file is written or not: what is smaller may be there already.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = prepared(Path(place))
        before = contents(folder)
        with start(command, folder, largest) as process:
            out, err = process.communicate(timeout=300)
        assert (process.returncode, out) == (1, ""), (process.returncode, out, err)
        assert err.startswith("fitact: ") and err.count("\n") == 1, err
        check_whole(folder)
        assert before.items() <= contents(folder).items()
        check_run(command, folder)


def check_read_only(command: str) -> None:
    """Check a command in a folder that may not be written, and its next run, when it may."""
    with tempfile.TemporaryDirectory() as place:
        folder = prepared(Path(place))
        before = contents(folder)
        folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
        for path in folders:
            path.chmod(0o555)
        try:
            with start(command, folder, obedient=True) as process:
                out, err = process.communicate(timeout=300)
        finally:
            for path in folders:
                path.chmod(0o755)
        assert (process.returncode, out) == (1, ""), (process.returncode, out, err)
        assert err.startswith("fitact: ") and err.count("\n") == 1, err
        assert contents(folder) == before
        check_run(command, folder)


def check_together(command: str) -> None:
    """Check that two processes in one folder write what one writes."""
    with tempfile.TemporaryDirectory() as place:
        folder = prepared(Path(place))
        with start(command, folder) as one, start(command, folder) as other:
            ends = [process.communicate(timeout=300)[1] for process in (one, other)]
        assert [one.returncode, other.returncode, *ends] == [0, 0, "", ""], ends
        assert contents(folder) == undisturbed(command)[0]


def moments(command: str, count: int, seed: int) -> Iterator[float]:
    """Yield random moments in the time that a command takes."""
    chance = random.Random(f"{seed}/{command}")
    _, seconds = undisturbed(command)
    for _ in range(count):
        yield chance.uniform(0, 1.1 * seconds)


def run(count: int, seed: int) -> int:
    """Interrupt and kill each command that many times; return 1 if anything failed."""
    failed = 0
    for command in COMMANDS:
        seen: Counter[str] = Counter()
        for sign in (signal.SIGINT, signal.SIGKILL):
            for after in moments(command, count, seed):
                try:
                    seen[f"{sign.name} {check_interrupted(command, sign, after)}"] += 1
                except AssertionError as error:
                    failed += 1
                    print(f"{command}, {sign.name} after {after:.3f} s: {error}", flush=True)
        for check in (check_no_room, check_read_only, check_together) if command in WRITING else ():
            try:
                check(command)
                seen[check.__name__] += 1
            except AssertionError as error:
                failed += 1
                print(f"{command}, {check.__name__}: {error}", flush=True)
        print(f"{command}: {dict(seen)}", flush=True)
    return int(failed > 0)
