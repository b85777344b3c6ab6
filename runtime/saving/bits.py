"""Masks in one bit an element.

Bit r of the bytes is the r-th eighth of the elements. Fewer than eight may be left; these follow as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack(mask: Tensor) -> Tensor:
    """Return the bits of a mask, uint8, one-dimensional.

    Args:
        mask: bool, of any shape, dense: its elements fill their memory in some order, which the bits have too.

    """
    flat = mask.as_strided((mask.numel(),), (1,)).view(torch.uint8)
    size, rest = divmod(len(flat), 8)
    bits = flat.new_empty(size + rest)
    rows = flat[: 8 * size].view(8, size)
    fours = torch.add(rows[:4], rows[4:], alpha=16)
    twos = torch.add(fours[:2], fours[2:], alpha=4)
    torch.add(twos[0], twos[1], alpha=2, out=bits[:size])
    if rest:
        bits[size:] = flat[8 * size :]
    return bits


def unpack(bits: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """Return the mask that was packed, bool.

    Args:
        bits: what `pack` returned.
        shape: the mask's.
        stride: the mask's.

    """
    size, rest = divmod(shape.numel(), 8)
    flat = bits.new_empty(8 * size + rest)
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)[:, None]
    torch.bitwise_right_shift(bits[:size], shifts, out=flat[: 8 * size].view(8, size)).bitwise_and_(1)
    if rest:
        flat[8 * size :] = bits[size:]
    return flat.view(torch.bool).as_strided(shape, stride)
