"""Block codes: tensors in k bits an element, 8, 6, 5, 4 or 3, in PyTorch's operators.

Elements are quantised in *blocks* of 64 contiguous ones, each with a scale s in bfloat16: at 8, 6 and 5 bits the
largest magnitude; at 4 and 3 bits the element of largest magnitude, which is then exact, with its sign turned. A
code is the integer q, in two's complement, of s·z with z = y(1 + |y|)/2 and y = q/N: levels are finer near 0. N is
2^(k - 1) - 1 at 8, 6 and 5 bits; at 4 and 3 bits it is 2^(k - 1), and q = N is no code.

The rows of a *tile* of 64 rows × 64 features share the *shifts* of its channels: a channel whose mean exponent is
d ≥ 2 above that of the tile's channels, and its largest above the mean of their largest, is divided by 2^d before
the scale is taken. Zeros do not count. Where no channel stands out, nothing changes.

A block with an infinity comes back as infinities and NaN, one with a NaN as NaN. Magnitudes below 2^-112 may come
back as 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fitact.runtime.kernels import KERNEL_DEVICES, options
from fitact.runtime.torch_internals import FakeTensor

BLOCK = 64  # elements of a block, rows of a tile
BITS = 3, 4, 5, 6, 8
# Elements that are computed at a time: on a CPU tensors of half a MiB, elsewhere enough to keep a GPU busy.
CHUNK, CHUNK_ELSEWHERE = 2**17, 2**22
THREADS = 64  # of a program of a kernel: what is done for a channel or a block is done by fewer
FAKE_AS_ON_A_GPU = False  # whether fake tensors of a CPU are coded as by kernels: nothing is computed
# The parts of a code from the highest bit on: how many bits, and how many come before.
PARTS = {6: ((4, 0), (2, 4)), 5: ((4, 0), (1, 4)), 4: ((4, 0),), 3: ((2, 0), (1, 2))}
INTEGERS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}  # with as many bits for each of eight elements
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
        x: float32, bfloat16 or float16; features are the last dimension. A copy is made if it is not contiguous.
        bits: of a code: 8, 6, 5, 4 or 3.
        signs: whether what is not 0 keeps its sign, however small it is.

    Returns:
        Codes, int64 (blocks, bits); scales, bfloat16 (blocks,); shifts, uint8 (tiles, 32), two in a byte. If the
        features are no multiple of 64, blocks are cut from several rows in a row.

    """
    x = x.detach().contiguous()
    blocks, tiles = sizes(x.shape)
    codes = x.new_empty(blocks, bits, dtype=torch.int64)
    scales = torch.empty(blocks, dtype=torch.bfloat16, device=x.device)
    shifts = torch.empty(tiles, 4, dtype=torch.int64, device=x.device)
    parts = codes, scales, shifts
    if _by_kernels(x):
        _launch("encode_tile", x, *parts, constants("encode", bits, x.dtype, signs))
        return parts
    for chunk in _chunks(columns_of(x.shape), x, *parts):
        _encode(signs, *chunk)
    return parts


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
    if _by_kernels(x):
        _launch("decode_tile", x, codes, scales, shifts, constants("decode", codes.shape[-1], dtype))
        return x
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
        yield x[-rest:].view(1, 1, 1, -1), *(tensor[-1:].view(1, 1, 1, -1) for tensor in (codes, scales, shifts))


def _by_kernels(x: Tensor) -> bool:
    return x.device.type in KERNEL_DEVICES or (FAKE_AS_ON_A_GPU and isinstance(x, FakeTensor))


