"""Rows of parametrised tests: texts in a table, and what runs in the full product alone."""

import re
from collections.abc import Callable, Collection, Iterable
from itertools import product
from typing import Any

import pytest


def listed(text: str) -> list[str]:
    """Return texts that stand two spaces or a line apart."""
    return re.split(r" {2,}|\n\s*", text.strip())


def turning(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return the product of all axes but the last, which goes through its values while any other does."""
    *given, last = map(list, axes)
    rows = product(*map(enumerate, given))
    return [(*(value for _, value in row), last[sum(i for i, _ in row) % len(last)]) for row in rows]


def full(rows: Iterable[Any], quick: Collection[Any] | Callable[[Any], bool]) -> list[Any]:
    """Return rows, of the full product alone if they are not quick; a row may be a tuple."""
    often = quick if callable(quick) else quick.__contains__
    return [
        pytest.param(*(row if type(row) is tuple else [row]), marks=[] if often(row) else pytest.mark.full)
        for row in rows
    ]
