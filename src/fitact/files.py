"""Reading and writing files so that nothing half-written is ever left behind."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fitact.errors import JobError, UsageError


def read_text(path: Path, limit: int) -> str:
    """Return the text of a file of at most `limit` bytes; UsageError if that is not what it is."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {reason(error)}") from None
    if len(data) > limit:
        raise UsageError(f"{path}: larger than the {limit} bytes that such a file may have")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: expected UTF-8 text") from None


def write(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: beside its place first, then renamed into it.

    Folders on the way are made; JobError if the system refuses.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    beside = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(beside, 0o666 & ~_umask())  # mkstemp makes private files
        os.replace(beside, path)
    except BaseException as error:
        if beside is not None:
            Path(beside).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise JobError(f"{path}: cannot be written: {reason(error)}") from None
        raise


def reason(error: OSError) -> str:
    """Return the system's reason, in lower case and without the file's name."""
    return (error.strerror or str(error)).lower()


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
