"""Reading and writing files: only regular ones, whole or not at all, whatever happens to the process.

Ctrl-C, a kill or a full disk: one line, status 130 or 1, no half-written file, and the next run does it all.
"""

import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fitact.base import JobError, UsageError, read_text, remove_all, write, write_all
from fitact.base.files import PREFIX
from fitact.cli import main
from tests.conftest import ROOT, Command
from tests.support.commands import put, tree
from tests.support.processes import python
from tests.support.refusals import within

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pipes, devices and locks as POSIX has them")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def odd() -> Iterator[dict[str, Path]]:
    """One of each kind of file that is no regular one."""
    paths = {kind: Path(f"{kind}.json") for kind in ("pipe", "directory", "socket", "device")}
    os.mkfifo(paths["pipe"])
    paths["directory"].mkdir()
    paths["device"].symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.json")
        yield paths


READ = """
import sys
from fitact.cli import main
print(*(main([command, sys.argv[1]]) for command in ("codegen", "plot", "show")))
"""


@pytest.mark.parametrize("kind", ["pipe", "directory", "socket", "device"])
def test_only_regular_files_are_read(kind: str, odd: dict[str, Path]) -> None:
    """By any command; in a process of its own: it would wait for ever, or fill the memory."""
    arguments = [sys.executable, "-c", READ, str(odd[kind])]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "2 2 2\n")
    line, other, last = done.stderr.splitlines()
    assert line == other == last and line.startswith(f"fitact: {odd[kind]}: cannot be read: ")
    assert kind in ("directory", "socket") or line.endswith(f"expected a regular file, this is a {kind}")


@pytest.mark.parametrize("kind", ["pipe", "directory", "socket"])
def test_only_regular_files_are_replaced(kind: str, odd: dict[str, Path]) -> None:
    before, there = odd[kind].stat(), [*tree()]
    with pytest.raises(JobError, match=f"cannot be written: is a {kind}"):
        write(odd[kind], "text")
    assert odd[kind].stat().st_ino == before.st_ino and [*tree()] == there


def test_a_link_stays_a_link_and_is_read() -> None:
    link = Path("b")
    link.symlink_to(put("a", "old"))
    write(link, "text")
    assert link.is_symlink() and Path("a").read_text() == read_text(link, 4) == "text"
    with pytest.raises(UsageError, match="larger than the 3 bytes"):
        read_text(link, 3)


def test_a_replaced_file_leaves_its_permissions_and_the_user_s_mask_holds() -> None:
    for mode in (0o600, 0o664, 0o755):
        file = put("a", "old")
        file.chmod(mode)
        write(file, "new")
        assert file.read_text() == "new" and file.stat().st_mode & 0o777 == mode
    before = os.umask(0o027)
    try:
        write(Path("b"), "text")
    finally:
        os.umask(before)
    assert Path("b").stat().st_mode & 0o777 == 0o640


def test_a_link_out_of_the_folder_is_refused() -> None:
    put("other/a", "old")
    folder = Path("folder")
    folder.mkdir()
    for name, target in (("a", "../other/a"), ("new", "../other/new"), ("b", "../other")):
        (folder / name).symlink_to(target)
    before = tree()
    for path in ("a", "new", "b/a"):
        with pytest.raises(JobError, match=f"{path}: cannot be changed: is a link out of the folder"):
            write_all(folder, {"c": "text", path: "text"})
    with pytest.raises(JobError, match="is a link out of the folder"):
        remove_all(folder, ["b/a"])
    assert tree() == before


def test_a_process_that_fails_leaves_nothing() -> None:
    """Whichever file it is that cannot be written, before any is in its place."""
    put("a", "old")
    Path("b").mkdir()
    before = tree()
    for other, error in (({"b": "new"}, JobError), ({"c": "\ud800"}, UnicodeEncodeError)):
        with pytest.raises(error):
            write_all(Path(), {"a": "new"} | other)
    assert tree() == before


def test_a_folder_is_made_replaced_and_removed() -> None:
    place = Path("far/folder")
    write_all(place, {"a.py": "new", "b/c.py": "new", "b/d/e.py": "new"})
    assert [tree(place)[name] for name in ("a.py", "b/c.py", "b/d/e.py")] == [b"new"] * 3
    put(place / "mine", "mine")
    write_all(place, {"a.py": "newer"})
    remove_all(place, ["b/c.py", "b/d/e.py", "not there"])
    assert tree(place) == {"a.py": b"newer", "mine": b"mine"}
    (place / "mine").unlink()
    (place / "__pycache__").mkdir()
    remove_all(place, ["a.py"])
    assert not [*Path("far").iterdir()]


