"""The layout of `kernels` written with PyTorch's operators: CPU, float64, and devices without Triton.

The same codes bit for bit, the same gradients (up to the contraction of products and sums). On a CPU the work goes
chunk by chunk, so that the int32 intermediates stay in the cache, never weigh as much as the tensor, and no thread
waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

ROWS = 8
COLUMNS = 1024
TILE = ROWS * COLUMNS
CHUNK = 4  # tiles: 32768 elements, up to which PyTorch's operators stay in the calling thread


def tiles_of(x: Tensor) -> int:
    """Return how many tiles the elements of x fill, the last one padded."""
    return (x.numel() + TILE - 1) // TILE


def arithmetic_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which x is compared and multiplied: float32, but float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _chunks(x: Tensor, tiles: int) -> Iterator[tuple[slice, slice]]:
    """Yield, chunk by chunk, a slice of the tiles and the slice of the elements in them."""
    size = CHUNK if x.device.type == "cpu" else max(tiles, 1)
    for first in range(0, tiles, size):
        last = min(first + size, tiles)
        yield slice(first, last), slice(first * TILE, min(last * TILE, x.numel()))


def encode(x: Tensor, borders: Sequence[float], bits: int, even: bool) -> Tensor:
    """Return the codes of a contiguous tensor: (tiles · bits · COLUMNS,), uint8, plane by plane in each tile.

    A code counts the borders strictly below x (below |x| if `even`); that of NaN is 0.
    """
    flat = x.view(-1)
    tiles = tiles_of(x)
    planes = x.new_empty((tiles, bits, COLUMNS), dtype=torch.uint8)
    for tile, element in _chunks(x, tiles):
        part = flat[element].to(arithmetic_dtype(x))
        if even:
            part = part.abs()
        code = part.new_zeros((tile.stop - tile.start) * TILE, dtype=torch.int32)
        inside = code[: part.numel()]
        above = torch.empty_like(inside)
        for border in borders:
            inside += torch.gt(part, border, out=above)
        rows = code.view(-1, ROWS, COLUMNS)
        word = rows[:, 0].clone()
        for row in range(1, ROWS):
            word |= rows[:, row] << (bits * row)
        for plane in range(bits):
            planes[tile, plane] = (word >> (8 * plane)) & 0xFF
    return planes.view(-1)


def backward(
    dy: Tensor,
    y: Tensor | None,
    codes: Tensor,
    bits: int,
    slope: Callable[[Tensor, Tensor], Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """Return dy · slope(y, code) in `dtype`, shape of the contiguous dy, rounded once.

    Args:
        dy: the gradient of the output, contiguous.
        y: the output, contiguous, or None if it is not kept; `slope` then gets an empty tensor in its place.
        codes: as `encode` returns them; empty if `bits` is 0, and `slope` then gets an empty tensor.
        bits: of a code.
        slope: takes part of y in float32 (float64) and the codes of that part, int32, both one-dimensional.
        dtype: of the result.

    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    flat, dx = dy.view(-1), torch.empty(dy.shape, dtype=dtype, device=dy.device)
    planes = codes.view(-1, bits, COLUMNS) if bits else codes
    flat_dx, nothing = dx.view(-1), flat.new_empty(0, dtype=wide)
    for tile, element in _chunks(dy, tiles_of(dy)):
        part = flat[element]
        code = _decode(planes[tile], bits)[: part.numel()] if bits else codes
        flat_dx[element] = part * slope(nothing if y is None else y.view(-1)[element].to(wide), code)
    return dx


def _decode(planes: Tensor, bits: int) -> Tensor:
    """Return the codes of some tiles, (tiles · TILE,) of int32, from their planes, (tiles, bits, COLUMNS)."""
    part = planes.to(torch.int32)
    word = part[:, 0].clone()
    for plane in range(1, bits):
        word |= part[:, plane] << (8 * plane)
    code = torch.empty((part.shape[0], ROWS, COLUMNS), dtype=torch.int32, device=planes.device)
    for row in range(ROWS):
        torch.bitwise_and(word >> (bits * row), (1 << bits) - 1, out=code[:, row])
    return code.view(-1)
