"""The registry of activations, and the kinds of them: what each keeps for backward, and how it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from . import reference
from .library import Registry

if TYPE_CHECKING:
    from .launch import Launch


@dataclass(frozen=True, kw_only=True)
class Pointwise(ABC):
    """A registered activation, with all that the ops need to run it. Subclasses are the kinds of activation.

    Attributes:
        key: identifies the fit and the generated text.
        name: its name in messages.
        value: the activation in PyTorch's operators, Tensor → Tensor.
        forward, backward: Triton kernels; their arguments are those of `run_forward` and `run_backward`.
        bits: bits kept per element as codes.
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
        """Return the threads of a program, such that a thread has 16 bytes of a row of the widest tensor.

        With four bits, half precision gets twice as many threads, because the table of levels takes registers.
        """
        return 256 if self.bits == 4 or any(tensor.dtype == torch.float32 for tensor in tensors) else 128

    @abstractmethod
    def encode(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the codes of a contiguous tensor, uint8 (tiles · bits · COLUMNS,), by PyTorch's operators.

        `dtype` is that of y.
        """

    @abstractmethod
    def gradient(self, dy: Tensor, y: Tensor | None, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return dy · f′ in `dtype`, with the shape of the contiguous dy, by PyTorch's operators."""

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
        return reference.encode(x, self.borders, self.bits, self.even)

    def gradient(self, dy: Tensor, y: Tensor | None, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return reference.backward(dy, None, codes, self.bits, self._derivative, dtype)

    @cached_property
    def _derivative(self) -> reference.Levels:
        return reference.Levels(self.levels)

    def run_forward(self, launch: Launch, x: Tensor, y: Tensor, codes: Tensor) -> None:
        launch(self.forward, x, y, codes)

    def run_backward(self, launch: Launch, dy: Tensor, y: Tensor | None, codes: Tensor, dx: Tensor) -> None:
        launch(self.backward, dy, codes, dx)


@dataclass(frozen=True, kw_only=True)
class Exact(Pointwise):
    """An activation whose derivative is a function of its output.

    Attributes:
        derivative: that function in PyTorch's operators, Tensor → Tensor.

    """

    keeps_output = True

    derivative: Callable[[Tensor], Tensor]

    def encode(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.new_empty(0, dtype=torch.uint8)

    def gradient(self, dy: Tensor, y: Tensor | None, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return reference.backward(dy, y, codes, 0, self._derivative, dtype)

    @cached_property
    def _derivative(self) -> reference.Tabulated:
        return reference.Tabulated(lambda y, _: self.derivative(y), 0)

    def run_forward(self, launch: Launch, x: Tensor, y: Tensor, codes: Tensor) -> None:
        launch(self.forward, x, y)

    def run_backward(self, launch: Launch, dy: Tensor, y: Tensor | None, codes: Tensor, dx: Tensor) -> None:
        launch(self.backward, dy, y, dx)


@dataclass(frozen=True, kw_only=True)
class Inverted(Pointwise):
    """An activation whose derivative is a function of its output and of the piece that its input lies in.

    Attributes:
        borders: for each dtype of y, the 2^bits − 1 borders of the pieces in x, each a float32.
        derivatives: for each dtype of y, f′ in PyTorch's operators, as a function of y (float32, one-dimensional)
            and of the codes (int32). The entry for float32 also serves float64.

    """

    keeps_output = True

    borders: Mapping[torch.dtype, tuple[float, ...]]
    derivatives: Mapping[torch.dtype, Callable[[Tensor, Tensor], Tensor]]

    def encode(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.bits:
            return x.new_empty(0, dtype=torch.uint8)
        return reference.encode(x, self.borders[_fitted(dtype)], self.bits, even=False)

    def gradient(self, dy: Tensor, y: Tensor | None, codes: Tensor, dtype: torch.dtype) -> Tensor:
        assert y is not None
        return reference.backward(dy, y, codes, self.bits, self._derivatives[_fitted(y.dtype)], dtype)

    @cached_property
    def _derivatives(self) -> dict[torch.dtype, reference.Tabulated]:
        kinds = self.derivatives.items()
        return {dtype: reference.Tabulated(function, self.bits) for dtype, function in kinds}

    def run_forward(self, launch: Launch, x: Tensor, y: Tensor, codes: Tensor) -> None:
        launch(self.forward, x, y, *([codes] if self.bits else []))

    def run_backward(self, launch: Launch, dy: Tensor, y: Tensor | None, codes: Tensor, dx: Tensor) -> None:
        launch(self.backward, dy, y, *([codes] if self.bits else []), dx)


def _fitted(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype whose fit serves a dtype."""
    return torch.float32 if dtype == torch.float64 else dtype


_registry: Registry[Pointwise] = Registry("activation")
register = _registry.register
find = _registry.find
refuse_second_derivative = _registry.refuse_second_derivative


def is_generated(kind: type) -> bool:
    """Return whether a class comes from `fitact codegen`, whose modules register their activation under a key."""
    return _registration(kind) is not None


def registered(kind: type[nn.Module]) -> Pointwise:
    """Return the activation that a generated class has registered."""
    activation = _registration(kind)
    assert activation is not None, f"{kind.__name__} comes from fitact codegen"
    return activation


def _registration(kind: type) -> Pointwise | None:
    """Return what a class has registered, None unless the class and its module come from `fitact codegen`.

    Such a module registers its key in its runtime, which is its own copy if it was made with --standalone; and it
    holds the function and the class of what it registers.
    """
    home: Mapping[str, Any] = getattr(getattr(kind, "forward", None), "__globals__", {})
    key, ops = home.get("_KEY"), getattr(home.get("_rt"), "ops", None)
    registry = getattr(getattr(getattr(ops, "registry", None), "_registry", None), "by_key", None)
    if not isinstance(key, str) or kind.__module__ != home.get("__name__") or type(registry) is not dict:
        return None
    activation: Pointwise | None = registry.get(key)
    function = home.get(getattr(activation, "name", ""))
    own = getattr(function, "__globals__", None) is home and kind.__name__ in home.get("__all__", ())
    return activation if own else None