def test_many_processes_write_one_folder() -> None:
    """Every one succeeds, each file is that of one of them in the end, and nothing else is there."""
    code = """
import sys
from pathlib import Path
from fitact.base import write_all
for _ in range(100):
    write_all(Path(sys.argv[1]), dict.fromkeys("ab", sys.argv[2] * 5000))
"""
    running = [subprocess.Popen([sys.executable, "-c", code, "folder", letter]) for letter in "abcd"]
    assert [process.wait(timeout=120) for process in running] == [0] * 4
    written = tree(Path("folder"))
    assert written.keys() == {"a", "b"}
    assert {*written.values()} <= {letter.encode() * 5000 for letter in "abcd"}


ODD = "a\x1b[31m\x07b"  # what a terminal obeys
UNREADABLE = os.fsdecode(b"a\xffb")  # no UTF-8


@pytest.fixture
def fitted(command: Command) -> Command:
    put("generated/fits/tanh_output.json", (ROOT / "generated/fits/tanh_output.json").read_text("utf-8"))
    assert command("codegen")[0] == 0
    return command


@pytest.mark.parametrize("name", ["tanh_output.py", "stray.py", "fits/stray.json"])
@pytest.mark.parametrize("line", ["codegen", "codegen --check"])
def test_a_pipe_among_generated_files_is_refused(line: str, name: str, fitted: Command) -> None:
    """Whoever opened it would wait for ever."""
    Path("generated", name).unlink(missing_ok=True)
    os.mkfifo(Path("generated", name))
    message = f"fitact: generated/{name}: cannot be read: expected a regular file, this is a pipe\n"
    with within(60):
        assert fitted(line) == (2, "", message)


@pytest.mark.parametrize("name", [ODD, UNREADABLE])
def test_names_of_files_are_printed_as_plain_text(name: str, fitted: Command) -> None:
    shown = name.replace("\x1b", "\\x1b").replace("\x07", "\\x07").replace("\udcff", "\\udcff")
    shutil.copyfile("generated/tanh_output.py", f"generated/{name}.py")
    assert f"--- generated/{shown}.py (no fit generates it)\n" in fitted("codegen --check")[1]
    assert fitted("codegen") == (0, f"removed generated/{shown}.py\n", "")
    assert fitted("plot -o", f"{name}.svg") == (0, f"wrote {shown}.svg\n", "")
    assert fitted("codegen --out", name)[1] == f"wrote {shown}/__init__.py\nwrote {shown}/tanh_output.py\n"
    assert fitted("fit --fn tanh --method output -o", f"{name}.json")[1].endswith(f"wrote {shown}.json\n")
    assert fitted("plot", f"no {name}.json")[2].startswith(f"fitact: no {shown}.json: cannot be read: ")


def test_a_file_of_the_user_s_among_generated_ones(fitted: Command) -> None:
    """Nothing removes it, so the check says what to do."""
    line = "--- generated/own.py (not generated by fitact: move it elsewhere)\n"
    for text in ("# mine\n", ""):
        put("generated/own.py", text)
        assert fitted("codegen")[1].endswith("nothing to do, 1 modules are up to date\n")
        assert fitted("codegen --check")[:2] == (1, line)


STYLE = "lines.linewidth: 9\naxes.facecolor: red\nfont.size: 30\nsvg.fonttype: none\ntext.usetex: True\n"
PLOT = "from fitact.cli import main; assert main(['plot', '-o', 'own.svg']) == 0"


@pytest.mark.parametrize("text", [STYLE, "font.size: 30\naxes.grid: perhaps\nno parameter\n"])
def test_pictures_are_drawn_under_default_parameters(text: str, fitted: Command) -> None:
    """In a process of its own, since matplotlib reads its configuration once; it may be invalid."""
    assert fitted("plot -o plain.svg")[0] == 0
    put("matplotlibrc", text)
    python(PLOT)
    assert Path("own.svg").read_bytes() == Path("plain.svg").read_bytes()


COMMANDS = ("fit --fn tanh --bits 1 --bits 2", "codegen")  # all write by `write_all`, the others too


@pytest.fixture(scope="module", autouse=True)
def _not_ignored() -> Iterator[None]:
    """Let commands hear Ctrl-C even where a shell has started the tests in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def prepared(folder: Path) -> Path:
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
    put(tmp_path / "click.py", "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    assert run("codegen", tmp_path) == (130, "fitact: interrupted\n")
