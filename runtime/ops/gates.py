"""Gates h = a(g)·b(u) as functions of tensors, and their autograd."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..recipes import note
from .autograd import may_need_gradient
from .gate_ops import Gate, find, like
from .library import Gradients, check_dtype, ops, with_signature


def apply_gate(g: Tensor, u: Tensor, key: str) -> Tensor:
    """Return the gate of g and u, keeping both for backward.

    Args:
        g: float16, bfloat16, float32 or float64, of any shape, strides and device. For a DTensor, each process
            computes its own shard; a partial DTensor is summed over the processes first.
        u: of the shape, dtype and device of g; its strides may differ. A DTensor of the same mesh if g is one; it
            gets the placements of g.
        key: the key of a registered gate.

    Returns:
        A tensor of the shape and dtype of g, laid out like g (if g is not dense, like a copy of it). It carries a
        note of how to compute it again from g and u, for a context of `fitact.saving`.

    Raises:
        TypeError: g or u is not a tensor of one of these dtypes, or they differ in dtype or device, or one of them
            is a DTensor and the other is not, or has another mesh.
        ValueError: they differ in shape.

    """
    gate = find(key)
    _check(gate, g, u)
    if type(g).__name__ == "DTensor":
        return _distributed(g, u, key)
    if not (may_need_gradient(g) or may_need_gradient(u)):
        return like(gate.a.value(g) * gate.b.value(u), g)
    if torch.compiler.is_compiling():
        compiled: Tensor = ops.gate_forward(g, u, key)
        return compiled
    h: Tensor = _Gate.apply(g, u, key)[0]
    return note(h, partial(ops.gate_forward, key=key), g, u)


def _distributed(g: Any, u: Any, key: str) -> Tensor:
    """Return the gate of two DTensors of one mesh, with the placements of g."""
    from torch.distributed.tensor import DTensor, Replicate

    placements = [Replicate() if one.is_partial() else one for one in g.placements]
    g, u = (one.redistribute(placements=placements) for one in (g, u))
    laid_out = torch.empty_like(torch.empty_strided(g.shape, g.stride(), device="meta"))
    h: Tensor = DTensor.from_local(
        apply_gate(g.to_local(), u.to_local(), key),
        g.device_mesh,
        placements,
        run_check=False,
        shape=g.shape,
        stride=laid_out.stride(),
    )
    return h


def _check(gate: Gate, g: Tensor, u: Tensor) -> None:
    """Raise unless g and u are tensors of one shape, dtype and device."""
    for name, tensor in (("g", g), ("u", u)):
        check_dtype(gate.name, tensor, f"{name} to be a tensor")
    meshes = [getattr(one, "device_mesh", None) for one in (g, u)]
    if meshes[0] != meshes[1]:
        found = " and ".join("a local tensor" if mesh is None else f"a DTensor on {mesh}" for mesh in meshes)
        raise TypeError(f"{gate.name}: expected g and u to be both DTensors of one mesh, or none, got {found}")
    if (g.dtype, g.device) != (u.dtype, u.device):
        raise TypeError(
            f"{gate.name}: expected g and u of one dtype and device, got {g.dtype} on {g.device} and {u.dtype} on "
            f"{u.device}"
        )
    if g.shape != u.shape:
        raise ValueError(
            f"{gate.name}: expected g and u of one shape, got {tuple(g.shape)} and {tuple(u.shape)}: "
            "expand one of them first"
        )


class _Gate(torch.autograd.Function):
    """Saves g and u, and an empty tensor that ties the gradients to g and u."""

    generate_vmap_rule = True

    @staticmethod
    @with_signature
    def forward(g: Tensor, u: Tensor, key: str) -> tuple[Tensor, Tensor]:
        return ops.gate_forward(g, u, key), g.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        (g, u, ctx.key), (_, autograd_anchor) = inputs, output
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(g, u, autograd_anchor)

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, *_: None) -> tuple[Tensor | None, Tensor | None, None]:
        if dh is None:
            return None, None, None
        g, u, autograd_anchor = ctx.saved_tensors
        wants_g, wants_u = ctx.needs_input_grad[:2]
        name, op = find(ctx.key).name, "gate_backward"
        dg, du = Gradients.apply(name, autograd_anchor, op, dh, g, u, wants_g, wants_u, ctx.key)
        return dg if wants_g else None, du if wants_u else None, None
