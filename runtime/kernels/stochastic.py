"""The Triton tile loop of coded activations whose codes are drawn at random.

A *position* is a whole number of 1/65536 that rises by 1 from node to node; adding a random number of 16 bits and
rounding down draws the code. A table has the positions of all numbers of bfloat16. A float32 lies between two of
them, which the upper 16 bits find; the position is interpolated between theirs. All this is whole numbers, so that
`ops.reference` draws the same codes.

The 128 bits that Philox makes of one counter serve the eight elements of a column of a tile: row r takes the lower
half of word r, and row r + 4 the upper half of it. The counter is 1024 · tile + column.
"""

from __future__ import annotations

from .coded import HALF, _store_bytes, store_words
from .tiles import COLUMNS, ROWS
from .triton_compat import constexpr, jit, tl

NAN = constexpr(0x7FFF)  # bits of one in bfloat16


@jit
def position_of(x, table):
    """Return the position of x, int32, 0 for NaN. table: those of numbers of bfloat16, int32, by their bits."""
    if x.dtype == tl.bfloat16:
        return tl.load(table + x.to(tl.uint16, bitcast=True).to(tl.int32))
    number = x.to(tl.float32)
    bits = number.to(tl.int32, bitcast=True)
    upper = (bits >> 16) & 0xFFFF
    first, after = tl.load(table + upper), tl.load(table + ((upper + 1) & 0xFFFF))
    # at most 2^16 · (2^15 − 1), which an int32 holds: no two nodes lie between neighbours
    found = first + (((after - first) * ((bits & 0xFFFF) >> 1)) >> 15)
    return tl.where(number == number, found, 0)


@jit
def _drawn_row(x_row, y_row, left, random, table, value: tl.constexpr, whole: tl.constexpr):
    """Write y = value(x) of a row and return the codes, 0 where the tensor has ended; random: 16 bits."""
    column = tl.arange(0, COLUMNS)
    if whole:
        x = tl.load(x_row + column)
        tl.store(y_row + column, value(x.to(tl.float32)).to(y_row.dtype.element_ty))
        return (position_of(x, table) + random) >> 16
    inside = column < left
    x = tl.load(x_row + column, mask=inside, other=0.0)
    tl.store(y_row + column, value(x.to(tl.float32)).to(y_row.dtype.element_ty), mask=inside)
    return tl.where(inside, (position_of(x, table) + random) >> 16, 0)


@jit
def _drawn_rows(
    x, y, codes, first, left, table, seed, value: tl.constexpr, bits: tl.constexpr, whole: tl.constexpr
):
    """Do the tile that begins at `first`, of which `left` elements are there if it is not whole."""
    # a load, of the position of NaN, which is 0: so the numbers are made by the threads that need them. Otherwise
    # Triton spreads them over the threads in another way, and moves them through shared memory
    zero = tl.load(table + (tl.zeros((COLUMNS,), tl.int32) + NAN))
    counter = first // ROWS + tl.arange(0, COLUMNS) + zero
    lower, upper = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    word, second, third, fourth = tl.philox(tl.load(seed), lower, upper, lower * 0, lower * 0)
    low, high = tl.zeros((COLUMNS,), tl.int32), tl.zeros((COLUMNS,), tl.int32)
    for row in range(HALF):
        at, rest = first + row * COLUMNS, left - row * COLUMNS
        random = (word & 0xFFFF).to(tl.int32)
        code = _drawn_row(x + at, y + at, rest, random, table, value, whole)
        if bits == 8:
            _store_bytes(codes + at, code, rest, whole)
        else:
            low |= code << (bits * row)
        at, rest = at + HALF * COLUMNS, rest - HALF * COLUMNS
        random = (word >> 16).to(tl.int32)
        code = _drawn_row(x + at, y + at, rest, random, table, value, whole)
        if bits == 8:
            _store_bytes(codes + at, code, rest, whole)
        else:
            high |= code << (bits * row)
        word, second, third, fourth = second, third, fourth, word
    if bits < 8:
        store_words(codes + first // 8 * bits, low, high, bits)


@jit
def drawn_forward_tile(x, y, codes, table, seed, n, value: tl.constexpr, bits: tl.constexpr):
    """Forward on the tile of this program: x (n,) → y (n,) and codes of x that are drawn at random.

    value: device function, float32 → float32. table: as `position_of` takes it. seed: int64, (1,).
    """
    first = tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    if first + ROWS * COLUMNS <= n:
        _drawn_rows(x, y, codes, first, 0, table, seed, value, bits, True)
    else:
        _drawn_rows(x, y, codes, first, (n - first).to(tl.int32), table, seed, value, bits, False)
