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
import torch
import torch.nn.functional as F

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32, torch.float64)

# PyTorch's own, written out here: the catalog is under test.
STOCK: dict[str, Any] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "selu": F.selu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "tanh": torch.tanh,
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


@cache
def shipped() -> list[Shipped]:
    folder = files("fitact.generated") / "fits"
    fits = sorted((path.name, json.loads(path.read_text())) for path in folder.iterdir())
    return [Shipped(file.removesuffix(".json"), fit) for file, fit in fits]


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
