"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], align: str = "") -> list[str]:
    """Return rows as lines with their columns aligned, each by its letter: < to the left, the default, or >."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = align.ljust(len(widths), "<")
    return ["  ".join(map("{:{}{}}".format, row, sides, widths)).rstrip() for row in rows]
