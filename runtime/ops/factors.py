"""The factors of gates h = a(g)·b(u): what they keep of their arguments, and how backward uses that."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import reference
from .library import KERNEL_DTYPES


class Tables(NamedTuple):
    """What kernels read for codes.

    Attributes:
        codes: by dtype, as `reference.first_codes` returns them.
        borders: float32, (2^bits − 1,), and infinities.
        values: float32, (2^bits,).
        derivatives: likewise.

    """

    codes: dict[torch.dtype, Tensor]
    borders: Tensor
    values: Tensor
    derivatives: Tensor

    @classmethod
    def on(
        cls, device: torch.device, borders: tuple[float, ...], table: tuple[tuple[float, float], ...]
    ) -> Tables:
        """Return the tables of borders, and of values and derivatives by code, on a device."""
        values, derivatives = zip(*table, strict=True)
        return cls(
            {dtype: reference.first_codes(borders, dtype, device) for dtype in KERNEL_DTYPES},
            # followed by as many infinities, so that a search never runs past them
            reference.constant((*borders, *(math.inf,) * len(table)), torch.float32, device),
            reference.constant(values, torch.float32, device),
            reference.constant(derivatives, torch.float32, device),
        )


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A factor that keeps its argument x as it is, and computes everything again from it.

    Attributes:
        value: of x, in PyTorch's operators, dtype kept.

    """

    value: Callable[[Tensor], Tensor]

    @property
    def bits(self) -> int:
        """Bits of a code; 0 where x is kept."""
        return 0

    def encode(self, x: Tensor) -> Tensor:
        """Return the codes of x, uint8 (`reference.bytes_of_codes`,), in the order of its elements."""
        return x.new_empty(0, dtype=torch.uint8)

    def value_and_codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the value of x, and the codes of x."""
        return self.value(x), self.encode(x)

    def again(self, kept: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the value from what is kept, as `dtype`."""
        return self.value(kept).to(dtype)

    def gradient(self, dy: Tensor, kept: Tensor) -> Tensor:
        """Return dy times the derivative, by PyTorch's own backward; it is in the dtype of dy."""
        pull: Any = torch.func.vjp(self.value, kept)[1]
        dx: Tensor = pull(dy)[0]
        return dx

    def coding(self, codes: Tensor, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return what a kernel takes to write codes of x: these, the first codes, and the borders."""
        return None, None, None

    def tables(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Return what a kernel takes to look up: values and derivatives, float32."""
        return None, None


@dataclass(frozen=True, kw_only=True)
class CodedFactor(Factor):
    """A factor that keeps a code of its argument, by which value and derivative are looked up.

    Attributes:
        borders: 2^bits − 1 numbers, increasing; a code counts those strictly below x.
        table: for each code the value and the derivative.

    """

    borders: tuple[float, ...]
    table: tuple[tuple[float, float], ...]

    @cached_property
    def bits(self) -> int:
        """Bits of a code."""
        return (len(self.table) - 1).bit_length()

    @cached_property
    def values(self) -> tuple[float, ...]:
        """The values, by code."""
        return tuple(value for value, _ in self.table)

    @cached_property
    def derivatives(self) -> tuple[float, ...]:
        """The derivatives, by code."""
        return tuple(derivative for _, derivative in self.table)

    @cached_property
    def levels(self) -> reference.Levels:
        """The derivatives, as PyTorch's operators look them up."""
        return reference.Levels(self.derivatives)

    def again(self, kept: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the values of codes, of that size."""
        return reference.look_up(self.values, kept, self.bits, size, dtype)

    @cached_property
    def linear(self) -> bool:
        """Whether the derivative is 1 everywhere, so that none is looked up."""
        return {*self.derivatives} == {1.0}

    def gradient(self, dy: Tensor, kept: Tensor) -> Tensor:
        """Return dy times the derivatives of codes."""
        if self.linear:
            return dy
        return reference.backward(dy.contiguous(), None, kept, self.bits, self.levels, dy.dtype)

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return what a kernel takes to look up: values and derivatives, float32, without them if all are 1."""
        tables = self.on(device)
        return tables.values, None if self.linear else tables.derivatives

    def encode(self, x: Tensor) -> Tensor:
        """Return the codes of x."""
        return reference.encode(x.contiguous(), self.borders, self.bits, even=False)

    def coding(self, codes: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what a kernel takes to write codes of x: these, the first codes, and the borders."""
        tables = self.on(x.device)
        return codes, tables.codes[x.dtype], tables.borders

    def on(self, device: torch.device) -> Tables:
        """Return what kernels read on a device, made once."""
        if device not in self._tables:
            self._tables[device] = Tables.on(device, self.borders, self.table)
        return self._tables[device]

    @cached_property
    def _tables(self) -> dict[torch.device, Tables]:
        return {}
