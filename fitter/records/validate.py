"""Checks of the values in a record; each function raises a UsageError that names the field."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import numpy as np

from fitact.base import UsageError, quote

MAX_TEXT = 200  # characters of a free text
FREE_TEXT = re.compile(rf"[ !$-&(-\[\]-_a-~]{{1,{MAX_TEXT}}}")  # printable ASCII without quotes, # and backslashes


def check_numbers(what: str, values: tuple[float, ...], count: int, *, single: bool = False) -> None:
    """Raise UsageError unless there are `count` finite numbers, and float32 holds each exactly if `single`."""
    if len(values) != count:
        raise UsageError(f"{what}: expected {count} numbers, got {len(values)}")
    for i, value in enumerate(values):
        if not math.isfinite(value):
            raise UsageError(f"{what}[{i}]: expected a finite number, got {value!r}")
        if single and not (abs(value) < 3.4e38 and float(np.float32(value)) == value):
            raise UsageError(f"{what}[{i}]: expected a number that float32 holds exactly, got {value!r}")


def check_increasing(what: str, values: tuple[float, ...]) -> None:
    """Raise UsageError unless the numbers increase."""
    if any(a >= b for a, b in pairwise(values)):
        raise UsageError(f"{what}: expected increasing numbers, got {quote(list(values))}")


def check_bits(bits: object, allowed: range) -> None:
    """Raise UsageError unless a code may have that many bits."""
    *fewer, most = allowed
    if type(bits) is not int or bits not in allowed:
        raise UsageError(f"bits: expected {', '.join(map(str, fewer))} or {most}, got {quote(bits)}")


def check_domain(domain: tuple[float, ...], reach: float) -> None:
    """Raise UsageError unless these are two increasing numbers of at most `reach` in size."""
    check_numbers("domain", domain, 2)
    check_increasing("domain", domain)
    if max(map(abs, domain)) > reach:
        raise UsageError(f"domain: expected numbers of at most {reach:g} in size, got {quote(list(domain))}")


def free_text(value: object, what: str) -> str:
    """Return a text that may stand anywhere: in a comment, a docstring, a picture."""
    if not isinstance(value, str) or not FREE_TEXT.fullmatch(value):
        raise UsageError(
            f"{what}: expected 1 to {MAX_TEXT} characters of printable ASCII, no quotes, # and backslashes, "
            f"got {quote(value)}"
        )
    return value
