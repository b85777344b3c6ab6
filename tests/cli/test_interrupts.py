"""Ctrl-C: one line, status 130 and no half-written file."""

import signal
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import fitact.cli.tables
from fitact.cli import main
from tests.fuzz.interruptions import COMMANDS, contents, prepared

ROOT = Path(__file__).parents[2]

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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three fits, and the current one."""
    monkeypatch.chdir(tmp_path)
    return prepared(tmp_path)


def start(command: str) -> subprocess.Popen[str]:
    """Start a command; return once it is ready for an interrupt."""
    arguments = [sys.executable, "-c", ENTRY, *COMMANDS[command]]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("command", COMMANDS)
def test_as_soon_as_it_is_ready(command: str, folder: Path) -> None:
    """Later moments, drawn at random, are in tests/fuzz."""
    before = contents(folder)
    with start(command) as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "fitact: interrupted\n")
    assert contents(folder) == before


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
    for name in ("a.py", "b/x.py"):
        (folder / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "folder" / name).write_text("old")
    before = contents(folder)
    code = f"{START}{MOMENTS[moment]}\nprint('went on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "fitact: interrupted\n")
    assert contents(folder) == before


def test_ignored_where_the_shell_ignores_it(folder: Path) -> None:
    """As with `nohup`, and in the background of a script."""
    code = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)\nfrom fitact.cli import cli\n"
    code += f"cli.callback = lambda: {STOP}\nfrom fitact.__main__ import main\nsys.exit(main())"
    arguments = [sys.executable, "-c", code, "show", "generated/fits/tanh_output.json"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "tanh_output" in done.stdout


def test_one_line_where_it_is_raised(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By a program that calls the command line itself, and has Python's own handler."""

    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fitact.cli.tables, "catalog", stop)
    assert main(["show"]) == 130
    assert capsys.readouterr() == ("", "fitact: interrupted\n")


def test_the_entry_is_that_of_the_package() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    module, _, name = scripts["fitact"].partition(":")
    assert module == "fitact.__main__"
    assert callable(getattr(import_module(module), name))
