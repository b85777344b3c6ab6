"""Masks in one bit an element, in the layout of codes of one bit (`ops.reference`).

The last tile of the bits ends where its elements do: a mask of n elements takes at most n bytes, and n/8 if n is a
multiple of a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fitact.runtime.kernels import COLUMNS, ROWS, TILE


def pack(mask: Tensor) -> Tensor:
    """Return the bits of a mask, uint8, one-dimensional.

    Args:
        mask: bool, of any shape, dense: its elements fill their memory in some order, which the bits have too.

    """
    flat = mask.as_strided((mask.numel(),), (1,)).view(torch.uint8)
    whole, rest = divmod(len(flat), TILE)
    words = flat.new_empty(whole * COLUMNS + min(rest, COLUMNS))
    if whole:
        _words(flat[: whole * TILE], words[: whole * COLUMNS].view(whole, 1, COLUMNS))
    if rest:
        tile = torch.nn.functional.pad(flat[whole * TILE :], (0, TILE - rest))
        words[whole * COLUMNS :] = _words(tile).view(-1)[:rest]
    return words


def _words(flat: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the words of whole tiles, (tiles, 1, COLUMNS): bit r belongs to row r."""
    rows = flat.view(-1, ROWS, COLUMNS)
    fours = torch.add(rows[:, :4], rows[:, 4:], alpha=16)
    twos = torch.add(fours[:, :2], fours[:, 2:], alpha=4)
    return torch.add(twos[:, :1], twos[:, 1:], alpha=2, out=out)


def unpack(words: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """Return the mask that was packed, bool.

    Args:
        words: what `pack` returned.
        shape: the mask's.
        stride: the mask's.

    """
    size = shape.numel()
    whole, rest = divmod(size, TILE)
    flat = words.new_empty(size)
    if whole:
        _rows(words[: whole * COLUMNS], flat[: whole * TILE].view(-1, ROWS, COLUMNS))
    if rest:
        columns = torch.nn.functional.pad(words[whole * COLUMNS :], (0, COLUMNS - min(rest, COLUMNS)))
        flat[whole * TILE :] = _rows(columns).view(-1)[:rest]
    return flat.view(torch.bool).as_strided(shape, stride)


def _rows(words: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the bits of the words of whole tiles, (tiles, ROWS, COLUMNS), as zeros and ones."""
    shifts = torch.arange(ROWS, dtype=torch.uint8, device=words.device)[:, None]
    return torch.bitwise_right_shift(words.view(-1, 1, COLUMNS), shifts, out=out).bitwise_and_(1)
