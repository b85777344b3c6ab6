"""The ops and their autograd.

    fitact::forward(Tensor x, ScalarType dtype, int[]? dims, str key) -> (Tensor y, Tensor codes)
    fitact::backward(Tensor grad, Tensor? output, Tensor codes, ScalarType dtype, str key) -> Tensor

In a standalone folder, which has a copy of this file, they have the folder's own namespace. `dtype` is that of y
in forward, and of the input's gradient in backward.

To PyTorch all are opaque: a compiler cannot look inside, keep x and compute the codes again. The key, a
hash of the fit and of the generated text, finds the activation; so a compiled graph holds no Python object,
and registering the same module twice is harmless. On CUDA (and ROCm) the generated Triton kernels run; all
other devices, and float64, run `reference`. With TRITON_INTERPRET=1 the CPU runs the kernels too, interpreted.

The ops see only contiguous tensors. Before calling them, `apply` permutes any input into memory order. Autograd
undoes the permutation, so codes and gradient are always in the same order. `dims` is the permutation back (None
for none, as AOTInductor takes no empty list): PyTorch's own activations round differently in different layouts,
and the PyTorch path evaluates them in the caller's layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..autocast import active_autocast
from ..torch_internals import constant_in_graphs, in_functorch_transform
from . import reference
from .launch import Launch
from .library import (
    KERNEL_DTYPES,
    Gradients,
    Op,
    batched,
    check_dtype,
    define,
    ops,
    save_key,
    with_signature,
)
from .registry import Pointwise, find, refuse_second_derivative

Dims = Sequence[int] | None


def apply(x: Tensor, key: str) -> Tensor:
    """Return the activation of x, keeping its codes for backward.

    Args:
        x: float16, bfloat16, float32 or float64, of any shape, strides and device. For a DTensor, each process
            codes its own shard; a partial DTensor is summed over the processes first.
        key: the key of a registered activation.

    Returns:
        A tensor of the shape and memory order of x (contiguous if x is not dense). Its dtype is that of x; where
        backward needs the output, under autocast it is the autocast dtype, so that the next layer keeps the
        same storage and no copy of it.

    Raises:
        TypeError: x is not a tensor of one of these dtypes.

    """
    activation = find(key)
    if type(x).__name__ == "DTensor":
        return _distributed(x, key)
    check_dtype(activation.name, x)
    dtype = autocast_dtype(x) if activation.keeps_output else x.dtype
    if not may_need_gradient(x):
        return _without_codes(activation, x, dtype)
    order = None if x.is_contiguous() else memory_order(x)
    if order is None:
        return _differentiable(x.contiguous(), dtype, None, key)
    dims = inverse(order)
    return _differentiable(x.permute(order), dtype, dims, key).permute(dims)


def may_need_gradient(x: Tensor) -> bool:
    """Return whether a gradient of x can be requested.

    An exported program may be called with another input. In a transform of torch.func, x may need a gradient at a
    level that `requires_grad` does not show.
    """
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or _is_exporting() or in_functorch_transform()


@constant_in_graphs
def _is_exporting() -> bool:
    """Return whether `torch.export` traces; before 2.12 the compiler takes the public function for always true."""
    return torch.compiler.is_exporting()


def _without_codes(activation: Pointwise, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `apply` returns, bit for bit and in the same memory order, using only PyTorch's operators."""
    if x.is_contiguous() or torch.compiler.is_compiling():  # a compiler rounds and lays out results as it likes
        return _value(activation, x, dtype)
    x = x if memory_order(x) is not None else x.contiguous()
    y = _value(activation, x, dtype)
    return y if y.stride() == x.stride() else torch.empty_like(x, dtype=dtype).copy_(y)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to which autocast casts x for the next layer; the dtype of x if autocast is off."""
    return (x.dtype in KERNEL_DTYPES and active_autocast(x.device.type)) or x.dtype


def _distributed(x: Any, key: str) -> Tensor:
    """Return the activation of a DTensor, with the same placements."""
    from torch.distributed.tensor import DTensor, Replicate

    if any(placement.is_partial() for placement in x.placements):
        x = x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])
    y: Tensor = DTensor.from_local(
        apply(x.to_local(), key), x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )
    return y


def _differentiable(x: Tensor, dtype: torch.dtype, dims: Dims, key: str) -> Tensor:
    if torch.compiler.is_compiling():
        # In a traced Function, an in-place change of y would go unnoticed, and an export would lack a gradient.
        y: Tensor = ops.forward(x, dtype, dims, key)[0]
    else:
        y = _Pointwise.apply(x, dtype, dims, key)[0]
    return y


def _keep(ctx: Any, inputs: tuple[Any, ...], y: Tensor, *others: Tensor) -> None:
    """Keep for backward: y where it is needed, and the other tensors."""
    ctx.dtype, ctx.key = inputs[0].dtype, inputs[3]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(y if find(ctx.key).keeps_output else None, *others)


def memory_order(x: Tensor) -> list[int] | None:
    """Return the permutation that makes a dense tensor contiguous, None if there is none."""
    strides, sizes = x.stride(), x.shape
    order: list[int] = []
    for dim in range(x.dim()):  # insertion sort: a compiler can guard comparisons of symbolic sizes, but not sort
        place = len(order)
        while place > 0:
            other = order[place - 1]
            if strides[dim] < strides[other] or (strides[dim] == strides[other] and sizes[dim] <= sizes[other]):
                break
            place -= 1
        order.insert(place, dim)
    return order if x.permute(order).is_contiguous() else None


def inverse(order: Sequence[int]) -> list[int]:
    """Return the permutation that undoes another."""
    return sorted(range(len(order)), key=list(order).__getitem__)


class _Pointwise(torch.autograd.Function):
    """Saves the codes, y if it is needed, and an empty tensor that ties the gradient to x without keeping x."""

    generate_vmap_rule = True

    @staticmethod
    @with_signature
    def forward(x: Tensor, dtype: torch.dtype, dims: Dims, key: str) -> tuple[Tensor, ...]:
        return *ops.forward(x, dtype, dims, key), x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        _keep(ctx, inputs, *output)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 4
        y, codes, autograd_anchor = ctx.saved_tensors
        name, op = find(ctx.key).name, "backward"
        dx = Gradients.apply(name, autograd_anchor, op, dy.contiguous(), y, codes, ctx.dtype, ctx.key)
        return dx, None, None, None


def _value(activation: Pointwise, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the activation of x as a tensor of its own; autocast widens the results of some operators."""
    y = activation.value(x).to(dtype)
    return y.clone() if y is x else y


