"""Ctrl-C, a kill or a full disk: one line, status 130 or 1, no half-written file, and the next run does it all."""

import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import pytest

import fitact.cli.tables
from fitact.base.files import PREFIX
from tests.conftest import ROOT, Command
from tests.support.commands import MODEL, put, tree

COMMANDS = {
    "fit": ["fit", "--fn", "tanh", "--bits", "1", "--bits", "2"],
    "codegen": ["codegen"],
    "codegen --standalone": ["codegen", "--standalone"],
    "plot": ["plot", "-o", "picture.svg"],
    "show": ["show", "gelu"],
    "plan": ["plan", "mine:tiny", "--gib", "1", "-o", "plan.json"],
}
SOME = [name for name in COMMANDS if name != "plan"]  # which takes longest

# The command line as it is installed; it tells when it is ready for an interrupt.
ENTRY = """
import signal, sys

install = signal.signal

def ready(number, handler):
    before = install(number, handler)
    if number == signal.SIGINT:
        signal.signal = install
        print("ready", flush=True)
    return before

signal.signal = ready
from fitact.__main__ import main
sys.exit(main())
"""


@pytest.fixture(scope="module", autouse=True)
def _not_ignored() -> Iterator[None]:
    """Let commands hear Ctrl-C even where a shell has started the tests in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return prepared(tmp_path)


def prepared(folder: Path) -> Path:
    (folder / "generated" / "fits").mkdir(parents=True)
    (folder / "mine.py").write_text(MODEL)
    for name in ("gelu_fewbit3", "silu_fewbit2", "tanh_output"):
        shutil.copy(ROOT / "generated" / "fits" / f"{name}.json", folder / "generated" / "fits")
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_as_soon_as_it_is_ready(command: str, folder: Path) -> None:
    before = tree()
    arguments = [sys.executable, "-c", ENTRY, *COMMANDS[command]]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "fitact: interrupted\n")
    assert tree() == before


def run(command: str, folder: Path, stop: tuple[float, int] = (0, 0), largest: int = 0) -> tuple[int, str]:
    """Run a command in a folder; return its status and errors. No file is left half-written, unless it is killed.

    stop: after how many seconds which signal is sent; largest: no file of it may have more bytes.
    """
    limited = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (largest, largest)) if largest else None
    # without files of bytecode: Python itself may leave one half-written
    arguments = [sys.executable, "-B", "-m", "fitact", *COMMANDS[command]]
    with subprocess.Popen(arguments, cwd=folder, stderr=subprocess.PIPE, text=True, preexec_fn=limited) as process:
        if stop[1]:
            time.sleep(stop[0])
            process.send_signal(stop[1])
        _, err = process.communicate(timeout=300)
    for path in folder.rglob("*"):
        if path.name.startswith(PREFIX):
            assert stop[1] == signal.SIGKILL, path
            path.unlink()
        elif path.suffix == ".json":
            json.loads(path.read_text("utf-8"))
        elif path.suffix == ".py":
            compile(path.read_text("utf-8"), path.name, "exec")
        elif path.suffix == ".svg":
            assert path.read_text("utf-8").endswith("</svg>\n"), path
    return process.returncode, err


@pytest.mark.full
@pytest.mark.parametrize("command", SOME)
def test_at_a_random_moment(command: str, tmp_path: Path) -> None:
    """Interrupted or killed, the next run leaves what one leaves that was not disturbed."""
    undisturbed, *folders = (prepared(tmp_path / name) for name in "abc")
    began = time.monotonic()
    assert run(command, undisturbed) == (0, "")
    seconds = time.monotonic() - began
    chance = random.Random(command)
    signals = chance.sample([signal.SIGINT, signal.SIGKILL], 2)
    for after, sign, folder in zip((chance.uniform(0, seconds), 0.8 * seconds), signals, folders, strict=True):
        status, err = run(command, folder, (after, sign))
        # before the first line of fitact has run, Python ends itself, and tells how
        early = status == -sign or (status in (1, 130) and "KeyboardInterrupt" in err)
        assert early or (status, err) in ((130, "fitact: interrupted\n"), (0, ""))
        assert run(command, folder) == (0, "")
        assert tree(folder) == tree(undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("command", [name for name in SOME if name != "show"])
def test_no_room(command: str, folder: Path) -> None:
    status, err = run(command, folder, largest=100)
    assert status == 1 and err.startswith("fitact: ") and err.count("\n") == 1
    assert run(command, folder) == (0, "")


START = "import os, signal\nfrom pathlib import Path\nfrom fitact.base import files, interrupts\n"
STOP = "os.kill(os.getpid(), signal.SIGINT)"
# In the middle of a write; and where an exception would only be printed and forgotten, as in a finalizer.
MOMENTS = {
    "write": f"""
interrupts.end_at_once()
os.replace = lambda *paths: {STOP}
files.write_all(Path("folder"), {{name: "new" for name in ("a.py", "b/c.py", "b/d/e.py")}})
""",
    "finalizer": f"""
interrupts.end_at_once()

class Watched:
    def __del__(self):
        {STOP}
        for _ in range(10): pass

Watched()
""",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_at_once(moment: str, folder: Path) -> None:
    for name in ("a.py", "b/d/x.py"):
        put(f"folder/{name}", "old")
    before = tree()
    code = f"{START}{MOMENTS[moment]}\nprint('went on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "fitact: interrupted\n")
    assert tree() == before


def test_ignored_where_the_shell_ignores_it(folder: Path) -> None:
    """As with `nohup`, and in the background of a script."""
    code = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)\nfrom fitact.cli import cli\n"
    code += f"cli.callback = lambda: {STOP}\nfrom fitact.__main__ import main\nsys.exit(main())"
    arguments = [sys.executable, "-c", code, "show", "generated/fits/tanh_output.json"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "tanh_output" in done.stdout


def test_one_line_where_it_is_raised(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a program that calls the command line itself, and has Python's own handler."""

    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fitact.cli.tables, "catalog", stop)
    assert command("show") == (130, "", "fitact: interrupted\n")


def test_the_entry_is_that_of_the_package() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    assert callable(resolve_name(scripts["fitact"])) and scripts["fitact"].startswith("fitact.__main__:")
