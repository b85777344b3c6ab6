"""The layout of `kernels.tiles` in PyTorch's operators, for CPU, float64 and devices without Triton.

Codes are the same bit for bit, and so are gradients, up to the contraction of products and sums. A CPU works chunk
by chunk, so that intermediates stay small and in the caches. There, a comparison that writes numbers of its own
dtype takes a third of the time of one that writes booleans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from . import inductor

ROWS = 8
COLUMNS = 1024
TILE = ROWS * COLUMNS
CHUNK = 16  # tiles per thread, 512 KiB of float32: with fewer, threads wait for each other; more overflow caches
LARGEST = 8 * CHUNK  # the most tiles for any number of threads
PATTERNS = 1 << 16  # how many numbers a half-precision dtype has
FEW = inductor.FEW


def tiles_of(x: Tensor) -> int:
    """Return how many tiles the elements of x fill, the last one padded."""
    return (x.numel() + TILE - 1) // TILE


def in_words(bits: int) -> bool:
    """Return whether codes stand in words, for whole tiles; those of 8 bits are a byte each, in memory order."""
    return 0 < bits < 8


def bytes_of_codes(x: Tensor, bits: int) -> int:
    """Return the bytes that codes of a tensor take."""
    if in_words(bits):
        return tiles_of(x) * bits * COLUMNS
    return x.numel() if bits else 0


def arithmetic_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which x is compared and multiplied: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def chunk() -> int:
    """Return how many tiles a CPU processes at a time."""
    return min(CHUNK * torch.get_num_threads(), LARGEST)


def _chunks(x: Tensor, start: int, tiles: int) -> Iterator[tuple[slice, slice]]:
    """Yield, chunk by chunk, a slice of the tiles from `start` on and the slice of the elements in them."""
    size = chunk() if x.device.type == "cpu" else max(tiles, 1)
    for first in range(start, tiles, size):
        last = min(first + size, tiles)
        yield slice(first, last), slice(first * TILE, min(last * TILE, x.numel()))


@cache
def _shifts(count: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the bit positions of a word's parts, (count, 1): of the codes of rows, or of the bytes of planes."""
    return torch.arange(0, count * width, width, dtype=dtype, device=device)[:, None]


def _word_dtype(bits: int) -> torch.dtype:
    """Return a dtype for words of ROWS codes."""
    return torch.int32 if ROWS * bits <= 32 else torch.int64


def encode(x: Tensor, borders: tuple[float, ...], bits: int, even: bool) -> Tensor:
    """Return the codes of a contiguous tensor, uint8: (tiles · bits · COLUMNS,), plane by plane in each tile.

    A code counts the borders strictly below x (below |x| if `even`); that of NaN is 0. Codes of 8 bits are
    (elements,), in memory order.
    """
    flat = x.view(-1)
    tiles, done = tiles_of(x), _whole(x)
    if x.numel() <= COLUMNS and len(borders) <= FEW:
        return _encode_row(flat, borders, bits, even)
    codes = x.new_empty(bytes_of_codes(x, bits), dtype=torch.uint8)
    if done:
        whole = flat[: done * TILE].view(-1, ROWS, COLUMNS)
        inductor.encoder(borders, bits, even, x.dtype)(
            whole, codes[: done * bits * COLUMNS].view(-1, bits, COLUMNS)
        )
    half = x.dtype.itemsize == 2 and x.device.type == "cpu" and tiles > 1
    table = first_codes(borders, x.dtype, x.device, even) if half else None
    for tile, element in _chunks(x, done, tiles):
        part = flat[element]
        code = _count(part, borders, even) if table is None else table.index_select(0, _patterns(part))
        if in_words(bits):
            _pack(code, codes.view(tiles, bits, COLUMNS)[tile])
        else:
            codes[element] = code
    return codes


def _encode_row(x: Tensor, borders: tuple[float, ...], bits: int, even: bool) -> Tensor:
    """Return the codes of at most a row, which are its words, in few operations to save overhead."""
    codes = x.new_zeros(bytes_of_codes(x, bits), dtype=torch.uint8)
    x = x.to(arithmetic_dtype(x))
    above = (x.abs() if even else x)[:, None] > constant(borders, x.dtype, x.device)
    torch.sum(above, 1, dtype=torch.uint8, out=codes[: x.numel()])
    return codes


def _pack(code: Tensor, planes: Tensor) -> None:
    """Write codes, integers (elements,) and overwritten, to the planes (tiles, bits, COLUMNS) of their tiles."""
    bits = planes.shape[1]
    dtype = _word_dtype(bits)
    if missing := len(planes) * TILE - code.numel():
        code = torch.nn.functional.pad(code, (0, missing))
    rows = code.to(dtype).view(-1, ROWS, COLUMNS)
    rows.bitwise_left_shift_(_shifts(ROWS, bits, dtype, code.device))
    word = rows.sum(1, keepdim=True, dtype=dtype)  # no two have a bit in common
    planes.copy_(word.bitwise_right_shift(_shifts(bits, 8, dtype, code.device)))  # stores the low bytes


