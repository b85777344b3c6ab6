"""The op pair, its autograd, and the registry of activations.

    fitact::forward(Tensor x, int[] dims, str key) -> (Tensor y, Tensor codes)
    fitact::backward(Tensor grad, Tensor? output, Tensor codes, str key) -> Tensor

To PyTorch both are opaque: a compiler cannot look inside, keep x and compute the codes again. The key, a
hash of the fit and of the generated text, finds the activation; so a compiled graph holds no Python object,
and registering the same module twice is harmless. On CUDA (and ROCm) the generated Triton kernels run; all
other devices, and float64, run `eager`. With TRITON_INTERPRET=1 the CPU runs the kernels too, interpreted.

The ops see contiguous tensors only. `apply` brings any input into memory order outside of them, by a
permutation that autograd undoes, so that codes and gradient cannot meet in different orders. `dims` is the
permutation back (empty for none): PyTorch's own activations round differently in different layouts, and the
PyTorch path evaluates them in the caller's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import eager
from .language import HAS_TRITON

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DTYPES = (*KERNEL_DTYPES, torch.float64)


@dataclass(frozen=True, kw_only=True)
class Step:
    """An activation whose derivative is a step function of its input: what the ops need to run it.

    Attributes:
        key: identifies fit and generated text.
        name: as messages call it.
        bits: kept per element.
        borders, levels: the step function, 2^bits − 1 and 2^bits numbers, each a float32.
        even: whether |x| is compared with the borders.
        value: the activation with PyTorch's operators, Tensor → Tensor.
        forward: Triton kernel (x, y, codes, n).
        backward: Triton kernel (dy, codes, dx, n).

    """

    key: str
    name: str
    bits: int
    borders: tuple[float, ...]
    levels: tuple[float, ...]
    even: bool
    value: Callable[[Tensor], Tensor]
    forward: Any
    backward: Any

    def threads(self, x: Tensor) -> int:
        """Return the threads of a program: a thread's share of a row is then 16 bytes of x.

        Four bits want twice the threads that half precision would have: their table of levels takes registers.
        """
        return 256 if self.bits == 4 or x.dtype == torch.float32 else 128


_registry: dict[str, Step] = {}


def register(step: Step) -> str:
    """Make an activation known to the ops and return its key; again is harmless."""
    _registry[step.key] = step
    return step.key


def find(key: str) -> Step:
    """Return the activation of a key."""
    try:
        return _registry[key]
    except KeyError:
        raise RuntimeError(
            f"no activation is registered under the key {key!r}: import the generated module it comes from"
        ) from None


def in_float32(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap an activation made of several operators so that half precision is rounded only at its end."""

    def value(x: Tensor) -> Tensor:
        return function(x.to(eager.arithmetic_dtype(x))).to(x.dtype)

    return value


def apply(x: Tensor, key: str) -> Tensor:
    """Return the activation of x, keeping its codes for backward.

    Args:
        x: float16, bfloat16, float32 or float64, any shape, strides and device.
        key: of a registered activation.

    Returns:
        A tensor of the shape, dtype and memory order of x (contiguous if x is not dense).

    Raises:
        TypeError: x is not a tensor of one of these dtypes.

    """
    if getattr(x, "dtype", None) not in DTYPES:
        found = getattr(x, "dtype", type(x).__name__)
        raise TypeError(
            f"{find(key).name}: expected a tensor of float16, bfloat16, float32 or float64, got {found}"
        )
    if not torch.is_grad_enabled():
        return find(key).value(x).to(x.dtype)  # autocast widens some operators' results
    if x.is_contiguous():
        return _differentiable(x, (), key)
    order = _memory_order(x)
    if order is None:
        return _differentiable(x.contiguous(), (), key)
    dims = _inverse(order)
    return _differentiable(x.permute(order), dims, key).permute(dims)


def _differentiable(x: Tensor, dims: Sequence[int], key: str) -> Tensor:
    y: Tensor = _Pointwise.apply(x, dims, key)[0]
    return y


def _memory_order(x: Tensor) -> list[int] | None:
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


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=list(order).__getitem__)


class _Pointwise(torch.autograd.Function):
    """Saves the codes, and an empty tensor that ties the gradient to x without keeping x."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dims: Sequence[int], key: str) -> tuple[Tensor, Tensor, Tensor]:
        return *torch.ops.fitact.forward(x, dims, key), x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.key = inputs[2]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, None, None]:
        if dy is None:
            return None, None, None
        codes, tie = ctx.saved_tensors
        return _Gradient.apply(dy.contiguous(), tie, codes, ctx.key), None, None


class _Gradient(torch.autograd.Function):
    """dy · level, which cannot be differentiated again: without it, second derivatives would be silently 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(dy: Tensor, tie: Tensor, codes: Tensor, key: str) -> Tensor:
        dx: Tensor = torch.ops.fitact.backward(dy, None, codes, key)
        return dx

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.key = inputs[3]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"{find(ctx.key).name}: a second derivative was asked for, but only codes of the first are kept; "
            "use the exact activation where gradients are differentiated again"
        )


