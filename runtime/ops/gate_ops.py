"""The ops of gates h = a(g)·b(u), and which gates there are.

    fitact::gate_forward(Tensor g, Tensor u, str key) -> (Tensor h, Tensor codes of g, Tensor codes of u)
    fitact::gate_backward(Tensor dh, Tensor g, Tensor u, bool, bool, str key) -> (Tensor dg, Tensor du)
    fitact::gate_value(Tensor g, Tensor u, SymInt[] size, ScalarType dtype, str key) -> Tensor h

Like the ops of `autograd`, they are opaque to PyTorch. In backward and value, g and u are what is kept of them:
the tensors themselves, or their codes; the two bools say which gradients are wanted. Codes are in the order of the
elements, whatever the layouts of g and u, which may differ: halves of one tensor are kept as views. The result h
is laid out like g, and gradients like dh.

Values are those of PyTorch's composition: a(g) rounded to the dtype, and then multiplied. So are the gradients
where g and u are kept: dh·b(u) goes through PyTorch's own backward of a, and dh·a(g) through that of b.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..torch_internals import constant_in_graphs
from . import reference
from .factors import Factor
from .launch import Launch, threads_of
from .library import KERNEL_DTYPES, Op, Registry, alone, batched, define, ops, save_key
from .registry import home_of


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A registered gate, with all that the ops need to run it.

    Attributes:
        key: identifies the fit and the generated text.
        name: its name in messages.
        a, b: the factors, of g and of u.
        forward, backward, again: Triton kernels; their arguments are those that the functions below launch them
            with. None where the gate is computed by its factors alone.

    """

    key: str
    name: str
    a: Factor
    b: Factor
    forward: Any = None
    backward: Any = None
    again: Any = None

    @property
    def exact(self) -> bool:
        """Whether g and u are kept as they are."""
        return not (self.a.bits or self.b.bits)

    @property
    def in_words(self) -> bool:
        """Whether codes stand in words, for whole tiles."""
        return any(reference.in_words(factor.bits) for factor in (self.a, self.b))


_registry: Registry[Gate] = Registry("gate")
register_gate = _registry.register
find = _registry.find
refuse_second_derivative = _registry.refuse_second_derivative


def generated_gate(kind: type) -> Gate | None:
    """Return the gate of a generated class, None if it is none."""
    return _registry.by_key.get(home_of(kind).get("_KEY", ""))


