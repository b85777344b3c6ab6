"""The operations that keep less: what they return, and what they note on it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fitact.runtime.torch_internals import in_functorch_transform

from .recipes import Source, note, source, use

Function = Callable[..., Tensor]


def _once() -> None:
    """Raise where a second derivative is asked for."""
    if torch.is_grad_enabled():
        raise RuntimeError("a rebuilt output has no second derivative: call backward without create_graph")


def _recorded(*inputs: Tensor) -> bool:
    """Whether autograd alone, and no transform of `torch.func`, looks at what is computed of inputs."""
    wanted = torch.is_grad_enabled() and any(one.requires_grad for one in inputs)
    return wanted and not in_functorch_transform()


def _autocast(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return what enters the autocast that is on now."""
    if not torch.is_autocast_enabled(device):
        return nullcontext
    dtype = torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype)


# ------------------------------------------------------------------------------------------------------- consumers


class _Linear(torch.autograd.Function):
    """x Wᵀ + b, or x W + b, of rows: the products of PyTorch's own backward, x rebuilt for them."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, rebuild: Function, transposed: bool, *state: Tensor
    ) -> Tensor:
        if not transposed:
            return F.linear(x, weight, bias)
        assert bias is not None
        return torch.addmm(bias, x, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.rebuild, ctx.transposed, *state = inputs
        ctx.columns = x.stride(0) == 1 and x.stride(1) == x.shape[0]
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, *state)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _once()
        (rows,) = grads
        weight, *state = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dx = dw = None
        if wants_weight:
            x = ctx.rebuild(*state)
            x = x.reshape(len(rows), x.shape[-1])
            dw = x.t() @ rows if ctx.transposed else rows.t() @ x
            del x
        if wants_x:
            weight = weight.t() if ctx.transposed else weight
            dx = (weight.t() @ rows.t()).t() if ctx.columns else rows @ weight
        return dx, dw, rows.sum(0) if wants_bias else None, None, None, *(None for _ in state)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool = False) -> Tensor | None:
    """Return the layer's output, or None if its input has to be kept.

    Args:
        x: (..., inputs).
        weight: (outputs, inputs), or (inputs, outputs) if `transposed`.
        bias: (outputs,) or None.
        transposed: whether the weight is, as in transformers' Conv1D.

    """
    if not (torch.is_grad_enabled() and weight.requires_grad) or (transposed and bias is None):
        return None
    if not (x.is_contiguous() and weight.is_contiguous()):
        return None  # PyTorch's own products are others then
    device = x.device.type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if weight.dtype != x.dtype if cast is None else torch.float64 in (weight.dtype, x.dtype):
        return None  # as PyTorch does it, or says what is wrong
    found = source(x)
    if found is None:
        return None
    rebuild = found.function
    if cast is not None:
        x, weight = x.to(cast), weight.to(cast)
        bias = None if bias is None else bias.to(cast)
        rebuild = _Cast(rebuild, cast)
    use(rebuild)
    with torch.autocast(device, enabled=False):
        rows: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            x.reshape(-1, x.shape[-1]), weight, bias, rebuild, transposed, *found.state
        )
    return rows.view(*x.shape[:-1], rows.shape[-1])


class _Cast:
    """What is rebuilt, in another dtype."""

    def __init__(self, rebuild: Function, dtype: torch.dtype) -> None:
        self.rebuild, self.dtype = rebuild, dtype

    def use(self) -> None:
        use(self.rebuild)

    def __call__(self, *state: Tensor) -> Tensor:
        return self.rebuild(*state).to(self.dtype)


# ------------------------------------------------------------------------------------------------------- producers


class Plain:
    """A function as it runs in the autocast that is on now, without autograd."""

    def __init__(self, function: Function, device: str) -> None:
        self.function, self.autocast = function, _autocast(device)

    def use(self) -> None:
        """Tell the function, if it wants to know, that a layer will call it once in each backward pass."""
        use(self.function)

    def __call__(self, *state: Tensor) -> Tensor:
        """Return the function of the state."""
        with torch.no_grad(), self.autocast():
            return self.function(*state)


def noted(output: Tensor, function: Function, *state: Tensor) -> Tensor:
    """Return an output that is to be rebuilt as a function of what its operation keeps."""
    return note(output, Plain(function, output.device.type), *state)


class _Gate(torch.autograd.Function):
    """f(g)·u, of which g and u are kept."""

    @staticmethod
    def forward(g: Tensor, u: Tensor, function: Function) -> Tensor:
        return function(g) * u

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, u, ctx.function = inputs
        ctx.autocast = _autocast(g.device.type)
        ctx.save_for_backward(g, u)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _once()
        (grad,) = grads
        g, u = ctx.saved_tensors
        wants_g, wants_u = ctx.needs_input_grad[:2]
        with torch.enable_grad(), ctx.autocast():
            g = g.detach().requires_grad_(wants_g)
            value = ctx.function(g)
        dg = torch.autograd.grad(value, g, grad * u)[0] if wants_g else None
        du = grad * value.detach() if wants_u else None
        return dg, du, None


def gate(function: Function, g: Tensor, u: Tensor) -> Tensor:
    """Return f(g)·u, which keeps g and u, its output to be rebuilt from them.

    Args:
        function: f, of one element.
        g: its argument, any shape.
        u: of the shape and dtype of g.

    """
    if not _recorded(g, u) or g.shape != u.shape or g.dtype != u.dtype:
        return function(g) * u
    h: Tensor = _Gate.apply(g, u, function)  # type: ignore[no-untyped-call]
    return noted(h, lambda g, u: function(g) * u, g, u)


class _Again(torch.autograd.Function):
    """A function whose backward computes it again, from the inputs that it keeps."""

    @staticmethod
    def forward(function: Function, *inputs: Tensor) -> Tensor:
        return function(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.function, *tensors = inputs
        ctx.autocast = _autocast(tensors[0].device.type)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _once()
        wanted = ctx.needs_input_grad[1:]
        with torch.enable_grad(), ctx.autocast():
            inputs = [
                one.detach().requires_grad_(wants) for one, wants in zip(ctx.saved_tensors, wanted, strict=True)
            ]
            output = ctx.function(*inputs)
        asked = [one for one, wants in zip(inputs, wanted, strict=True) if wants]
        found = iter(torch.autograd.grad(output, asked, grads))
        return None, *(next(found) if wants else None for wants in wanted)


def again(function: Function, *inputs: Tensor) -> Tensor:
    """Return a function of inputs that keeps these alone, its output to be rebuilt from them."""
    if not _recorded(*inputs):
        return function(*inputs)
    y: Tensor = _Again.apply(function, *inputs)  # type: ignore[no-untyped-call]
    return noted(y, function, *inputs)


class _Dropout(torch.autograd.Function):
    """PyTorch's dropout, of which a mask of one byte an element is kept."""

    @staticmethod
    def forward(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        if x.is_cuda:
            y, mask = torch.native_dropout(x, p, True)
            return y, mask
        mask = torch.empty_like(x).bernoulli_(1 - p)
        return x * mask.div(1 - p), mask.bool()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.p = inputs[1]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        _once()
        (mask,) = ctx.saved_tensors
        return None if grads[0] is None else _dropped(grads[0], mask, ctx.p), None


def _dropped(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """Return what dropout with this mask makes of x, rounded as PyTorch rounds it."""
    if x.is_cuda:
        return (x.float() * mask * (1 / (1 - p))).to(x.dtype)
    return x * mask.to(x.dtype).div_(1 - p)


def dropout(x: Tensor, p: float) -> Tensor | None:
    """Return x after dropout, to be rebuilt from what x is rebuilt from and a mask; None if x has to be kept."""
    found = source(x) if torch.is_grad_enabled() and 0 < p < 1 else None
    if found is None:
        return None
    y, mask = _Dropout.apply(x, p)  # type: ignore[no-untyped-call]
    return note(y, _Dropped(found, p), mask, *found.state)


class _Dropped:
    """What dropout makes of what is rebuilt."""

    def __init__(self, found: Source, p: float) -> None:
        self.rebuild, self.p = found.function, p

    def use(self) -> None:
        use(self.rebuild)

    def __call__(self, mask: Tensor, *state: Tensor) -> Tensor:
        return _dropped(self.rebuild(*state), mask, self.p)
