"""The ops of gates h = a(g)·b(u), and which gates there are.

    fitact::gate_forward(Tensor g, Tensor u, str key) -> Tensor h
    fitact::gate_backward(Tensor dh, Tensor g, Tensor u, bool, bool, str key) -> (Tensor dg, Tensor du)

Like the ops of `autograd`, they are opaque to PyTorch. The two bools say which gradients are wanted. The layouts
of g and u may differ: halves of one tensor are kept as views. The result h is laid out like g, and gradients like
dh.

Values are those of PyTorch's composition: a(g) rounded to the dtype, and then multiplied. So are the gradients:
dh·b(u) goes through PyTorch's own backward of a, and dh·a(g) through that of b.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import reference
from .factors import Factor
from .launch import Launch, threads_of
from .library import KERNEL_DTYPES, Op, Registry, alone, batched, define, ops, save_key


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A registered gate, with all that the ops need to run it.

    Attributes:
        key: identifies the fit and the generated text.
        name: its name in messages.
        a, b: the factors, of g and of u.
        forward, backward: Triton kernels; their arguments are those that the functions below launch them
            with. None where the gate is computed by its factors alone.

    """

    key: str
    name: str
    a: Factor
    b: Factor
    forward: Any = None
    backward: Any = None


_registry: Registry[Gate] = Registry("gate")
register_gate = _registry.register
find = _registry.find
refuse_second_derivative = _registry.refuse_second_derivative


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a tensor in the memory order that `torch.empty_like` gives another of its shape."""
    if torch.compiler.is_compiling() or tensor.stride() == other.stride():
        return tensor
    laid_out = torch.empty_like(other)
    return tensor if tensor.stride() == laid_out.stride() else laid_out.copy_(tensor)


# ------------------------------------------------------------------------------------------ by PyTorch's operators


def _forward_reference(g: Tensor, u: Tensor, key: str) -> Tensor:
    gate = find(key)
    with alone(g):
        return like(gate.a.value(g) * gate.b.value(u), g)


def _backward_reference(
    dh: Tensor, g: Tensor, u: Tensor, wants_g: bool, wants_u: bool, key: str
) -> tuple[Tensor, Tensor]:
    gate = find(key)
    with alone(dh):
        dg, du = dh.new_empty(0), dh.new_empty(0)
        if wants_g:
            dg = like(gate.a.gradient(dh * gate.b.value(u), g), dh)
        if wants_u:
            du = like(gate.b.gradient(dh * gate.a.value(g), u), dh)
        return dg, du


# ------------------------------------------------------------------------------------------------------- by Triton


def _forward_triton(g: Tensor, u: Tensor, key: str) -> Tensor:
    gate = find(key)
    if g.dtype not in KERNEL_DTYPES or gate.forward is None:
        return _forward_reference(g, u, key)
    laid_out = torch.empty_like(g)
    h = laid_out if laid_out.is_contiguous() else laid_out.new_empty(laid_out.shape)
    (g, *rows_g), (u, *rows_u) = _rows(g), _rows(u)
    Launch(h, threads_of(h.dtype))(gate.forward, g, u, h, *rows_g, *rows_u)
    return h if h is laid_out else laid_out.copy_(h)


def _backward_triton(
    dh: Tensor, g: Tensor, u: Tensor, wants_g: bool, wants_u: bool, key: str
) -> tuple[Tensor, Tensor]:
    gate = find(key)
    if dh.dtype not in KERNEL_DTYPES or gate.backward is None:
        return _backward_reference(dh, g, u, wants_g, wants_u, key)
    flat = dh.contiguous()
    dg, du = (torch.empty_like(flat) if wanted else None for wanted in (wants_g, wants_u))
    (g, *rows_g), (u, *rows_u) = _rows(g), _rows(u)
    Launch(flat, threads_of(flat.dtype))(gate.backward, flat, g, u, dg, du, *rows_g, *rows_u)
    found = [dh.new_empty(0) if one is None else like(one, dh) for one in (dg, du)]
    return found[0], found[1]


def _rows(x: Tensor) -> tuple[Tensor, int | None, int | None]:
    """Return a tensor as kernels read it, with width and stride of its rows if it is a view of longer ones.

    What is neither contiguous nor of such rows is copied.
    """
    if x.is_contiguous():
        return x, None, None
    width = x.shape[-1] if x.dim() else 0
    if width >= reference.COLUMNS and x.stride(-1) == 1:
        try:
            return x, width, x.view(-1, width).stride(0)
        except RuntimeError:  # the rows are not equally far apart
            pass
    return x.contiguous(), None, None


# ----------------------------------------------------------------------------------------------------- for PyTorch


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    g, u, ctx.key = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(g, u)


def _differentiate(ctx: Any, dh: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
    if dh is None:
        return None, None, None
    wants_g, wants_u = ctx.needs_input_grad[:2]
    dg, du = ops.gate_backward(dh, *ctx.saved_tensors, wants_g, wants_u, ctx.key)
    return dg if wants_g else None, du if wants_u else None, None


def _forward_fake(g: Tensor, u: Tensor, key: str) -> Tensor:
    return torch.empty_like(g)


def _backward_fake(
    dh: Tensor, g: Tensor, u: Tensor, wants_g: bool, wants_u: bool, key: str
) -> tuple[Tensor, Tensor]:
    dg, du = (torch.empty_like(dh) if wanted else dh.new_empty(0) for wanted in (wants_g, wants_u))
    return dg, du


def _forward_vmap(info: Any, in_dims: Any, g: Tensor, u: Tensor, key: str) -> tuple[Tensor, int]:
    size, (dim_g, dim_u, *_) = info.batch_size, in_dims
    shape = u.movedim(dim_u, 0).shape if dim_g is None else g.movedim(dim_g, 0).shape
    h = ops.gate_forward(batched(g, dim_g, size), batched(u, dim_u, size), key)
    return h.reshape(shape), 0


def _backward_vmap(
    info: Any, in_dims: Any, dh: Tensor, g: Tensor, u: Tensor, wants_g: bool, wants_u: bool, key: str
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    size, (dim, *dims) = info.batch_size, in_dims
    shape = (size, *dh.shape) if dim is None else dh.movedim(dim, 0).shape
    whole = (batched(one, at, size) for one, at in zip((dh, g, u), (dim, *dims[:2]), strict=True))
    found = ops.gate_backward(*whole, wants_g, wants_u, key)
    dg, du = (
        one.reshape(shape) if wanted else one.new_empty(size, 0)
        for one, wanted in zip(found, (wants_g, wants_u), strict=True)
    )
    return (dg, du), (0, 0)


define(
    "gate",
    {
        "gate_forward": Op(
            "(Tensor g, Tensor u, str key) -> Tensor",
            _forward_reference,
            _forward_triton,
            _forward_fake,
            _forward_vmap,
            _differentiate,
            _save,
        ),
        "gate_backward": Op(
            "(Tensor dh, Tensor g, Tensor u, bool wants_g, bool wants_u, str key) -> (Tensor, Tensor)",
            _backward_reference,
            _backward_triton,
            _backward_fake,
            _backward_vmap,
            refuse_second_derivative,
            save_key,
        ),
    },
)
