"""The operations that keep less: what they return, and what they note on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fitact.runtime.autocast import active_autocast, without_autocast
from fitact.runtime.recipes import note, plain
from fitact.runtime.torch_internals import in_functorch_transform, storage_id

from .derivatives import READS, Of, Plain, Reads, autocast, differentiable, once
from .recipes import (
    Function,
    Read,
    Source,
    applied,
    cast,
    narrow,
    product_dtype,
    recast,
    source,
    use,
)


def recorded(*inputs: Tensor) -> bool:
    """Whether autograd alone, and no transform of `torch.func`, looks at what is computed of inputs."""
    wanted = torch.is_grad_enabled() and any(one.requires_grad for one in inputs)
    return wanted and not in_functorch_transform()


# ------------------------------------------------------------------------------------------------------- consumers


class _Linear(torch.autograd.Function):
    """x Wᵀ + b, or x W + b, of rows: the products of PyTorch's own backward, x rebuilt for them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        parameter: Tensor | None,
        rebuild: Function | None,
        transposed: bool,
        *state: Tensor,
    ) -> Tensor:
        ctx.rebuild, ctx.transposed, ctx.dtype = rebuild, transposed, weight.dtype
        rows = x.reshape(-1, x.shape[-1])
        ctx.shape, ctx.columns = x.shape, rows.stride(0) == 1 and rows.stride(1) == rows.shape[0]
        kept = weight if parameter is None else parameter
        ctx.save_for_backward(kept if ctx.needs_input_grad[0] else None, *state)
        if not transposed:
            return F.linear(x, weight, bias)  # of any shape, because the rows would be a view outside
        assert bias is not None
        return torch.addmm(bias, x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        once()
        rows = grads[0].reshape(-1, grads[0].shape[-1])
        weight, *state = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dx = dw = None
        if wants_weight:
            x = state[0] if ctx.rebuild is None else ctx.rebuild(*state)
            x = x.reshape(len(rows), x.shape[-1])
            dw = x.t() @ rows if ctx.transposed else rows.t() @ x
            del x
        if wants_x:
            weight = weight.to(ctx.dtype)
            weight = weight.t() if ctx.transposed else weight
            dx = (weight.t() @ rows.t()).t() if ctx.columns else rows @ weight
            dx = dx.reshape(ctx.shape)
        return dx, dw, rows.sum(0) if wants_bias else None, None, None, None, *(None for _ in state)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool = False, exact: bool = True
) -> Tensor | None:
    """Return the layer's output, or None if it would keep no less than PyTorch's.

    If autocast casts the weight, the parameter is kept, and cast again.

    Args:
        x: (..., inputs).
        weight: (outputs, inputs), or (inputs, outputs) if `transposed`.
        bias: (outputs,) or None.
        transposed: whether the weight is, as in transformers' Conv1D.
        exact: whether to keep an input that would not be rebuilt bit for bit.

    """
    if not torch.is_grad_enabled() or (transposed and bias is None):
        return None
    in_rows = x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1 < x.shape[1])  # such as first tokens
    if not (in_rows and weight.is_contiguous()):
        return None  # PyTorch computes other products then
    dtype = product_dtype(x, weight)
    again = x.requires_grad and recast(x, weight, dtype)
    found = source(x, exact) if weight.requires_grad else None
    if found is not None and not (found.exact or x.is_contiguous()):
        return None  # the first tokens of texts alone may be far smaller than what codes are made for
    if dtype is None or (found is None and not again):
        return None
    rebuild: Function | None = None
    if found is not None:
        rebuild = found.function if x.dtype == dtype else Of(partial(Tensor.to, dtype=dtype), found)
        use(rebuild)
    x, parameter, weight = x.to(dtype), weight, cast(weight, dtype)
    bias = None if bias is None else cast(bias, dtype)
    state = found.state if found is not None else (x.detach(),) if weight.requires_grad else ()
    # PyTorch's own output is a view of rows too, unless these are all, or there is no bias
    whole = not transposed and (x.dim() == 2 or (x.dim() > 2 and bias is None))
    rows = x if whole else x.reshape(-1, x.shape[-1])
    with without_autocast(x.device.type):
        y: Tensor = applied(
            _Linear, rows, weight, bias, parameter.detach() if again else None, rebuild, transposed, *state
        )
    return y if whole else y.view(*x.shape[:-1], y.shape[-1])


# ------------------------------------------------------------------------------------------------------- producers


def noted(output: Tensor, function: Function, *state: Tensor) -> Tensor:
    """Note on an output that it is a function of what its operation keeps, and return it."""
    return note(output, Plain(function, output.device.type), *state)


def gate(function: Function, g: Tensor, u: Tensor) -> Tensor:
    """Return f(g)·u, which keeps g and u alone and can be rebuilt from them.

    Args:
        function: f, an elementwise function.
        g: its argument, any shape.
        u: of the shape and dtype of g.

    """
    if g.shape != u.shape or g.dtype != u.dtype:
        return function(g) * u
    return again(lambda u, g: function(g) * u, u, g)  # in this order they get their gradients


