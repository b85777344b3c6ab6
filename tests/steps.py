"""What tests of step activations share: the shipped ones, every bit pattern, and a plain oracle."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32, torch.float64)

# Exact as step functions: PyTorch's own gradient is the reference at every float.
PIECEWISE_LINEAR = (
    "hardshrink",
    "hardsigmoid",
    "hardtanh",
    "leaky_relu",
    "relu",
    "relu6",
    "softshrink",
    "threshold",
)


def wide(x: torch.Tensor) -> torch.Tensor:
    """At least float32."""
    return x if x.dtype == torch.float64 else x.float()


# PyTorch's own, written out here: the catalog is under test.
STOCK: dict[str, Any] = {
    "celu": F.celu,
    "elu": F.elu,
    "exp": torch.exp,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardshrink": F.hardshrink,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "leaky_relu": F.leaky_relu,
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    # PyTorch has none; rounded once
    "quick_gelu": lambda x: (wide(x) * torch.sigmoid(1.702 * wide(x))).to(x.dtype),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "relu6": F.relu6,
    "selu": F.selu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "softshrink": F.softshrink,
    "softsign": F.softsign,
    "tanh": torch.tanh,
    "tanhshrink": F.tanhshrink,
    "threshold": lambda x: F.threshold(x, 1.0, 0.0),
}


@dataclass(frozen=True)
class Shipped:
    """A shipped step activation, its fit as plain JSON."""

    name: str
    fit: Any

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(f"fitact.generated.{self.name}")

    @property
    def function(self) -> Any:
        return getattr(self.module, self.name)

    @property
    def stock(self) -> Any:
        return STOCK[self.fit["activation"]["name"]]

    def slope(self, x: torch.Tensor) -> torch.Tensor:
        """The level of each element in float64, by the definition: how many borders lie strictly below."""
        at = x.detach().double().abs() if self.fit["even"] else x.detach().double()
        code = sum((at > border).long() for border in self.fit["borders"])
        return torch.tensor(self.fit["levels"], dtype=torch.float64)[code]

    def gradient(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """dy · level, multiplied in float32 (float64 for float64) and rounded to the dtype of dy."""
        wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
        return (dy.to(wide) * self.slope(x).to(wide)).to(dy.dtype)

    @property
    def piecewise_linear(self) -> bool:
        return self.fit["activation"]["name"] in PIECEWISE_LINEAR

    def stock_gradient(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """PyTorch's own, by autograd."""
        leaf = x.detach().requires_grad_()
        (dx,) = torch.autograd.grad(self.stock(leaf), leaf, dy)
        return dx


@cache
def shipped() -> list[Shipped]:
    """The shipped step activations."""
    folder = files("fitact.generated") / "fits"
    fits = sorted((path.name, json.loads(path.read_text())) for path in folder.iterdir())
    return [Shipped(file.removesuffix(".json"), fit) for file, fit in fits if "levels" in fit]


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """All 65 536 bit patterns of a half-precision dtype, NaNs and infinities among them."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def around(borders: list[float], dtype: torch.dtype) -> torch.Tensor:
    """Each border with the floats next to it, both signs, and the special values."""
    kind = np.float64 if dtype == torch.float64 else np.float32
    at = np.array(borders, dtype=kind)
    below, above = np.nextafter(at, kind(-np.inf)), np.nextafter(at, kind(np.inf))
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], dtype=kind)
    return torch.from_numpy(np.concatenate([at, below, above, -at, -below, -above, special]))


# One of each kind: every width, an even derivative, a jump, exact steps, a formula that PyTorch lacks.
KINDS = {
    "gelu_fewbit1",
    "gelu_fewbit2",
    "gelu_fewbit3",
    "gelu_fewbit4",
    "hardtanh_fewbit1",
    "quick_gelu_fewbit3",
    "relu6_fewbit2",
    "selu_fewbit3",
    "tanh_fewbit3",
}


def each(only: set[str] | None = None) -> pytest.MarkDecorator:
    """Parametrise `one` by the shipped activations; those not in `only` run in the full product alone."""
    return pytest.mark.parametrize(
        "one",
        [
            pytest.param(one, id=one.name, marks=[] if only is None or one.name in only else pytest.mark.full)
            for one in shipped()
        ],
    )
