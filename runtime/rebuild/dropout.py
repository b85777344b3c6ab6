"""Dropout that keeps its mask as one bit an element, in the layout of codes of one bit (`ops.reference`).

The last tile of the bits ends where its elements do: a mask of n elements takes at most n bytes, and n/8 if n is a
multiple of a tile.
"""

from __future__ import annotations

from ctypes import c_float
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fitact.runtime.ops.reference import COLUMNS, ROWS, TILE
from fitact.runtime.recipes import note, plain

from .derivatives import Of, once
from .functions import recorded
from .recipes import applied, kept_source, source


class _Dropout(torch.autograd.Function):
    """PyTorch's dropout, which keeps a mask of one bit an element, in the output's order of memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        y, bits = _dropout(x, p)
        ctx.p, ctx.layout = p, (y.shape, y.stride())
        ctx.mark_non_differentiable(bits)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(bits)
        return y, bits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        once()
        (bits,) = ctx.saved_tensors
        grad = grads[0]
        if grad is None:
            return None, None
        if grad.is_cuda:
            mask = unpack(bits, *ctx.layout)
            return torch.ops.aten.native_dropout_backward(grad, mask, 1 / (1 - ctx.p)), None
        return _dropped(grad, bits, ctx.layout, ctx.p), None


def _dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return PyTorch's dropout of x, and the bits of its mask."""
    if not x.is_cuda:
        factor = torch.empty_like(x).bernoulli_(1 - p)
        if x.stride() == factor.stride():
            bits = pack(factor.bool())
            return torch.mul(x, factor.div_(1 - p), out=factor), bits
        mask = factor.bool()
        y = x * factor.div_(1 - p)
    else:
        y, mask = torch.native_dropout(x, p, True)
    return y, pack(mask if mask.stride() == y.stride() else torch.empty_like(y, dtype=torch.bool).copy_(mask))


def _dropped(x: Tensor, bits: Tensor, layout: tuple[torch.Size, tuple[int, ...]], p: float) -> Tensor:
    """Return what PyTorch's dropout makes of x, rounded as it rounds, with the mask that was packed."""
    if x.is_cuda:  # the kernel computes in float32, from 1 - p in float32
        wide, keep = (torch.float64, 1 - p) if x.dtype == torch.float64 else (torch.float32, c_float(1 - p).value)
        return (x.to(wide) * unpack(bits, *layout)).mul_(1 / keep).to(x.dtype)
    factor = unpack(bits, *layout).to(x.dtype).div_(1 - p)
    return torch.mul(x, factor, out=factor) if x.stride() == factor.stride() else x * factor


def dropout(x: Tensor, p: float) -> Tensor | None:
    """Return x after dropout, which keeps a bit an element; None if PyTorch has to do it.

    If x can be rebuilt, so can the output, from that and the mask.
    """
    if not (recorded(x) and plain(x) and 0 < p < 1):
        return None
    found = source(x, exact=False) or kept_source(x)
    y, bits = applied(_Dropout, x, p)
    again = partial(_dropped, layout=(y.shape, y.stride()), p=p)
    return y if found is None else note(y, Of(again, found, 1), bits, *found.state, exact=found.exact)


# ---------------------------------------------------------------------------------------------------------- masks


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
