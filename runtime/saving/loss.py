"""Cross entropy a few rows at a time, which saves logits as they are instead of logarithms in float32."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from fitact.runtime.kernels import active_autocast
from fitact.runtime.torch_internals import (
    cross_entropy_backward,
    has_batched_gradients,
    in_functorch_transform,
    is_alone,
    mark_of,
    version_of,
)

PIECES, PIECE = (4, 64), 2**21  # the least and the most pieces of logits; elements of one in between
ALIGNED = 8  # rows: a multiple of these starts as the first one does, at a multiple of 16 bytes


class _CrossEntropy(torch.autograd.Function):
    """PyTorch's cross entropy; it saves the logits, and recomputes the logarithms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, reduction: str, ignored: int) -> Tensor:
        ctx.reduction, ctx.ignored, ctx.autocast = reduction, ignored, active_autocast(x.device.type)
        ctx.save_for_backward(x, target)
        losses = [
            F.cross_entropy(part, answers, ignore_index=ignored, reduction="none")
            for part, answers in _pieces(x, target)
        ]
        # reduced as PyTorch reduces the losses of all rows, in its order, which only their number decides
        rows, counts = torch.cat(losses).neg()[:, None].expand(-1, 2), int(ignored == 0)
        return F.nll_loss(
            rows, torch.where(target == ignored, ignored, counts), ignore_index=ignored, reduction=reduction
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, target = ctx.saved_tensors
        around = nullcontext() if ctx.autocast is None else torch.autocast(x.device.type, ctx.autocast)
        if torch.is_grad_enabled() or has_batched_gradients():  # a second derivative, or many gradients at once
            with around, torch.enable_grad():
                logits = x if x.requires_grad else x.detach().requires_grad_()
                loss = F.cross_entropy(logits, target, ignore_index=ctx.ignored, reduction=ctx.reduction)
            return *torch.autograd.grad(loss, logits, grads, create_graph=True), None, None, None
        # logits that were just recomputed, for nobody else, make room for their gradient
        grad, gradient = grads[0], x.detach() if is_alone(x) else torch.empty_like(x)
        if ctx.reduction == "mean":  # as PyTorch divides
            grad = grad / (target != ctx.ignored).sum().to(grad.dtype)
        for rows, answers, into, of_losses in _pieces(x, target, gradient, grad.expand(len(x))):
            if x.dtype == torch.float32:
                cross_entropy_backward(of_losses, F.log_softmax(rows, 1), answers, ctx.ignored, into)
                continue
            with torch.enable_grad(), around:  # autocast decides what is cast
                part = rows.detach().requires_grad_()
                loss = F.cross_entropy(part, answers, ignore_index=ctx.ignored, reduction="none")
            into.copy_(torch.autograd.grad(loss, part, of_losses)[0])
        return gradient, None, None, None


def _pieces(x: Tensor, *others: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Return the pieces of logits, each with the same rows of other tensors."""
    least, most = PIECES
    size = min(x.numel() // least, max(PIECE, x.numel() // most))
    rows = max(size // x.shape[1] // ALIGNED, 1) * ALIGNED
    return zip(*(tensor.split(rows) for tensor in (x, *others)), strict=True)


def by_rows(
    *, input: Any, target: Any, reduction: str, ignore_index: int, label_smoothing: float, **others: Any
) -> Tensor | None:
    """Return the loss of logits that take fewer bytes than float32; None if PyTorch's own stores no more."""
    x, ignored = input, ignore_index
    if label_smoothing or any(option is not None for option in others.values()):
        return None
    if not (isinstance(x, Tensor) and isinstance(target, Tensor) and x.requires_grad) or in_functorch_transform():
        return None
    if not (x.dim() == 2 and x.is_contiguous() and x.numel()) or unpack_dual(x).tangent is not None:
        return None
    if target.dtype != torch.int64 or target.shape != x.shape[:1] or not _is_narrow(x):
        return None
    loss: Tensor = _CrossEntropy.apply(x, target, reduction, ignored)
    return loss


def _is_narrow(x: Tensor) -> bool:
    """Return whether what is stored of logits takes fewer bytes than their logarithms in float32."""
    if active_autocast(x.device.type) and x.untyped_storage().nbytes() < 4 * x.numel():
        return True
    mark = mark_of(x.untyped_storage())
    recompute = None if mark is None else mark.recompute
    if x.dtype != torch.float32 or recompute is None or recompute.version != version_of(x):
        return False
    adds: float = recompute.adds()
    return adds < x.nbytes  # which may be some rows of what is recomputed