def kept(gate: Gate, g: Tensor, u: Tensor, codes_g: Tensor, codes_u: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is kept of g and of u."""
    return codes_g if gate.a.bits else g, codes_u if gate.b.bits else u


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a tensor in the memory order that `torch.empty_like` gives another of its shape."""
    if torch.compiler.is_compiling() or tensor.stride() == other.stride():
        return tensor
    laid_out = torch.empty_like(other)
    return tensor if tensor.stride() == laid_out.stride() else laid_out.copy_(tensor)


# ------------------------------------------------------------------------------------------ by PyTorch's operators


def _forward_reference(g: Tensor, u: Tensor, key: str) -> tuple[Tensor, Tensor, Tensor]:
    gate = find(key)
    with alone(g):
        (a, codes_g), (b, codes_u) = gate.a.value_and_codes(g), gate.b.value_and_codes(u)
        return like(a * b, g), codes_g, codes_u


def _backward_reference(
    dh: Tensor, g: Tensor, u: Tensor, wants_g: bool, wants_u: bool, key: str
) -> tuple[Tensor, Tensor]:
    gate = find(key)
    with alone(dh):
        dg, du = dh.new_empty(0), dh.new_empty(0)
        if wants_g:
            dg = like(gate.a.gradient(dh * gate.b.again(u, dh.shape, dh.dtype), g), dh)
        if wants_u:
            du = like(gate.b.gradient(dh * gate.a.again(g, dh.shape, dh.dtype), u), dh)
        return dg, du


def _value_reference(g: Tensor, u: Tensor, size: Sequence[int], dtype: torch.dtype, key: str) -> Tensor:
    gate = find(key)
    with alone(g):
        h = gate.a.again(g, size, dtype) * gate.b.again(u, size, dtype)
        return h.contiguous() if gate.a.bits else like(h, g)


# ------------------------------------------------------------------------------------------------------- by Triton


@constant_in_graphs
def prepare(key: str, device: str) -> None:
    """Put the tables of a gate on a device, while the compiler traces at the latest; see `decode.prepare`."""
    gate = find(key)
    if type(torch.empty(0)) is Tensor:
        for factor in (gate.a, gate.b):
            factor.tables(torch.device(device))


def _forward_triton(g: Tensor, u: Tensor, key: str) -> tuple[Tensor, Tensor, Tensor]:
    gate = find(key)
    if g.dtype not in KERNEL_DTYPES or gate.forward is None:
        return _forward_reference(g, u, key)
    laid_out, codes_g, codes_u = _forward_fake(g, u, key)
    h = laid_out if laid_out.is_contiguous() else laid_out.new_empty(laid_out.shape)
    (g, *rows_g), (u, *rows_u) = _rows(g), _rows(u)
    tables = (*gate.a.coding(codes_g, g), *gate.b.coding(codes_u, u))
    Launch(h, threads_of(h.dtype))(gate.forward, g, u, h, *tables, *rows_g, *rows_u)
    return h if h is laid_out else laid_out.copy_(h), codes_g, codes_u


def _backward_triton(
    dh: Tensor, g: Tensor, u: Tensor, wants_g: bool, wants_u: bool, key: str
) -> tuple[Tensor, Tensor]:
    gate = find(key)
    if dh.dtype not in KERNEL_DTYPES or gate.backward is None:
        return _backward_reference(dh, g, u, wants_g, wants_u, key)
    flat = dh.contiguous()
    dg, du = (torch.empty_like(flat) if wanted else None for wanted in (wants_g, wants_u))
    (g, *rows_g), (u, *rows_u) = _rows(g), _rows(u)
    tables = (*gate.a.tables(dh.device), *gate.b.tables(dh.device))
    Launch(flat, threads_of(flat.dtype))(gate.backward, flat, g, u, dg, du, *tables, *rows_g, *rows_u)
    found = [dh.new_empty(0) if one is None else like(one, dh) for one in (dg, du)]
    return found[0], found[1]


def _value_triton(g: Tensor, u: Tensor, size: Sequence[int], dtype: torch.dtype, key: str) -> Tensor:
    gate = find(key)
    if dtype not in KERNEL_DTYPES or gate.again is None:
        return _value_reference(g, u, size, dtype, key)
    h, laid_out = g.new_empty(size, dtype=dtype), g
    (g, *rows_g), (u, *rows_u) = _rows(g), _rows(u)
    values = gate.a.tables(h.device)[0], gate.b.tables(h.device)[0]
    Launch(h, threads_of(h.dtype))(gate.again, g, u, h, *values, *rows_g, *rows_u)
    return h if gate.a.bits else like(h, laid_out)


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


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    g, u, ctx.key = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*kept(find(ctx.key), g, u, *output[1:]))


def _differentiate(ctx: Any, dh: Tensor | None, *_: None) -> tuple[Tensor | None, Tensor | None, None]:
    if dh is None:
        return None, None, None
    wants_g, wants_u = ctx.needs_input_grad[:2]
    dg, du = ops.gate_backward(dh, *ctx.saved_tensors, wants_g, wants_u, ctx.key)
    return dg if wants_g else None, du if wants_u else None, None


def _forward_fake(g: Tensor, u: Tensor, key: str) -> tuple[Tensor, Tensor, Tensor]:
    gate = find(key)
    codes = [g.new_empty(reference.bytes_of_codes(g, one.bits), dtype=torch.uint8) for one in (gate.a, gate.b)]
    return torch.empty_like(g), codes[0], codes[1]


