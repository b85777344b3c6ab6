"""The operations that keep less: what they return, and what they note on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import c_float
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from fitact.runtime.recipes import note, plain
from fitact.runtime.torch_internals import in_functorch_transform

from .bits import pack, unpack
from .recipes import Function, Source, applied, source, use


def once() -> None:
    """Raise where a second derivative is asked for."""
    if torch.is_grad_enabled():
        raise RuntimeError("a rebuilt output has no second derivative: call backward without create_graph")


def recorded(*inputs: Tensor) -> bool:
    """Whether autograd alone, and no transform of `torch.func`, looks at what is computed of inputs."""
    wanted = torch.is_grad_enabled() and any(one.requires_grad for one in inputs)
    return wanted and not in_functorch_transform()


def autocast(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return what enters the autocast that is on now."""
    if not torch.is_autocast_enabled(device):
        return nullcontext
    dtype = torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype)


class _Power(torch.autograd.Function):
    """A power, whose derivative takes one tensor where PyTorch's takes three, of the same numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exponent: float) -> Tensor:
        ctx.exponent = exponent
        ctx.save_for_backward(x)
        return x.pow(exponent)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return x.pow(ctx.exponent - 1).mul_(ctx.exponent).mul_(grads[0]), None


class _Powers(TorchFunctionMode):
    """A context in which powers are differentiated like this; autocast, which casts them, does that itself."""

    NAMES = (torch.pow, Tensor.pow, Tensor.__pow__)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.NAMES and len(args) == 2 and not kwargs and type(args[1]) in (int, float) and args[1]:
            x, exponent = args
            if x.requires_grad and x.is_floating_point() and not torch.is_autocast_enabled(x.device.type):
                return applied(_Power, x, exponent)
        return func(*args, **(kwargs or {}))


@contextmanager
def differentiable(autocast: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter a context in which a function is computed again for its derivative, in the autocast that it ran in."""
    with torch.enable_grad(), autocast(), _Powers():
        yield


# ------------------------------------------------------------------------------------------------------- consumers


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Return a context without autocast; to enter one takes longer than to ask."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def product_dtype(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """Return the dtype in which a layer multiplies; None if PyTorch has to do it, or to say what is wrong."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x.dtype if x.dtype == weight.dtype else None
    return None if torch.float64 in (weight.dtype, x.dtype) else torch.get_autocast_dtype(device)