def _forward_reference(x: Tensor, dtype: torch.dtype, dims: Dims, key: str) -> tuple[Tensor, Tensor]:
    activation = find(key)
    with torch.no_grad():
        y = _value(activation, x.permute(list(dims)) if dims else x, dtype)
        if dims:
            # set_: the result may be a permutation of y, but not a view, which could not be changed in place
            y = y.permute(inverse(dims)).contiguous()
            y = x.new_empty(0, dtype=dtype).set_(y.untyped_storage(), y.storage_offset(), y.shape, y.stride())
        return y, activation.encode(x, dtype)


def _backward_reference(
    grad: Tensor, output: Tensor | None, codes: Tensor, dtype: torch.dtype, key: str
) -> Tensor:
    with torch.no_grad():
        return find(key).gradient(grad, output, codes, dtype)


def _forward_triton(x: Tensor, dtype: torch.dtype, dims: Dims, key: str) -> tuple[Tensor, Tensor]:
    if x.dtype not in KERNEL_DTYPES:
        return _forward_reference(x, dtype, dims, key)
    activation = find(key)
    y, codes = _forward_fake(x, dtype, dims, key)
    activation.run_forward(Launch(x, activation.threads(x, y)), x, y, codes)
    return y, codes


def _backward_triton(grad: Tensor, output: Tensor | None, codes: Tensor, dtype: torch.dtype, key: str) -> Tensor:
    if grad.dtype not in KERNEL_DTYPES:
        return _backward_reference(grad, output, codes, dtype, key)
    activation = find(key)
    dx = torch.empty_like(grad, dtype=dtype)
    activation.run_backward(Launch(grad, activation.threads(grad, dx)), grad, output, codes, dx)
    return dx


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _keep(ctx, inputs, *output)


def _differentiate(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 4
    y, codes = ctx.saved_tensors
    return ops.backward(dy.contiguous(), y, codes, ctx.dtype, ctx.key), None, None, None


def _forward_fake(x: Tensor, dtype: torch.dtype, dims: Dims, key: str) -> tuple[Tensor, Tensor]:
    # one dimension: a compiler would specialise on a dimension of tiles that is 1
    size = reference.bytes_of_codes(x, find(key).bits)
    return torch.empty_like(x, dtype=dtype), x.new_empty(size, dtype=torch.uint8)


def _backward_fake(grad: Tensor, output: Tensor | None, codes: Tensor, dtype: torch.dtype, key: str) -> Tensor:
    return torch.empty_like(grad, dtype=dtype)


def _forward_vmap(
    info: Any, in_dims: Any, x: Tensor, dtype: torch.dtype, _: Any, key: str
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    size, dim = info.batch_size, in_dims[0]
    shape = x.movedim(dim, 0).shape
    y, codes = ops.forward(batched(x, dim, size, in_tiles=find(key).bits > 0), dtype, None, key)
    y = y[:, : shape[1:].numel()].reshape(shape)
    return (y, codes.view(size, codes.numel() // max(size, 1))), (0, 0)


def _backward_vmap(
    info: Any, in_dims: Any, grad: Tensor, output: Tensor | None, codes: Tensor, dtype: torch.dtype, key: str
) -> tuple[Tensor, int]:
    size, (grad_dim, output_dim, codes_dim, *_) = info.batch_size, in_dims
    shape = (size, *grad.shape) if grad_dim is None else grad.movedim(grad_dim, 0).shape
    codes = codes.expand(size, -1) if codes_dim is None else codes.movedim(codes_dim, 0)
    whole = partial(batched, size=size, in_tiles=find(key).bits > 0)
    y = None if output is None else whole(output, output_dim)
    dx = ops.backward(whole(grad, grad_dim), y, codes.reshape(-1), dtype, key)
    return dx[:, : torch.Size(shape[1:]).numel()].reshape(shape), 0


define(
    "pointwise",
    {
        "forward": Op(
            "(Tensor x, ScalarType dtype, int[]? dims, str key) -> (Tensor, Tensor)",
            _forward_reference,
            _forward_triton,
            _forward_fake,
            _forward_vmap,
            _differentiate,
            _save,
        ),
        "backward": Op(
            "(Tensor grad, Tensor? output, Tensor codes, ScalarType dtype, str key) -> Tensor",
            _backward_reference,
            _backward_triton,
            _backward_fake,
            _backward_vmap,
            refuse_second_derivative,
            save_key,
        ),
    },
)
