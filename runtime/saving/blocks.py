"""Block codes: tensors in k bits an element, 8, 6, 5, 4 or 3, in PyTorch's operators.

Elements are quantised in *blocks* of 64 contiguous ones, each with a scale s in bfloat16: at 8, 6 and 5 bits the
largest magnitude; at 4 and 3 bits the element of largest magnitude, which is then exact, with its sign turned. A
code is the integer q, in two's complement, of s·z with z = y(1 + |y|)/2 and y = q/N: levels are finer near 0. N is
2^(k - 1) - 1 at 8, 6 and 5 bits; at 4 and 3 bits it is 2^(k - 1), and q = N is no code.

The rows of a *tile* of 64 rows × 64 features share the *shifts* of its channels: a channel whose mean exponent is
d ≥ 2 above that of the tile's channels is divided by 2^d before the scale is taken. Zeros do not count. Where no
channel stands out, nothing changes.

A block with an infinity comes back as infinities and NaN, one with a NaN as NaN. Magnitudes below 2^-112 may come
back as 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BLOCK = 64  # elements of a block, rows of a tile
BITS = 3, 4, 5, 6, 8
# Elements that are computed at a time: on a CPU tensors of half a MiB, elsewhere enough to keep a GPU busy.
CHUNK, CHUNK_ELSEWHERE = 2**17, 2**22
# The bits of a code from the highest on, in parts that fill bytes.
PARTS = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1)}
EACH_BYTE = 0x0101010101010101
LARGE = 2.0**127  # a finite inverse of 0


def columns_of(shape: Sequence[int]) -> int:
    """Return the length of the rows that a tensor is cut into: its features, or several times these."""
    features = math.lcm(shape[-1], BLOCK) if shape else BLOCK
    return features if features and math.prod(shape) % features == 0 else BLOCK


def sizes(shape: Sequence[int]) -> tuple[int, int]:
    """Return how many blocks and how many tiles a tensor has."""
    columns = columns_of(shape)
    rows, rest = divmod(math.prod(shape), columns)
    more = int(rest > 0)
    return rows * columns // BLOCK + more, -(-rows // BLOCK) * columns // BLOCK + more


def nbytes(shape: Sequence[int], bits: int) -> int:
    """Return the bytes of a tensor's codes, scales and shifts."""
    blocks, tiles = sizes(shape)
    return blocks * (BLOCK * bits // 8 + 2) + tiles * BLOCK // 2


def encode(x: Tensor, bits: int, signs: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes, scales and shifts of a tensor.

    Args:
        x: float32, bfloat16 or float16, contiguous; features are the last dimension.
        bits: of a code: 8, 6, 5, 4 or 3.
        signs: whether what is not 0 keeps its sign, however small it is.

    Returns:
        Codes, int64 (blocks, bits); scales, bfloat16 (blocks,); shifts, uint8 (tiles, 32), two in a byte. If the
        features are no multiple of 64, blocks are cut from several rows in a row.

    """
    blocks, tiles = sizes(x.shape)
    codes = x.new_empty(blocks, bits, dtype=torch.int64)
    scales = x.new_empty(blocks, dtype=torch.bfloat16)
    shifts = x.new_empty(tiles, BLOCK // 2, dtype=torch.uint8)
    for part, *into in _chunks(columns_of(x.shape), x.detach(), codes, scales, shifts):
        for one, value in zip(into, _encoded(part, bits, signs), strict=True):
            one.copy_(value)
    return codes, scales, shifts


def decode(codes: Tensor, scales: Tensor, shifts: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the tensor that was encoded, contiguous.

    Args:
        codes: what `encode` returned.
        scales: the same.
        shifts: the same.
        shape: the tensor's.
        dtype: the tensor's.

    """
    x = codes.new_empty(*shape, dtype=dtype)
    for into, *of in _chunks(columns_of(shape), x, codes, scales, shifts):
        into.copy_(_decoded(dtype, *of)[..., : into.shape[-1]])
    return x


def _chunks(
    columns: int, x: Tensor, codes: Tensor, scales: Tensor, shifts: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of some tiles, (tiles, rows, blocks, parts of a block); shifts have one row."""
    across, block, tile = columns // BLOCK, 0, 0
    x = x.view(-1)
    rows, rest = divmod(x.numel(), columns)
    for tiles, height in ((rows // BLOCK, BLOCK), (1, rows % BLOCK)):
        shape = tiles, height, across
        if not math.prod(shape):
            continue
        end = block + math.prod(shape)
        parts = [
            x[block * BLOCK : end * BLOCK].view(*shape, BLOCK),
            codes[block:end].view(*shape, -1),
            scales[block:end].view(*shape, 1),
            shifts[tile : tile + tiles * across].view(tiles, 1, across, -1),
        ]
        block, tile = end, tile + tiles * across
        most = (CHUNK if x.is_cpu else CHUNK_ELSEWHERE) // BLOCK // height
        for some in zip(*(part.split(max(most // across, 1)) for part in parts), strict=True):
            yield from zip(*(part.split(most, 2) for part in some), strict=True)
    if rest:
        yield x[-rest:].view(1, 1, 1, -1), *(one[-1:].view(1, 1, 1, -1) for one in (codes, scales, shifts))


def _levels(bits: int) -> int:
    """Return N."""
    return (1 << bits - 1) - (bits > 4)


def _encoded(part: Tensor, bits: int, signs: bool) -> tuple[Tensor, Tensor, Tensor]:
    levels = _levels(bits)
    x = part.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if x.shape[-1] < BLOCK:
        x = torch.nn.functional.pad(x, (0, BLOCK - x.shape[-1]))
    shifts = _shifts(x)
    x.mul_(_power_of_two(-shifts))
    if bits > 4:
        top = x.abs().amax(-1, keepdim=True)
    else:
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        top = torch.where(high >= -low, -high, -low)
    most = 65280.0 if part.dtype == torch.float16 else torch.finfo(torch.bfloat16).max
    scales = top.clamp(-most, most).bfloat16()  # finite for every finite element
    z = x.mul_((2 * levels**2 / scales.float()).clamp_(-LARGE, LARGE))
    q = z.abs().add_(levels**2 / 4).sqrt_().sub_((levels - 1) / 2)  # N|y| + 1/2, the fraction is cut off
    if signs:
        q.clamp_(min=1)
    q.mul_(z.sign_()).clamp_(-levels, levels - (bits < 5))
    return _packed(q.to(torch.int8), bits), torch.where(top.isinf(), top, scales), _packed_shifts(shifts)


def _decoded(dtype: torch.dtype, codes: Tensor, scales: Tensor, shifts: Tensor) -> Tensor:
    bits = codes.shape[-1]
    levels, most = _levels(bits) << 8 - bits, torch.finfo(dtype).max
    infinite, scales = scales.isinf(), scales.float().clamp(-most, most)
    q = _unpacked(codes).float()  # times 2^(8 - k), as the levels
    x = q.abs().add_(levels).mul_(q).mul_(scales.div_(2 * levels**2))
    x.mul_(_power_of_two(_unpacked_shifts(shifts))).clamp_(-most, most)
    return x.mul_(torch.where(infinite, math.inf, 1.0))


def _shifts(x: Tensor) -> Tensor:
    """Return d of each channel of each tile, int32 (tiles, 1, blocks, 64)."""
    exponents = x.view(torch.int32).bitwise_and(255 << 23).bitwise_right_shift_(23)
    total = exponents.sum(1, keepdim=True, dtype=torch.int32)
    mean = total / exponents.clamp_(max=1).sum(1, keepdim=True, dtype=torch.int32)  # NaN if all are 0
    above = mean.sub(mean.nanmean(-1, keepdim=True)).round_()
    return above.masked_fill_(~(above >= 2), 0).clamp_(max=15).int()


def _power_of_two(exponents: Tensor) -> Tensor:
    return ((exponents + 127) << 23).view(torch.float32)


def _packed_shifts(shifts: Tensor) -> Tensor:
    low, high = shifts.to(torch.uint8).chunk(2, -1)
    return low | high << 4


def _unpacked_shifts(shifts: Tensor) -> Tensor:
    return torch.cat([shifts & 15, shifts >> 4], -1).int()


def _packed(q: Tensor, bits: int) -> Tensor:
    """Return the codes of blocks, (..., bits): a word has the same part of the codes of each 64 / p elements."""
    words, position, parts = q.view(torch.int64), bits, []
    for width in PARTS[bits]:
        position -= width
        part = words >> position & (2**width - 1) * EACH_BYTE if width < 8 else words
        for places in (4, 2, 1):
            if places >= width:
                low, high = part.chunk(2, -1)
                part = low | high << places
        parts.append(part)
    return torch.cat(parts, -1)


def _unpacked(codes: Tensor) -> Tensor:
    """Return q times 2^(8 - k), int8 (..., 64)."""
    parts = PARTS[codes.shape[-1]]
    q: Tensor | None = None
    position = 8
    for width, words in zip(parts, codes.split(parts, -1), strict=True):
        position -= width
        if width < 8:
            places = torch.arange(0, 8, width, device=codes.device)[:, None]
            words = (words[..., None, :] >> places & (2**width - 1) * EACH_BYTE).flatten(-2) << position
        q = words if q is None else q | words
    assert q is not None
    return q.contiguous().view(torch.int8)
