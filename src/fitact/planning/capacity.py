"""Finding the largest batch or sequence that fits, from few measurements."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from math import prod

TRIES = 6  # sizes from the polynomial, before the middle of what is left is tried
MOST = 2**40  # where there is no other limit
REACH = 8  # how many times the largest size measured the polynomial is trusted


def largest_size(needed: Callable[[int], int], room: int, sizes: Sequence[int], limit: int = MOST) -> int:
    """Return the largest size, up to a limit, that needs at most `room` bytes; 0 if none does.

    It and the next size, which does not fit, are measured. The first `sizes` give a polynomial, which is shifted
    to the last measurement and gives the next size to measure; after TRIES sizes it is the middle. A size far
    beyond those that the polynomial interpolates becomes one of them. Codes are padded to whole tiles, and the
    peak of a step may be the optimizer's, whatever the size. So the bytes are not exactly a polynomial, but they
    never fall.
    """
    nodes = {size: needed(size) for size in sizes}  # what the polynomial interpolates
    most = max(sizes)  # measured

    def at(size: int) -> float:
        """Return the polynomial's value, by Lagrange's formula."""
        return sum(value * prod((size - b) / (a - b) for b in nodes if b != a) for a, value in nodes.items())

    def solve(taken: float) -> int:
        """Return the largest size, up to the limit, where the polynomial is at most this; 0 if none."""
        high = 1
        while high <= limit and at(high) <= taken:
            high *= 2
        return high // 2 + bisect(range(high // 2 + 1, min(high, limit + 1)), taken, key=at)

    low, high = 0, limit + 1  # what fits, and what does not
    off, tries = 0.0, 0
    while high - low > 1:
        size = solve(room - off) if tries < TRIES else (low + high) // 2
        size = min(max(size, low + 1), high - 1, REACH * most)
        most, taken = max(most, size), needed(size)
        if size >= 2 * max(nodes):
            del nodes[min(nodes)]
            nodes[size] = taken
        low, high = (size, high) if taken <= room else (low, size)
        off, tries = taken - at(size), tries + 1
    return low
