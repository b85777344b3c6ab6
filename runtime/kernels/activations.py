"""Activations of one input, which save codes, the output, or both."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor

from . import inputs, reference
from .launch import launch
from .ops import differentiable
from .registry import Backward, Forward, Kernel, Two, find


def apply(x: Tensor, key: str) -> Tensor:
    """Return the activation of x, saving its codes for backward.

    Args:
        x: float16, bfloat16, float32 or float64, of any shape, strides and device. For a DTensor, each process
            codes its own shard; a partial DTensor is summed over the processes first.
        key: the key of a registered activation.

    Returns:
        A tensor of the shape of x, laid out like `torch.empty_like` of x. Its dtype is that of x; where backward
        needs the output, under autocast it is the autocast dtype, so that the next layer saves the same storage
        and no copy of it.

    Raises:
        TypeError: x is not a tensor of one of these dtypes.

    """
    activation: Pointwise = find(key)
    if inputs.mesh_of(x) is not None:
        return inputs.sharded(x, lambda shard, _: apply(shard, key), lambda placement: not placement.is_partial())
    inputs.check_dtype(activation.name, x)
    dtype = inputs.autocast_dtype(x) if activation.saves_output else x.dtype
    gradient = inputs.may_need_gradient(x)
    if not gradient and torch.compiler.is_compiling():  # a compiler rounds and lays out results as it likes
        return activation.result(x, dtype)
    order, dims = inputs.in_memory_order(x)
    x = inputs.permuted(x, order).contiguous()
    if gradient:
        return inputs.permuted(differentiable(x, None, dtype, key, dims=dims), dims)
    x = inputs.permuted(x, dims)
    return inputs.like(activation.result(x, dtype), x)


@dataclass(frozen=True, kw_only=True)
class Pointwise(Kernel):
    """An activation of one input; subclasses define f′ as a function of what is saved.

    Attributes:
        value: the activation in PyTorch's operators, Tensor → Tensor.
        even: whether |x| is compared with the borders.

    """

    saves_input: ClassVar[bool] = False

    value: Callable[[Tensor], Tensor]
    even: bool = False

    def threads(self, *tensors: Tensor) -> int:
        """Return the threads of a program, such that a thread has 16 bytes of a row of the widest tensor.

        With four bits, half precision gets twice as many threads, because the table of levels takes registers.
        """
        return 256 if self.bits == 4 or any(tensor.dtype == torch.float32 for tensor in tensors) else 128

    @abstractmethod
    def fitted(self, dtype: torch.dtype) -> tuple[tuple[float, ...], reference.Derivative]:
        """Return, for y in a dtype, the 2^bits − 1 borders that codes count, each a float32, and f′."""

    def result(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the activation of x as a tensor of its own; autocast widens the results of some operators."""
        y = self.value(x).to(dtype)
        return y.clone() if y is x else y

    def compute(self, given: Forward) -> tuple[Tensor, Tensor]:
        x, dtype = given.x, inputs.DTYPES[given.dtype]
        y = inputs.in_layout(lambda x: self.result(x, dtype), given.dims, x)
        if not self.bits:
            return y, self.codes(given)
        return y, reference.encode(x, self.fitted(dtype)[0], self.bits, self.even)

    def gradients(self, given: Backward) -> Two:
        dy, y = given.dy, given.saved
        _, derivative = self.fitted(dy.dtype if y is None else y.dtype)
        return reference.backward(dy, y, given.codes, self.bits, derivative, inputs.DTYPES[given.dtype]), None

    def launch(self, given: Forward, y: Tensor, codes: Tensor) -> None:
        x, own = given.x, [codes] if self.bits else []
        launch(self.forward, reference.tiles_of(x), self.threads(x, y), x, y, *own, x.numel())

    def launch_backward(self, given: Backward, dx: Tensor | None, d_other: Tensor | None) -> None:
        assert dx is not None
        dy = given.dy
        own = [given.saved] * self.saves_output + [given.codes] * (self.bits > 0)
        launch(self.backward, reference.tiles_of(dy), self.threads(dy, dx), dy, *own, dx, dy.numel())


@dataclass(frozen=True, kw_only=True)
class Step(Pointwise):
    """An activation whose derivative is a step function of its input.

    Attributes:
        borders, levels: the step function, 2^bits − 1 and 2^bits numbers, each a float32.

    """

    borders: tuple[float, ...]
    levels: tuple[float, ...]

    def fitted(self, dtype: torch.dtype) -> tuple[tuple[float, ...], reference.Derivative]:
        return self.borders, partial(reference.level, self.levels)


@dataclass(frozen=True, kw_only=True)
class Output(Pointwise):
    """An activation whose derivative is a function of its output.

    Attributes:
        derivative: that function in PyTorch's operators, Tensor → Tensor.

    """

    saves_output: ClassVar[bool] = True

    derivative: Callable[[Tensor], Tensor]

    def fitted(self, dtype: torch.dtype) -> tuple[tuple[float, ...], reference.Derivative]:
        return (), self._derivative

    @cached_property
    def _derivative(self) -> reference.Tabulated:
        return reference.Tabulated(lambda y, _: self.derivative(y), 0)


@dataclass(frozen=True, kw_only=True)
class Inverted(Pointwise):
    """An activation whose derivative is a function of its output and of the piece that its input lies in.

    Attributes:
        borders: for each dtype of y, the borders of the pieces in x.
        derivatives: for each dtype of y, f′ in PyTorch's operators, as a function of y (float32, one-dimensional)
            and of the codes (int32). The entry for float32 also serves float64.

    """

    saves_output: ClassVar[bool] = True

    borders: Mapping[torch.dtype, tuple[float, ...]]
    derivatives: Mapping[torch.dtype, Callable[[Tensor, Tensor], Tensor]]

    def fitted(self, dtype: torch.dtype) -> tuple[tuple[float, ...], reference.Derivative]:
        dtype = torch.float32 if dtype == torch.float64 else dtype
        return self.borders.get(dtype, ()), self._derivatives[dtype]  # no borders where bits are 0

    @cached_property
    def _derivatives(self) -> dict[torch.dtype, reference.Tabulated]:
        return {dtype: reference.Tabulated(each, self.bits) for dtype, each in self.derivatives.items()}
