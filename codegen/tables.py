"""Tables of codes as generated code has them."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Sequence

from fitact.fitter.records.coded import CodedFit


def search_steps(borders: Iterable[float]) -> int:
    """Return how many comparisons tell apart the codes of all float32 that have their upper 16 bits in common."""
    upper = Counter(struct.pack(">f", border + 0.0)[:2] for border in borders)  # -0.0 is no other number than 0.0
    return max(upper.values()).bit_length()


def lines(numbers: Iterable[float]) -> list[Sequence[str]]:
    """Return the texts of numbers, four to a line."""
    texts = [*map(repr, numbers)]
    return [texts[at : at + 4] for at in range(0, len(texts), 4)]


def pairs(code: CodedFit) -> list[list[list[str]]]:
    """Return the texts of the value and the derivative of each code, two codes to a line."""
    texts = [[repr(one) for one in pair] for pair in zip(code.values, code.derivatives, strict=True)]
    return [texts[at : at + 2] for at in range(0, len(texts), 2)]