@cache
def constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor, made once."""
    return torch.tensor(numbers, dtype=dtype, device=device)


def _whole(x: Tensor) -> int:
    """Return how many tiles, from the first on, compiled code processes."""
    return x.numel() // TILE if x.device.type == "cpu" and inductor.asked_for() else 0


def _count(x: Tensor, borders: tuple[float, ...], even: bool) -> Tensor:
    """Return how many borders are less than each x, int32, the fastest way.

    A few are compared one after the other; of many, a float32 with those alone that have its upper bits.
    """
    x = x.to(arithmetic_dtype(x))
    x = x.abs() if even else x
    if len(borders) > FEW:
        return _search(x, borders) if x.dtype == torch.float64 else _look_up(x, borders)
    count, above = torch.empty_like(x), torch.empty_like(x)
    torch.gt(x, borders[0], out=count)
    for border in borders[1:]:
        count += torch.gt(x, border, out=above)
    return count.to(torch.int32)


def _search(x: Tensor, borders: tuple[float, ...]) -> Tensor:
    """Return how many borders are less than each x, int32, by a search, which would put NaN last."""
    least = torch.where(x.isnan(), -torch.inf, x)
    return torch.bucketize(least, constant(borders, x.dtype, x.device), out_int32=True)


def _look_up(x: Tensor, borders: tuple[float, ...]) -> Tensor:
    """Return how many borders are less than each float32, int32, (n,) as x: the kernels' `code_of`."""
    table, padded, steps = _by_upper_bits(borders, x.device)
    code = table.index_select(0, (x.view(torch.int32) >> 16).bitwise_and_(PATTERNS - 1))
    for step in (1 << shift for shift in reversed(range(steps))):
        middle = padded.index_select(0, code + (step - 1) if step > 1 else code)
        code.add_(torch.gt(x, middle, out=middle).to(torch.int32), alpha=step)
    return code.mul_(torch.eq(x, x, out=torch.empty_like(x)).to(torch.int32))  # NaN has code 0