def _backward_fake(
    dh: Tensor, g: Tensor, u: Tensor, wants_g: bool, wants_u: bool, key: str
) -> tuple[Tensor, Tensor]:
    dg, du = (torch.empty_like(dh) if wanted else dh.new_empty(0) for wanted in (wants_g, wants_u))
    return dg, du


def _value_fake(g: Tensor, u: Tensor, size: Sequence[int], dtype: torch.dtype, key: str) -> Tensor:
    return g.new_empty(size, dtype=dtype) if find(key).a.bits else torch.empty_like(g)


def _batched_kept(
    gate: Gate, size: int, g: Tensor, dim_g: int | None, u: Tensor, dim_u: int | None
) -> tuple[Tensor, Tensor]:
    """Return what is kept of the arguments of a batch."""
    kept = []
    for factor, one, dim in ((gate.a, g, dim_g), (gate.b, u, dim_u)):
        if factor.bits:
            rows = one.expand(size, *one.shape) if dim is None else one.movedim(dim, 0)
            kept.append(rows.reshape(-1))
        else:
            kept.append(batched(one, dim, size, in_words=gate.in_words))
    return kept[0], kept[1]


def _forward_vmap(
    info: Any, in_dims: Any, g: Tensor, u: Tensor, key: str
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    gate, size, (dim_g, dim_u, *_) = find(key), info.batch_size, in_dims
    shape = u.movedim(dim_u, 0).shape if dim_g is None else g.movedim(dim_g, 0).shape
    whole = [batched(one, dim, size, in_words=gate.in_words) for one, dim in ((g, dim_g), (u, dim_u))]
    h, *codes = ops.gate_forward(*whole, key)
    h = h[:, : shape[1:].numel()].reshape(shape)
    return (h, *(one.view(size, one.numel() // max(size, 1)) for one in codes)), (0, 0, 0)


def _backward_vmap(
    info: Any, in_dims: Any, dh: Tensor, g: Tensor, u: Tensor, wants_g: bool, wants_u: bool, key: str
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    gate, size, (dim, dim_g, dim_u, *_) = find(key), info.batch_size, in_dims
    shape = (size, *dh.shape) if dim is None else dh.movedim(dim, 0).shape
    kept = _batched_kept(gate, size, g, dim_g, u, dim_u)
    found = ops.gate_backward(batched(dh, dim, size, in_words=gate.in_words), *kept, wants_g, wants_u, key)
    dg, du = (
        one[:, : torch.Size(shape[1:]).numel()].reshape(shape) if wanted else one.new_empty(size, 0)
        for one, wanted in zip(found, (wants_g, wants_u), strict=True)
    )
    return (dg, du), (0, 0)


def _value_vmap(
    info: Any, in_dims: Any, g: Tensor, u: Tensor, size: Sequence[int], dtype: torch.dtype, key: str
) -> tuple[Tensor, int]:
    gate, batch, (dim_g, dim_u, *_) = find(key), info.batch_size, in_dims
    kept = _batched_kept(gate, batch, g, dim_g, u, dim_u)
    count = torch.Size(size).numel()
    padded = count + (-count % reference.TILE if gate.in_words else 0)
    h = ops.gate_value(*kept, (batch, padded), dtype, key)
    return h[:, :count].reshape(batch, *size), 0


define(
    "gate",
    {
        "gate_forward": Op(
            "(Tensor g, Tensor u, str key) -> (Tensor, Tensor, Tensor)",
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
        "gate_value": Op(
            "(Tensor g, Tensor u, SymInt[] size, ScalarType dtype, str key) -> Tensor",
            _value_reference,
            _value_triton,
            _value_fake,
            _value_vmap,
            refuse_second_derivative,
            save_key,
        ),
    },
)
