"""Convolutions that keep what their input is rebuilt from."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .derivatives import once
from .functions import cast, product_dtype, without_autocast
from .recipes import Function, applied, source, use

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _Convolution(torch.autograd.Function):
    """A convolution of a batch, with PyTorch's own backward, its input rebuilt for that."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rebuild: Function,
        options: tuple[Any, ...],
        *state: Tensor,
    ) -> Tensor:
        ctx.rebuild, ctx.options, ctx.bias = rebuild, options, None if bias is None else [*bias.shape]
        ctx.save_for_backward(weight, *state)
        return torch.convolution(x, weight, bias, *options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        once()
        weight, *state = ctx.saved_tensors
        found = torch.ops.aten.convolution_backward(
            grads[0], ctx.rebuild(*state), weight, ctx.bias, *ctx.options, ctx.needs_input_grad[:3]
        )
        return *found, None, None, *(None for _ in state)


class _Padding(NamedTuple):
    """How an input is padded.

    Attributes:
        around: what is padded before the convolution, as for `F.pad`; empty for nothing.
        mode: with what.
        inside: the zeros that the convolution takes for granted on both sides of each dimension.

    """

    around: tuple[int, ...]
    mode: str
    inside: tuple[int, ...]


def _padding(module: Convolution) -> _Padding:
    sizes = [*zip(module.kernel_size, module.dilation, strict=True)]
    if module.padding == "same":
        totals = [dilation * (kernel - 1) for kernel, dilation in sizes]
        sides = [(total // 2, total - total // 2) for total in totals]
    elif module.padding == "valid":
        sides = [(0, 0) for _ in sizes]
    else:
        sides = [(int(one), int(one)) for one in module.padding]
    if module.padding_mode != "zeros":
        around = tuple(one for side in reversed(sides) for one in side)
        return _Padding(around, module.padding_mode, (0,) * len(sides))
    around = tuple(one for left, right in reversed(sides) for one in (0, right - left))
    return _Padding(around if any(around) else (), "constant", tuple(left for left, _ in sides))


class _Prepared:
    """What is rebuilt, as the convolution gets it: padded, in its dtype, and as a batch."""

    def __init__(self, rebuild: Function, padding: _Padding, dtype: torch.dtype, alone: bool) -> None:
        self.rebuild, self.padding, self.dtype, self.alone = rebuild, padding, dtype, alone

    def use(self) -> None:
        use(self.rebuild)

    def __call__(self, *state: Tensor) -> Tensor:
        return self.prepare(self.rebuild(*state))

    def prepare(self, x: Tensor) -> Tensor:
        if self.padding.around:
            x = F.pad(x, self.padding.around, self.padding.mode)
        x = x.to(self.dtype)
        return x.unsqueeze(0) if self.alone else x


def convolution(module: Convolution, x: Tensor, exact: bool = True) -> Tensor | None:
    """Return what a convolution makes of x, or None if x has to be kept.

    Args:
        module: the convolution.
        x: (batch, channels, ...), or without a batch.
        exact: whether to keep an input that would not be rebuilt bit for bit.

    """
    weight, bias, spatial = module.weight, module.bias, len(module.kernel_size)
    if not (torch.is_grad_enabled() and weight.requires_grad and spatial < x.ndim <= spatial + 2):
        return None
    dtype, found = product_dtype(x, weight), source(x, exact)
    if dtype is None or found is None:
        return None
    padding = _padding(module)
    prepared = _Prepared(found.function, padding, dtype, x.ndim == spatial + 1)
    use(prepared)
    options = module.stride, padding.inside, module.dilation, False, (0,) * spatial, module.groups
    weight, bias = cast(weight, dtype), None if bias is None else cast(bias, dtype)
    with without_autocast(x.device.type):
        y: Tensor = applied(
            _Convolution,
            prepared.prepare(x),
            weight,
            bias,
            prepared,
            options,
            *found.state,
        )
    return y.squeeze(0) if prepared.alone else y
