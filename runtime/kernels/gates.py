"""Gates h = a(g)·b(u), which save g and u.

Values are those of PyTorch's composition: a(g) rounded to the dtype, and then multiplied. So are the gradients:
dh·b(u) goes through PyTorch's own backward of a, and dh·a(g) through that of b. The layouts of g and u may differ:
halves of one tensor are saved as views, and kernels read them as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import inputs, reference
from .launch import launch, threads_of
from .ops import differentiable
from .registry import Backward, Forward, Kernel, Two, find


def apply_gate(g: Tensor, u: Tensor, key: str) -> Tensor:
    """Return the gate of g and u, saving both for backward.

    Args:
        g: as x of `apply`.
        u: of the shape, dtype and device of g; its strides may differ. A DTensor of the same mesh if g is one; it
            gets the placements of g.
        key: the key of a registered gate.

    Returns:
        A tensor of the shape and dtype of g, laid out like `torch.empty_like` of g. It carries a way to recompute
        it from g and u, for a context of `fitact.saving`.

    Raises:
        TypeError: g or u is not a tensor of one of these dtypes, or they differ in dtype or device, or one of them
            is a DTensor and the other is not, or has another mesh.
        ValueError: they differ in shape.

    """
    gate = find(key)
    _check(gate.name, g, u)
    if inputs.mesh_of(g) is not None:

        def of_shards(shard: Tensor, placements: list[Any]) -> Tensor:
            other: Any = u
            return apply_gate(shard, other.redistribute(placements=placements).to_local(), key)

        return inputs.sharded(g, of_shards, lambda placement: not placement.is_partial())
    if not inputs.may_need_gradient(g, u):
        with inputs.without_autocast(g.device.type):
            return inputs.like(gate.value(g, u), g)
    order, dims = inputs.in_memory_order(g)
    g, u = inputs.permuted(g, order), inputs.permuted(u, order)
    return inputs.permuted(differentiable(g, u, g.dtype, key, dims=dims), dims)


def _check(name: str, g: Tensor, u: Tensor) -> None:
    """Raise unless g and u are tensors of one shape, dtype and device."""
    inputs.check_dtype(name, g, "g to be a tensor")
    inputs.check_dtype(name, u, "u to be a tensor")
    inputs.check_meshes(name, "g and u to be both", g, u)
    if (g.dtype, g.device) != (u.dtype, u.device):
        raise TypeError(
            f"{name}: expected g and u of one dtype and device, got {g.dtype} on {g.device} and {u.dtype} on "
            f"{u.device}"
        )
    if g.shape != u.shape:
        raise ValueError(
            f"{name}: expected g and u of one shape, got {tuple(g.shape)} and {tuple(u.shape)}: "
            "expand one of them first"
        )


@dataclass(frozen=True, kw_only=True)
class Gate(Kernel):
    """A gate. The other tensor of the ops is u.

    Attributes:
        a, b: the factors, of g and of u, in PyTorch's operators; they keep the dtype.
        a_derivative, b_derivative: of factors that are no single function of PyTorch, in float32 or float64.

    """

    reads_views: ClassVar[bool] = True

    a: Callable[[Tensor], Tensor]
    b: Callable[[Tensor], Tensor]
    a_derivative: Callable[[Tensor], Tensor] | None = None
    b_derivative: Callable[[Tensor], Tensor] | None = None

    def value(self, g: Tensor, u: Tensor) -> Tensor:
        """Return the gate in PyTorch's operators."""
        return self.a(g) * self.b(u)

    def compute(self, given: Forward) -> tuple[Tensor, Tensor]:
        with inputs.without_autocast(given.x.device.type):
            return inputs.in_layout(self.value, given.dims, given.x, given.other), self.codes(given)

    def gradients(self, given: Backward) -> Two:
        g, u, dh, dg, du = given.saved, given.other, given.dy, None, None
        with inputs.without_autocast(dh.device.type):
            if given.wants_x:
                dg = _pulled(self.a, self.a_derivative, g, dh * self.b(u))
            if given.wants_other:
                du = _pulled(self.b, self.b_derivative, u, dh * self.a(g))
        return dg, du

    def launch(self, given: Forward, y: Tensor, codes: Tensor) -> None:
        (g, *rows_g), (u, *rows_u) = _rows(given.x), _rows(given.other)
        launch(self.forward, reference.tiles_of(y), threads_of(y.dtype), g, u, y, *rows_g, *rows_u, y.numel())

    def launch_backward(self, given: Backward, dx: Tensor | None, d_other: Tensor | None) -> None:
        dh, (g, *rows_g), (u, *rows_u) = given.dy, _rows(given.saved), _rows(given.other)
        rest = g, u, dx, d_other, *rows_g, *rows_u, dh.numel()
        launch(self.backward, reference.tiles_of(dh), threads_of(dh.dtype), dh, *rest)


def _pulled(
    function: Callable[[Tensor], Tensor], derivative: Callable[[Tensor], Tensor] | None, x: Tensor, dy: Tensor
) -> Tensor:
    """Return dy times the derivative of a function of x, contiguous; without one, by PyTorch's own backward."""
    if derivative is not None:
        return (dy * derivative(x.to(reference.arithmetic_dtype(x)))).to(x.dtype).contiguous()
    pull: Any = torch.func.vjp(function, x)[1]
    dx: Tensor = pull(dy)[0]
    return dx.contiguous()


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
