"""The registry of activations: what each kind of generated module keeps for backward, and how it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from . import eager

if TYPE_CHECKING:
    from .ops import Launch


@dataclass(frozen=True, kw_only=True)
class Pointwise(ABC):
    """A registered activation: what the ops need to run it. Its subclasses are the kinds of generated module.

    Attributes:
        key: identifies fit and generated text.
        name: as messages call it.
        value: the activation with PyTorch's operators, Tensor → Tensor.
        forward, backward: Triton kernels; their arguments are those of `run_forward` and `run_backward`.
        bits: kept per element as codes.
        keeps_output: whether backward needs y.

    """

    key: str
    name: str
    value: Callable[[Tensor], Tensor]
    forward: Any
    backward: Any
    bits: int = 0
    keeps_output: ClassVar[bool]

    def threads(self, *tensors: Tensor) -> int:
        """Return the threads of a program: a thread's share of a row is then 16 bytes of the widest tensor.

        Four bits want twice the threads that half precision would have: their table of levels takes registers.
        """
        return 256 if self.bits == 4 or any(tensor.dtype == torch.float32 for tensor in tensors) else 128

    @abstractmethod
    def encode(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the codes of a contiguous tensor, (tiles · bits · COLUMNS,) of uint8, by PyTorch's operators.

        `dtype` is that of y.
        """

    @abstractmethod
    def gradient(self, dy: Tensor, y: Tensor | None, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return dy · f′ in `dtype`, shape of the contiguous dy, with PyTorch's operators."""

    @abstractmethod
    def run_forward(self, launch: Launch, x: Tensor, y: Tensor, codes: Tensor) -> None:
        """Launch the forward kernel, which writes y and codes."""

    @abstractmethod
    def run_backward(self, launch: Launch, dy: Tensor, y: Tensor | None, codes: Tensor, dx: Tensor) -> None:
        """Launch the backward kernel, which writes dx."""


@dataclass(frozen=True, kw_only=True)
class Step(Pointwise):
    """An activation whose derivative is a step function of its input.

    Attributes:
        borders, levels: the step function, 2^bits − 1 and 2^bits numbers, each a float32.
        even: whether |x| is compared with the borders.

    """

    keeps_output = False

    borders: tuple[float, ...]
    levels: tuple[float, ...]
    even: bool

    def encode(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return eager.encode(x, self.borders, self.bits, self.even)

    def gradient(self, dy: Tensor, y: Tensor | None, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return eager.backward(dy, None, codes, self.bits, self._slope, dtype)

    @cached_property
    def _slope(self) -> eager.Levels:
        return eager.Levels(self.levels)

    def run_forward(self, launch: Launch, x: Tensor, y: Tensor, codes: Tensor) -> None:
        launch(self.forward, x, y, codes)

    def run_backward(self, launch: Launch, dy: Tensor, y: Tensor | None, codes: Tensor, dx: Tensor) -> None:
        launch(self.backward, dy, codes, dx)


@dataclass(frozen=True, kw_only=True)
class Exact(Pointwise):
    """An activation whose derivative is a function of its output.

    Attributes:
        slope: that function with PyTorch's operators, Tensor → Tensor.

    """

    keeps_output = True

    slope: Callable[[Tensor], Tensor]

    def encode(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.new_empty(0, dtype=torch.uint8)

    def gradient(self, dy: Tensor, y: Tensor | None, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return eager.backward(dy, y, codes, 0, self._slope, dtype)

    @cached_property
    def _slope(self) -> eager.Tabulated:
        return eager.Tabulated(lambda y, _: self.slope(y), 0)

    def run_forward(self, launch: Launch, x: Tensor, y: Tensor, codes: Tensor) -> None:
        launch(self.forward, x, y)

    def run_backward(self, launch: Launch, dy: Tensor, y: Tensor | None, codes: Tensor, dx: Tensor) -> None:
        launch(self.backward, dy, y, dx)


@dataclass(frozen=True, kw_only=True)
class Inverted(Pointwise):
    """An activation whose derivative is a function of its output and of the piece that its input lies in.

    Attributes:
        splits: by dtype of y, the 2^bits − 1 borders of the pieces in x, each a float32.
        slopes: by dtype of y, f′ with PyTorch's operators as a function of y, one-dimensional, in float32, and of
            the codes, int32. What is there for float32 is for float64 too.

    """

    keeps_output = True

    splits: Mapping[torch.dtype, tuple[float, ...]]
    slopes: Mapping[torch.dtype, Callable[[Tensor, Tensor], Tensor]]

    def encode(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.bits:
            return x.new_empty(0, dtype=torch.uint8)
        return eager.encode(x, self.splits[_fitted(dtype)], self.bits, even=False)

    def gradient(self, dy: Tensor, y: Tensor | None, codes: Tensor, dtype: torch.dtype) -> Tensor:
        assert y is not None
        return eager.backward(dy, y, codes, self.bits, self._slopes[_fitted(y.dtype)], dtype)

    @cached_property
    def _slopes(self) -> dict[torch.dtype, eager.Tabulated]:
        return {dtype: eager.Tabulated(slope, self.bits) for dtype, slope in self.slopes.items()}

    def run_forward(self, launch: Launch, x: Tensor, y: Tensor, codes: Tensor) -> None:
        launch(self.forward, x, y, *([codes] if self.bits else []))

    def run_backward(self, launch: Launch, dy: Tensor, y: Tensor | None, codes: Tensor, dx: Tensor) -> None:
        launch(self.backward, dy, y, *([codes] if self.bits else []), dx)


def _fitted(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype whose fit serves a dtype."""
    return torch.float32 if dtype == torch.float64 else dtype


_registry: dict[str, Pointwise] = {}


def register(activation: Pointwise) -> str:
    """Make an activation known to the ops and return its key; again is harmless."""
    _registry[activation.key] = activation
    return activation.key


def find(key: str) -> Pointwise:
    """Return the activation of a key."""
    try:
        return _registry[key]
    except KeyError:
        raise RuntimeError(
            f"no activation is registered under the key {key!r}: import the generated module it comes from"
        ) from None