class _Linear(torch.autograd.Function):
    """x Wᵀ + b, or x W + b, of rows: the products of PyTorch's own backward, x rebuilt for them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rebuild: Function,
        transposed: bool,
        *state: Tensor,
    ) -> Tensor:
        ctx.rebuild, ctx.transposed = rebuild, transposed
        rows = x.reshape(-1, x.shape[-1])
        ctx.shape, ctx.columns = x.shape, rows.stride(0) == 1 and rows.stride(1) == rows.shape[0]
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, *state)
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
            x = ctx.rebuild(*state)
            x = x.reshape(len(rows), x.shape[-1])
            dw = x.t() @ rows if ctx.transposed else rows.t() @ x
            del x
        if wants_x:
            weight = weight.t() if ctx.transposed else weight
            dx = (weight.t() @ rows.t()).t() if ctx.columns else rows @ weight
            dx = dx.reshape(ctx.shape)
        return dx, dw, rows.sum(0) if wants_bias else None, None, None, *(None for _ in state)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool = False, exact: bool = True
) -> Tensor | None:
    """Return the layer's output, or None if its input has to be kept.

    Args:
        x: (..., inputs).
        weight: (outputs, inputs), or (inputs, outputs) if `transposed`.
        bias: (outputs,) or None.
        transposed: whether the weight is, as in transformers' Conv1D.
        exact: whether to keep an input that would not be rebuilt bit for bit.

    """
    if not (torch.is_grad_enabled() and weight.requires_grad) or (transposed and bias is None):
        return None
    if not (x.is_contiguous() and weight.is_contiguous()):
        return None  # PyTorch's own products are others then
    dtype, found = product_dtype(x, weight), source(x, exact)
    if dtype is None or found is None:
        return None
    rebuild = found.function if x.dtype == dtype else _Cast(found.function, dtype)
    x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    use(rebuild)
    # PyTorch's own output is a view of rows too, unless these are all, or there is no bias
    whole = not transposed and (x.dim() == 2 or (x.dim() > 2 and bias is None))
    with without_autocast(x.device.type):
        y: Tensor = applied(
            _Linear, x if whole else x.reshape(-1, x.shape[-1]), weight, bias, rebuild, transposed, *found.state
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


class Plain:
    """A function as it runs in the autocast that is on now, without autograd."""

    def __init__(self, function: Function, device: str) -> None:
        self.function, self.autocast = function, autocast(device)

    def use(self) -> None:
        """Tell the function, if it wants to know, that a layer will call it once in each backward pass."""
        use(self.function)

    def __call__(self, *state: Tensor) -> Tensor:
        """Return the function of tensors."""
        with torch.no_grad(), self.autocast():
            return self.function(*state)


def noted(output: Tensor, function: Function, *state: Tensor) -> Tensor:
    """Return an output that is to be rebuilt as a function of what its operation keeps."""
    return note(output, Plain(function, output.device.type), *state)


class _Gate(torch.autograd.Function):
    """f(g)·u, of which g and u are kept."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, u: Tensor, function: Function) -> Tensor:
        ctx.function, ctx.autocast = function, autocast(g.device.type)
        ctx.save_for_backward(g, u)
        return function(g) * u

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        once()
        g, u = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()
        wants_g, wants_u = ctx.needs_input_grad[:2]
        with differentiable(ctx.autocast):
            g = g.detach().requires_grad_(wants_g)
            value = ctx.function(g)
            edge = get_gradient_edge(value * u.detach()) if wants_g else None
        du = grads[0] * value.detach() if wants_u else None
        del value, u  # autograd frees what it keeps of them as it goes
        dg = None if edge is None else torch.autograd.grad(edge, g, grads)[0]
        return dg, du, None


def gate(function: Function, g: Tensor, u: Tensor) -> Tensor:
    """Return f(g)·u, which keeps g and u, its output to be rebuilt from them.

    Args:
        function: f, of one element.
        g: its argument, any shape.
        u: of the shape and dtype of g.

    """
    if not recorded(g, u) or g.shape != u.shape or g.dtype != u.dtype:
        return function(g) * u
    h: Tensor = applied(_Gate, g, u, function)
    return noted(h, lambda g, u: function(g) * u, g, u)


class _Again(torch.autograd.Function):
    """A function whose backward computes it again, from the inputs that it keeps."""

    @staticmethod
    def forward(ctx: Any, function: Function, *inputs: Tensor) -> Tensor:
        ctx.function, ctx.autocast = function, autocast(inputs[0].device.type)
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        once()
        wanted = ctx.needs_input_grad[1:]
        with differentiable(ctx.autocast):
            inputs = [
                one.detach().requires_grad_(wants) for one, wants in zip(ctx.saved_tensors, wanted, strict=True)
            ]
            edge = get_gradient_edge(ctx.function(*inputs))
        asked = [one for one, wants in zip(inputs, wanted, strict=True) if wants]
        found = iter(torch.autograd.grad(edge, asked, grads))
        return None, *(next(found) if wants else None for wants in wanted)


def again(function: Function, *inputs: Tensor) -> Tensor:
    """Return a function of inputs that keeps these alone, its output to be rebuilt from them."""
    if not recorded(*inputs):
        return function(*inputs)
    y: Tensor = applied(_Again, function, *inputs)
    return noted(y, function, *inputs)


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
    found = source(x, exact=False)
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
