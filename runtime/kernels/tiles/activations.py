"""The Triton tile loops that every generated activation shares, and the layout of the codes.

A tile is 8 rows of 1024 elements, in contiguous order. Row r of column j owns bits [k·r, k·r + k) of an
8k-bit word, and the 1024 words of a tile are stored as k planes of 1024 bytes. So a program of one tile
needs no cross-lane work, reads and writes whole vectors, and k bits an element are saved exactly; only the
last tile is padded, with code 0. The layout is part of the format: `reference` writes the same bytes.

The rows of a tile are a loop, not written out: written out they take more registers, and longer formulas spill.

Arithmetic and comparisons are in float32 whatever the storage dtype: comparing bfloat16 with a border would
round the border first.
"""

from __future__ import annotations

from .triton import constexpr, jit, tl

ROWS = constexpr(8)
COLUMNS = constexpr(1024)


@jit
def pick(code, table: tl.constexpr, size: tl.constexpr, first: tl.constexpr = 0, stride: tl.constexpr = 1):
    """table[first + stride·(code mod size)], as a tree of selects over constants; size is a power of 2."""
    if size == 1:
        return tl.full(code.shape, table[first], tl.float32)
    else:
        half: tl.constexpr = size // 2
        upper = pick(code, table, half, first + stride * half, stride)
        return tl.where((code & half) != 0, upper, pick(code, table, half, first, stride))


@jit
def encode(x, borders: tl.constexpr, bits: tl.constexpr):
    """How many of the 2^bits − 1 borders lie strictly below x: binary search, one compare a bit."""
    code = tl.zeros(x.shape, tl.int32)
    for d in tl.static_range(bits):
        border = pick(code, borders, 1 << d, (1 << (bits - 1 - d)) - 1, 1 << (bits - d))
        code = code << 1 | (x > border).to(tl.int32)
    return code


@jit
def _clamp(
    t, code, ends: tl.constexpr, size: tl.constexpr, width: tl.constexpr, first: tl.constexpr, stride: tl.constexpr
):  # fmt: skip
    """Return t in the interval of its code: rows of `width` lower and upper ends, the columns as in `_horner`."""
    low, high = pick(code, ends, size, first, stride), pick(code, ends, size, width + first, stride)
    return tl.clamp(t, low, high, propagate_nan=tl.PropagateNan.ALL)


@jit
def _horner(
    t, code, table: tl.constexpr, degree: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
    first: tl.constexpr, stride: tl.constexpr,
):  # fmt: skip
    """Return a polynomial: rows of `width` coefficients, the highest power first, in column first + stride·code.

    Leading powers that neither of two codes has are left out, except t itself, which passes NaN on.
    """
    if size == 2 and degree > 1 and table[first] == 0.0 and table[first + stride] == 0.0:
        return _horner(t, code, table, degree - 1, size, width, first + width, stride)
    else:
        value = pick(code, table, size, first, stride)
        for k in tl.static_range(1, degree + 1):
            value = value * t + pick(code, table, size, first + width * k, stride)
        return value


@jit
def _polynomial(t, code, ends: tl.constexpr, table: tl.constexpr, degree: tl.constexpr, size: tl.constexpr):
    """Return a polynomial at t clamped, each element by the numbers of its code, as `quotient` takes them.

    With four codes, the middle two and the outer two have very different degrees: each pair is done by itself.
    """
    if size == 4:
        half = code >> 1
        outer = _horner(_clamp(t, half, ends, 2, 4, 0, 3), half, table, degree, 2, 4, 0, 3)
        inner = _horner(_clamp(t, half, ends, 2, 4, 1, 1), half, table, degree, 2, 4, 1, 1)
        return tl.where(((code ^ half) & 1) == 0, outer, inner)
    else:
        return _horner(_clamp(t, code, ends, size, size, 0, 1), code, table, degree, size, size, 0, 1)


