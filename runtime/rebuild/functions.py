"""The operations that keep less: what they return, and what they note on it."""

from __future__ import annotations

from ctypes import c_float
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fitact.runtime.recipes import note, plain
from fitact.runtime.torch_internals import in_functorch_transform

from .bits import pack, unpack
from .derivatives import READS, Of, Plain, Reads, autocast, differentiable, once
from .recipes import (
    Function,
    Source,
    applied,
    cast,
    kept_source,
    product_dtype,
    recast,
    source,
    use,
    without_autocast,
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
    """Return the layer's output, or None if it keeps no less than PyTorch's.

    Of a weight that autocast casts, the parameter is kept, and cast again.

    Args:
        x: (..., inputs).
        weight: (outputs, inputs), or (inputs, outputs) if `transposed`.
        bias: (outputs,) or None.
        transposed: whether the weight is, as in transformers' Conv1D.
        exact: whether to keep an input that would not be rebuilt bit for bit.

    """
    if not torch.is_grad_enabled() or (transposed and bias is None):
        return None
    if not (x.is_contiguous() and weight.is_contiguous()):
        return None  # PyTorch's own products are others then
    dtype = product_dtype(x, weight)
    again = x.requires_grad and recast(x, weight, dtype)
    found = source(x, exact) if weight.requires_grad else None
    if dtype is None or (found is None and not again):
        return None
    rebuild = None if found is None else found.function if x.dtype == dtype else _Cast(found.function, dtype)
    x, parameter, weight = x.to(dtype), weight, cast(weight, dtype)
    bias = None if bias is None else cast(bias, dtype)
    if rebuild is not None:
        use(rebuild)
    state = found.state if found is not None else (x.detach(),) if weight.requires_grad else ()
    # PyTorch's own output is a view of rows too, unless these are all, or there is no bias
    whole = not transposed and (x.dim() == 2 or (x.dim() > 2 and bias is None))
    rows = x if whole else x.reshape(-1, x.shape[-1])
    with without_autocast(x.device.type):
        y: Tensor = applied(
            _Linear, rows, weight, bias, parameter.detach() if again else None, rebuild, transposed, *state
        )
    return y if whole else y.view(*x.shape[:-1], y.shape[-1])


class _Cast:
    """What is rebuilt, in another dtype."""

    def __init__(self, rebuild: Function, dtype: torch.dtype) -> None:
        self.rebuild, self.dtype = rebuild, dtype

    def use(self) -> None:
        use(self.rebuild)

    def __call__(self, *state: Tensor) -> Tensor:
        return self.rebuild(*state).to(self.dtype)


# ------------------------------------------------------------------------------------------------------- producers


def noted(output: Tensor, function: Function, *state: Tensor) -> Tensor:
    """Return an output that is to be rebuilt as a function of what its operation keeps."""
    return note(output, Plain(function, output.device.type), *state)


def gate(function: Function, g: Tensor, u: Tensor) -> Tensor:
    """Return f(g)·u, which keeps g and u, its output to be rebuilt from them.

    Args:
        function: f, of one element.
        g: its argument, any shape.
        u: of the shape and dtype of g.

    """
    if g.shape != u.shape or g.dtype != u.dtype:
        return function(g) * u
    return again(lambda u, g: function(g) * u, u, g)  # in this order they get their gradients


class _Again(torch.autograd.Function):
    """A function whose backward computes it again, from the inputs that it keeps, each given as often as READS.

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
    """Return a function of tensors that keeps these alone, its output to be rebuilt from them.

    Args:
        function: of all tensors.
        x: the first.
        others: that follow.
        found: what x is rebuilt from, to be kept in its place; None to keep x.

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


class _Dropout(torch.autograd.Function):
    """PyTorch's dropout, of which a mask of one bit an element is kept, in the output's order of memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        y, bits = _dropout(x, p)
        ctx.p, ctx.layout = p, (y.shape, y.stride())
        ctx.mark_non_differentiable(bits)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(bits)
        return y, bits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        once()
        (bits,) = ctx.saved_tensors
        grad = grads[0]
        if grad is None:
            return None, None
        if grad.is_cuda:
            mask = unpack(bits, *ctx.layout)
            return torch.ops.aten.native_dropout_backward(grad, mask, 1 / (1 - ctx.p)), None
        return _dropped(grad, bits, ctx.layout, ctx.p), None


def _dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return PyTorch's dropout of x, and the bits of its mask."""
    if not x.is_cuda:
        factor = torch.empty_like(x).bernoulli_(1 - p)
        if x.stride() == factor.stride():
            bits = pack(factor.bool())
            return torch.mul(x, factor.div_(1 - p), out=factor), bits
        mask = factor.bool()
        y = x * factor.div_(1 - p)
    else:
        y, mask = torch.native_dropout(x, p, True)
    return y, pack(mask if mask.stride() == y.stride() else torch.empty_like(y, dtype=torch.bool).copy_(mask))


def _dropped(x: Tensor, bits: Tensor, layout: tuple[torch.Size, tuple[int, ...]], p: float) -> Tensor:
    """Return what PyTorch's dropout makes of x, rounded as it rounds, with the mask that was packed."""
    if x.is_cuda:  # the kernel computes in float32, from 1 - p in float32
        wide, keep = (torch.float64, 1 - p) if x.dtype == torch.float64 else (torch.float32, c_float(1 - p).value)
        return (x.to(wide) * unpack(bits, *layout)).mul_(1 / keep).to(x.dtype)
    factor = unpack(bits, *layout).to(x.dtype).div_(1 - p)
    return torch.mul(x, factor, out=factor) if x.stride() == factor.stride() else x * factor


def dropout(x: Tensor, p: float) -> Tensor | None:
    """Return x after dropout, which keeps a bit an element; None if PyTorch has to do it.

    If x can be rebuilt, so can the output, from that and the mask.
    """
    if not (recorded(x) and plain(x) and 0 < p < 1):
        return None
    found = source(x, exact=False) or kept_source(x)
    y, bits = applied(_Dropout, x, p)
    return y if found is None else note(y, _Dropped(found, p, y), bits, *found.state, exact=found.exact)


class _Dropped:
    """What dropout makes of what is rebuilt."""

    def __init__(self, found: Source, p: float, y: Tensor) -> None:
        self.rebuild, self.p, self.layout = found.function, p, (y.shape, y.stride())

    def use(self) -> None:
        use(self.rebuild)

    def __call__(self, bits: Tensor, *state: Tensor) -> Tensor:
        return _dropped(self.rebuild(*state), bits, self.layout, self.p)