def _forward_eager(x: Tensor, dims: Sequence[int], key: str) -> tuple[Tensor, Tensor]:
    step = find(key)
    with torch.no_grad():
        y = step.value(x.permute(list(dims)) if dims else x).to(x.dtype)
        if dims:
            # set_: the result may be a permutation of y, but no view of it, or it could not be changed in place
            y = y.permute(_inverse(dims)).contiguous()
            y = x.new_empty(0).set_(y.untyped_storage(), y.storage_offset(), y.shape, y.stride())
        return y, eager.encode(x, step.borders, step.bits, step.even)


def _backward_eager(grad: Tensor, output: Tensor | None, codes: Tensor, key: str) -> Tensor:
    step = find(key)
    with torch.no_grad():
        return eager.decode(grad, codes, step.levels, step.bits)


def _forward_triton(x: Tensor, dims: Sequence[int], key: str) -> tuple[Tensor, Tensor]:
    if x.dtype not in KERNEL_DTYPES:
        return _forward_eager(x, dims, key)
    step = find(key)
    y, codes = _forward_fake(x, dims, key)
    if x.numel():
        warp = _warp_size(x.device)
        with torch.cuda.device_of(x):
            step.forward[(eager.tiles_of(x),)](x, y, codes, x.numel(), num_warps=step.threads(x) // warp)
    return y, codes


def _backward_triton(grad: Tensor, output: Tensor | None, codes: Tensor, key: str) -> Tensor:
    if grad.dtype not in KERNEL_DTYPES:
        return _backward_eager(grad, output, codes, key)
    step = find(key)
    dx = torch.empty_like(grad)
    if grad.numel():
        warp = _warp_size(grad.device)
        with torch.cuda.device_of(grad):
            step.backward[(eager.tiles_of(grad),)](
                grad, codes, dx, grad.numel(), num_warps=step.threads(grad) // warp
            )
    return dx


@cache
def _warp_size(device: torch.device) -> int:
    """Return the lanes of a warp, 64 on AMD's data-centre GPUs; the interpreter has no use for it."""
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


def _forward_fake(x: Tensor, dims: Sequence[int], key: str) -> tuple[Tensor, Tensor]:
    # one dimension: a compiler would specialise on a dimension of tiles that is 1
    size = eager.tiles_of(x) * find(key).bits * eager.COLUMNS
    return torch.empty_like(x), x.new_empty(size, dtype=torch.uint8)


def _backward_fake(grad: Tensor, output: Tensor | None, codes: Tensor, key: str) -> Tensor:
    return torch.empty_like(grad)


def _padded(x: Tensor, dim: int | None, size: int) -> Tensor:
    """Return a batch (size, …) as (size, elements rounded up to whole tiles), contiguous."""
    batch = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    flat = batch.reshape(size, batch.shape[1:].numel())
    return torch.nn.functional.pad(flat, (0, -flat.shape[1] % eager.TILE))


def _forward_vmap(
    info: Any, in_dims: Any, x: Tensor, dims: Sequence[int], key: str
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """Batching rule: every element of the batch gets tiles of its own, so that its codes are its own."""
    size, dim = info.batch_size, in_dims[0]
    shape = x.movedim(dim, 0).shape
    y, codes = torch.ops.fitact.forward(_padded(x, dim, size), (), key)
    y = y[:, : shape[1:].numel()].reshape(shape)
    return (y, codes.view(size, codes.numel() // max(size, 1))), (0, 0)


def _backward_vmap(
    info: Any, in_dims: Any, grad: Tensor, output: Tensor | None, codes: Tensor, key: str
) -> tuple[Tensor, int]:
    size, (grad_dim, _, codes_dim, _) = info.batch_size, in_dims
    shape = (size, *grad.shape) if grad_dim is None else grad.movedim(grad_dim, 0).shape
    codes = codes.expand(size, -1) if codes_dim is None else codes.movedim(codes_dim, 0)
    dx = torch.ops.fitact.backward(_padded(grad, grad_dim, size), output, codes.reshape(-1), key)
    return dx[:, : torch.Size(shape[1:]).numel()].reshape(shape), 0


def _define() -> torch.library.Library:
    library = torch.library.Library("fitact", "DEF")
    tags = (torch.Tag.pt2_compliant_tag,)
    library.define("forward(Tensor x, int[] dims, str key) -> (Tensor, Tensor)", tags=tags)
    library.define("backward(Tensor grad, Tensor? output, Tensor codes, str key) -> Tensor", tags=tags)
    library.impl("forward", _forward_eager, "CompositeExplicitAutograd")
    library.impl("backward", _backward_eager, "CompositeExplicitAutograd")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for device in ["CUDA", "CPU"] if interpreted else ["CUDA"]:
        if HAS_TRITON:
            library.impl("forward", _forward_triton, device)
            library.impl("backward", _backward_triton, device)
    torch.library.register_fake("fitact::forward", _forward_fake, lib=library)
    torch.library.register_fake("fitact::backward", _backward_fake, lib=library)
    torch.library.register_vmap("fitact::forward", _forward_vmap, lib=library)
    torch.library.register_vmap("fitact::backward", _backward_vmap, lib=library)
    return library


_library = _define()  # the ops live as long as this object