class _Again(torch.autograd.Function):
    """A function whose backward computes it again from the inputs that it keeps; each input is given READS times.

    If the first input is rebuilt, the others come first in what is kept.
    """

    @staticmethod
    def forward(ctx: Any, function: Function, rebuild: Function | None, count: int, *given: Tensor) -> Tensor:
        inputs = given[count::READS]
        ctx.function, ctx.rebuild, ctx.autocast = function, rebuild, autocast(inputs[0].device.type)
        ctx.count = count
        ctx.save_for_backward(*(inputs if rebuild is None else given[:count]))
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        once()
        wanted = ctx.needs_input_grad[3 + ctx.count :: READS]
        kept = ctx.saved_tensors
        if ctx.rebuild is not None:
            others = len(wanted) - 1
            kept = (ctx.rebuild(*kept[others:]), *kept[:others])
        with differentiable(ctx.autocast):
            inputs = [one.detach().requires_grad_(wants) for one, wants in zip(kept, wanted, strict=True)]
            del kept
            reads = Reads(ctx.function(*inputs), inputs)
        return *(None,) * (3 + ctx.count), *reads.gradients(grads)


def again(function: Function, x: Tensor, *others: Tensor, found: Source | None = None) -> Tensor:
    """Return a function of tensors, which keeps these alone and can be rebuilt from them.

    Args:
        function: of all tensors.
        x: the first.
        others: the others.
        found: what x is rebuilt from, which is kept in its place; None to keep x.

    """
    if not recorded(x, *others):
        return function(x, *others)
    reads = [one for one in (x, *others) for _ in range(READS)]
    if found is None:
        y: Tensor = applied(_Again, function, None, 0, *reads)
        return noted(y, function, x, *others)
    use(found.function)
    use(function)
    state = (*others, *found.state)
    y = applied(_Again, function, found.function, len(state), *state, *reads)
    return noted(y, Of(function, found, len(others)), *state)


# ---------------------------------------------------------------------------------------------------------- losses

PIECES, PIECE = (16, 64), 2**22  # the least and the most pieces of logits; elements of one in between
ALIGNED = 8  # rows: a multiple of these starts as the first one does, at a multiple of 16 bytes


class _CrossEntropy(torch.autograd.Function):
    """PyTorch's cross entropy, a few rows at a time; it keeps the logits in the dtype that they had."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        target: Tensor,
        reduction: str,
        ignored: int,
        rebuild: Function,
        *state: Tensor,
    ) -> Tensor:
        ctx.reduction, ctx.ignored, ctx.rebuild = reduction, ignored, rebuild
        ctx.autocast = autocast(x.device.type)
        ctx.save_for_backward(target, *state)
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
        once()
        target, *state = ctx.saved_tensors
        x, grad = ctx.rebuild(*state), grads[0]
        # where nobody else reads x, and it is no tensor that was kept, the gradient takes its place
        alone = isinstance(ctx.rebuild, Read) and ctx.rebuild.recipe.value is None
        alone = alone and storage_id(x) not in map(storage_id, state)
        gradient = x if alone else torch.empty_like(x)
        if ctx.reduction == "mean":  # as PyTorch divides
            grad = grad / (target != ctx.ignored).sum().to(grad.dtype)
        grad = grad.expand(len(x))
        for rows, answers, into, of_losses in _pieces(x, target, gradient, grad):
            with torch.enable_grad(), ctx.autocast():
                part = rows.detach().requires_grad_()
                loss = F.cross_entropy(part, answers, ignore_index=ctx.ignored, reduction="none")
            into.copy_(torch.autograd.grad(loss, part, of_losses)[0])
        return gradient, None, None, None, None, *(None for _ in state)


def _pieces(x: Tensor, *others: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Return the pieces of logits, each with the same rows of other tensors."""
    least, most = PIECES
    size = min(x.numel() // least, max(PIECE, x.numel() // most))
    rows = max(size // x.shape[1] // ALIGNED, 1) * ALIGNED
    return zip(*(one.split(rows) for one in (x, *others)), strict=True)


def cross_entropy(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return a loss that keeps logits in half precision, where PyTorch's keeps float32 made of them."""
    given: dict[str, Any] = {**_ARGUMENTS, **dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
    x, target, reduction, ignored = (given.pop(name) for name in ("input", "target", "reduction", "ignore_index"))
    found = None
    if isinstance(x, Tensor) and isinstance(target, Tensor) and not any(map(_is_given, given.values())):
        found = _logits(x, target)
    if found is None:
        loss: Tensor = function(*args, **kwargs)
    else:
        use(found.function)
        loss = applied(_CrossEntropy, x, target, reduction, ignored, found.function, *found.state)
    return loss


_ARGUMENTS: dict[str, Any] = {
    "input": None,
    "target": None,
    "weight": None,
    "size_average": None,
    "ignore_index": -100,
    "reduce": None,
    "reduction": "mean",
    "label_smoothing": 0.0,
}


def _is_given(option: Any) -> bool:
    return isinstance(option, Tensor) or bool(option)


def _logits(x: Tensor, target: Tensor) -> Source | None:
    """Return what logits, (rows, classes), are rebuilt from; None if PyTorch has to compute their loss."""
    if not (recorded(x) and plain(x) and plain(target) and x.dim() == 2 and x.is_contiguous() and x.numel()):
        return None
    if target.dtype != torch.int64 or target.shape != x.shape[:1]:
        return None
    if active_autocast(x.device.type) and x.untyped_storage().nbytes() < 4 * x.numel():
        return Source(torch.Tensor.detach, (x.detach(),))
    found, extra = narrow(x)
    return found if x.dtype == torch.float32 and sum(extra.values()) < x.nbytes else None
