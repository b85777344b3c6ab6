"""Finding the largest batch or sequence that fits, from few measurements."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from math import prod

TRIES = 6  # sizes from the polynomial, before the middle of what is left is tried
REACH = 8  # how many times the largest size measured the polynomial is trusted


@dataclass
class Curve:
    """Bytes as a polynomial of a size, interpolated through measured sizes.

    Attributes:
        needed: measures the bytes of a size.
        limit: the largest possible size; None if there is no limit.
        through: sizes to interpolate.
        measured: the bytes of all sizes measured so far.
        nodes: the measured points that the polynomial goes through.

    """

    needed: Callable[[int], int]
    limit: int | None
    through: InitVar[Sequence[int]]
    measured: dict[int, int] = field(default_factory=dict)
    nodes: dict[int, int] = field(init=False)

    def __post_init__(self, through: Sequence[int]) -> None:
        self.nodes = {size: self.measure(size) for size in through}

    def measure(self, size: int) -> int:
        """Return the bytes of a size, measured once."""
        if size not in self.measured:
            self.measured[size] = self.needed(size)
        return self.measured[size]

    def at(self, size: int) -> float:
        """Return the polynomial's value, by Lagrange's formula."""
        return sum(
            value * prod((size - b) / (a - b) for b in self.nodes if b != a) for a, value in self.nodes.items()
        )

    def solve(self, room: float) -> int:
        """Return the largest size, up to the limit, where the polynomial is at most `room`; 0 if none."""
        most = 2**40 - 1 if self.limit is None else self.limit
        high = 1
        while high <= most and self.at(high) <= room:
            high *= 2
        return high // 2 + bisect(range(high // 2 + 1, min(high, most + 1)), room, key=self.at)

    def largest(self, room: int) -> int:
        """Return the largest size that fits; 0 if none. It and the next size, which does not fit, are measured.

        Codes are padded to whole tiles, and the peak of a step may be the optimizer's, whatever the size. So the
        bytes are not exactly a polynomial, but they never fall. The polynomial, shifted to the last measurement,
        gives the next size to measure; after TRIES sizes it is the middle. A size far beyond the nodes becomes one
        of them.
        """
        low, high = 0, None if self.limit is None else self.limit + 1  # what fits, and what does not
        off, tries = 0.0, 0
        while high is None or high - low > 1:
            size = self.solve(room - off)
            if tries >= TRIES:
                size = 2 * low if high is None else (low + high) // 2
            size = max(size, low + 1)
            size = min(size, REACH * max(self.measured) if high is None else high - 1)
            needed = self.measure(size)
            if size >= 2 * max(self.nodes):
                del self.nodes[min(self.nodes)]
                self.nodes[size] = needed
            low, high = (size, high) if needed <= room else (low, size)
            off, tries = needed - self.at(size), tries + 1
        return low
