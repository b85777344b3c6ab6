"""Outputs of Liger's gates and norms, which backward computes again from what these save themselves.

PyTorch's modes see no call of a library's own function. But its output has the function's node, and that knows how
the function's tensors are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fitact.runtime.torch_internals import function_of, packed_by

from .recompute import Computed, Operand, Reading
from .storage import Mark, Stored

NORM = "LigerRMSNormFunctionBackward"
LLAMA, GEMMA = 0, 1  # how a norm casts, by the number that its node has: the weight as it is, or in float32
# The nodes, and for those of gates the numbers that they have of their call.
NODES: dict[str, tuple[str, ...]] = {
    NORM: (),
    "LigerSiLUMulFunctionBackward": ("gate_multiplier", "down_multiplier"),
    "LigerGELUMulFunctionBackward": (),
}


def is_known(x: Tensor) -> bool:
    """Return whether one of these functions has returned a tensor."""
    return type(x.grad_fn).__name__ in NODES


def call_of(x: Tensor) -> tuple[Callable[..., Tensor], list[Operand]] | None:
    """Return a call that computes what a function has returned; None if a context did not see what that saved."""
    node: Any = x.grad_fn
    name, packed = type(node).__name__, packed_by(node)
    if not packed or not all(isinstance(each, Stored | Reading) for each in packed):
        return None
    # With an offset, the kernel's version of Triton decides how LLAMA rounds the weight.
    if name == NORM and node.casting_mode != GEMMA and (node.casting_mode != LLAMA or node.offset):
        return None
    operands = [_operand(each) for each in packed]
    if name == NORM:
        return partial(_norm, node.casting_mode == GEMMA, node.offset, x.shape), operands
    numbers = [getattr(node, number) for number in NODES[name] if hasattr(node, number)]
    return partial(_gate, function_of(node), x.shape, numbers), operands


class _Saved(Mark):
    """The mark of a tensor, of which only how it is stored is known."""

    def __init__(self, stored: Stored) -> None:
        super().__init__(None)
        self._stored = stored

    def stored(self, *_: Any) -> Stored:
        """Return what is stored."""
        return self._stored


def _operand(saved: Stored | Reading) -> Operand:
    if isinstance(saved, Stored):
        return Operand(_Saved(saved), saved.version, saved.layout, None, None)
    made = saved.computed
    if isinstance(made, Computed):
        return Operand(Mark(None), made.recompute.version, saved.layout, made.recompute, None)
    return Operand(_Saved(made), made.version, saved.layout, None, None)


def _gate(function: Any, shape: torch.Size, numbers: Sequence[float], *factors: Tensor) -> Tensor:
    y: Tensor = function.apply(*factors, *numbers)
    return y.view(shape)


def _norm(wide: bool, offset: float, shape: torch.Size, x: Tensor, *others: Tensor) -> Tensor:
    """Return what Liger's kernel makes of its input, its weight if it has one, and the inverse deviations."""
    *weights, inverse = others
    y = x.float() * inverse[:, None]
    y = y if wide else y.to(x.dtype)
    for weight in weights:
        y = y * (offset + (weight.float() if wide else weight))
    return y.to(x.dtype).view(shape)
