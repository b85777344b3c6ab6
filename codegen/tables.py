"""Tables of codes as generated code has them."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any


def search_steps(borders: Iterable[float]) -> int:
    """Return how many comparisons tell apart the codes of all float32 that have their upper 16 bits in common."""
    upper = Counter(struct.pack(">f", border + 0.0)[:2] for border in borders)  # -0.0 is no other number than 0.0
    return max(upper.values()).bit_length()


def lines(numbers: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """Return numbers as lines of `count`."""
    return [numbers[at : at + count] for at in range(0, len(numbers), count)]
