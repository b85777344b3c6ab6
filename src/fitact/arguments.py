"""Checks of the numbers that callers pass."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from fitact.errors import UsageError, quote


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


def several(what: str, values: Any) -> list[Any]:
    """Return a collection as a list; UsageError if it is not a collection, or is a string."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UsageError(f"{what}: expected several values, as a tuple, got {quote(values)}")
    return list(values)