@jit
def quotient(
    t, code, ends: tl.constexpr, numerator: tl.constexpr, p: tl.constexpr, denominator: tl.constexpr,
    q: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Return P(t)/Q(t) with t clamped, each element by the numbers of its code; there are `size` codes.

    ends: the lower and then the upper ends of the interval to clamp to, by code. numerator, denominator: the
    coefficients of P and Q by code, a row for each power, the highest first. p, q: the degrees of P and Q.
    """
    value = _polynomial(t, code, ends, numerator, p, size)
    if q == 0:  # Q is 1 then
        return value
    else:
        return value / _polynomial(t, code, ends, denominator, q, size)


@jit
def load(place, inside, whole: tl.constexpr):
    """Return elements in float32, 0 where the tensor has ended; `whole`: all of them are inside."""
    if whole:
        return tl.load(place).to(tl.float32)
    else:
        return tl.load(place, mask=inside, other=0).to(tl.float32)


@jit
def store(place, value, inside, whole: tl.constexpr):
    """Write the elements that exist, in the dtype of their place."""
    if whole:
        tl.store(place, value.to(place.dtype.element_ty))
    else:
        tl.store(place, value.to(place.dtype.element_ty), mask=inside)


@jit
def _forward_rows(
    x, y, first, left, value: tl.constexpr, code: tl.constexpr, bits: tl.constexpr, whole: tl.constexpr
):  # fmt: skip
    """Write y = value(x) of the tile that begins at `first`, and return its words of codes.

    If the tile is not whole, it has `left` elements. A code is 0 where the tensor has ended, or without codes.
    """
    column = tl.arange(0, COLUMNS)
    word = tl.zeros((COLUMNS,), tl.int32)
    for row in range(ROWS):
        at = first + row * COLUMNS
        inside = column < left - row * COLUMNS
        element = load(x + at + column, inside, whole)
        store(y + at + column, value(element), inside, whole)
        if code is not None:
            own = code(element)
            word |= (own if whole else tl.where(inside, own, 0)) << (bits * row)
    return word


@jit
def _backward_rows(
    dy, y, dx, word, first, left, derivative: tl.constexpr, bits: tl.constexpr, whole: tl.constexpr
):  # fmt: skip
    """Write dx = dy · derivative(y, code) of the tile that begins at `first`; `left`: as there."""
    column = tl.arange(0, COLUMNS)
    for row in range(ROWS):
        at = first + row * COLUMNS
        inside = column < left - row * COLUMNS
        factor = derivative(None if y is None else load(y + at + column, inside, whole), word >> (bits * row))
        result = load(dy + at + column, inside, whole) * factor
        store(dx + at + column, result, inside, whole)


@jit
def forward_tile(x, y, codes, n, value: tl.constexpr, code: tl.constexpr, bits: tl.constexpr):
    """Forward on the tile of this program: x (n,) → y (n,) and codes (tiles · bits · COLUMNS,) of uint8.

    value: device function, float32 → float32. code: device function, float32 → int32 below 2^bits. `codes` and
    `code` are None if `bits` is 0.
    """
    tile = tl.program_id(0).to(tl.int64)  # offsets pass 2^31 on tensors that fit a GPU
    first = tile * (ROWS * COLUMNS)
    if first + ROWS * COLUMNS <= n:  # an unmasked row is read and written in whole vectors
        word = _forward_rows(x, y, first, 0, value, code, bits, True)
    else:
        word = _forward_rows(x, y, first, (n - first).to(tl.int32), value, code, bits, False)
    if bits > 0:
        planes = codes + tile * (bits * COLUMNS) + tl.arange(0, COLUMNS)
        for plane in tl.static_range(bits):
            tl.store(planes + plane * COLUMNS, (word >> (8 * plane)).to(tl.uint8))


@jit
def backward_tile(dy, y, codes, dx, n, derivative: tl.constexpr, bits: tl.constexpr):
    """Backward on the tile of this program: dx = dy · derivative(y, code), all (n,) but the codes.

    derivative: device function of y, float32 or None, and of the code, the low `bits` bits of an int32; it returns
    float32. `y` is None where the output is not saved, `codes` if `bits` is 0.
    """
    tile = tl.program_id(0).to(tl.int64)
    first = tile * (ROWS * COLUMNS)
    word = tl.zeros((COLUMNS,), tl.int32)
    if bits > 0:
        planes = codes + tile * (bits * COLUMNS) + tl.arange(0, COLUMNS)
        for plane in tl.static_range(bits):
            word |= tl.load(planes + plane * COLUMNS).to(tl.int32) << (8 * plane)
    if first + ROWS * COLUMNS <= n:
        _backward_rows(dy, y, dx, word, first, 0, derivative, bits, True)
    else:
        _backward_rows(dy, y, dx, word, first, (n - first).to(tl.int32), derivative, bits, False)
