"""The op that looks up values by codes.

    fitact::decode(Tensor codes, SymInt[] size, ScalarType dtype, str key) -> Tensor

The result is contiguous, in the order of the codes; `dtype` is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..torch_internals import constant_in_graphs
from . import reference
from .launch import Launch
from .library import KERNEL_DTYPES, Op, ops
from .registry import Coded, find


def coded(key: str) -> Coded:
    """Return a coded activation.

    Raises:
        TypeError: the activation of this key has no values to look up.

    """
    activation = find(key)
    if not isinstance(activation, Coded):
        kind = type(activation).__name__
        raise TypeError(f"{activation.name}: expected an activation with values to look up, got a {kind}")
    return activation


@constant_in_graphs
def prepare(key: str, device: str) -> None:
    """Put the tables of a coded activation on a device, while the compiler traces at the latest.

    If the first launch made them, they would be in memory that a CUDA graph of the compiler uses again. Tensors
    without numbers need none.
    """
    activation = find(key)
    if isinstance(activation, Coded) and type(torch.empty(0)) is Tensor:
        activation.argument.tables(torch.device(device))


def by_reference(codes: Tensor, size: Sequence[int], dtype: torch.dtype, key: str) -> Tensor:
    """Decode by PyTorch's operators."""
    with torch.no_grad():
        return coded(key).argument.again(codes, size, dtype)


def by_triton(codes: Tensor, size: Sequence[int], dtype: torch.dtype, key: str) -> Tensor:
    """Decode by the generated kernel."""
    if dtype not in KERNEL_DTYPES:
        return by_reference(codes, size, dtype, key)
    activation = coded(key)
    y = codes.new_empty(size, dtype=dtype)
    activation.run_decode(Launch(y, activation.threads(y)), codes, y)
    return y


def fake(codes: Tensor, size: Sequence[int], dtype: torch.dtype, key: str) -> Tensor:
    """Return a result without numbers."""
    return codes.new_empty(size, dtype=dtype)


def batching(
    info: Any, in_dims: Any, codes: Tensor, size: Sequence[int], dtype: torch.dtype, key: str
) -> tuple[Tensor, int]:
    """Decode a batch; each element has its own tiles."""
    count, rows = torch.Size(size).numel(), codes.movedim(in_dims[0], 0)
    padded = count + (-count % reference.TILE if reference.in_words(coded(key).bits) else 0)
    y = ops.decode(rows.reshape(-1), (info.batch_size, padded), dtype, key)
    return y[:, :count].reshape(info.batch_size, *size), 0


OP = Op(
    "(Tensor codes, SymInt[] size, ScalarType dtype, str key) -> Tensor", by_reference, by_triton, fake, batching
)