@cache
def _by_upper_bits(borders: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Return codes by upper bits, int32 (PATTERNS,), borders and infinities, and how many comparisons follow."""
    upper = (constant(borders, torch.float32, device) + 0.0).view(torch.int32) >> 16  # -0.0 is no other than 0.0
    steps = int(upper.unique(return_counts=True)[1].max()).bit_length()
    padded = constant((*borders, *(torch.inf,) * (1 << steps)), torch.float32, device)
    return first_codes(borders, torch.float32, device).to(torch.int32), padded, steps


def _patterns(x: Tensor) -> Tensor:
    """Return the bits of half-precision numbers, int32 from 0 to 65535."""
    return x.view(torch.int16).to(torch.int32).bitwise_and_(PATTERNS - 1)


def _numbers(dtype: torch.dtype) -> Tensor:
    """Return all numbers of a half-precision dtype, indexed by their bits, (PATTERNS,)."""
    return torch.arange(PATTERNS, dtype=torch.int32).to(torch.int16).view(dtype)


@cache
def first_codes(
    borders: tuple[float, ...], dtype: torch.dtype, device: torch.device, even: bool = False
) -> Tensor:
    """Return a table of codes, uint8 (PATTERNS,), by the bits of a number in half precision.

    For float32 the index is the upper bits, and the code is that of the least number with these bits.
    """
    if dtype.itemsize == 2:
        return _count(_numbers(dtype), borders, even).to(device, torch.uint8)
    upper = torch.arange(PATTERNS, dtype=torch.int32) << 16
    least = torch.where(upper < 0, upper | (PATTERNS - 1), upper)  # for negative numbers, the largest in size
    return _search(least.view(torch.float32), borders).to(device, torch.uint8)


class Derivative(Protocol):
    """f′ as a function of y and of a code (int32), one-dimensional tensors that are empty if they are not kept."""

    def __call__(self, y: Tensor, code: Tensor) -> Tensor:
        """Return f′, float32 or float64, of y in any dtype, in few passes over the memory."""

    def traced(self, y: Tensor, code: Tensor) -> Tensor:
        """Return f′ of y in float32 or float64 and of any shape, in operations that a compiler fuses."""


def backward(
    dy: Tensor, y: Tensor | None, codes: Tensor, bits: int, derivative: Derivative, dtype: torch.dtype
) -> Tensor:
    """Return dy · derivative(y, code), rounded once to `dtype`, with the shape of dy.

    Args:
        dy: the gradient of the output, contiguous.
        y: the output, contiguous, or None if it is not kept.
        codes: as `encode` returns them; empty if `bits` is 0.
        bits: bits of a code.
        derivative: f′.
        dtype: dtype of the result.

    """
    flat = dy.view(-1)
    if dy.numel() <= COLUMNS:  # the codes of at most a row are the words of their tile
        code = codes[: dy.numel()].to(torch.int32) if bits else codes
        factor = derivative(flat.new_empty(0) if y is None else y.view(-1), code)
        return torch.mul(dy, factor.view(dy.shape)).to(dtype)
    dx = torch.empty(dy.shape, dtype=dtype, device=dy.device)
    flat_dx, flat_y = dx.view(-1), flat.new_empty(0) if y is None else y.view(-1)
    if done := _whole(dy):
        rows = [part[: done * TILE].view(-1, ROWS, COLUMNS) for part in (flat, flat_dx)]
        kept = flat_y if y is None else flat_y[: done * TILE].view(-1, ROWS, COLUMNS)
        planes = codes[: done * bits * COLUMNS].view(-1, bits, COLUMNS) if bits else codes
        inductor.multiplier(derivative.traced, bits, dtype)(rows[0], kept, planes, rows[1])
    for tile, element in _chunks(dy, done, tiles_of(dy)):
        part = flat[element]
        code = _unpack(codes, bits, tile, element) if bits else codes
        torch.mul(part, derivative(flat_y if y is None else flat_y[element], code), out=flat_dx[element])
    return dx


def _unpack(codes: Tensor, bits: int, tile: slice, element: slice) -> Tensor:
    """Return the codes of several tiles, int32 (elements,)."""
    if not in_words(bits):
        return codes[element].to(torch.int32)
    dtype = _word_dtype(bits)
    planes = codes.view(-1, bits, COLUMNS)[tile]
    parts = planes.to(dtype).bitwise_left_shift_(_shifts(bits, 8, dtype, planes.device))
    word = parts.sum(1, keepdim=True, dtype=dtype)
    rows = word.bitwise_right_shift(_shifts(ROWS, bits, dtype, planes.device))
    code = rows.bitwise_and_((1 << bits) - 1).view(-1)[: element.stop - element.start]
    return code.to(torch.int32)


def look_up(
    numbers: tuple[float, ...], codes: Tensor, bits: int, size: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return the number of each code, rounded to `dtype`, contiguous.

    Args:
        numbers: 2^bits of them, by code.
        codes: as `encode` returns them.
        bits: bits of a code.
        size: the shape of the result.
        dtype: its dtype.

    """
    y = torch.empty(size, dtype=dtype, device=codes.device)
    table, flat = constant(numbers, dtype, codes.device), y.view(-1)
    if y.numel() <= COLUMNS:
        torch.index_select(table, 0, codes[: y.numel()].to(torch.int32), out=flat)
        return y
    for tile, element in _chunks(y, 0, tiles_of(y)):
        torch.index_select(table, 0, _unpack(codes, bits, tile, element), out=flat[element])
    return y


class Levels:
    """The derivative of a step function: the level of each code."""

    def __init__(self, levels: tuple[float, ...]) -> None:
        self.levels = levels

    def __call__(self, y: Tensor, code: Tensor) -> Tensor:
        """Return the levels, in float64 if the (empty) y is float64."""
        return constant(self.levels, arithmetic_dtype(y), y.device).index_select(0, code)

    def traced(self, y: Tensor, code: Tensor) -> Tensor:
        """Return the levels, a few by selects."""
        if len(self.levels) > FEW + 1:
            return torch.tensor(self.levels, dtype=arithmetic_dtype(y))[code.to(torch.int64)]
        return inductor.pick(code, self.levels).to(arithmetic_dtype(y))


class Tabulated:
    """A function of y and a code, for y of any dtype; in half precision its values are looked up in a table.

    A half-precision dtype has 65536 numbers. On a CPU, the first tensor of more than a tile makes this class
    compute the function of all of them, for each code, once.

    Args:
        function: a function of y in float32 or float64 and a code in int32, both one-dimensional, in PyTorch's
            operators.
        bits: bits of a code; without codes `function` gets an empty tensor.

    """

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], bits: int) -> None:
        self.function = function
        self.bits = bits
        self.tables: dict[torch.dtype, Tensor] = {}

    def __call__(self, y: Tensor, code: Tensor) -> Tensor:
        """Return the function in float32, or in float64 for float64, with the shape of the one-dimensional y."""
        if y.dtype.itemsize > 2 or y.device.type != "cpu" or (y.dtype not in self.tables and y.numel() < TILE):
            return self.function(y.to(arithmetic_dtype(y)), code)
        if y.dtype not in self.tables:
            self.tables[y.dtype] = self._table(y.dtype)
        at = _patterns(y)
        return self.tables[y.dtype].index_select(0, at.add_(code, alpha=PATTERNS) if self.bits else at)

    def traced(self, y: Tensor, code: Tensor) -> Tensor:
        """Return the function of y in float32 or float64."""
        return self.function(y, code)

    def _table(self, dtype: torch.dtype) -> Tensor:
        y = _numbers(dtype).to(torch.float32).repeat(1 << self.bits)
        return self.function(y, torch.arange(len(y), dtype=torch.int32) // PATTERNS)
