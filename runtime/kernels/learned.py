"""The Triton kernels of formulas with learned numbers.

The numbers are a matrix, float32: a row for each, with a column for each channel, or with one column. Device
functions take x, the place of their first number and the distance to the next. Backward goes by blocks of
(rows, channels, inner), so that a block's elements that share a channel are summed in the program: the sums of all
blocks are written, and added up afterwards, always in the same order. The layouts of codes and tables are those of
`coded`.
"""

from __future__ import annotations

from .coded import HALF, code_of, store_words
from .tiles import COLUMNS, ROWS
from .triton_compat import constexpr, jit, tl

BLOCK = constexpr(4096)  # elements of a program in backward
HEIGHT, WIDTH = constexpr(32), constexpr(128)  # or these, where the channels lie beside each other


@jit
def _places(numbers, start, channels, inner):
    """Return where the first numbers of a row of elements are, and how far the next ones are."""
    if channels is None:
        return numbers, 1
    elif inner is None:
        return numbers + ((start % channels).to(tl.int32) + tl.arange(0, COLUMNS)) % channels, channels
    else:
        row = start // inner
        within = (start - row * inner).to(tl.int32) + tl.arange(0, COLUMNS)
        return numbers + ((row % channels).to(tl.int32) + within // inner) % channels, channels


@jit
def _point_of(kept, points, at, inside, bits: tl.constexpr):
    """Return x of elements, float32: as it was kept, or a point looked up by its code."""
    if bits == 0:
        return tl.load(kept + at, mask=inside, other=0.0).to(tl.float32)
    elif bits == 8:
        return tl.load(points + tl.load(kept + at, mask=inside, other=0).to(tl.int32))
    else:
        tile = at // (ROWS * COLUMNS)
        rest = (at - tile * (ROWS * COLUMNS)).to(tl.int32)
        bit = rest // COLUMNS * bits
        byte = kept + tile * (bits * COLUMNS) + (bit // 8 * COLUMNS + rest % COLUMNS)
        low = tl.load(byte, mask=inside, other=0).to(tl.int32)
        high = tl.load(byte + COLUMNS, mask=inside & (bit % 8 + bits > 8), other=0).to(tl.int32)
        return tl.load(points + (((low | high << 8) >> (bit % 8)) & ((1 << bits) - 1)))


@jit
def _forward_row(
    x, y, start, n, table, borders, numbers, channels, inner, value: tl.constexpr, bits: tl.constexpr,
    steps: tl.constexpr,
):  # fmt: skip
    """Write y of a row, and return its codes, 0 where the tensor has ended."""
    at = tl.arange(0, COLUMNS)
    inside = at < tl.minimum(n - start, COLUMNS).to(tl.int32)
    place, stride = _places(numbers, start, channels, inner)
    kept = tl.load(x + start + at, mask=inside, other=0.0)
    tl.store(y + start + at, value(kept.to(tl.float32), place, stride).to(y.dtype.element_ty), mask=inside)
    if bits == 0:
        return tl.zeros((COLUMNS,), tl.int32)
    else:
        return tl.where(inside, code_of(kept, table, borders, steps), 0)


@jit
def _tile(x, y, numbers, channels, inner, n, value: tl.constexpr):
    """Write y of the tile of this program; unmasked rows are read and written in whole vectors."""
    first = tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    if first + ROWS * COLUMNS <= n:
        for row in range(ROWS):
            start = first + row * COLUMNS
            place, stride = _places(numbers, start, channels, inner)
            at = tl.arange(0, COLUMNS)
            kept = tl.load(x + start + at).to(tl.float32)
            tl.store(y + start + at, value(kept, place, stride).to(y.dtype.element_ty))
    else:
        for row in range(ROWS):
            start = first + row * COLUMNS
            _forward_row(x, y, start, n, None, None, numbers, channels, inner, value, 0, 0)


@jit
def _block(x, y, numbers, channels, n, value: tl.constexpr):
    """Write y of this program's block of HEIGHT rows and WIDTH channels that lie beside each other."""
    block = tl.program_id(0).to(tl.int64)
    beside = tl.cdiv(channels, WIDTH)
    left = (block % beside).to(tl.int32) * WIDTH
    first = block // beside * HEIGHT
    row, column = tl.arange(0, HEIGHT)[:, None], left + tl.arange(0, WIDTH)
    at = first * channels + row * channels + column[None, :]
    if ((first + HEIGHT) * channels <= n) & (left + WIDTH <= channels):
        place = (numbers + column)[None, :]
        tl.store(y + at, value(tl.load(x + at).to(tl.float32), place, channels).to(y.dtype.element_ty))
    else:
        valid = column < channels
        inside = valid[None, :] & ((first + row) * channels < n)
        place = (numbers + tl.where(valid, column, 0))[None, :]
        kept = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + at, value(kept, place, channels).to(y.dtype.element_ty), mask=inside)


@jit
def learned_forward_tile(
    x, y, codes, table, borders, numbers, channels, inner, n, value: tl.constexpr, bits: tl.constexpr,
    steps: tl.constexpr,
):  # fmt: skip
    """Forward on the tile of this program: x (n,) → y (n,) and the codes of x, if `bits` is not 0.

    Without codes, a program has a block as in backward where WIDTH channels or more lie beside each other.

    value: device function of x, float32, and of the places of numbers. table, borders, steps: as `code_of` takes
    them. channels: columns of `numbers`, None for one. inner: elements of a channel that lie beside each other,
    None for one.
    """
    first = tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    if bits == 0 and channels is not None and inner is None:
        if channels >= WIDTH:
            _block(x, y, numbers, channels, n, value)
        else:
            _tile(x, y, numbers, channels, inner, n, value)
    elif bits == 0:
        _tile(x, y, numbers, channels, inner, n, value)
    elif bits == 8:
        for row in range(ROWS):
            start = first + row * COLUMNS
            code = _forward_row(x, y, start, n, table, borders, numbers, channels, inner, value, bits, steps)
            at = start + tl.arange(0, COLUMNS)
            tl.store(codes + at, code.to(tl.uint8), mask=at < n)
    else:
        low, high = tl.zeros((COLUMNS,), tl.int32), tl.zeros((COLUMNS,), tl.int32)
        for row in range(HALF):
            start = first + row * COLUMNS
            code = _forward_row(x, y, start, n, table, borders, numbers, channels, inner, value, bits, steps)
            low |= code << (bits * row)
            start += HALF * COLUMNS
            code = _forward_row(x, y, start, n, table, borders, numbers, channels, inner, value, bits, steps)
            high |= code << (bits * row)
        store_words(codes + first // 8 * bits, low, high, bits)


@jit
def learned_value_tile(
    kept, points, numbers, y, channels, inner, n, value: tl.constexpr, bits: tl.constexpr
):  # fmt: skip
    """Write y of the tile of this program from what is kept: x, or codes if `bits` is not 0."""
    first = tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    if bits == 0:
        learned_forward_tile(
            kept, y, None, None, None, numbers, channels, inner, n, value, bits, 0
        )  # fmt: skip
    else:
        for row in range(ROWS):
            start = first + row * COLUMNS
            at = start + tl.arange(0, COLUMNS)
            inside = at < n
            place, stride = _places(numbers, start, channels, inner)
            x = _point_of(kept, points, at, inside, bits)
            tl.store(y + at, value(x, place, stride).to(y.dtype.element_ty), mask=inside)


@jit
def _gradients(
    dy, kept, points, dx, at, inside, place, stride, derivative: tl.constexpr, bits: tl.constexpr
):  # fmt: skip
    """Write dx of elements, if it is wanted, and return their dy and x."""
    grad = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    x = _point_of(kept, points, at, inside, bits)
    if dx is not None:
        tl.store(dx + at, (grad * derivative(x, place, stride)).to(dx.dtype.element_ty), mask=inside)
    return grad, x


@jit
def learned_backward_block(
    dy, kept, points, numbers, dx, sums, channels, inner, rows, derivative: tl.constexpr, gradient: tl.constexpr,
    count: tl.constexpr, bits: tl.constexpr,
):  # fmt: skip
    """Backward on the block of this program: dy and what is kept → dx, and the sums of dy times each gradient.

    The tensors are (rows, channels, inner) in memory. A block has elements of one channel; if `inner` is None, as
    in place of 1, it has HEIGHT rows of WIDTH channels.

    dx, sums: None if not wanted; sums: (blocks of a channel, count, channels), float32. channels: None for one.
    derivative, gradient: device functions of x and of the places of numbers; gradient takes the number of the row,
    too.
    """
    block = tl.program_id(0).to(tl.int64)
    if channels is not None and inner is None:
        beside = tl.cdiv(channels, WIDTH)
        column = (block % beside).to(tl.int32) * WIDTH + tl.arange(0, WIDTH)
        valid = column < channels
        row = block // beside * HEIGHT + tl.arange(0, HEIGHT)
        at = row[:, None] * channels + column[None, :]
        inside = (row < rows)[:, None] & valid[None, :]
        place = (numbers + tl.where(valid, column, 0))[None, :]
        grad, x = _gradients(dy, kept, points, dx, at, inside, place, channels, derivative, bits)
        if sums is not None:
            out = sums + block // beside * count * channels + column
            for which in tl.static_range(count):
                share = tl.where(inside, grad * gradient(x, place, channels, which), 0.0)
                tl.store(out + which * channels, tl.sum(share, 0), mask=valid)
    else:
        if channels is None:
            at = block * BLOCK + tl.arange(0, BLOCK)
            inside, place, stride, out = at < rows, numbers, 1, block * count
        else:
            channel, part = (block % channels).to(tl.int32), block // channels
            first = part * BLOCK // inner
            within = (part * BLOCK - first * inner).to(tl.int32) + tl.arange(0, BLOCK)
            row = first + within // inner
            at = (row * channels + channel) * inner + within % inner
            inside, place, stride, out = row < rows, numbers + channel, channels, part * count * channels + channel
        grad, x = _gradients(dy, kept, points, dx, at, inside, place, stride, derivative, bits)
        if sums is not None:
            for which in tl.static_range(count):
                share = tl.where(inside, grad * gradient(x, place, stride, which), 0.0)
                tl.store(sums + out + which * stride, tl.sum(share, 0))
