"""The Triton tile loops of coded activations: a code of x is written, and numbers are looked up by it.

Codes of 3 to 7 bits have the layout of `tiles`: row r of column j owns bits [k·r, k·r + k) of an 8k-bit word, and
the words are stored as k planes of bytes. Here a word is held as two, of four rows each, which fit an int32. Codes
of 8 bits are a byte an element, in memory order.

The tables are in memory, because 255 borders are too many for a tree of selects. A float32 finds its code from its
upper 16 bits: a table has the code of the least number with these bits, and a few comparisons with the borders
above add the rest. A number of half precision has only 16 bits, so the table has its code itself.
"""

from __future__ import annotations

from .tiles import COLUMNS, ROWS, existing, load_row, store_row
from .triton_compat import constexpr, jit, tl

HALF = constexpr(4)  # rows whose codes fit an int32


@jit
def code_of(x, table, borders, steps: tl.constexpr):
    """Return the code of x, int32: how many borders lie strictly below, 0 for NaN.

    x: as it is stored. table: 65536 codes, uint8, by the bits of x; for a float32 by its upper bits, the codes of
    the least such numbers. borders: all of them, float32, then 2^steps or more infinities. steps: of the search
    among the borders that have the same upper bits.
    """
    if x.dtype == tl.float32:
        code = tl.load(table + ((x.to(tl.int32, bitcast=True) >> 16) & 0xFFFF)).to(tl.int32)
        for step in tl.static_range(steps):
            middle = borders + (code + ((1 << (steps - 1 - step)) - 1))
            code += tl.where(x > tl.load(middle), 1 << (steps - 1 - step), 0)
        return tl.where(x == x, code, 0)
    else:
        return tl.load(table + x.to(tl.uint16, bitcast=True).to(tl.int32)).to(tl.int32)


@jit
def store_words(planes, low, high, bits: tl.constexpr):
    """Write the codes of a tile as planes: `low` has those of rows 0 to 3 of each column, `high` the others."""
    column = tl.arange(0, COLUMNS)
    for plane in tl.static_range(bits):
        if 8 * plane + 8 <= HALF * bits:
            byte = low >> (8 * plane)
        elif 8 * plane >= HALF * bits:
            byte = high >> (8 * plane - HALF * bits)
        else:
            byte = low >> (8 * plane) | high << (HALF * bits - 8 * plane)
        tl.store(planes + plane * COLUMNS + column, byte.to(tl.uint8))


@jit
def load_words(planes, bits: tl.constexpr):
    """Return what `store_words` has written; the bits above the last code are arbitrary."""
    column = tl.arange(0, COLUMNS)
    low, high = tl.zeros((COLUMNS,), tl.int32), tl.zeros((COLUMNS,), tl.int32)
    for plane in tl.static_range(bits):
        byte = tl.load(planes + plane * COLUMNS + column).to(tl.int32)
        if 8 * plane < HALF * bits:
            low |= byte << (8 * plane)
        if 8 * plane >= HALF * bits:
            high |= byte << (8 * plane - HALF * bits)
        elif 8 * plane + 8 > HALF * bits:
            high |= byte >> (HALF * bits - 8 * plane)
    return low, high


@jit
def _forward_row(
    x_row, y_row, left, table, borders, value: tl.constexpr, steps: tl.constexpr, whole: tl.constexpr
):
    """Write y = value(x) of a row and return the codes, 0 where the tensor has ended."""
    column = tl.arange(0, COLUMNS)  # as in `tiles`: by functions it would take more registers
    if whole:
        x = tl.load(x_row + column)
        tl.store(y_row + column, value(x.to(tl.float32)).to(y_row.dtype.element_ty))
    else:
        x = tl.load(x_row + column, mask=column < left, other=0.0)
        tl.store(y_row + column, value(x.to(tl.float32)).to(y_row.dtype.element_ty), mask=column < left)
    return existing(code_of(x, table, borders, steps), left, whole)


@jit
def _looked_up_row(dy_row, out_row, code, table, left, whole: tl.constexpr):
    """Write dy · table[code] of a row, or table[code] without dy."""
    number = tl.load(table + code)
    if dy_row is not None:
        number = load_row(dy_row, left, whole).to(tl.float32) * number
    store_row(out_row, number, left, whole)


@jit
def _forward_rows(
    x,
    y,
    codes,
    first,
    left,
    table,
    borders,
    value: tl.constexpr,
    bits: tl.constexpr,
    steps: tl.constexpr,
    whole: tl.constexpr,
):
    """Process the tile that begins at `first`; if it is not whole, it has `left` elements."""
    if bits == 8:
        for row in range(ROWS):
            at, rest = first + row * COLUMNS, left - row * COLUMNS
            code = _forward_row(x + at, y + at, rest, table, borders, value, steps, whole)
            store_row(codes + at, code, rest, whole)
    else:
        low, high = tl.zeros((COLUMNS,), tl.int32), tl.zeros((COLUMNS,), tl.int32)
        for row in range(HALF):
            at, rest = first + row * COLUMNS, left - row * COLUMNS
            low |= _forward_row(x + at, y + at, rest, table, borders, value, steps, whole) << (bits * row)
            at, rest = at + HALF * COLUMNS, rest - HALF * COLUMNS
            high |= _forward_row(x + at, y + at, rest, table, borders, value, steps, whole) << (bits * row)
        store_words(codes + first // 8 * bits, low, high, bits)


@jit
def _looked_up_rows(dy, codes, table, out, first, left, bits: tl.constexpr, whole: tl.constexpr):
    """Process the tile that begins at `first`; if it is not whole, it has `left` elements."""
    if bits == 8:
        for row in range(ROWS):
            at, rest = first + row * COLUMNS, left - row * COLUMNS
            dy_at = None if dy is None else dy + at
            code = load_row(codes + at, rest, whole).to(tl.int32)
            _looked_up_row(dy_at, out + at, code, table, rest, whole)
    else:
        mask: tl.constexpr = (1 << bits) - 1
        low, high = load_words(codes + first // 8 * bits, bits)
        for row in range(HALF):
            at, rest = first + row * COLUMNS, left - row * COLUMNS
            dy_at = None if dy is None else dy + at
            _looked_up_row(dy_at, out + at, (low >> (bits * row)) & mask, table, rest, whole)
            at, rest = at + HALF * COLUMNS, rest - HALF * COLUMNS
            dy_at = None if dy is None else dy + at
            _looked_up_row(dy_at, out + at, (high >> (bits * row)) & mask, table, rest, whole)


@jit
def coded_forward_tile(
    x, y, codes, table, borders, n, value: tl.constexpr, bits: tl.constexpr, steps: tl.constexpr
):
    """Forward on the tile of this program: x (n,) → y (n,) and the codes of x.

    value: device function, float32 → float32. table, borders, steps: as `code_of` takes them.
    """
    first = tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    if first + ROWS * COLUMNS <= n:  # an unmasked row is read and written in whole vectors
        _forward_rows(x, y, codes, first, 0, table, borders, value, bits, steps, True)
    else:
        left = (n - first).to(tl.int32)
        _forward_rows(x, y, codes, first, left, table, borders, value, bits, steps, False)


@jit
def looked_up_tile(dy, codes, table, out, n, bits: tl.constexpr):
    """Write dy · table[code] of the tile of this program, or table[code] if dy is None; all (n,) but the table."""
    first = tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    if first + ROWS * COLUMNS <= n:
        _looked_up_rows(dy, codes, table, out, first, 0, bits, True)
    else:
        _looked_up_rows(dy, codes, table, out, first, (n - first).to(tl.int32), bits, False)
