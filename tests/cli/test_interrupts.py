"""Ctrl-C at any moment: the command is done, or one line, status 130 and no half-written file."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import fitact.cli.tables
from fitact.cli import main

ROOT = Path(__file__).parents[2]
MOMENTS = 12

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
COMMANDS = {
    "fit": ["fit", "--fn", "tanh", "--bits", "1", "--bits", "2"],
    "codegen": ["codegen", "--standalone"],
    "plot": ["plot", "-o", "picture.svg"],
    "show": ["show", "gelu"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three fits, and the current one."""
    fits = tmp_path / "generated" / "fits"
    fits.mkdir(parents=True)
    for name in ("gelu_fewbit3", "silu_fewbit2", "tanh_exact"):
        (fits / f"{name}.json").write_bytes((ROOT / "generated" / "fits" / f"{name}.json").read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def whole(folder: Path) -> Iterator[str]:
    """Yield the files of a folder, each read to its end."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        text = path.read_text("utf-8")
        if path.suffix == ".json":
            json.loads(text)
        elif path.suffix == ".py":
            compile(text, path.name, "exec")
        else:
            assert text.endswith("</svg>\n")
        yield path.relative_to(folder).as_posix()


def start(command: str) -> subprocess.Popen[str]:
    """Start a command; return once it is ready for an interrupt."""
    arguments = [sys.executable, "-c", ENTRY, *COMMANDS[command]]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    "moment", [0, 3, *(pytest.param(i, marks=pytest.mark.full) for i in (1, 2, *range(4, 12)))]
)
@pytest.mark.parametrize("command", COMMANDS)
def test_at_any_moment(command: str, moment: int, folder: Path, took: dict[str, float]) -> None:
    before = set(whole(folder))
    with start(command) as process:
        time.sleep(took[command] * moment / (MOMENTS - 1))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) in ((130, "fitact: interrupted\n"), (0, ""))
    after = set(whole(folder))
    assert before <= after
    assert not any(part.startswith(".") for name in after for part in name.split("/"))
    if process.returncode == 0 and command != "show":
        assert out.splitlines()[-1].startswith("wrote ")


@pytest.fixture(scope="module")
def took(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Return how long each command takes undisturbed, about: moments are parts of that."""
    seconds = {}
    where = Path.cwd()
    for command in COMMANDS:
        os.chdir(tmp_path_factory.mktemp(command))
        fits = Path("generated") / "fits"
        fits.mkdir(parents=True)
        (fits / "tanh_exact.json").write_bytes((ROOT / "generated" / "fits" / "tanh_exact.json").read_bytes())
        with start(command) as process:
            began = time.monotonic()
            _, err = process.communicate(timeout=120)
            seconds[command] = time.monotonic() - began
        os.chdir(where)
        assert (process.returncode, err) == (0, "")
    return seconds


def test_in_the_middle_of_a_write(folder: Path) -> None:
    code = """
import os, signal
from pathlib import Path
from fitact import interrupts
from fitact.files import write
interrupts.end_at_once()
os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGINT)
write(Path("a"), "text")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (130, "fitact: interrupted\n")
    assert [path.name for path in folder.iterdir()] == ["generated"]


def test_where_an_exception_would_only_be_printed() -> None:
    """A finalizer's exceptions are printed and forgotten, so an interrupt that is one would be too."""
    code = """
import os, signal
from fitact import interrupts
interrupts.end_at_once()

class Watched:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(10): pass

Watched()
print("went on")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "fitact: interrupted\n")


def test_ignored_where_the_shell_ignores_it(folder: Path) -> None:
    """As with `nohup`, and in the background of a script."""
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    code += "from fitact.cli import cli\nimport os\n"
    code += "cli.callback = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
    code += "from fitact.__main__ import main\nsys.exit(main())"
    arguments = [sys.executable, "-c", code, "show", "generated/fits/tanh_exact.json"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "tanh_exact" in done.stdout


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
