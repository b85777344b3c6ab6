"""What tests of step activations share: the shipped ones, and a plain oracle."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from tests.support.generated import Generated, fits, same

# Exact as step functions: PyTorch's own gradient is the reference at every float.
PIECEWISE_LINEAR = ("hardshrink", "hardsigmoid", "hardtanh", "identity", "leaky_relu", "relu", "relu6")
PIECEWISE_LINEAR += ("softshrink", "threshold")


@dataclass(frozen=True)
class Shipped(Generated):
    saves_output = False

    def code(self, x: torch.Tensor, _dtype: torch.dtype) -> torch.Tensor:
        """How many borders lie strictly below."""
        at = x.detach().double().abs() if self.fit["even"] else x.detach().double()
        return sum((at > border).long() for border in self.fit["borders"])

    def derivative(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.fit["levels"], dtype=torch.float64)[self.code(x, x.dtype)]

    def gradient(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """dy · level, multiplied in float32 (float64 for float64) and rounded to the dtype of dy."""
        wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
        return (dy.to(wide) * self.derivative(x).to(wide)).to(dy.dtype)

    @property
    def corners(self) -> Sequence[float]:
        return self.fit["borders"]

    def check_gradient(self, x: torch.Tensor, y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor) -> None:
        """Bit for bit; where f′ is a step function itself, PyTorch's own gradient too."""
        assert same(dx, self.gradient(x, dy))
        if self.plain in PIECEWISE_LINEAR and x.dtype != torch.float64:  # a level such as 0.01 is a float32
            number = ~x.isnan()
            assert bool((dx == self.baseline_gradient(x, dy))[number].all())


@cache
def shipped() -> list[Shipped]:
    return [Shipped(name, fit) for name, fit in fits().items() if "levels" in fit]
