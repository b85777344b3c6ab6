"""Reading and writing files without leaving half-written ones behind."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from .errors import JobError, UsageError

# The name of an unfinished file: PREFIX, a random number, SUFFIX.
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
    data = read_start(path, limit + 1)
    if len(data) > limit:
        raise UsageError(f"{path}: larger than the {limit} bytes that such a file may have")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: expected UTF-8 text") from None


def read_start(path: Path, size: int = -1) -> bytes:
    """Return the first bytes of a regular file, by default all; UsageError if it is anything else."""
    try:
        with open(path, "rb", opener=_opened_at_once) as file:
            kind = _other_kind(os.fstat(file.fileno()))
            data = b"" if kind else file.read(size)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {reason(error)}") from None
    if kind:
        raise UsageError(f"{path}: cannot be read: expected a regular file, this is {kind}")
    return data


def write(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all, as `write_all` does."""
    write_all(path.parent, {path.name: content})


def write_all(folder: Path, contents: Mapping[str, str | bytes]) -> None:
    """Write files of a folder: all under other names first, then each is renamed, in order.

    Missing folders are made. A file that is replaced leaves its permissions to the new one. Where the path is a
    link to another file in the folder, that file is written.

    Args:
        folder: where.
        contents: by their paths in the folder.

    Raises:
        JobError: the system refuses, or a path is no regular file or a link out of the folder. No file has changed
            then, unless a renaming was refused.

    """
    staged: list[tuple[str, Path]] = []
    path = folder
    try:
        for name, content in contents.items():
            path = folder / name
            if kind := _other_kind(path.stat()) if path.exists() else "":
                raise JobError(f"{path}: cannot be written: is {kind}")
            place = _within(folder, path)
            place.parent.mkdir(parents=True, exist_ok=True)
            beside = str(place.parent / f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}")
            staged.append((beside, place))
            with open(beside, "xb") as file:
                file.write(content.encode("utf-8") if isinstance(content, str) else content)
            with suppress(FileNotFoundError):
                os.chmod(beside, stat.S_IMODE(place.stat().st_mode))
        for beside, place in staged:
            path = place
            os.replace(beside, place)
    except OSError as error:
        raise JobError(f"{path}: cannot be written: {reason(error)}") from None
    finally:
        for beside, _ in staged:
            Path(beside).unlink(missing_ok=True)


def is_unfinished(path: Path) -> bool:
    """Whether a path is that of a file which is being written, or was when its process was killed."""
    return path.name.startswith(PREFIX) and path.name.endswith(SUFFIX)


def remove_all(folder: Path, paths: Iterable[str]) -> None:
    """Remove files of a folder, and the folders that then hold nothing but Python's caches, itself among them.

    Args:
        folder: where.
        paths: the files' paths in the folder; those that are not there are passed over.

    Raises:
        JobError: the system refuses.

    """
    try:
        for path in paths:
            (_within(folder, (folder / path).parent) / Path(path).name).unlink(missing_ok=True)
        for within, _, _ in os.walk(folder, topdown=False):
            if set(os.listdir(within)) <= {"__pycache__"}:
                shutil.rmtree(within)
    except OSError as error:
        raise JobError(f"{folder}: cannot be removed: {reason(error)}") from None


def _within(folder: Path, path: Path) -> Path:
    """Return where a path leads; JobError if a link leads it out of a folder."""
    place = Path(os.path.realpath(path))
    if not place.is_relative_to(os.path.realpath(folder)):
        raise JobError(f"{path}: cannot be changed: is a link out of the folder")
    return place


def _opened_at_once(path: str, flags: int) -> int:
    """Open a file; if it is a pipe, do not wait for its other end."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _other_kind(status: os.stat_result) -> str:
    """Return what a file is, or `""` if it is a regular file."""
    return "" if stat.S_ISREG(status.st_mode) else KINDS.get(stat.S_IFMT(status.st_mode), "something else")


def reason(error: OSError) -> str:
    """Return the system's reason in lower case, without the file's name."""
    return (error.strerror or str(error)).lower()
