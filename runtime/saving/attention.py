"""Attention that PyTorch does not fuse, as on a CPU with dropout or a trained mask, and recomputed attention.

Not fused, the operations are those of `_scaled_dot_product_attention_math` in PyTorch's
aten/src/ATen/native/transformers/attention.cpp, in the same order and with the same layouts of memory. So outputs
and gradients are PyTorch's, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from fitact.runtime.kernels import active_autocast, without_autocast
from fitact.runtime.torch_internals import (
    ATTENTION_BACKEND,
    SAFE_SOFTMAX,
    after_backward,
    in_functorch_transform,
    without_dispatch_modes,
)

from .capture import is_plain
from .storage import is_parameter

Call = Callable[..., Tensor]
TENSORS = ("query", "key", "value", "attn_mask")
ALLOWED: Mapping[SDPBackend, Callable[[], bool]] = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
}
OPTIONS: dict[str, Any] = {"dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


def attention(
    call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], share: Callable[..., object]
) -> Tensor | None:
    """Return what `F.scaled_dot_product_attention` returns, step by step; None if PyTorch has to compute it.

    Args:
        call: makes one of the calls: of a function, with its arguments.
        args: of the attention.
        kwargs: of the attention.
        share: called with queries, keys and values that are about to be cast to float32.

    """
    taken = _taken(args, kwargs)
    if taken is None:
        return None
    tensors, given, low = taken
    if tensors[-1] is None:
        tensors.pop()
    if not all(tensor is not None and tensor.is_cpu and tensor.numel() and tensor.dim() > 1 for tensor in tensors):
        return None
    if low and any(map(is_parameter, tensors)):
        return None  # PyTorch has to cast it, for all that read its cast
    dtypes = [_dtype(tensor, low) for tensor in tensors]
    if not (_is_usual(tensors, dtypes, **given) and _is_composed(tensors, dtypes, given)):
        return None
    if not 0 <= given["dropout_p"] <= 1:
        return None
    with without_autocast(tensors[0].device.type):
        cast = [_to(call, *both) for both in zip(tensors, dtypes, strict=True)]
        return _composed(call, share, *cast, **given)


def _taken(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any], torch.dtype | None] | None:
    """Return tensors and options of attention, and autocast's dtype; None if PyTorch has to run it as it is.

    If queries, keys and values are one tensor, PyTorch sums their gradients in an order of its own. And autocast
    caches its cast of a trained leaf for all readers.
    """
    given: dict[str, Any] = {**OPTIONS, **dict(zip((*TENSORS, *OPTIONS), args, strict=False)), **kwargs}
    tensors = [given.pop(name, None) for name in TENSORS]
    some = [tensor for tensor in tensors if tensor is not None]
    if given.keys() != OPTIONS.keys() or tensors[0] is tensors[1] is tensors[2] or not all(map(is_plain, some)):
        return None
    trained = [tensor for tensor in some if tensor.requires_grad]
    low = active_autocast(some[0].device.type)
    if not trained or (low and any(tensor.is_leaf and tensor.dtype != low for tensor in trained)):
        return None
    return tensors, given, low


def _dtype(x: Tensor, low: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which attention reads a tensor under an autocast to `low`, if there is one."""
    return low if low and x.is_floating_point() and x.dtype != torch.float64 else x.dtype


def _is_usual(
    tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], is_causal: bool, enable_gqa: bool, **_: Any
) -> bool:
    """Whether tensors are (..., heads, rows, width) and go together; of others PyTorch says what is wrong."""
    q, k, v, *masks = (tensor.shape for tensor in tensors)
    if not len(q) == len(k) == len(v) > 2 or not q[:-3] == k[:-3] == v[:-3]:
        return False
    if any(q[-3] % shape[-3] if enable_gqa else q[-3] != shape[-3] for shape in (k, v)):
        return False
    if not dtypes[0] == dtypes[1] == dtypes[2] or not {*dtypes[3:]} <= {dtypes[0], torch.bool, torch.float32}:
        return False
    return q[-1] == k[-1] and k[-2] == v[-2] and not (is_causal and masks)


def _is_composed(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], given: Mapping[str, Any]) -> bool:
    """Whether PyTorch does not fuse the attention of tensors, once they have these dtypes."""
    with torch.no_grad(), without_dispatch_modes():  # for a CPU's fake tensors it would say that it never does
        choice = ATTENTION_BACKEND(*map(_stand_in, tensors, dtypes), **given)
    return choice == SDPBackend.MATH.value


