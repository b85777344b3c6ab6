"""The Triton tile loops of coded activations, and of gates, whose codes are drawn at random.

A *position* is a whole number of 1/65536 that rises by 1 from node to node; adding a random number of 16 bits and
rounding down draws the code. A table has the positions of all numbers of bfloat16. A float32 lies between two of
them, which the upper 16 bits find; its position is interpolated between theirs. All of these are integers, so
`ops.reference` draws the same codes.

The 128 bits that Philox makes of one counter serve the eight elements of a column of a tile: row r takes the lower
half of word r, and row r + 4 its upper half. The lower half of the counter is 1024 · tile + column. Its upper half
is 0, or 1 for codes of a gate's argument u.
"""

from __future__ import annotations

from .coded import HALF, store_words
from .gates import _load, _start
from .tiles import COLUMNS, ROWS, existing, load_row, store_row
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
    x = load_row(x_row, left, whole)
    store_row(y_row, value(x.to(tl.float32)), left, whole)
    return existing((position_of(x, table) + random) >> 16, left, whole)


@jit
def _random_words(first, table, seed, stream: tl.constexpr):
    """Return four random words for each column of the tile that begins at `first`."""
    # The position of NaN is 0. Because it is loaded, the threads that need the numbers make them; otherwise Triton
    # spreads them over the threads in another way, and moves them through shared memory
    zero = tl.load(table + (tl.zeros((COLUMNS,), tl.int32) + NAN))
    counter = first // ROWS + tl.arange(0, COLUMNS) + zero
    lower, upper = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    return tl.philox(tl.load(seed), lower, upper, lower * 0 + stream, lower * 0)


@jit
def _drawn_rows(
    x, y, codes, first, left, table, seed, value: tl.constexpr, bits: tl.constexpr, whole: tl.constexpr
):
    """Process the tile that begins at `first`; if it is not whole, it has `left` elements."""
    word, second, third, fourth = _random_words(first, table, seed, 0)
    low, high = tl.zeros((COLUMNS,), tl.int32), tl.zeros((COLUMNS,), tl.int32)
    for row in range(HALF):
        at, rest = first + row * COLUMNS, left - row * COLUMNS
        random = (word & 0xFFFF).to(tl.int32)
        code = _drawn_row(x + at, y + at, rest, random, table, value, whole)
        if bits == 8:
            store_row(codes + at, code, rest, whole)
        else:
            low |= code << (bits * row)
        at, rest = at + HALF * COLUMNS, rest - HALF * COLUMNS
        random = (word >> 16).to(tl.int32)
        code = _drawn_row(x + at, y + at, rest, random, table, value, whole)
        if bits == 8:
            store_row(codes + at, code, rest, whole)
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


@jit
def _words_if(first, table, seed, stream: tl.constexpr, bits: tl.constexpr):
    """Return random words for a factor with codes; for one without, zeros."""
    if bits == 0:
        zero = tl.zeros((COLUMNS,), tl.uint32)
        return zero, zero, zero, zero
    else:
        return _random_words(first, table, seed, stream)


@jit
def _drawn(x, codes, left, random, table, bits: tl.constexpr, whole: tl.constexpr):
    """Return the codes of a row for a word, 0 where the tensor has ended; write them if they have 8 bits."""
    if bits == 0:
        return tl.zeros((COLUMNS,), tl.int32)
    else:
        code = (position_of(x, table) + random.to(tl.int32)) >> 16
        if bits == 8:
            store_row(codes, code, left, whole)
        return existing(code, left, whole)


@jit
def _drawn_gate_row(
    g, u, h, codes_g, table_g, random_g, codes_u, table_u, random_u, behind_g, width_g, stride_g, behind_u,
    width_u, stride_u, offset, left, a: tl.constexpr, b: tl.constexpr, bits_g: tl.constexpr, bits_u: tl.constexpr,
    whole: tl.constexpr,
):  # fmt: skip
    """Write h of a row and return the codes of g and u."""
    x = _load(g, behind_g, offset, left, width_g, stride_g, whole)
    y = _load(u, behind_u, offset, left, width_u, stride_u, whole)
    dtype: tl.constexpr = h.dtype.element_ty
    product = a(x.to(tl.float32)).to(dtype).to(tl.float32) * b(y.to(tl.float32)).to(dtype).to(tl.float32)
    store_row(h + offset, product, left, whole)
    row_g = codes_g + offset if bits_g == 8 else codes_g
    row_u = codes_u + offset if bits_u == 8 else codes_u
    code_g = _drawn(x, row_g, left, random_g, table_g, bits_g, whole)
    code_u = _drawn(y, row_u, left, random_u, table_u, bits_u, whole)
    return code_g, code_u


