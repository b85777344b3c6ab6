"""The layout of `tiles.activations` in PyTorch's operators, for CPU, float64 and devices without Triton.

Codes are the same bit for bit, and so are gradients, up to the contraction of products and sums. A CPU works chunk
by chunk, so that intermediates stay small and in the caches. There, a comparison that writes numbers of its own
dtype takes a third of the time of one that writes booleans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

ROWS = 8
COLUMNS = 1024
TILE = ROWS * COLUMNS
CHUNK = 16  # tiles per thread, 512 KiB of float32: with fewer, threads wait for each other; more overflow caches
LARGEST = 8 * CHUNK  # the most tiles for any number of threads
PATTERNS = 1 << 16  # how many numbers a half-precision dtype has


def tiles_of(x: Tensor) -> int:
    """Return how many tiles the elements of x fill, the last one padded."""
    return (x.numel() + TILE - 1) // TILE


def bytes_of_codes(x: Tensor, bits: int) -> int:
    """Return the bytes that codes of a tensor take."""
    return tiles_of(x) * bits * COLUMNS


def arithmetic_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which x is compared and multiplied: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def chunk() -> int:
    """Return how many tiles a CPU processes at a time."""
    return min(CHUNK * torch.get_num_threads(), LARGEST)


def _chunks(x: Tensor, tiles: int) -> Iterator[tuple[slice, slice]]:
    """Yield, chunk by chunk, a slice of the tiles and the slice of the elements in them."""
    size = chunk() if x.device.type == "cpu" else max(tiles, 1)
    for first in range(0, tiles, size):
        last = min(first + size, tiles)
        yield slice(first, last), slice(first * TILE, min(last * TILE, x.numel()))


@cache
def _shifts(count: int, width: int, device: torch.device) -> Tensor:
    """Return the bit positions of a word's parts, (count, 1): of the codes of rows, or of the bytes of planes."""
    return torch.arange(0, count * width, width, dtype=torch.int32, device=device)[:, None]


def encode(x: Tensor, borders: tuple[float, ...], bits: int, even: bool) -> Tensor:
    """Return the codes of a contiguous tensor, uint8: (tiles · bits · COLUMNS,), plane by plane in each tile.

    A code counts the borders strictly below x (below |x| if `even`); that of NaN is 0.
    """
    flat, tiles = x.view(-1), tiles_of(x)
    if x.numel() <= COLUMNS:  # the codes of at most a row are its words: few operations, to save overhead
        codes, flat = x.new_zeros(bytes_of_codes(x, bits), dtype=torch.uint8), flat.to(arithmetic_dtype(x))
        above = (flat.abs() if even else flat)[:, None] > constant(borders, flat.dtype, x.device)
        torch.sum(above, 1, dtype=torch.uint8, out=codes[: x.numel()])
        return codes
    codes = x.new_empty(bytes_of_codes(x, bits), dtype=torch.uint8)
    half = x.dtype.itemsize == 2 and x.device.type == "cpu" and tiles > 1
    table = _by_pattern(borders, x.dtype, even) if half else None
    for tile, element in _chunks(x, tiles):
        part = flat[element]
        code = _count(part, borders, even) if table is None else table.index_select(0, _patterns(part))
        _pack(code, codes.view(tiles, bits, COLUMNS)[tile])
    return codes


def _pack(code: Tensor, planes: Tensor) -> None:
    """Write codes, integers (elements,) and overwritten, to the planes (tiles, bits, COLUMNS) of their tiles."""
    bits = planes.shape[1]
    if missing := len(planes) * TILE - code.numel():
        code = torch.nn.functional.pad(code, (0, missing))
    rows = code.to(torch.int32).view(-1, ROWS, COLUMNS)
    rows.bitwise_left_shift_(_shifts(ROWS, bits, code.device))
    word = rows.sum(1, keepdim=True, dtype=torch.int32)  # no two have a bit in common
    planes.copy_(word.bitwise_right_shift(_shifts(bits, 8, code.device)))  # stores the low bytes


