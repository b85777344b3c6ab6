"""Formulas with learned numbers as functions of tensors, their autograd, and as modules with parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..ops.autograd import inverse, may_need_gradient, memory_order
from ..ops.library import Gradients, check_dtype, ops, with_signature
from ..ops.reference import arithmetic_dtype
from ..recipes import note
from .ops import Learned, find


def apply_learned(x: Tensor, numbers: Sequence[Tensor], dim: int, key: str) -> Tensor:
    """Return the formula of x, keeping for backward x or the output, and the numbers.

    Args:
        x: float16, bfloat16, float32 or float64, of any shape, strides and device. For a DTensor, each process
            keeps its own shard; a partial DTensor is summed over the processes first.
        numbers: the learned numbers, in the order of the formula; each has one element, or one for each channel,
            of any shape; DTensors of the mesh of x if x is one. The arithmetic is in float32, or in float64 if x
            is.
        dim: the dimension of x that the channels lie along; unused where every number has one element.
        key: the key of a registered formula.

    Returns:
        A tensor of the shape, dtype and memory order of x (contiguous if x is not dense). Unless the output is
        what is kept, it carries a note of how to compute it again, for a context of `fitact.saving`.

    Raises:
        TypeError: x is not a tensor of one of these dtypes, or of x and the numbers some are DTensors and others
            are not, or have another mesh.
        ValueError: a number has another size than one or the channels of x, or x has no such dimension.

    """
    formula = find(key)
    wide = any(number.numel() != 1 for number in numbers)
    _check(formula, x, numbers, dim, wide)
    if _mesh(x) is not None:
        return _distributed(x, numbers, dim % x.dim() if wide else -1, key)
    dtype = arithmetic_dtype(x)
    dim = dim % x.dim() if wide else 0
    channels = x.shape[dim] if wide else 1
    if not (may_need_gradient(x) or any(may_need_gradient(number) for number in numbers)):
        return _plain(formula, x, numbers, dim, dtype)
    packed = torch.stack([number.to(dtype).reshape(-1).expand(channels) for number in numbers])
    order = None if x.is_contiguous() else memory_order(x)
    if order is None:
        return _differentiable(x.contiguous(), packed, dim, key)
    place = order.index(dim) if wide else 0
    return _differentiable(x.permute(order), packed, place, key).permute(inverse(order))


def _mesh(tensor: Any) -> Any:
    """Return the mesh of a DTensor, None for other tensors."""
    return getattr(tensor, "device_mesh", None)


def _distributed(x: Any, numbers: Sequence[Any], dim: int, key: str) -> Tensor:
    """Return the formula of a DTensor, with the same placements; gradients of numbers are summed over the shards.

    Where x is split along its channels, each process takes their part of the numbers.
    """
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

    if any(type(p) not in (Replicate, Shard) for p in x.placements):
        x = x.redistribute(placements=[p if type(p) in (Replicate, Shard) else Replicate() for p in x.placements])
    local = []
    for number in numbers:
        wide = next((i for i, size in enumerate(number.shape) if size > 1), None)
        values: list[Placement] = []
        gradients: list[Placement] = []
        for placement in x.placements:
            if wide is not None and placement.is_shard(dim):
                values.append(Shard(wide))
                gradients.append(Shard(wide))
            else:
                values.append(Replicate())
                gradients.append(Partial() if placement.is_shard() else Replicate())
        local.append(number.redistribute(placements=values).to_local(grad_placements=gradients))
    y: Tensor = DTensor.from_local(
        apply_learned(x.to_local(), local, dim, key),
        x.device_mesh,
        x.placements,
        run_check=False,
        shape=x.shape,
        stride=x.stride(),
    )
    return y


def _plain(formula: Learned, x: Tensor, numbers: Sequence[Tensor], dim: int, dtype: torch.dtype) -> Tensor:
    """Return the formula by PyTorch's operators alone."""
    after = (1,) * (x.dim() - dim - 1)
    columns = [
        number.to(dtype).reshape(-1, *after) if number.numel() > 1 else number.to(dtype).reshape(())
        for number in numbers
    ]
    with torch.autocast(x.device.type, enabled=False):
        y = formula.value(x.to(dtype), *columns).to(x.dtype)
    laid_out = torch.empty_like(x) if not torch.compiler.is_compiling() else y
    return y if y.stride() == laid_out.stride() else laid_out.copy_(y)


