"""Plain text: tables, lists, errors."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence

LISTED = 8  # the most names that an error lists


def starred(path: str) -> str:
    """Return a path with a star for each number, the same for all equal layers."""
    return re.sub(r"\b\d+\b", "*", path)


def columns(rows: Sequence[Sequence[str]], align: str = "") -> list[str]:
    """Return rows as lines of aligned columns; `align` has a letter per column, < (the default) or >."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = align.ljust(len(widths), "<")
    return ["  ".join(map("{:{}{}}".format, row, sides, widths)).rstrip() for row in rows]


def three(value: float) -> str:
    """Return a number with three significant digits."""
    value = float(f"{value:.2e}")
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(digits, 0)}f}"


def few(names: Sequence[str]) -> str:
    """Return the first few names, for an error message."""
    return ", ".join(names[:LISTED]) + (", ..." if len(names) > LISTED else "")


def binary(count: int) -> str:
    """Return bytes with three digits, in GiB or, below a tenth of it, in MiB."""
    return f"{three(count / 2**30)} GiB" if count >= 2**30 // 10 else f"{three(count / 2**20)} MiB"


def near(name: str, known: Sequence[str]) -> str:
    """Return the end of a message about an unknown name: the known names near it, or some if none is."""
    close = difflib.get_close_matches(name, known, LISTED)
    return f"; near it are {', '.join(close)}" if close else f"; there are {few(known)}" if known else ""


def printable(text: str) -> str:
    """Return a text with escapes for what a terminal would obey or cannot show; ends of lines and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def one_line(error: BaseException) -> str:
    """Return an error's class and message as one line."""
    text = " ".join(str(error).split())
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= 200 else f"{line[:197]}..."