def _launch(
    name: str, x: Tensor, codes: Tensor, scales: Tensor, shifts: Tensor, constants: dict[str, Any]
) -> None:
    """Run a program of a kernel for each tile, and one for the elements that are left over."""
    from fitact.runtime.kernels import tiles

    if isinstance(x, FakeTensor):
        return
    columns, x = columns_of(x.shape), x.view(-1)
    rows, rest = divmod(x.numel(), columns)
    across = columns // BLOCK
    kernel, given = getattr(tiles, name), constants | launching(x.device)
    with torch.cuda.device_of(x):
        if rows:
            parts = {"x": x, "codes": codes, "scales": scales, "shifts": shifts}
            kernel[-(-rows // BLOCK) * across,](**parts, rows=rows, across=across, n=0, rest=False, **given)
        if rest:
            parts = {"x": x[-rest:], "codes": codes[-1:], "scales": scales[-1:], "shifts": shifts[-1:]}
            kernel[1,](**parts, rows=1, across=1, n=rest, rest=True, **given)


def launching(device: torch.device) -> dict[str, Any]:
    """Return Triton's options: a fused product and sum would have other bits than PyTorch's operators."""
    return options(THREADS, device) | {"enable_fp_fusion": False}


def constants(pass_: str, bits: int, dtype: torch.dtype, signs: bool = False) -> dict[str, Any]:
    """Return what a kernel is compiled for, but for `rest`."""
    of_bits = {"bits": bits, "levels": _levels(bits)}
    if pass_ == "decode":
        return of_bits | {"most": torch.finfo(dtype).max}
    rounds, back = _grid(bits)
    return of_bits | {"most": _most(dtype), "rounds": rounds, "back": back, "signs": signs}


def _grid(bits: int) -> tuple[float, float]:
    """Return what to add to 2N²|z|, and then to subtract, to get the square of N|y| + N/2.

    It lies halfway between two multiples of a power of two, and all borders between codes are such multiples. So
    the last bit of the root changes no code: PyTorch's builds do not agree on it.
    """
    rounds = 2.0 ** (bits + 9)
    return rounds, rounds - _levels(bits) ** 2 / 4 - rounds * 2.0**-24


def _most(dtype: torch.dtype) -> float:
    """Return the largest scale of finite elements: of float16, the largest bfloat16 that it can have."""
    return 65280.0 if dtype == torch.float16 else torch.finfo(torch.bfloat16).max


def _levels(bits: int) -> int:
    """Return N."""
    return (1 << bits - 1) - (bits > 4)


def _encode(signs: bool, part: Tensor, codes: Tensor, scales: Tensor, shifts: Tensor) -> None:
    bits = codes.shape[-1]
    levels = _levels(bits)
    x = part.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if x.shape[-1] < BLOCK:
        x = torch.nn.functional.pad(x, (0, BLOCK - x.shape[-1]))
    d = _shifts(x)
    if d is None:
        shifts.zero_()
    else:
        x.mul_(_power_of_two(-d))
        _pack(shifts, d.to(torch.int8))
    if bits > 4:
        top = x.abs().amax(-1, keepdim=True)
    else:
        low, high = x.amin(-1, keepdim=True).neg_(), x.amax(-1, keepdim=True)
        top = torch.where(high > low, high.neg(), low).add_(0.0)  # no -0
    most = _most(part.dtype)
    scales.copy_(top.clamp(-most, most))  # finite for every finite element
    inverse = (top.new_full((), 2 * levels**2) / scales.float()).clamp_(-LARGE, LARGE)
    finite = isinstance(top, FakeTensor) or math.isfinite(top.sum())
    if not finite:
        nan = top.isnan()
        x.masked_fill_(nan, 0)
        inverse.masked_fill_(nan, 0)
        scales.copy_(torch.where(top.isinf(), top, scales)).masked_fill_(nan, math.nan)
    z = x.mul_(inverse)
    rounds, back = _grid(bits)
    q = z.abs().add_(rounds).sub_(back).sqrt_().sub_((levels - 1) / 2)  # N|y| + 1/2, the fraction is cut off
    if signs:
        q.clamp_(min=1)
    if not finite:
        q.clamp_(max=levels)
    integers = q.mul_(z.sign_()).to(torch.int8)
    _pack(codes, integers if bits > 4 else integers.clamp_(max=levels - 1))


def _decoded(dtype: torch.dtype, codes: Tensor, scales: Tensor, shifts: Tensor) -> Tensor:
    bits = codes.shape[-1]
    levels, most = _levels(bits) << 8 - bits, torch.finfo(dtype).max
    infinite, scales = scales.isinf(), scales.to(torch.float32, copy=True)
    q = _unpacked(codes).float()  # times 2^(8 - k), as the levels
    x = q.abs().add_(levels).mul_(q).mul_(_power_of_two(_unpacked(shifts).int() >> 4 & 15))
    x.mul_(scales.mul_(0.5 / levels**2)).clamp_(-most, most)
    return x.mul_(torch.where(infinite, math.inf, 1.0))


def _shifts(x: Tensor) -> Tensor | None:
    """Return d of each channel of each tile, int32 (tiles, 1, blocks, 64); None if all are 0."""
    exponents = x.view(torch.int32).bitwise_and(255 << 23).bitwise_right_shift_(23)
    sums = exponents.sum(1, keepdim=True, dtype=torch.int32)
    counts = exponents.clamp_(max=1).sum(1, keepdim=True, dtype=torch.int32)
    total, count = (tensor.sum(-1, keepdim=True, dtype=torch.int32) for tensor in (sums, counts))
    over, under = sums.mul_(count).sub_(counts * total), counts.mul_(count)  # over/under: above the tile's mean
    out = 2 * over >= (3 * under).clamp_(min=1)
    if isinstance(out, FakeTensor) or not out.any():
        return None
    above = (over.float() / under.float()).add_(0.5).floor_()
    # other channels may have tiny numbers beside ones as large
    tops = x.abs().nan_to_num_(0.0, math.inf).amax(1, keepdim=True).view(torch.int32) >> 23
    total, count = (tensor.sum(-1, keepdim=True, dtype=torch.int32) for tensor in (tops, tops > 0))
    d = ((tops * count - total).float() / count.float()).add_(0.5).floor_().minimum(above).clamp_(max=15)
    return d.masked_fill_(~out | (d < 2), 0).int()


def _power_of_two(exponents: Tensor) -> Tensor:
    return ((exponents + 127) << 23).view(torch.float32)


def _pack(codes: Tensor, q: Tensor) -> None:
    """Write the codes of blocks, (..., bits)."""
    words, bits = q.view(torch.int64), codes.shape[-1]
    if bits == 8:
        codes.copy_(words)
        return
    for width, before in PARTS[bits]:
        after = bits - before - width
        part = (words >> after if after else words) & (2**width - 1) * EACH_BYTE
        for places in (4, 2, 1):
            if places >= width:
                part |= part >> 7 * places
        _words(codes, width, before).copy_(part.view(INTEGERS[width])[..., :: 8 // width])


def _unpacked(codes: Tensor) -> Tensor:
    """Return q times 2^(8 - k), int8 (..., 64)."""
    bits = codes.shape[-1]
    if bits == 8:
        return codes.contiguous().view(torch.int8)
    q: Tensor | None = None
    for width, before in PARTS[bits]:
        part = _words(codes, width, before).long().bitwise_and_((1 << 8 * width) - 1)
        for places in (1, 2, 4):
            if places >= width:
                part |= part << 7 * places
        part.bitwise_and_((2**width - 1) * EACH_BYTE).bitwise_left_shift_(8 - before - width)
        q = part if q is None else q.bitwise_or_(part)
    assert q is not None
    return q.view(torch.int8)


def _words(codes: Tensor, width: int, before: int) -> Tensor:
    """Return the words of a part of the codes, (..., 8)."""
    words = codes.view(INTEGERS[width])
    start = 8 * before // width
    return words[..., start : start + 8]