@jit
def _drawn_gate_rows(
    g, u, h, codes_g, table_g, codes_u, table_u, seed, width_g, stride_g, width_u, stride_u, first, left,
    a: tl.constexpr, b: tl.constexpr, bits_g: tl.constexpr, bits_u: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Process the tile that begins at `first`; if it is not whole, it has `left` elements."""
    g, behind_g = _start(g, first, width_g, stride_g)
    u, behind_u = _start(u, first, width_u, stride_u)
    h += first
    if bits_g > 0:
        codes_g += first // 8 * bits_g
    if bits_u > 0:
        codes_u += first // 8 * bits_u
    word_g, second_g, third_g, fourth_g = _words_if(first, table_g, seed, 0, bits_g)
    word_u, second_u, third_u, fourth_u = _words_if(first, table_u, seed, 1, bits_u)
    low_g, high_g = tl.zeros((COLUMNS,), tl.int32), tl.zeros((COLUMNS,), tl.int32)
    low_u, high_u = tl.zeros((COLUMNS,), tl.int32), tl.zeros((COLUMNS,), tl.int32)
    for row in range(HALF):
        offset = row * COLUMNS
        code_g, code_u = _drawn_gate_row(
            g, u, h, codes_g, table_g, word_g & 0xFFFF, codes_u, table_u, word_u & 0xFFFF, behind_g, width_g,
            stride_g, behind_u, width_u, stride_u, offset, left - offset, a, b, bits_g, bits_u, whole,
        )  # fmt: skip
        low_g |= code_g << (bits_g * row)
        low_u |= code_u << (bits_u * row)
        offset += HALF * COLUMNS
        code_g, code_u = _drawn_gate_row(
            g, u, h, codes_g, table_g, word_g >> 16, codes_u, table_u, word_u >> 16, behind_g, width_g,
            stride_g, behind_u, width_u, stride_u, offset, left - offset, a, b, bits_g, bits_u, whole,
        )  # fmt: skip
        high_g |= code_g << (bits_g * row)
        high_u |= code_u << (bits_u * row)
        word_g, second_g, third_g, fourth_g = second_g, third_g, fourth_g, word_g
        word_u, second_u, third_u, fourth_u = second_u, third_u, fourth_u, word_u
    if bits_g > 0 and bits_g < 8:
        store_words(codes_g, low_g, high_g, bits_g)
    if bits_u > 0 and bits_u < 8:
        store_words(codes_u, low_u, high_u, bits_u)


@jit
def drawn_gate_forward_tile(
    g, u, h, codes_g, table_g, codes_u, table_u, seed, width_g, stride_g, width_u, stride_u, n,
    a: tl.constexpr, b: tl.constexpr, bits_g: tl.constexpr, bits_u: tl.constexpr,
):  # fmt: skip
    """Forward on the tile of this program: g and u (n,) → h (n,) and codes that are drawn at random.

    a, b: device functions, float32 → float32. bits: of codes; 0 means none, and what belongs to them
    is None. table: as `position_of` takes it. seed: int64, (1,). width, stride: as in `gates`.
    """
    first = tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    if first + ROWS * COLUMNS <= n:
        _drawn_gate_rows(
            g, u, h, codes_g, table_g, codes_u, table_u, seed, width_g, stride_g, width_u, stride_u,
            first, 0, a, b, bits_g, bits_u, True,
        )  # fmt: skip
    else:
        _drawn_gate_rows(
            g, u, h, codes_g, table_g, codes_u, table_u, seed, width_g, stride_g, width_u, stride_u,
            first, (n - first).to(tl.int32), a, b, bits_g, bits_u, False,
        )  # fmt: skip
