"""Activations whose input is rebuilt: a norm's input is kept, and nothing for the activation that follows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fitact.runtime.recipes import note

from .derivatives import autocast, differentiable, once
from .functions import Plain
from .recipes import Function, Source, applied, source, use


class _Chained(torch.autograd.Function):
    """f(x), perhaps in place of x, which is rebuilt for the derivative."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, run: Function, function: Function, rebuild: Function, *state: Tensor
    ) -> Tensor:
        ctx.function, ctx.rebuild, ctx.autocast = function, rebuild, autocast(x.device.type)
        ctx.save_for_backward(*state)
        y = run(x)
        if y is x:
            ctx.mark_dirty(x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        once()
        state = ctx.saved_tensors
        x = ctx.rebuild(*state).detach().requires_grad_()
        with differentiable(ctx.autocast):
            edge = get_gradient_edge(ctx.function(x))
        (dx,) = torch.autograd.grad(edge, x, grads)
        return dx, None, None, None, *(None for _ in state)


class _Of:
    """A function of what is rebuilt."""

    def __init__(self, function: Function, found: Source) -> None:
        self.function, self.rebuild = function, found.function

    def use(self) -> None:
        use(self.rebuild)

    def __call__(self, *state: Tensor) -> Tensor:
        return self.function(self.rebuild(*state))


def chained(run: Function, function: Function, x: Tensor, exact: bool = True) -> Tensor | None:
    """Return f(x), which keeps what x is rebuilt from and is rebuilt from it too; None if x cannot be.

    Args:
        run: f, which may overwrite its argument and return that.
        function: the same f, which does not.
        x: its argument.
        exact: whether to keep an argument that would not be rebuilt bit for bit.

    """
    found = source(x, exact) if torch.is_grad_enabled() else None
    if found is None:
        return None
    use(found.function)
    use(function)
    y: Tensor = applied(_Chained, x, run, function, found.function, *found.state)
    return note(y, _Of(Plain(function, x.device.type), found), *found.state, exact=found.exact)
