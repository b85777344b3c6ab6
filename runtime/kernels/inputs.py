"""What kernels are given: dtypes, layouts, autocast, shards of a DTensor; and whether a gradient may be wanted.

PyTorch raises where it is asked about the autocast of a type of device that has none, such as meta.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .internals import constant_in_graphs, in_functorch_transform

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DTYPES = (*KERNEL_DTYPES, torch.float64)


def check_dtype(name: str, x: Any, what: str = "a tensor") -> None:
    """Raise a TypeError that begins with a name unless x is a tensor of DTYPES."""
    dtype = getattr(x, "dtype", None)
    if dtype not in DTYPES:
        given = dtype or type(x).__name__
        raise TypeError(f"{name}: expected {what} of float16, bfloat16, float32 or float64, got {given}")


def mesh_of(tensor: Any) -> Any:
    """Return the mesh of a DTensor, None for other tensors."""
    return getattr(tensor, "device_mesh", None)


def check_meshes(name: str, what: str, *tensors: Any) -> None:
    """Raise a TypeError unless tensors are all DTensors of one mesh, or none of them is a DTensor."""
    meshes = [mesh_of(tensor) for tensor in tensors]
    if any(mesh != meshes[0] for mesh in meshes):
        given = ", ".join("a local tensor" if mesh is None else f"a DTensor on {mesh}" for mesh in meshes)
        raise TypeError(f"{name}: expected {what} DTensors of one mesh, or none, got {given}")


def may_need_gradient(*tensors: Tensor) -> bool:
    """Return whether a gradient of any tensor can be requested.

    An exported program may be called with another input. In a transform of torch.func, a tensor may need a
    gradient at a level that `requires_grad` does not show.
    """
    if not torch.is_grad_enabled():
        return False
    return any(x.requires_grad for x in tensors) or _is_exporting() or in_functorch_transform()


@constant_in_graphs
def _is_exporting() -> bool:
    """Return whether `torch.export` traces; before 2.12 the compiler takes the public function for always true."""
    return torch.compiler.is_exporting()


@constant_in_graphs
def _has_autocast(device: str) -> bool:
    """Return whether a type of device has autocast; before 2.13 a compiler cannot trace this question."""
    return torch.amp.is_autocast_available(device)


def active_autocast(device: str) -> torch.dtype | None:
    """Return the dtype to which autocast casts on a type of device, None where it is off."""
    if _has_autocast(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Return a context without autocast; entering one takes longer than asking whether it is on."""
    return nullcontext() if active_autocast(device) is None else torch.autocast(device, enabled=False)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to which autocast casts x for the next layer; the dtype of x if autocast is off."""
    return (x.dtype in KERNEL_DTYPES and active_autocast(x.device.type)) or x.dtype


def memory_order(x: Tensor) -> list[int]:
    """Return the permutation to the order in which `torch.empty_like` of x lays out its elements.

    If x is dense, that makes it contiguous. Expanded dimensions stay where they are, as PyTorch leaves them.
    """
    strides, sizes = x.stride(), x.shape
    order = list(range(x.dim()))
    for start in range(x.dim() - 2, -1, -1):  # insertion sort: a compiler can guard comparisons of symbolic sizes
        place = start
        for other in range(start + 1, x.dim()):
            outer, inner = order[place], order[other]
            if 0 in (strides[outer], strides[inner]):
                continue
            if strides[outer] > strides[inner]:
                break
            if strides[outer] < strides[inner] or sizes[outer] < sizes[inner]:
                order[place], order[other], place = inner, outer, other
    return order


def inverse(order: Sequence[int]) -> list[int]:
    """Return the permutation that undoes another."""
    return sorted(range(len(order)), key=list(order).__getitem__)


def in_memory_order(x: Tensor) -> tuple[list[int] | None, list[int] | None]:
    """Return the permutation to memory order and the one back, None and None where x is in this order."""
    order = None if x.is_contiguous() else memory_order(x)
    return (None, None) if order is None or order == sorted(order) else (order, inverse(order))


def permuted(x: Tensor, dims: Sequence[int] | None) -> Tensor:
    """Return a permutation of a tensor; None for none."""
    return x if dims is None else x.permute(list(dims))


def in_layout(function: Callable[..., Tensor], dims: Sequence[int] | None, *tensors: Tensor) -> Tensor:
    """Return a function of tensors in memory order, contiguous, computed in the layout that `dims` permutes to."""
    if not dims:
        return function(*tensors).contiguous()
    y = function(*(permuted(tensor, dims) for tensor in tensors)).permute(inverse(dims)).contiguous()
    # set_: the result may be a permutation of y, but not a view, which could not be changed in place
    return y.new_empty(0).set_(y.untyped_storage(), y.storage_offset(), y.shape, y.stride())


def like(y: Tensor, x: Tensor) -> Tensor:
    """Return y laid out like `torch.empty_like` of x; a compiler lays out as it likes."""
    if torch.compiler.is_compiling() or y.stride() == x.stride():
        return y
    laid_out = torch.empty_like(x, dtype=y.dtype)
    return y if y.stride() == laid_out.stride() else laid_out.copy_(y)


def sharded(
    x: Any, run: Callable[[Tensor, list[Any]], Tensor], stays: Callable[[Any], bool], *, contiguous: bool = False
) -> Tensor:
    """Return a DTensor of what each process computes of its shard of the DTensor x: `run(shard, placements)`.

    x is gathered first along a placement that does not stay. The result is laid out like x, or contiguous.
    """
    from torch.distributed.tensor import DTensor, Replicate

    placements = [placement if stays(placement) else Replicate() for placement in x.placements]
    if placements != list(x.placements):
        x = x.redistribute(placements=placements)
    alone, order = torch.empty_strided(x.shape, x.stride(), device="meta"), torch.preserve_format
    stride = torch.empty_like(alone, memory_format=torch.contiguous_format if contiguous else order).stride()
    y: Tensor = DTensor.from_local(
        run(x.to_local(), placements), x.device_mesh, placements, run_check=False, shape=x.shape, stride=stride
    )
    return y