def _differentiable(x: Tensor, numbers: Tensor, dim: int, key: str) -> Tensor:
    inner = math.prod(x.shape[dim + 1 :]) if numbers.shape[1] > 1 else 1
    if torch.compiler.is_compiling():
        compiled: Tensor = ops.learned_forward(x, numbers, inner, key)
        return compiled
    y: Tensor = _Formula.apply(x, numbers, inner, key)[0]
    if find(key).keeps_output:
        return y
    return note(y, partial(ops.learned_forward, inner=inner, key=key), x, numbers)


def _check(formula: Learned, x: Tensor, numbers: Sequence[Tensor], dim: int, wide: bool) -> None:
    """Raise unless x is a tensor that the formula takes, and each number has one element or one a channel."""
    check_dtype(formula.name, x)
    meshes = [_mesh(one) for one in (x, *numbers)]
    if any(mesh != meshes[0] for mesh in meshes):
        found = ", ".join("a local tensor" if mesh is None else f"a DTensor on {mesh}" for mesh in meshes)
        raise TypeError(
            f"{formula.name}: expected x and the learned numbers to be all DTensors of one mesh, or none, "
            f"got {found}"
        )
    if wide and not -x.dim() <= dim < x.dim():
        raise ValueError(f"{formula.name}: expected a tensor with a dimension {dim}, got {tuple(x.shape)}")
    channels = x.shape[dim] if wide else 1
    for own, number in zip(formula.numbers, numbers, strict=True):
        if number.numel() not in (1, channels):
            raise ValueError(
                f"{formula.name}: {own.name}: expected 1 element or {channels}, the channels of {tuple(x.shape)} "
                f"along dimension {dim}, got {number.numel()}"
            )


class _Formula(torch.autograd.Function):
    """Saves what is kept and the numbers, and an empty tensor that ties the gradients to x."""

    generate_vmap_rule = True

    @staticmethod
    @with_signature
    def forward(x: Tensor, numbers: Tensor, inner: int, key: str) -> tuple[Tensor, Tensor]:
        return ops.learned_forward(x, numbers, inner, key), x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        (x, numbers, ctx.inner, ctx.key), (y, autograd_anchor) = inputs, output
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y if find(ctx.key).keeps_output else x, numbers, autograd_anchor)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, Tensor | None, None, None]:
        if dy is None:
            return None, None, None, None
        kept, numbers, autograd_anchor = ctx.saved_tensors
        wants_x, wants_numbers = ctx.needs_input_grad[:2]
        arguments = dy.contiguous(), kept, numbers, ctx.inner, wants_x, wants_numbers, ctx.key
        dx, found = Gradients.apply(find(ctx.key).name, autograd_anchor, "learned_backward", *arguments)
        return dx if wants_x else None, found if wants_numbers else None, None, None


class LearnedModule(nn.Module):
    """The module of a formula; its learned numbers are parameters.

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
        wide = [number.name for number in formula.numbers if number.channel]
        if wide and channels is None:
            raise TypeError(f"{formula.name}: expected channels, the size of {' and '.join(wide)}")
        if channels is not None and not wide:
            raise TypeError(
                f"{formula.name}: expected no channels, as it has one of each number, got {channels!r}"
            )
        if channels is not None and not (type(channels) is int and channels > 0):
            raise ValueError(f"{formula.name}: channels: expected a positive number, got {channels!r}")
        self.channels = channels
        self.dim = dim
        for number in formula.numbers:
            size = (channels or 1) if number.channel else 1
            start = torch.full((size,), number.start, device=device, dtype=dtype)
            self.register_parameter(number.name, nn.Parameter(start))

    def reset_parameters(self) -> None:
        """Set the learned numbers to their starts."""
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
