"""Formulas with learned parameters, which save x and the numbers; and modules that compute one.

The op gets the numbers as a matrix: a row for each, with a column for each channel or one column; it is float64 if
x is, else float32. Their gradients are sums over elements, in the same dtype: first over parts of the tensor, then
over these, always in the same order and without atomics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from . import inputs, reference
from .launch import launch, threads_of
from .ops import differentiable
from .reference import arithmetic_dtype
from .registry import Backward, Forward, Kernel, Two, find

PART = 1 << 17  # elements whose gradients are added up at once, 512 KiB of float32
THREADS = 256


def apply_learned(x: Tensor, numbers: Sequence[Tensor], dim: int, key: str) -> Tensor:
    """Return the formula of x, saving for backward x and the numbers.

    Args:
        x: as for `apply`.
        numbers: the learned parameters, in the formula's order; each has one element, or one for each channel,
            of any shape; DTensors of the mesh of x if x is one. The arithmetic is in float32, or in float64 if x
            is.
        dim: the dimension of x that the channels lie along; unused where every number has one element.
        key: the key of a registered formula.

    Returns:
        A tensor of the shape and dtype of x, laid out like `torch.empty_like` of x. It carries a way to recompute
        it, for a context of `fitact.saving`.

    Raises:
        TypeError: x is not a tensor of one of these dtypes, or of x and the numbers some are DTensors and others
            are not, or have another mesh.
        ValueError: a number has another size than one or the channels of x, or x has no such dimension.

    """
    formula = find(key)
    wide = any(number.numel() != 1 for number in numbers)
    _check(formula, x, numbers, dim, wide)
    if inputs.mesh_of(x) is not None:
        return _distributed(x, numbers, dim % x.dim() if wide else -1, key)
    dtype, dim = arithmetic_dtype(x), dim % x.dim() if wide else 0
    channels = x.shape[dim] if wide else 1
    if not inputs.may_need_gradient(x, *numbers):
        after = (1,) * (x.dim() - dim - 1)
        shapes = ((-1, *after) if number.numel() > 1 else () for number in numbers)
        columns = [number.to(dtype).reshape(shape) for number, shape in zip(numbers, shapes, strict=True)]
        with inputs.without_autocast(x.device.type):
            return inputs.like(formula.value(x.to(dtype), *columns).to(x.dtype), x)
    packed = torch.stack([number.to(dtype).reshape(-1).expand(channels) for number in numbers])
    order, dims = inputs.in_memory_order(x)
    x, dim = inputs.permuted(x, order), dim if order is None else order.index(dim)
    inner = math.prod(x.shape[dim + 1 :]) if channels > 1 else 1
    return inputs.permuted(differentiable(x.contiguous(), packed, x.dtype, key, inner=inner), dims)


def _distributed(x: Any, numbers: Sequence[Any], dim: int, key: str) -> Tensor:
    """Return the formula of a DTensor, with the same placements; gradients of numbers are summed over the shards.

    Where x is split along its channels, each process takes their part of the numbers.
    """
    from torch.distributed.tensor import Partial, Placement, Replicate, Shard

    def of_shards(shard: Tensor, placements: list[Any]) -> Tensor:
        local = []
        for number in numbers:
            wide = next((i for i, size in enumerate(number.shape) if size > 1), None)
            values: list[Placement] = [
                Shard(wide) if wide is not None and each.is_shard(dim) else Replicate() for each in placements
            ]
            pairs = zip(placements, values, strict=True)
            gradients = [Partial() if each.is_shard() and own.is_replicate() else own for each, own in pairs]
            local.append(number.redistribute(placements=values).to_local(grad_placements=gradients))
        return apply_learned(shard, local, dim, key)

    return inputs.sharded(x, of_shards, lambda placement: type(placement) in (Replicate, Shard))


def _check(formula: Learned, x: Tensor, numbers: Sequence[Tensor], dim: int, wide: bool) -> None:
    """Raise unless x is a tensor that the formula takes, and each number has one element or one a channel."""
    inputs.check_dtype(formula.name, x)
    inputs.check_meshes(formula.name, "x and the learned parameters to be all", x, *numbers)
    if wide and not -x.dim() <= dim < x.dim():
        raise ValueError(f"{formula.name}: expected a tensor with a dimension {dim}, got {tuple(x.shape)}")
    channels = x.shape[dim] if wide else 1
    for own, number in zip(formula.numbers, numbers, strict=True):
        if number.numel() not in (1, channels):
            raise ValueError(
                f"{formula.name}: {own.name}: expected 1 element or {channels}, the channels of {tuple(x.shape)} "
                f"along dimension {dim}, got {number.numel()}"
            )


class Number(NamedTuple):
    """A learned parameter: its name, its start, and whether there is one for every channel."""

    name: str
    start: float
    channel: bool


@dataclass(frozen=True, kw_only=True)
class Learned(Kernel):
    """A formula with learned parameters. The other tensor of the ops has the numbers.

    Attributes:
        numbers: the learned parameters.
        value: of x and the numbers, in PyTorch's operators; all are of one dtype, float32 or float64.
        derivative: likewise in x.
        derivatives: likewise in each number.

    """

    by_element: ClassVar[bool] = True

    numbers: tuple[Number, ...]
    value: Callable[..., Tensor]
    derivative: Callable[..., Tensor]
    derivatives: tuple[Callable[..., Tensor], ...]

    def compute(self, given: Forward) -> tuple[Tensor, Tensor]:
        x, numbers = given.x, given.other
        y, columns, shape = torch.empty_like(x), _columns(numbers), (-1, numbers.shape[1], given.inner)
        with inputs.without_autocast(x.device.type):
            for part in _parts(x.numel(), *shape[1:]):
                y.view(shape)[part] = self.value(x.view(shape)[part].to(numbers.dtype), *columns)
        return y, self.codes(given)

    def gradients(self, given: Backward) -> Two:
        dy, saved, numbers = given.dy, given.saved, given.other
        columns, shape, sums = _columns(numbers), (-1, numbers.shape[1], given.inner), []
        dx = torch.empty_like(dy) if given.wants_x else None
        with inputs.without_autocast(dy.device.type):
            for part in _parts(dy.numel(), *shape[1:]):
                at, grad = (tensor.view(shape)[part].to(numbers.dtype) for tensor in (saved, dy))
                if dx is not None:
                    dx.view(shape)[part] = grad * self.derivative(at, *columns)
                if given.wants_other:
                    products = [grad * derivative(at, *columns) for derivative in self.derivatives]
                    sums.append(torch.stack([product.sum((0, 2)) for product in products]))
        return dx, torch.stack(sums).sum(0) if given.wants_other else None

    def launch(self, given: Forward, y: Tensor, codes: Tensor) -> None:
        from .tiles import WIDTH

        x, numbers = given.x, given.other
        channels, beside = _channels(numbers, given.inner)
        programs, threads = reference.tiles_of(x), threads_of(x.dtype)
        if channels is not None and channels >= WIDTH.value and beside is None:  # blocks, as in backward
            programs, threads = math.prod(_blocks(x.numel() // channels, channels)), THREADS
        launch(self.forward, programs, threads, x, y, numbers, channels, beside, x.numel())

    def launch_backward(self, given: Backward, dx: Tensor | None, d_other: Tensor | None) -> None:
        from .tiles import BLOCK, TRIPS

        dy, numbers = given.dy, given.other
        channels, beside = _channels(numbers, given.inner)
        rows = dy.numel() // ((channels or 1) * (beside or 1))
        if channels is not None and beside is None:
            parts, across = _blocks(rows, channels)
        else:
            parts, across = -(-rows * (beside or 1) // (BLOCK.value * TRIPS.value)), channels or 1
        sums = None if d_other is None else d_other.new_empty(parts, *d_other.shape)
        launch(self.backward, parts * across, THREADS, dy, given.saved, numbers, dx, sums, channels, beside, rows)
        if d_other is not None and sums is not None:
            torch.sum(sums, 0, out=d_other)


def _columns(numbers: Tensor) -> tuple[Tensor, ...]:
    """Return each number so that it meets (rows, channels, inner)."""
    return tuple(row.unsqueeze(-1) for row in numbers)


def _parts(size: int, channels: int, inner: int) -> Iterator[slice]:
    """Return slices of the rows of (rows, channels, inner), which depend on the sizes alone."""
    width = max(channels * inner, 1)
    rows, step = size // width, max(PART // width, 1)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _channels(numbers: Any, inner: int) -> tuple[int | None, int | None]:
    """Return what kernels take for the channels, and for the elements of each that lie beside each other."""
    return (numbers.shape[1], inner if inner > 1 else None) if numbers.shape[1] > 1 else (None, None)


def _blocks(rows: int, channels: int) -> tuple[int, int]:
    """Return how many programs channels that lie beside each other take, by rows and by channels."""
    from .tiles import HEIGHT, TRIPS, WIDTH

    return -(-rows // int(HEIGHT.value * TRIPS.value)), -(-channels // int(WIDTH.value))


class LearnedModule(nn.Module):
    """The module of a formula; its learned parameters are parameters.

    Args:
        channels: how many channels x has. Numbers with a value for each channel have parameters (channels,), the
            others (1,). None for a formula without such numbers.
        dim: the dimension of x that the channels lie along: the last, or 1 for images.
        device: of the parameters.
        dtype: of the parameters, by default PyTorch's.

    Raises:
        TypeError: channels are missing, or the formula has no numbers of channels.
        ValueError: channels is not a positive number.

    """

    key: ClassVar[str]

    def __init__(
        self,
        channels: int | None = None,
        dim: int = -1,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        formula = find(self.key)
        name, wide = formula.name, [number.name for number in formula.numbers if number.channel]
        if wide and channels is None:
            raise TypeError(f"{name}: expected channels, the size of {' and '.join(wide)}")
        if channels is not None and not wide:
            raise TypeError(f"{name}: expected no channels, as it has one of each number, got {channels!r}")
        if channels is not None and not (type(channels) is int and channels > 0):
            raise ValueError(f"{name}: channels: expected a positive number, got {channels!r}")
        self.channels, self.dim = channels, dim
        for number in formula.numbers:
            size = (channels or 1) if number.channel else 1
            start = torch.full((size,), number.start, device=device, dtype=dtype)
            self.register_parameter(number.name, nn.Parameter(start))

    def reset_parameters(self) -> None:
        """Set the learned parameters to their starts."""
        with torch.no_grad():
            for number in find(self.key).numbers:
                getattr(self, number.name).fill_(number.start)

    def extra_repr(self) -> str:
        """Return the channels and their dimension, for printing."""
        return "" if self.channels is None else f"{self.channels}, dim={self.dim}"

    def forward(self, input: Tensor) -> Tensor:
        """Return the formula of a tensor, see `apply_learned`."""
        numbers = [getattr(self, number.name) for number in find(self.key).numbers]
        return apply_learned(input, numbers, self.dim, self.key)
