"""Reading and writing files and folders without leaving half-written ones behind."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from fitact.errors import JobError, UsageError
from fitact.interrupts import held, unfinished

if sys.platform != "win32":
    import fcntl

# The name of an unfinished file or folder: PREFIX, a random number, SUFFIX.
PREFIX, SUFFIX = ".fitact-", ".writing"
KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_text(path: Path, limit: int) -> str:
    """Return the text of a regular file of at most `limit` bytes; UsageError if it is anything else."""
    try:
        with open(path, "rb", opener=_opened_at_once) as file:
            kind = _other_kind(os.fstat(file.fileno()))
            data = b"" if kind else file.read(limit + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {reason(error)}") from None
    if kind:
        raise UsageError(f"{path}: cannot be read: expected a regular file, this is {kind}")
    if len(data) > limit:
        raise UsageError(f"{path}: larger than the {limit} bytes that such a file may have")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: expected UTF-8 text") from None


def write(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all: under another name first, then renamed.

    Missing folders are made. If the path is a link, its target is written. JobError if the system refuses, or if
    the path is something other than a regular file.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        place = Path(os.path.realpath(path))
        kind = _other_kind(place.stat()) if place.exists() else ""
        folder = os.path.realpath(path.parent)
        if folder == "/dev" or folder.startswith(("/dev/fd", "/proc/")):
            kind = "a device"  # /dev/stdout may be a regular file, but must not be replaced
        if kind:
            raise JobError(f"{path}: cannot be written: is {kind}")
        place.parent.mkdir(parents=True, exist_ok=True)
        _sweep(place.parent)
        _write(place, data)
    except OSError as error:
        raise JobError(f"{path}: cannot be written: {reason(error)}") from None


def replace(folder: Path, new: Mapping[str, str], old: Iterable[str] = ()) -> None:
    """Replace files of a folder, all or none: write them beside the folder first, then rename them.

    Each top-level entry that a path in `new` or `old` starts with is removed or replaced; other entries stay.

    Args:
        folder: made if it is missing, and removed if nothing stays in it.
        new: the new texts by their paths in the folder.
        old: paths in the folder to remove.

    Raises:
        JobError: the system refuses; then nothing has changed.

    """
    parts = list(dict.fromkeys(path.partition("/")[0] for path in (*new, *old)))
    try:
        place = Path(os.path.realpath(folder))
        place.parent.mkdir(parents=True, exist_ok=True)
        _sweep(place.parent)
        with _folder_beside(place) as beside:
            for path, text in new.items():
                (beside / "new" / path).parent.mkdir(parents=True, exist_ok=True)
                (beside / "new" / path).write_bytes(text.encode("utf-8"))
            (beside / "old").mkdir()
            with held():
                _trade(place, beside, parts)
    except OSError as error:
        raise JobError(f"{folder}: cannot be written: {reason(error)}") from None


def _trade(place: Path, beside: Path, parts: Iterable[str]) -> None:
    """Swap parts of a folder with those that are written beside it."""
    if not place.exists():
        os.rename(beside / "new", place)
        return
    moved: list[tuple[Path, Path]] = []
    try:
        for part in parts:
            for here, there in ((place / part, beside / "old" / part), (beside / "new" / part, place / part)):
                if os.path.lexists(here):
                    os.rename(here, there)
                    moved.append((here, there))
    except BaseException:
        for here, there in reversed(moved):
            os.rename(there, here)
        raise
    if {path.name for path in place.iterdir()} <= {"__pycache__"}:
        shutil.rmtree(place)


@contextmanager
def _folder_beside(place: Path) -> Iterator[Path]:
    """Make a folder beside a place, and remove it with its contents at the end."""
    beside = _beside(place)
    unfinished.add(str(beside))
    try:
        with ExitStack() as stack:
            while not beside.exists():  # it may be swept away before it is locked
                beside.mkdir()
                with suppress(OSError):
                    stack.callback(os.close, number := _opened_at_once(str(beside), os.O_RDONLY))
                    _lock(number)
            yield beside
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        unfinished.discard(str(beside))


def _beside(place: Path) -> Path:
    return place.parent / f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}"


def _write(place: Path, data: bytes) -> None:
    beside = str(_beside(place))
    unfinished.add(beside)
    try:
        with open(beside, "xb") as file:
            _lock(file)
            if not os.path.exists(beside):  # another process swept it away before it was locked
                return _write(place, data)
            file.write(data)
            file.flush()
            if sys.platform == "win32":  # Windows cannot rename open files
                file.close()
            os.replace(beside, place)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
    finally:
        unfinished.discard(beside)


def _sweep(folder: Path) -> None:
    """Remove unfinished files of killed processes, whose locks are gone.

    Files stay where there are no locks, or where this process lacks the permission.
    """
    if sys.platform == "win32":
        return
    with suppress(OSError):
        for left in folder.glob(f"{PREFIX}*{SUFFIX}"):
            with suppress(OSError):
                flags = os.O_RDONLY if left.is_dir() else os.O_RDWR
                number = _opened_at_once(str(left), flags)
                try:
                    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
                finally:
                    os.close(number)


def _lock(file: IO[bytes] | int) -> None:
    """Protect an open file from `_sweep` until it is closed; without locks, nothing is swept either."""
    if sys.platform != "win32":
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)


def _opened_at_once(path: str, flags: int) -> int:
    """Open a file; if it is a pipe, do not wait for its other end."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _other_kind(status: os.stat_result) -> str:
    """Return what a file is, or `""` if it is a regular file."""
    return "" if stat.S_ISREG(status.st_mode) else KINDS.get(stat.S_IFMT(status.st_mode), "something else")


def reason(error: OSError) -> str:
    """Return the system's reason in lower case, without the file's name."""
    return (error.strerror or str(error)).lower()
