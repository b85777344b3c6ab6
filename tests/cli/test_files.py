"""Reading and writing files: only regular ones, whole or not at all, whatever happens to the process."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fitact.errors import JobError, UsageError
from fitact.files import PREFIX, SUFFIX, read_text, replace, write

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pipes, devices and locks as POSIX has them")

# Writes a file, and stops with everything written but nothing in its place until it is told to go on.
PAUSED = """
import os, sys
from pathlib import Path
from fitact.files import write

rename = os.replace

def replace(*paths):
    print("written", flush=True)
    sys.stdin.readline()
    rename(*paths)

os.replace = replace
write(Path(sys.argv[1]), sys.argv[2])
"""


@contextmanager
def paused(path: Path, text: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that is about to put a text in its place."""
    command = [sys.executable, "-c", PAUSED, str(path), text]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "written\n"
            yield process
        finally:
            process.kill()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -------------------------------------------------------------------------------------------------------- reading


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """One of each kind of file that is no regular one."""
    pipe, folder, place = tmp_path / "pipe.json", tmp_path / "folder.json", tmp_path / "socket.json"
    os.mkfifo(pipe)
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(place))
        yield {"pipe": pipe, "directory": folder, "socket": place, "device": Path("/dev/zero")}


@pytest.mark.parametrize("kind", ["pipe", "directory", "socket", "device"])
@pytest.mark.parametrize("command", ["codegen", "plot", "show"])
def test_only_regular_files_are_read(kind: str, command: str, odd: dict[str, Path], tmp_path: Path) -> None:
    """In a process of its own: it would wait for ever, or fill the memory."""
    path = odd[kind]
    if kind == "device" and command == "show":  # whose files have names that end in .json
        path = tmp_path / "zero.json"
        path.symlink_to("/dev/zero")
    arguments = [sys.executable, "-m", "fitact", command, str(path)]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"fitact: {path}: cannot be read: ")
    assert done.stderr.count("\n") == 1
    if kind in ("pipe", "device"):
        assert done.stderr.endswith(f"expected a regular file, this is a {kind}\n")


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text")
    (tmp_path / "b").symlink_to("a")
    assert read_text(tmp_path / "b", 4) == "text"
    with pytest.raises(UsageError, match="larger than the 3 bytes"):
        read_text(tmp_path / "b", 3)


# -------------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("kind", ["pipe", "directory", "socket"])
def test_only_regular_files_are_replaced(kind: str, odd: dict[str, Path]) -> None:
    before = odd[kind].stat()
    with pytest.raises(JobError, match=f"cannot be written: is a {kind}"):
        write(odd[kind], "text")
    assert odd[kind].stat().st_ino == before.st_ino
    assert names(odd[kind].parent) == ["folder.json", "pipe.json", "socket.json"]


