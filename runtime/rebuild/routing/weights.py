"""Weights that are divided in place by their sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fitact.runtime.recipes import plain
from fitact.runtime.torch_internals import base_of

from ..functions import recorded
from ..operation import Operation, bound
from ..recipes import applied, source
from .numbers import noted


def total(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return sums; if their dimension stays, as for a division by them, note what they are sums of."""
    output = function(*args, **kwargs)
    tensors, call = bound(function, args, kwargs)
    stays = any(one is True for one in (*args, *kwargs.values()))
    if stays and "out" not in kwargs and recorded(*tensors):
        found = [source(one) for one in tensors]
        if None not in found:
            noted(output, call, tensors, found)
    return output


class _InPlace(Operation):
    """An operation that writes its output over its first tensor, where PyTorch keeps a copy of that."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        output, x = Operation.forward(ctx, *given), given[2]
        ctx.mark_dirty(x)
        divided: Tensor = x.copy_(output)
        return divided


def divided(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Divide a tensor in place by another, and return it; its old value is rebuilt, if it can be."""
    if len(args) != 2 or kwargs or not all(isinstance(one, Tensor) and plain(one) for one in args):
        return function(*args, **kwargs)
    x, y = args
    found = [source(x), source(y)]
    if found[0] is None or not recorded(x, y) or base_of(x) is not None or x.is_leaf or y is x:
        return function(*args, **kwargs)
    if torch.result_type(x, y) != x.dtype or torch.broadcast_shapes(x.shape, y.shape) != x.shape:
        return function(*args, **kwargs)
    output: Tensor = applied(_InPlace, torch.div, None, x, y)
    noted(output, torch.div, [x, y], found)
    return output
