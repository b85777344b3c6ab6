"""Checks of the arguments that callers pass."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from .errors import UsageError, quote


def integer(what: str, value: Any, least: int) -> int:
    """Return an integer of any integer type, also NumPy's; UsageError if it is not one or is below `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise UsageError(f"{what}: expected an integer, {least} or more, got {quote(value)}")
    return int(value)


def real(what: str, value: Any, least: float, most: float) -> float:
    """Return a number as a float; UsageError unless it is a number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not least <= float(value) <= most:
        raise UsageError(f"{what}: expected a number from {least:g} to {most:g}, got {quote(value)}")
    return float(value)


def positive(what: str, value: Any, most: float) -> float:
    """Return a number as a float; UsageError unless it is above 0 and not above `most`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) <= most:
        raise UsageError(f"{what}: expected a number above 0, {most:g} or less, got {quote(value)}")
    return float(value)


def flags(**given: Any) -> None:
    """Raise UsageError unless each of these is True or False."""
    for what, value in given.items():
        if not isinstance(value, bool):
            raise UsageError(f"{what}: expected True or False, got {quote(value)}")


def several(what: str, values: Any) -> list[Any]:
    """Return a collection as a list; UsageError if it is not a collection, or is a string."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UsageError(f"{what}: expected several values, as a tuple, got {quote(values)}")
    return list(values)