@pytest.mark.parametrize("path", ["/dev/null", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_devices_stay(path: str, kind: str, tmp_path: Path) -> None:
    """Even for one who may write anywhere; and where standard output is a file, that file does."""
    code = """
import os, sys
from pathlib import Path
from fitact.files import write
path = Path(sys.argv[1])
before = path.stat(), path.lstat().st_ino
try:
    write(path, "text")
except Exception as error:
    print(error, path.stat().st_ino == before[0].st_ino, os.fstat(1).st_nlink, file=sys.stderr)
"""
    with (tmp_path / "out").open("w") as file:
        out = file if kind == "file" else subprocess.PIPE
        command = [sys.executable, "-c", code, path]
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stderr == f"{path}: cannot be written: is a device True 1\n"
    assert names(tmp_path) == ["out"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    (tmp_path / "b").symlink_to("a")
    write(tmp_path / "b", "new")
    assert (tmp_path / "b").is_symlink()
    assert (tmp_path / "a").read_text() == "new"


def test_a_name_as_long_as_the_system_allows(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 255)
    write(path, "text")
    assert path.read_text() == "text"


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_user_s_mask_holds(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write(tmp_path / "a", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_killed_process_leaves_nothing_for_long(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with paused(tmp_path / "a", "new") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (left,) = (name for name in names(tmp_path) if name != "a")
    assert left.startswith(PREFIX) and left.endswith(SUFFIX)
    assert (tmp_path / "a").read_text() == "old"
    write(tmp_path / "b", "another")
    assert names(tmp_path) == ["a", "b"]


def test_processes_leave_each_other_s_files_alone(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with paused(path, "slow") as process:
        write(tmp_path / "b", "quick")
        write(path, "quick")
        assert path.read_text() == "quick"
        _, _ = process.communicate("go on\n", timeout=60)
        assert process.returncode == 0
    assert path.read_text() == "slow"
    assert names(tmp_path) == ["a", "b"]


def test_a_file_swept_away_before_it_is_locked_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment between making and locking a file, in which another process may find it without a lock."""
    from fitact import files

    lock, swept = files._lock, []

    def late(file):  # type: ignore[no-untyped-def]
        if not swept:
            swept.append(file.name)
            files._sweep(tmp_path)
        lock(file)

    monkeypatch.setattr(files, "_lock", late)
    write(tmp_path / "a", "text")
    assert swept and not Path(swept[0]).exists()
    assert (tmp_path / "a").read_text() == "text"
    assert names(tmp_path) == ["a"]


def test_many_processes_write_one_file(tmp_path: Path) -> None:
    """Every one succeeds, the file is that of one of them, and nothing else is there."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom fitact.files import write\n"
        "for _ in range(200):\n    write(Path(sys.argv[1]), sys.argv[2] * 5000)"
    )
    path = tmp_path / "a"
    running = [subprocess.Popen([sys.executable, "-c", code, str(path), letter]) for letter in "abcd"]
    assert [process.wait(timeout=120) for process in running] == [0] * 4
    text = path.read_text()
    assert text in {letter * 5000 for letter in "abcd"}
    assert names(tmp_path) == ["a"]


def test_what_stays_is_somebody_else_s(tmp_path: Path) -> None:
    for name in (".hidden", f"{PREFIX}notes", f"a{SUFFIX}"):
        (tmp_path / name).write_text("mine")
    write(tmp_path / "a", json.dumps(1))
    assert len(names(tmp_path)) == 4


# --------------------------------------------------------------------------------------------------- whole folders


def inside(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


NEW = {"a.py": "new", "b/c.py": "new", "b/d/e.py": "new"}


def test_a_folder_is_made_replaced_and_removed(tmp_path: Path) -> None:
    place = tmp_path / "far" / "folder"
    replace(place, NEW)
    assert inside(place) == NEW
    (place / "b" / "old.py").write_text("old")
    (place / "mine").write_text("mine")
    replace(place, {"a.py": "newer"}, NEW)
    assert inside(place) == {"a.py": "newer", "mine": "mine"}
    replace(place, {}, NEW)
    assert inside(place) == {"mine": "mine"}
    (place / "mine").unlink()
    replace(place, NEW)
    (place / "__pycache__").mkdir()
    replace(place, {}, NEW)
    assert names(tmp_path / "far") == []


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    replace(tmp_path / "link", NEW)
    assert inside(tmp_path / "folder") == NEW
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("count", range(1, 6))
def test_a_folder_that_cannot_be_replaced_is_as_it_was(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the renamings fails."""
    place = tmp_path / "folder"
    before = {"a.py": "old", "b/c.py": "old", "mine": "mine"}
    replace(place, before)
    rename, done = os.rename, []

    def failing(*paths: Path) -> None:
        done.append(paths)
        if len(done) == count:
            raise PermissionError(13, "Permission denied")
        rename(*paths)

    monkeypatch.setattr(os, "rename", failing)
    if count > 4:
        replace(place, NEW)
        assert inside(place) == NEW | {"mine": "mine"}
    else:
        with pytest.raises(JobError, match=f"{place}: cannot be written: permission denied"):
            replace(place, NEW)
        assert inside(place) == before
    assert names(tmp_path) == ["folder"]


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("old", [{}, {"a.py": "old", "b/x.py": "old"}], ids=["made", "replaced"])
def test_a_process_that_ends_leaves_a_folder_as_it_was(
    sign: signal.Signals, old: dict[str, str], tmp_path: Path
) -> None:
    code = """
import os, sys, time
from pathlib import Path
from fitact import interrupts
from fitact.files import replace

def written(path, data, write=Path.write_bytes):
    write(path, data)
    if path.name == "e.py":
        print("written", flush=True)
        time.sleep(60)

interrupts.end_at_once()
Path.write_bytes = written
replace(Path(sys.argv[1]), {name: "new" for name in ("a.py", "b/c.py", "b/d/e.py")})
"""
    place = tmp_path / "folder"
    if old:
        replace(place, old)
    command = [sys.executable, "-c", code, str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        write(tmp_path / "beside", "")  # which sweeps, but not what is in use
        process.send_signal(sign)
        process.wait(timeout=60)
    left = {*names(tmp_path)} - {"beside", "folder"}
    assert len(left) == (sign == signal.SIGKILL)
    replace(tmp_path / "other", NEW)
    assert names(tmp_path) == ["beside", *(["folder"] if old else []), "other"]
    assert inside(place) == old if old else not place.exists()


def test_an_interrupt_waits_while_folders_trade_places(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from fitact import interrupts
from fitact.files import replace

def renamed(*paths, rename=os.rename):
    os.kill(os.getpid(), signal.SIGINT)
    rename(*paths)

interrupts.end_at_once()
os.rename = renamed
replace(Path(sys.argv[1]), {name: "new" for name in ("a.py", "b/c.py", "b/d/e.py")})
print("not reached")
"""
    replace(tmp_path / "folder", {"a.py": "old", "b/x.py": "old"})
    command = [sys.executable, "-c", code, str(tmp_path / "folder")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "fitact: interrupted\n")
    assert inside(tmp_path / "folder") == NEW
    assert names(tmp_path) == ["folder"]


def test_many_processes_write_one_folder(tmp_path: Path) -> None:
    """It is that of one of them in the end, and nothing else is there; who came between may be told so."""
    code = """
import sys
from pathlib import Path
from fitact.errors import JobError
from fitact.files import replace
for _ in range(100):
    try:
        replace(Path(sys.argv[1]), dict.fromkeys("ab", sys.argv[2] * 5000))
    except JobError:
        pass
"""
    path = tmp_path / "folder"
    running = [subprocess.Popen([sys.executable, "-c", code, str(path), letter]) for letter in "abcd"]
    assert [process.wait(timeout=120) for process in running] == [0] * 4
    replace(path, NEW, "ab")
    assert inside(path) == NEW
    assert names(tmp_path) == ["folder"]
