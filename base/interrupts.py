"""Ctrl-C ends a command at any moment: one line, status 130, nothing half-written.

An exception is not enough. It may be raised where it is only printed (in a callback), where a library turns it
into another one (during an import), or where nobody catches it (before the command line starts and after it ends).
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

STATUS = 130  # of a command that was interrupted: 128 and the signal's number
MESSAGE = "interrupted"

unfinished: set[str] = set()  # files being written, which an interrupt removes


def end_at_once() -> None:
    """Let an interrupt end this process, unless the parent process wants interrupts ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def come_too_late() -> None:
    """Ignore interrupts from now on: the work is done, and Python is about to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end(*_: object) -> None:
    for path in list(unfinished):
        with suppress(OSError):  # it may not be there yet, or already be in its place
            os.unlink(path)
    # a terminal shows ^C, and perhaps a progress bar, which has hidden the cursor
    line_end = "\033[?25h\n" if sys.stderr is not None and sys.stderr.isatty() else ""
    with suppress(OSError):  # standard error may be closed
        os.write(2, f"{line_end}fitact: {MESSAGE}\n".encode())
    os._exit(STATUS)