@cache
def constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor, made once."""
    return torch.tensor(numbers, dtype=dtype, device=device)


def _count(x: Tensor, borders: tuple[float, ...], even: bool) -> Tensor:
    """Return how many borders are less than each x, int32."""
    x = x.to(arithmetic_dtype(x))
    x = x.abs() if even else x
    count, above = torch.empty_like(x), torch.empty_like(x)
    torch.gt(x, borders[0], out=count)
    for border in borders[1:]:
        count += torch.gt(x, border, out=above)
    return count.to(torch.int32)


def _patterns(x: Tensor) -> Tensor:
    """Return the bits of half-precision numbers, int32 from 0 to 65535."""
    return x.view(torch.int16).to(torch.int32).bitwise_and_(PATTERNS - 1)


def _numbers(dtype: torch.dtype) -> Tensor:
    """Return all numbers of a half-precision dtype, indexed by their bits, (PATTERNS,)."""
    return torch.arange(PATTERNS, dtype=torch.int32).to(torch.int16).view(dtype)


@cache
def _by_pattern(borders: tuple[float, ...], dtype: torch.dtype, even: bool) -> Tensor:
    """Return a table of codes, uint8 (PATTERNS,), by the bits of a number in half precision."""
    return _count(_numbers(dtype), borders, even).to(torch.uint8)


# f′, float32 or float64, of y in any dtype and of a code (int32), of one dimension each, empty if not saved.
Derivative = Callable[[Tensor, Tensor], Tensor]


def backward(
    dy: Tensor, y: Tensor | None, codes: Tensor | None, bits: int, derivative: Derivative, dtype: torch.dtype
) -> Tensor:
    """Return dy · derivative(y, code), rounded once to `dtype`, with the shape of dy.

    dy and y are contiguous; y is None if it is not saved, and codes, as `encode` returns them, if `bits` is 0.
    """
    flat, codes = dy.view(-1), dy.new_empty(0, dtype=torch.uint8) if codes is None else codes
    flat_y = dy.new_empty(0) if y is None else y.view(-1)
    if dy.numel() <= COLUMNS:  # the codes of at most a row are the words of their tile
        code = codes[: dy.numel()].to(torch.int32) if bits else codes
        return torch.mul(dy, derivative(flat_y, code).view(dy.shape)).to(dtype)
    dx = torch.empty(dy.shape, dtype=dtype, device=dy.device)
    flat_dx = dx.view(-1)
    for tile, element in _chunks(dy, tiles_of(dy)):
        part = flat[element]
        code = _unpack(codes, bits, tile, element) if bits else codes
        torch.mul(part, derivative(flat_y if y is None else flat_y[element], code), out=flat_dx[element])
    return dx


def _unpack(codes: Tensor, bits: int, tile: slice, element: slice) -> Tensor:
    """Return the codes of several tiles, int32 (elements,)."""
    planes = codes.view(-1, bits, COLUMNS)[tile]
    parts = planes.to(torch.int32).bitwise_left_shift_(_shifts(bits, 8, planes.device))
    word = parts.sum(1, keepdim=True, dtype=torch.int32)
    rows = word.bitwise_right_shift(_shifts(ROWS, bits, planes.device))
    return rows.bitwise_and_((1 << bits) - 1).view(-1)[: element.stop - element.start]


def level(levels: tuple[float, ...], y: Tensor, code: Tensor) -> Tensor:
    """Return the level of each code, the derivative of a step function, in float64 if the (empty) y is."""
    return constant(levels, arithmetic_dtype(y), y.device).index_select(0, code)


class Tabulated:
    """A `Derivative` whose values are looked up in a table in half precision, which has 65536 numbers.

    On a CPU, the first tensor of more than a tile computes the function of all of them, for each code, once. The
    function is of y in float32 or float64, and of a code.
    """

    def __init__(self, function: Derivative, bits: int) -> None:
        self.function, self.bits = function, bits
        self.tables: dict[torch.dtype, Tensor] = {}

    def __call__(self, y: Tensor, code: Tensor) -> Tensor:
        """Return the function in float32, or in float64 for float64."""
        if y.dtype.itemsize > 2 or y.device.type != "cpu" or (y.dtype not in self.tables and y.numel() < TILE):
            return self.function(y.to(arithmetic_dtype(y)), code)
        if y.dtype not in self.tables:
            self.tables[y.dtype] = self._table(y.dtype)
        at = _patterns(y)
        return self.tables[y.dtype].index_select(0, at.add_(code, alpha=PATTERNS) if self.bits else at)

    def _table(self, dtype: torch.dtype) -> Tensor:
        y = _numbers(dtype).to(torch.float32).repeat(1 << self.bits)
        return self.function(y, torch.arange(len(y), dtype=torch.int32) // PATTERNS)
