"""The distribution of a stream of numbers: counts in fine fixed cells; no number is stored."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fitact.base import UsageError

# Cells are even steps of asinh(x / NEAR): near 0 they are 7.6e-6 wide, and from 0.01 on 1/128 of x.
STEPS, NEAR = 128, 2.0**-10
LARGEST = 8e29  # in size: numbers beyond it are left out
HALF = math.ceil(math.asinh(LARGEST / NEAR) * STEPS)  # cells on each side of 0
CHUNK = 1 << 20  # numbers at a time, as float64


@dataclass
class Sketch:
    """The numbers that were added: how many, their mean and spread, and their counts in fine cells.

    Attributes:
        count: how many are counted.
        left_out: how many are not: NaN, and those that are infinite or above LARGEST in size.
        mean: their mean, float64.
        squares: the sum of their squared distances from the mean, float64.
        least, largest: the extremes.
        counts: in each cell, from the most negative on, (2 HALF,) int64.

    """

    count: int = 0
    left_out: int = 0
    mean: float = 0.0
    squares: float = 0.0
    least: float = math.inf
    largest: float = -math.inf
    counts: Tensor = field(default_factory=lambda: torch.zeros(2 * HALF, dtype=torch.int64, device="cpu"))

    @property
    def deviation(self) -> float:
        """The standard deviation of the numbers."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def add(self, numbers: Tensor) -> None:
        """Add a tensor of real numbers, of any shape, dtype and device.

        Raises:
            UsageError: it is complex, not dense, or without values.

        """
        if numbers.is_complex() or numbers.layout != torch.strided or numbers.is_meta or numbers.is_nested:
            raise UsageError(f"expected a dense tensor of real numbers, got {numbers.dtype}, {numbers.layout}")
        for chunk in numbers.detach().reshape(-1).split(CHUNK):
            # float64 is not to be had on every device
            x = (chunk if chunk.device.type in ("cpu", "cuda") else chunk.cpu()).to(torch.float64)
            x = x[x.abs() <= LARGEST]  # false for NaN
            sketch = Sketch(x.numel(), chunk.numel() - x.numel())
            if sketch.count:
                sketch.mean = x.mean().item()
                sketch.squares = (x - sketch.mean).square().sum().item()
                sketch.least, sketch.largest = x.min().item(), x.max().item()
                cells = (torch.asinh(x / NEAR) * STEPS).floor_().to(torch.int64) + HALF
                sketch.counts = torch.bincount(cells.clamp_(0, 2 * HALF - 1), minlength=2 * HALF).cpu()
            self.merge(sketch)

    def merge(self, other: Sketch) -> None:
        """Add what another sketch has counted (Chan, Golub and LeVeque 1983, eq. 2.1)."""
        self.left_out += other.left_out
        if not other.count:
            return
        count, gap = self.count + other.count, other.mean - self.mean
        self.squares += other.squares + gap * gap * (self.count / count) * other.count
        self.mean += gap * (other.count / count)
        self.count = count
        self.least, self.largest = min(self.least, other.least), max(self.largest, other.largest)
        self.counts = self.counts + other.counts

    def cells(self) -> tuple[list[float], list[int]]:
        """Return the edges and the counts of the cells, from the first to the last that is not empty."""
        seen = self.counts.nonzero().flatten().tolist()
        if not seen:
            return [], []
        edges = [NEAR * math.sinh((i - HALF) / STEPS) for i in range(seen[0], seen[-1] + 2)]
        return edges, self.counts[seen[0] : seen[-1] + 1].tolist()
