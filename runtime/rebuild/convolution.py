"""Convolutions that keep what their input is rebuilt from."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fitact.runtime.autocast import without_autocast

from .derivatives import Of, once
from .recipes import Function, applied, cast, product_dtype, recast, source

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
        parameter: Tensor | None,
        rebuild: Function | None,
        options: tuple[Any, ...],
        *state: Tensor,
    ) -> Tensor:
        ctx.rebuild, ctx.options, ctx.bias = rebuild, options, None if bias is None else [*bias.shape]
        ctx.dtype = weight.dtype
        ctx.save_for_backward(weight if parameter is None else parameter, *state)
        return torch.convolution(x, weight, bias, *options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        once()
        weight, *state = ctx.saved_tensors
        x = state[0] if ctx.rebuild is None else ctx.rebuild(*state)
        found = torch.ops.aten.convolution_backward(
            grads[0], x, weight.to(ctx.dtype), ctx.bias, *ctx.options, ctx.needs_input_grad[:3]
        )
        return *found, None, None, None, *(None for _ in state)


class _Padding(NamedTuple):
    """How an input is padded.

    Attributes:
        around: what is padded before the convolution, as for `F.pad`; empty for nothing.
        mode: with what.
        inside: the zeros that the convolution itself adds on both sides of each dimension.

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


def _prepared(padding: _Padding, dtype: torch.dtype, alone: bool, x: Tensor) -> Tensor:
    """Return x as the convolution gets it: padded, in its dtype, and as a batch."""
    if padding.around:
        x = F.pad(x, padding.around, padding.mode)
    x = x.to(dtype)
    return x.unsqueeze(0) if alone else x


def convolution(module: Convolution, x: Tensor, exact: bool = True) -> Tensor | None:
    """Return a convolution's output, or None if it would keep no less than PyTorch's.

    If autocast casts the weight, the parameter is kept, and cast again.

    Args:
        module: the convolution.
        x: (batch, channels, ...), or without a batch.
        exact: whether to keep an input that would not be rebuilt bit for bit.

    """
    weight, bias, spatial = module.weight, module.bias, len(module.kernel_size)
    if not (torch.is_grad_enabled() and weight.requires_grad and spatial < x.ndim <= spatial + 2):
        return None
    dtype, found = product_dtype(x, weight), source(x, exact)
    again = recast(x, weight, dtype)
    if dtype is None or (found is None and not again):
        return None
    padding = _padding(module)
    alone = x.ndim == spatial + 1
    prepare = partial(_prepared, padding, dtype, alone)
    rebuild = None if found is None else Of(prepare, found)
    if rebuild is not None:
        rebuild.use()
    options = module.stride, padding.inside, module.dilation, False, (0,) * spatial, module.groups
    parameter, weight = weight, cast(weight, dtype)
    bias = None if bias is None else cast(bias, dtype)
    x = prepare(x)
    with without_autocast(x.device.type):
        y: Tensor = applied(
            _Convolution,
            x,
            weight,
            bias,
            parameter.detach() if again else None,
            rebuild,
            options,
            *((x.detach(),) if found is None else found.state),
        )
    return y.squeeze(0) if alone else y
