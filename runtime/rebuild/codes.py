"""Gates f(g)·u that keep codes: of g those of f's coded fit, and u itself or codes of the identity's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fitact.runtime.ops.autograd import DTYPES, KERNEL_DEVICES, NAMESPACE, Decoded
from fitact.runtime.ops.decode import prepare
from fitact.runtime.ops.registry import find
from fitact.runtime.recipes import note, plain

from . import functions
from .derivatives import once
from .recipes import applied

ops: Any = getattr(torch.ops, NAMESPACE)


class Codes(NamedTuple):
    """The codes that a gate keeps.

    Attributes:
        g: the key of f's coded fit.
        u: the key of the identity's; None to keep u as it is.

    """

    g: str
    u: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the fits."""
        return tuple(find(key).name for key in self if key is not None)


class _Product:
    """What stands in place of f(g)·u, from what is kept of g and u."""

    def __init__(self, codes: Codes, h: Tensor) -> None:
        self.g = Decoded(codes.g, h.shape, h.dtype)
        self.u = None if codes.u is None else Decoded(codes.u, h.shape, h.dtype)

    def factors(self, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return what stands in place of f(g) and u."""
        return self.g(g), u if self.u is None else self.u(u)

    def __call__(self, g: Tensor, u: Tensor) -> Tensor:
        f, u = self.factors(g, u)
        return f * u


class _Gate(torch.autograd.Function):
    """f(g)·u; returns the codes of g too, and what is kept of u where that is not u."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, u: Tensor, codes: Codes) -> tuple[Tensor, Tensor, Tensor | None]:
        y, of_g = ops.forward(g.contiguous(), None, g.dtype, codes.g)
        of_u = None
        if codes.u is not None:
            of_u = ops.forward(u.contiguous(), None, u.dtype, codes.u)[1]
        elif u.nbytes != u.untyped_storage().nbytes():
            of_u = u.clone(memory_format=torch.contiguous_format)  # as a view it would hold what is beside it
        h = y * u
        ctx.codes, ctx.product = codes, _Product(codes, h)
        ctx.mark_non_differentiable(*(one for one in (of_g, of_u) if one is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(of_g, u if of_u is None else of_u)
        return h, of_g, of_u

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        once()
        dh = grads[0]
        if dh is None:
            return None, None, None
        of_g, of_u = ctx.saved_tensors
        wants_g, wants_u = ctx.needs_input_grad[:2]
        f, u = ctx.product.factors(of_g, of_u)
        du = dh * f if wants_u else None
        del f
        dg = ops.backward((dh * u).contiguous(), None, of_g, dh.dtype, ctx.codes.g) if wants_g else None
        return dg, du, None


def gate(codes: Codes, function: Callable[..., Tensor], g: Tensor, u: Tensor) -> Tensor:
    """Return f(g)·u, which keeps codes of g, and u or its codes; layers that follow find what stands for it.

    Args:
        codes: which codes.
        function: f, of one element, as the model computes it; used where nothing is coded.
        g: its argument, any shape.
        u: of the shape and dtype of g.

    """
    if not (functions.recorded(g, u) and plain(g) and plain(u) and g.dtype in DTYPES):
        return functions.gate(function, g, u)
    if g.shape != u.shape or g.dtype != u.dtype:
        return functions.gate(function, g, u)
    if g.device.type in KERNEL_DEVICES:
        for key in filter(None, codes):
            prepare(key, str(g.device))
    h, of_g, of_u = applied(_Gate, g, u, codes)
    noted: Tensor = note(h, _Product(codes, h), of_g, u if of_u is None else of_u, exact=False)
    return noted
