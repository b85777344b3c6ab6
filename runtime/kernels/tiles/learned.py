"""The Triton kernels of formulas with learned parameters.

The numbers are a float32 matrix: a row for each, with a column for each channel or one column. Device functions
take x and the numbers, which a program loads once for all elements that share them. So what depends on the numbers
alone is computed once, and what two functions have in common is computed once for an element.

Backward goes by blocks of (rows, channels, inner). A program sums a block's elements that share a channel and
writes the sums; these are added up afterwards, always in the same order.
"""

from __future__ import annotations

from .activations import COLUMNS, ROWS, load, store
from .triton import constexpr, jit, tl

TRIPS = constexpr(8)  # of a program in backward
BLOCK = constexpr(2048)  # elements of a trip
HEIGHT, WIDTH = constexpr(16), constexpr(128)  # rows and channels of a trip where channels lie beside each other


@jit
def _loaded(place, stride, count: tl.constexpr):
    """Return the numbers from a place on."""
    numbers = ()
    for which in tl.static_range(count):
        numbers += (tl.load(place + which * stride),)
    return numbers


@jit
def _of_row(numbers, start, channels, inner, count: tl.constexpr):
    """Return the numbers of a row of elements; without channels, `numbers` are loaded already."""
    if channels is None:
        return numbers
    elif inner is None:
        place = numbers + ((start % channels).to(tl.int32) + tl.arange(0, COLUMNS)) % channels
        return _loaded(place, channels, count)
    else:
        row = start // inner
        within = (start - row * inner).to(tl.int32) + tl.arange(0, COLUMNS)
        place = numbers + ((row % channels).to(tl.int32) + within // inner) % channels
        return _loaded(place, channels, count)


@jit
def _rows(
    x, y, first, n, numbers, channels, inner, value: tl.constexpr, count: tl.constexpr, whole: tl.constexpr
):  # fmt: skip
    """Write y of the tile that begins at `first`; unmasked rows are read and written in whole vectors."""
    column = tl.arange(0, COLUMNS)
    for row in range(ROWS):
        start = first + row * COLUMNS
        inside = column < tl.minimum(n - start, COLUMNS).to(tl.int32)
        own = _of_row(numbers, start, channels, inner, count)
        store(y + start + column, value(load(x + start + column, inside, whole), *own), inside, whole)


@jit
def _tile(x, y, numbers, channels, inner, n, value: tl.constexpr, count: tl.constexpr):
    """Write y of the tile of this program."""
    first = tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    if first + ROWS * COLUMNS <= n:
        _rows(x, y, first, n, numbers, channels, inner, value, count, True)
    else:
        _rows(x, y, first, n, numbers, channels, inner, value, count, False)


@jit
def _block(x, y, numbers, channels, n, value: tl.constexpr, count: tl.constexpr):
    """Write y of this program's rows, WIDTH channels that lie beside each other."""
    block, beside = tl.program_id(0), tl.cdiv(channels, WIDTH)
    left = block % beside * WIDTH
    first = (block // beside).to(tl.int64) * (HEIGHT * TRIPS)
    row, column = tl.arange(0, HEIGHT)[:, None], (left + tl.arange(0, WIDTH))[None, :]
    valid = column < channels
    own = _loaded(numbers + tl.where(valid, column, 0), channels, count)
    at = first * channels + row * channels + column
    if ((first + HEIGHT * TRIPS) * channels <= n) & (left + WIDTH <= channels):
        for _ in range(TRIPS):
            store(y + at, value(load(x + at, None, True), *own), None, True)
            at += HEIGHT * channels
    else:
        for _ in range(TRIPS):
            inside = valid & (at < n)
            store(y + at, value(load(x + at, inside, False), *own), inside, False)
            at += HEIGHT * channels


@jit
def learned_forward_tile(x, y, numbers, channels, inner, n, value: tl.constexpr, count: tl.constexpr):
    """Write y of the tile of this program: x (n,) → y (n,).

    A program has rows as in backward where WIDTH channels or more lie beside each other.

    value: device function of x, float32, and of the numbers. channels: columns of `numbers`, None for one. inner:
    elements of a channel that lie beside each other, None for one. count: rows of `numbers`.
    """
    given = _loaded(numbers, 1, count) if channels is None else numbers
    if channels is not None and inner is None:
        if channels >= WIDTH:
            _block(x, y, numbers, channels, n, value, count)
        else:
            _tile(x, y, given, channels, inner, n, value, count)
    else:
        _tile(x, y, given, channels, inner, n, value, count)


@jit
def _zeros(shape: tl.constexpr, count: tl.constexpr):
    """Return sums of nothing."""
    sums = ()
    for _ in tl.static_range(count):
        sums += (tl.zeros(shape, tl.float32),)
    return sums


@jit
def _gradients(
    dy, saved, dx, sums, at, inside, numbers, derivative: tl.constexpr, gradient: tl.constexpr,
    count: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Write dx of elements, if it is wanted, and return the sums with dy times each of `count` gradients added."""
    grad, x = load(dy + at, inside, whole), load(saved + at, inside, whole)
    if dx is not None:
        store(dx + at, grad * derivative(x, *numbers), inside, whole)
    added = ()
    for which in tl.static_range(count):
        share = grad * gradient(x, *numbers, which)
        added += (sums[which] + (share if whole else tl.where(inside, share, 0.0)),)
    return added


@jit
def _beside(
    tensors, part, left, channels, rows, derivative: tl.constexpr, gradient: tl.constexpr, count: tl.constexpr,
    whole: tl.constexpr,
):  # fmt: skip
    """Backward on rows of WIDTH channels that lie beside each other; `whole`: none of them is outside."""
    dy, saved, numbers, dx, sums = tensors
    wanted: tl.constexpr = 0 if sums is None else count
    column = (left + tl.arange(0, WIDTH))[None, :]
    valid = column < channels
    own = _loaded(numbers + (column if whole else tl.where(valid, column, 0)), channels, count)
    first = part * (HEIGHT * TRIPS)
    row = first + tl.arange(0, HEIGHT)[:, None]
    at = row * channels + column
    added = _zeros((HEIGHT, WIDTH), wanted)
    for trip in range(TRIPS if whole else tl.minimum(tl.cdiv(rows - first, HEIGHT), TRIPS).to(tl.int32)):
        inside = (row + trip * HEIGHT < rows) & valid
        added = _gradients(dy, saved, dx, added, at, inside, own, derivative, gradient, wanted, whole)
        at += HEIGHT * channels
    for which in tl.static_range(wanted):
        place = sums + (part * count + which) * channels + left + tl.arange(0, WIDTH)
        tl.store(place, tl.sum(added[which], 0), mask=left + tl.arange(0, WIDTH) < channels)


@jit
def _apart(
    tensors, part, channel, channels, inner, size, derivative: tl.constexpr, gradient: tl.constexpr,
    count: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Backward on a part of the `size` elements of one channel; `whole`: none of them is outside."""
    dy, saved, numbers, dx, sums = tensors
    wanted: tl.constexpr = 0 if sums is None else count
    own = _loaded(numbers + channel, 1 if channels is None else channels, count)
    start = part * (BLOCK * TRIPS)
    added = _zeros((BLOCK,), wanted)
    for trip in range(TRIPS if whole else tl.minimum(tl.cdiv(size - start, BLOCK), TRIPS).to(tl.int32)):
        index = start + trip * BLOCK
        inside = index + tl.arange(0, BLOCK) < size
        if channels is None:
            at = index + tl.arange(0, BLOCK)
        else:
            row = index // inner
            within = (index - row * inner).to(tl.int32) + tl.arange(0, BLOCK)
            at = ((row + within // inner) * channels + channel) * inner + within % inner
        added = _gradients(dy, saved, dx, added, at, inside, own, derivative, gradient, wanted, whole)
    for which in tl.static_range(wanted):
        row = part * count + which
        tl.store(sums + (row if channels is None else row * channels + channel), tl.sum(added[which], 0))


@jit
def learned_backward_block(
    dy, saved, numbers, dx, sums, channels, inner, rows, derivative: tl.constexpr, gradient: tl.constexpr,
    count: tl.constexpr,
):  # fmt: skip
    """Backward on the block of this program: dy and what is saved → dx, and the sums of dy times each gradient.

    The tensors are (rows, channels, inner) in memory. A program makes TRIPS trips, each over BLOCK elements of one
    channel, or over HEIGHT rows of WIDTH channels if `inner` is None, which means 1.

    dx, sums: None if not wanted; sums: (blocks of a channel, count, channels), float32. channels: None for one.
    derivative, gradient: device functions of x and of the numbers; gradient takes the number of the row, too.
    """
    block, tensors = tl.program_id(0), (dy, saved, numbers, dx, sums)
    if channels is not None and inner is None:
        beside = tl.cdiv(channels, WIDTH)
        left, part = block % beside * WIDTH, (block // beside).to(tl.int64)
        if ((part + 1) * (HEIGHT * TRIPS) <= rows) & (left + WIDTH <= channels):
            _beside(tensors, part, left, channels, rows, derivative, gradient, count, True)
        else:
            _beside(tensors, part, left, channels, rows, derivative, gradient, count, False)
    else:
        if channels is None:
            part, channel, size = block.to(tl.int64), 0, rows
        else:
            part, channel, size = (block // channels).to(tl.int64), block % channels, rows * inner
        if (part + 1) * (BLOCK * TRIPS) <= size:
            _apart(tensors, part, channel, channels, inner, size, derivative, gradient, count, True)
        else:
            _apart(tensors, part, channel, channels, inner, size, derivative, gradient, count, False)
