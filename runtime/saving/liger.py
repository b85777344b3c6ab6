"""Outputs of Liger's gates and norms, recomputed in backward from the tensors that these save themselves.

PyTorch's modes see no call of another library's function. But the output has the function's node, which holds how
the function's tensors are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fitact.runtime.torch_internals import function_of, packed_by

from .recompute import Computed, Operand, Reading, Recompute
from .storage import Mark, Stored, quietly

NORM = "LigerRMSNormFunctionBackward"
LLAMA, GEMMA = 0, 1  # casting_mode of a norm's node: the weight in its own dtype, or in float32
# By the node's name, the numbers of a gate's call that its node has.
NODES: dict[str, tuple[str, ...]] = {
    NORM: (),
    "LigerSiLUMulFunctionBackward": ("gate_multiplier", "down_multiplier"),
    "LigerGELUMulFunctionBackward": (),
}


def is_known(x: Tensor) -> bool:
    """Return whether one of these functions has returned a tensor."""
    return type(x.grad_fn).__name__ in NODES


def liger_call(x: Tensor) -> tuple[Callable[..., Tensor], list[Operand]] | None:
    """Return a call that recomputes a function's output; None if a context did not store all that it saved."""
    node: Any = x.grad_fn
    name, packed = type(node).__name__, packed_by(node)
    if not packed or not all(isinstance(each, Stored | Reading) for each in packed):
        return None
    # With an offset, Triton's version decides how LLAMA's cast rounds the weight.
    if name == NORM and node.casting_mode != GEMMA and (node.casting_mode != LLAMA or node.offset):
        return None
    operands = [_operand(each) for each in packed]
    if name == NORM:
        return partial(_norm, node.casting_mode == GEMMA, node.offset, x.shape), operands
    numbers = [getattr(node, number) for number in NODES[name] if hasattr(node, number)]
    return partial(_gate, function_of(node), x.shape, numbers), operands


def compute_before_overwriting(node: Any, recompute: Recompute) -> None:
    """Let backward compute a gate's output just before the gate's node, if something will read it later.

    The gate's kernel writes its gradients over what it has saved, so that it cannot be computed any more.
    """
    if type(node).__name__ != NORM:
        node.register_prehook(partial(_before, recompute))


def _before(recompute: Recompute, _: Any) -> None:
    computed = recompute.alive()
    if computed is not None and computed.value is None:
        with quietly():
            computed.value = computed.made()
    for operand in recompute.operands:
        operand.mark.known = ()


def _operand(saved: Stored | Reading) -> Operand:
    """Return what reads a saved tensor; its mark is no memory's, and autograd alone holds what is stored."""
    mark, made = Mark(None), saved if isinstance(saved, Stored) else saved.computed
    if isinstance(made, Computed):
        return Operand(mark, made.recompute.version, saved.layout, made.recompute)
    mark.add(made)
    return Operand(mark, made.version, saved.layout)


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
