"""What tests of coded activations share: some with borders that are no optimum, and a plain oracle."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch

from fitact.fitter.analysis.activation import Activation
from fitact.fitter.numerics.weight import Weight
from fitact.fitter.records.coded import CodedFit
from tests.support.generated import HALVES, Generated, load, patterns, same
from tests.support.steps import around


@dataclass(frozen=True)
class Coded(Generated):
    """A coded activation."""

    keeps_output = False

    def code(self, x: torch.Tensor) -> torch.Tensor:
        """How many borders lie strictly below each x, one after the other."""
        at = x.detach().double()
        return sum(
            ((at > border).long() for border in self.fit["borders"]), torch.zeros(at.shape, dtype=torch.long)
        )

    def looked_up(self, x: torch.Tensor, numbers: str, dtype: torch.dtype) -> torch.Tensor:
        """The number of each element, of `values` or `derivatives`."""
        return torch.tensor(self.fit[numbers], dtype=torch.float64)[self.code(x)].to(dtype)

    def gradient(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """dy · derivative, multiplied in float32 (float64 for float64) and rounded to the dtype of dy."""
        wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
        return (dy.to(wide) * self.looked_up(x, "derivatives", wide)).to(dy.dtype)

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        return patterns(dtype) if dtype in HALVES else around(self.fit["borders"], dtype)

    def check_gradient(self, x: torch.Tensor, y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor) -> None:
        assert same(dx, self.gradient(x, dy))

    def kept(self, y: torch.Tensor) -> list[int]:
        """Whole tiles of codes; those of 8 bits are a byte an element."""
        return [y.numel()] if self.bits == 8 and y.numel() else super().kept(y) if self.bits < 8 else []


def record(bits: int, expression: str = "gelu", name: str = "", reach: float = 8.0) -> CodedFit:
    """A fit whose borders are evenly spaced in asinh, its numbers f and f′ in the middle of each cell."""
    activation = Activation.of(expression)
    count = 2**bits
    borders = np.float32(np.sinh(np.linspace(-1, 1, count + 1)[1:-1] * np.arcsinh(reach * 4)) / 4)
    outer = [2 * borders[0] - borders[1], *borders, 2 * borders[-1] - borders[-2]]
    middle = np.convolve(np.float64(outer), [0.5, 0.5], "valid")
    return CodedFit(
        name=name or f"{activation.name or 'own'}_coded{bits}",
        activation=activation,
        method="coded",
        error=dict.fromkeys(CodedFit.ERRORS, 0.0),
        bits=bits,
        domain=(-reach, reach),
        weight=Weight("normal(0, 2)"),
        borders=tuple(map(float, borders)),
        values=tuple(map(float, np.float32(activation.value(middle)))),
        derivatives=tuple(map(float, np.float32(activation.derivative(middle)))),
        reach=1.0,
    )


@cache
def coded(bits: int, expression: str = "gelu") -> Coded:
    """A generated one."""
    fit = record(bits, expression)
    return Coded(fit.name, json.loads(fit.to_json()), load(fit))


@cache
def dense() -> Coded:
    """One whose borders are 255 neighbouring float32."""
    borders = (np.float32(1).view(np.int32) + np.arange(-127, 128, dtype=np.int32)).view(np.float32)
    fit = replace(record(8), name="dense_coded8", borders=tuple(map(float, borders)))
    return Coded(fit.name, json.loads(fit.to_json()), load(fit))