def _stand_in(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor like x, with the memory of a row alone."""
    stride = x.stride(-1)
    row = torch.empty((x.shape[-1] - 1) * stride + 1, dtype=dtype)
    return row.as_strided(x.shape, (*(0,) * (x.dim() - 1), stride)).requires_grad_(x.requires_grad)


def _composed(
    call: Call,
    share: Callable[..., object],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    dtype, (heads, rows, width) = query.dtype, query.shape[-3:]
    if dtype in (torch.float16, torch.bfloat16) and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        share(query, key, value)
        query, key, value = (call(Tensor.to, tensor, torch.float32) for tensor in (query, key, value))
    factor = math.sqrt(1 / math.sqrt(width) if scale is None else abs(scale))
    query = call(torch.mul, query, -factor if scale is not None and scale < 0 else factor)
    if is_causal:
        mask = torch.ones(rows, key.shape[-2], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, torch.zeros((), dtype=dtype), torch.full((), -math.inf, dtype=dtype))
    if enable_gqa and not heads == key.shape[-3] == value.shape[-3]:
        key, value = (_repeated(call, tensor, heads) for tensor in (key, value))
    key = call(torch.mul, key.transpose(-2, -1), factor)
    query, key = _in_rows(call, query), _in_rows(call, key)
    scores = call(torch.matmul, query, key)
    del query, key
    if mask is not None:
        scores = scores.add_(mask)
    weights = call(SAFE_SOFTMAX, scores, -1)
    del scores
    if dropout_p:
        weights = call(F.dropout, weights, dropout_p)
    return _to(call, call(torch.matmul, weights, _in_rows(call, value)), dtype)


def _to(call: Call, x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else call(Tensor.to, x, dtype)


def _repeated(call: Call, x: Tensor, heads: int) -> Tensor:
    """Return the heads of keys or values, each several times in a row."""
    *batch, fewer, rows, width = x.shape
    x = x.unsqueeze(-3).expand(*batch, fewer, heads // fewer, rows, width)
    return call(torch.clone, x, memory_format=torch.contiguous_format).view(*batch, heads, rows, width)


def _in_rows(call: Call, x: Tensor) -> Tensor:
    """Return x as a matrix product copies it; where it can be viewed as three-dimensional, it is not copied."""
    return call(torch.reshape, x, (-1, *x.shape[-2:])).view(x.shape)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _backends() -> list[SDPBackend]:
    """Return the implementations of attention that are allowed."""
    return [backend for backend, is_allowed in ALLOWED.items() if is_allowed()]


class AttentionCall:
    """One call of attention that backward recomputes: once for its own gradients and all that read its output.

    Args:
        function: PyTorch's attention.
        options: its arguments that are no tensors.
        tensors: query, key, value and mask.

    """

    __slots__ = ("__weakref__", "_backends", "_function", "_made", "_needed", "_options")

    def __init__(self, function: Call, options: dict[str, Any], tensors: Sequence[Tensor | None]) -> None:
        self._function, self._options = function, options
        self._backends = _backends()
        self._needed = [tensor is not None and tensor.requires_grad for tensor in tensors]
        self._made: tuple[Tensor, Sequence[Tensor | None]] | None = None

    def first(self, *tensors: Tensor | None) -> Tensor:
        """Return the output; nothing is saved for it."""
        return self._run(tensors)[0].detach()

    def run(self, *tensors: Tensor | None) -> Tensor:
        """Return the output once more, and hold what its gradients need until the pass ends."""
        output, inputs = self._run(tensors)
        if after_backward(self):
            self._made = output, inputs
        return output.detach()

    def gradients(self, grad: Tensor, *tensors: Tensor | None) -> Sequence[Tensor | None]:
        """Return the gradients of queries, keys, values and mask; None for those that need none."""
        output, inputs = self._made or self._run(tensors)
        self._made = None
        return self._gradients(output, inputs, grad)

    def derivable(self, grad: Tensor, *tensors: Tensor | None) -> Sequence[Tensor | None]:
        """Return the gradients with a graph, for a second derivative."""
        return self._gradients(self._called(tensors), tensors, grad, create_graph=True)

    def release(self) -> None:
        """Free what is held for them."""
        self._made = None

    def _gradients(
        self, output: Tensor, inputs: Sequence[Tensor | None], grad: Tensor, **options: bool
    ) -> Sequence[Tensor | None]:
        needed = [tensor for tensor, needed in zip(inputs, self._needed, strict=True) if needed]
        gradients = iter(torch.autograd.grad(output, needed, grad, **options))  # type: ignore[arg-type]
        return [next(gradients) if needed else None for needed in self._needed]

    def _run(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor, Sequence[Tensor | None]]:
        # which implementation PyTorch takes depends on which of its inputs need a gradient
        inputs = [
            tensor if tensor is None else tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(tensors, self._needed, strict=True)
        ]
        with torch.enable_grad(), saved_tensors_hooks(Tensor.detach, _itself):
            return self._called(inputs), inputs

    def _called(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return the output, by an implementation that was allowed at first."""
        with nullcontext() if _backends() == self._backends else sdpa_kernel(self._backends):
            return self._function(*tensors, **self._options)


class RecomputedAttention(torch.autograd.Function):
    """Attention that saves its inputs alone."""

    @staticmethod
    def forward(ctx: Any, call: AttentionCall, *tensors: Tensor | None) -> Tensor:
        """Call it."""
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return call.first(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Call it again, unless a reader of its output has done so in this pass."""
        gradients = ctx.call.derivable if torch.is_grad_enabled() else ctx.call.gradients
        return None, *gradients(*grads, *ctx.saved_tensors)


def recomputed(
    call: Call, function: Call, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[AttentionCall, Sequence[Tensor | None]] | None:
    """Return attention that backward can recompute, and its tensors; None if PyTorch has to run it as it is.

    Args:
        call: makes the casts of autocast.
        function: PyTorch's attention.
        args: its arguments.
        kwargs: its arguments by name.

    """
    taken = _taken(args, kwargs)
    if taken is None or taken[1]["dropout_p"] or in_functorch_transform():
        return None
    tensors, given, low = taken
    tensors = [None if tensor is None else _to(call, tensor, _dtype(tensor, low)) for tensor in tensors]
    return AttentionCall(function, given, tensors), tensors
