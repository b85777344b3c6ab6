"""The errors that fitact raises on purpose; each message is one line and says what to do.

Any other exception that escapes is a bug in fitact.
"""

from __future__ import annotations


class FitactError(Exception):
    """Base class of all errors that fitact raises on purpose."""

    exit_status = 1


class UsageError(FitactError, ValueError):
    """The request cannot be met as stated: the command line exits with status 2."""

    exit_status = 2


class JobError(FitactError, RuntimeError):
    """A valid request failed, for example because a folder cannot be written: status 1."""


class FitWarning(UserWarning):
    """A fit was made, but it may not be what was wanted; the message says why."""


def quote(value: object, limit: int = 60) -> str:
    """Return `value` for an error message: its `repr`, cut to `limit` characters."""
    try:
        text = repr(value)
    except RecursionError:  # JSON may nest deeper than repr follows
        text = f"a {type(value).__name__} nested too deep to show"
    return text if len(text) <= limit else text[: limit - 3] + "..."
