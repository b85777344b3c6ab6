"""The Triton kernels of block codes: a program codes or decodes a tile of 64 rows × 64 features in one pass.

They write and read the bytes of `saving.blocks`, bit for bit. So division is correctly rounded, and products and
sums are not fused, but in the root, whose last bits change no code. A tile has the shape (64, 8, 8): eight
contiguous elements are in one thread, or in two, which packs their codes alone.
"""

from __future__ import annotations

from .triton import constexpr, jit, tl

ROWS = constexpr(64)
ONE = constexpr(1 << 20)  # in a word that counts exponents, and has their sum below
MAGNITUDE = constexpr(0x7FFFFFFF)
INFINITY = constexpr(0x7F800000)
LARGE = constexpr(2.0**127)


@jit
def _blocks(rows, across):
    """Return the indices of this program's tile and of its blocks, and which exist; a row has `across` blocks."""
    tile = tl.program_id(0)
    row = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # offsets pass 2^31 on tensors that fit a GPU
    return tile.to(tl.int64), row * across + tile % across, row < rows


@jit
def _elements(index):
    """Return the offsets of the elements of blocks, (64, 64)."""
    return index[:, None] * 64 + tl.arange(0, 64)[None, :]


@jit
def _bytes(codes, index):
    """Return pointers to codes of 8 bits, (64, 8, 8): eight at a time, as a thread has them."""
    element = tl.arange(0, 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    return codes.to(tl.pointer_type(tl.int8)) + (index[:, None, None] * 64 + element[None, :, :])


@jit
def _inside(exists, n, rest: tl.constexpr):
    """Return which elements exist; `rest`: the program has one block, of n elements."""
    inside = exists[:, None]
    if rest:
        inside = inside & (tl.arange(0, 64) < n)[None, :]
    return inside


@jit
def _places(width: tl.constexpr):
    """Return where in a word eight elements have `width` bits of their codes."""
    element = tl.arange(0, 8)[None, None, :]
    if width == 4:
        return (element & 3) * 8 + (element >> 2) * 4
    if width == 2:
        return (element & 1) * 8 + (element >> 1) * 2
    return element


@jit
def _words(base, index, bits: tl.constexpr, width: tl.constexpr, before: tl.constexpr):
    """Return pointers to the words of blocks, (blocks, 8); `before`: bits of an element that other words have."""
    words = base.to(tl.pointer_type(tl.int32 if width == 4 else tl.int16 if width == 2 else tl.int8))
    return words + ((index * (8 * bits // width) + 8 * before // width)[:, None] + tl.arange(0, 8)[None, :])


@jit
def _store(
    base, code, index, exists, bits: tl.constexpr, width: tl.constexpr, before: tl.constexpr, shift: tl.constexpr
):
    """Write `width` bits of codes, (blocks, 8, 8), from `shift` on."""
    to = _words(base, index, bits, width, before)
    word = tl.sum(((code >> shift) & ((1 << width) - 1)) << _places(width), 2)
    tl.store(to, word.to(to.dtype.element_ty), mask=exists[:, None])


@jit
def _load(base, index, exists, bits: tl.constexpr, width: tl.constexpr, before: tl.constexpr):
    """Return `width` bits of codes."""
    word = tl.load(_words(base, index, bits, width, before), mask=exists[:, None], other=0).to(tl.int32)
    return (word[:, :, None] >> _places(width)) & ((1 << width) - 1)


@jit
def _root(v, bits: tl.constexpr):
    """Return the square root, off by less than what can change a code of `bits` bits."""
    inverse = tl.rsqrt(v)
    root = v * inverse
    if bits == 8:
        root = tl.fma(tl.fma(-root, root, v), 0.5 * inverse, root)
    return root


@jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@jit
def encode_tile(
    x, codes, scales, shifts, rows, across, n, bits: tl.constexpr, levels: tl.constexpr, signs: tl.constexpr,
    most: tl.constexpr, rounds: tl.constexpr, back: tl.constexpr, rest: tl.constexpr,
):  # fmt: skip
    """Encode the tile of this program: x, `rows` rows of `across` blocks → codes, scales and shifts.

    levels: N of `saving.blocks`. most: the largest finite scale. rounds, back: as its `_grid` has them. rest: x is
    one block, whose first n elements exist.
    """
    tile, index, exists = _blocks(rows, across)
    inside = _inside(exists, n, rest)
    value = tl.load(x + _elements(index), mask=inside, other=0.0)  # as a tile of rows, for whole vectors
    value = tl.reshape(value, (ROWS, 8, 8)).to(tl.float32)

    exponent = (value.to(tl.int32, bitcast=True) >> 23) & 255
    channels = tl.sum(tl.where(exponent > 0, exponent + ONE, 0), 0)
    sums, counts = channels & (ONE - 1), channels // ONE
    total, count = tl.sum(tl.sum(sums, 1), 0), tl.sum(tl.sum(counts, 1), 0)
    over, under = sums * count - total * counts, counts * count  # over/under: its mean above that of the tile
    out = 2 * over >= tl.maximum(3 * under, 1)
    shift = tl.zeros((8, 8), tl.int32)
    if tl.max(tl.max(out.to(tl.int32), 1), 0) > 0:
        above = tl.floor(tl.div_rn(over.to(tl.float32), under.to(tl.float32)) + 0.5)
        tops = tl.max(tl.abs(value), 0)
        tops = tl.where(tops == tops, tops, 0.0).to(tl.int32, bitcast=True) >> 23  # NaN does not count
        total, count = tl.sum(tl.sum(tops, 1), 0), tl.sum(tl.sum((tops > 0).to(tl.int32), 1), 0)
        higher = tl.floor(tl.div_rn((tops * count - total).to(tl.float32), count.to(tl.float32)) + 0.5)
        above = tl.minimum(tl.minimum(above, higher), 15.0)
        shift = tl.where(out & (above >= 2.0), above, 0.0).to(tl.int32)
        value = value * _power_of_two(-shift)[None, :, :]
    _store(shifts, shift[None, :, :], tile + tl.arange(0, 1), tl.arange(0, 1) == 0, 4, 4, 0, 0)

    pattern = value.to(tl.int32, bitcast=True)
    if bits > 4:
        magnitude = tl.max(tl.max(pattern & MAGNITUDE, 2), 1)
        top = magnitude
    else:  # the sign is the lowest bit: of equal magnitudes, that of a negative element is the largest
        turned = pattern.to(tl.uint32, bitcast=True)
        turned = tl.max(tl.max((turned << 1) | (turned >> 31), 2), 1)
        magnitude = (turned >> 1).to(tl.int32, bitcast=True)
        negative = (turned & 1).to(tl.int32)
        top = tl.where(magnitude > 0, magnitude | ((negative ^ 1) << 31), 0)
    top = top.to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.minimum(top, most), -most).to(tl.bfloat16)
    finite = tl.where(magnitude == INFINITY, top.to(tl.bfloat16), scale)
    nan = tl.full((ROWS,), 0x7FC0, tl.int16).to(tl.bfloat16, bitcast=True)
    tl.store(scales + index, tl.where(magnitude > INFINITY, nan, finite), mask=exists)
    inverse = tl.div_rn(2.0 * levels * levels, scale.to(tl.float32))  # never denormal: Triton 3.5 makes that 0
    inverse = tl.maximum(tl.minimum(inverse, LARGE), -LARGE)
    inverse = tl.where(magnitude > INFINITY, 0.0, inverse)  # as integers, 0 and NaN are 0

    z = value * inverse[:, None, None]
    size = tl.minimum(tl.abs(z), 2.0 * levels * levels, propagate_nan=tl.PropagateNan.ALL)
    q = _root((size + rounds) - back, bits) - (levels - 1) / 2
    if signs:
        q = tl.where(z == 0, 0.0, tl.maximum(q, 1.0, propagate_nan=tl.PropagateNan.ALL))
    sign = z.to(tl.int32, bitcast=True) & -0x80000000
    code = (q.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True).to(tl.int32)
    if bits == 8:
        tl.store(_bytes(codes, index), code.to(tl.int8), mask=exists[:, None, None])
    else:
        upper: tl.constexpr = 4 if bits > 3 else 2
        lower: tl.constexpr = bits - upper
        if bits <= 4:
            code = tl.minimum(code, levels - 1)
        _store(codes, code, index, exists, bits, upper, 0, lower)
        if lower > 0:
            _store(codes, code, index, exists, bits, lower, upper, 0)


@jit
def decode_tile(
    codes, scales, shifts, x, rows, across, n, bits: tl.constexpr, levels: tl.constexpr, most: tl.constexpr,
    rest: tl.constexpr,
):  # fmt: skip
    """Decode the tile of this program; arguments as those of `encode_tile`, most: the dtype's largest number."""
    tile, index, exists = _blocks(rows, across)
    inside = _inside(exists, n, rest)
    shift = _load(shifts, tile + tl.arange(0, 1), tl.arange(0, 1) == 0, 4, 4, 0)
    scale = tl.load(scales + index, mask=exists, other=0.0).to(tl.float32)
    if bits == 8:
        code = tl.load(_bytes(codes, index), mask=exists[:, None, None], other=0).to(tl.int32)
    else:
        upper: tl.constexpr = 4 if bits > 3 else 2
        lower: tl.constexpr = bits - upper
        code = _load(codes, index, exists, bits, upper, 0)
        if lower > 0:
            code = (code << lower) | _load(codes, index, exists, bits, lower, upper)
        code = (code << (32 - bits)) >> 24  # times 2^(8 - k), as N
    turned: tl.constexpr = levels << (8 - bits)
    q = code.to(tl.float32)
    value = (tl.abs(q) + turned) * q * _power_of_two(shift)
    value = value * (scale * (0.5 / (turned * turned)))[:, None, None]
    limit = tl.where(tl.abs(scale) == float("inf"), float("inf"), most)[:, None, None]
    value = tl.minimum(value, limit, propagate_nan=tl.PropagateNan.ALL)
    value = tl.maximum(value, -limit, propagate_nan=tl.PropagateNan.ALL)
    tl.store(x + _elements(index), tl.reshape(value.to(x.dtype.element_ty), (ROWS, 64)), mask=inside)
