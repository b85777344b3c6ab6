"""The Triton tile loops of gates h = a(g)·b(u).

The layouts of codes and the tables are those of `coded`. A factor without codes is computed again from its
argument. The arguments may be views: rows of `width` elements, at least COLUMNS, that begin `stride` elements
apart; `width` is None where they are contiguous. All other tensors are contiguous.

Values are rounded as PyTorch rounds them in two steps: each factor to the dtype, and then the product.
"""

from __future__ import annotations

from .coded import HALF, code_of, load_words, store_words
from .tiles import COLUMNS, ROWS, existing, load_row, store_row
from .triton_compat import jit, tl


@jit
def _start(x, first, width, stride):
    """Return the address from which the tile at `first` is read, and how many elements after it the tile begins.

    With a width, that is the start of a row. Dividing 64-bit numbers is slow, so it is done once a tile.
    """
    if width is None:
        return x + first, 0
    else:
        row = first // width
        return x + row * stride, (first - row * width).to(tl.int32)


@jit
def _load(x, behind, offset, left, width, stride, whole: tl.constexpr):
    """Return a row of elements as they are stored, 0 where the tensor has ended.

    x, behind: as `_start` returns them. offset: of the row in its tile.
    """
    column = tl.arange(0, COLUMNS)
    if width is None:
        at = x + offset + column
    else:
        begin = behind + offset
        rows = begin // width
        within = begin - rows * width + column
        at = x + rows.to(tl.int64) * stride + within + tl.where(within >= width, stride - width, 0)
    if whole:
        return tl.load(at)
    else:
        return tl.load(at, mask=column < left, other=0.0)


@jit
def _coded(x, codes, left, first, borders, bits: tl.constexpr, steps: tl.constexpr, whole: tl.constexpr):
    """Return the codes of a row for a word, 0 where the tensor has ended; write them if they have 8 bits."""
    if bits == 0:
        return tl.zeros((COLUMNS,), tl.int32)
    else:
        code = code_of(x, first, borders, steps)
        if bits == 8:
            store_row(codes, code, left, whole)
        return existing(code, left, whole)


@jit
def _forward_row(
    g, u, h, codes_g, first_g, borders_g, codes_u, first_u, borders_u, behind_g, width_g, stride_g, behind_u,
    width_u, stride_u, offset, left, a: tl.constexpr, b: tl.constexpr, bits_g: tl.constexpr,
    steps_g: tl.constexpr, bits_u: tl.constexpr, steps_u: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Write h of a row and return the codes of g and u."""
    x = _load(g, behind_g, offset, left, width_g, stride_g, whole)
    y = _load(u, behind_u, offset, left, width_u, stride_u, whole)
    dtype: tl.constexpr = h.dtype.element_ty
    product = a(x.to(tl.float32)).to(dtype).to(tl.float32) * b(y.to(tl.float32)).to(dtype).to(tl.float32)
    store_row(h + offset, product, left, whole)
    row_g = codes_g + offset if bits_g == 8 else codes_g
    row_u = codes_u + offset if bits_u == 8 else codes_u
    code_g = _coded(x, row_g, left, first_g, borders_g, bits_g, steps_g, whole)
    code_u = _coded(y, row_u, left, first_u, borders_u, bits_u, steps_u, whole)
    return code_g, code_u


@jit
def _forward_rows(
    g, u, h, codes_g, first_g, borders_g, codes_u, first_u, borders_u, width_g, stride_g, width_u, stride_u,
    first, left, a: tl.constexpr, b: tl.constexpr, bits_g: tl.constexpr, steps_g: tl.constexpr,
    bits_u: tl.constexpr, steps_u: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Process the tile that begins at `first`; if it is not whole, it has `left` elements."""
    g, behind_g = _start(g, first, width_g, stride_g)
    u, behind_u = _start(u, first, width_u, stride_u)
    h += first
    if bits_g > 0:
        codes_g += first // 8 * bits_g
    if bits_u > 0:
        codes_u += first // 8 * bits_u
    low_g, high_g = tl.zeros((COLUMNS,), tl.int32), tl.zeros((COLUMNS,), tl.int32)
    low_u, high_u = tl.zeros((COLUMNS,), tl.int32), tl.zeros((COLUMNS,), tl.int32)
    for row in range(HALF):
        offset = row * COLUMNS
        code_g, code_u = _forward_row(
            g, u, h, codes_g, first_g, borders_g, codes_u, first_u, borders_u, behind_g, width_g, stride_g,
            behind_u, width_u, stride_u, offset, left - offset, a, b, bits_g, steps_g, bits_u, steps_u, whole,
        )  # fmt: skip
        low_g |= code_g << (bits_g * row)
        low_u |= code_u << (bits_u * row)
        offset += HALF * COLUMNS
        code_g, code_u = _forward_row(
            g, u, h, codes_g, first_g, borders_g, codes_u, first_u, borders_u, behind_g, width_g, stride_g,
            behind_u, width_u, stride_u, offset, left - offset, a, b, bits_g, steps_g, bits_u, steps_u, whole,
        )  # fmt: skip
        high_g |= code_g << (bits_g * row)
        high_u |= code_u << (bits_u * row)
    if bits_g > 0 and bits_g < 8:
        store_words(codes_g, low_g, high_g, bits_g)
    if bits_u > 0 and bits_u < 8:
        store_words(codes_u, low_u, high_u, bits_u)


@jit
def gate_forward_tile(
    g, u, h, codes_g, first_g, borders_g, codes_u, first_u, borders_u, width_g, stride_g, width_u, stride_u, n,
    a: tl.constexpr, b: tl.constexpr, bits_g: tl.constexpr, steps_g: tl.constexpr, bits_u: tl.constexpr,
    steps_u: tl.constexpr,
):  # fmt: skip
    """Forward on the tile of this program: g and u (n,) → h (n,) and codes.

    a, b: device functions, float32 → float32. bits: of codes; 0 means none, and what belongs to them
    is None. first, borders, steps: as `code_of` takes them.
    """
    first = tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    if first + ROWS * COLUMNS <= n:
        _forward_rows(
            g, u, h, codes_g, first_g, borders_g, codes_u, first_u, borders_u, width_g, stride_g, width_u,
            stride_u, first, 0, a, b, bits_g, steps_g, bits_u, steps_u, True,
        )  # fmt: skip
    else:
        _forward_rows(
            g, u, h, codes_g, first_g, borders_g, codes_u, first_u, borders_u, width_g, stride_g, width_u,
            stride_u, first, (n - first).to(tl.int32), a, b, bits_g, steps_g, bits_u, steps_u, False,
        )  # fmt: skip


@jit
def _words(codes, bits: tl.constexpr):
    """Return the words of a tile; without words, zeros."""
    if bits > 0 and bits < 8:
        return load_words(codes, bits)
    else:
        return tl.zeros((COLUMNS,), tl.int32), tl.zeros((COLUMNS,), tl.int32)


@jit
def _kept(kept, behind, offset, left, word, width, stride, bits: tl.constexpr, whole: tl.constexpr):
    """Return what is kept of a row: the elements, float32, or their codes, int32."""
    if bits == 0:
        return _load(kept, behind, offset, left, width, stride, whole).to(tl.float32)
    elif bits < 8:
        return word & ((1 << bits) - 1)
    else:
        return load_row(kept + offset, left, whole).to(tl.int32)


@jit
def _number(kept, table, function: tl.constexpr, bits: tl.constexpr):
    """Return a function of a row's elements, or its values for codes by a table; without a table they are 1."""
    if bits == 0:
        return function(kept)
    elif table is None:
        return tl.full((COLUMNS,), 1.0, tl.float32)
    else:
        return tl.load(table + kept)


@jit
def _backward_row(
    dh, g, u, dg, du, values_g, derivatives_g, values_u, derivatives_u, behind_g, width_g, stride_g, behind_u,
    width_u, stride_u, offset, left, word_g, word_u, a: tl.constexpr, da: tl.constexpr, b: tl.constexpr,
    db: tl.constexpr, bits_g: tl.constexpr, bits_u: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Write dg and du of a row; everything is read before anything is written, so each tensor is read once."""
    dtype: tl.constexpr = dh.dtype.element_ty
    grad = load_row(dh + offset, left, whole).to(tl.float32)
    x = _kept(g, behind_g, offset, left, word_g, width_g, stride_g, bits_g, whole)
    y = _kept(u, behind_u, offset, left, word_u, width_u, stride_u, bits_u, whole)
    if dg is not None:
        value = _number(y, values_u, b, bits_u).to(dtype).to(tl.float32)
        passed = (grad * value).to(dtype).to(tl.float32)
        store_row(dg + offset, passed * _number(x, derivatives_g, da, bits_g), left, whole)
    if du is not None:
        value = _number(x, values_g, a, bits_g).to(dtype).to(tl.float32)
        passed = (grad * value).to(dtype).to(tl.float32)
        store_row(du + offset, passed * _number(y, derivatives_u, db, bits_u), left, whole)


@jit
def _backward_rows(
    dh, g, u, dg, du, values_g, derivatives_g, values_u, derivatives_u, width_g, stride_g, width_u, stride_u,
    first, left, a: tl.constexpr, da: tl.constexpr, b: tl.constexpr, db: tl.constexpr,
    bits_g: tl.constexpr, bits_u: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Process the tile that begins at `first`; if it is not whole, it has `left` elements."""
    dh += first
    if dg is not None:
        dg += first
    if du is not None:
        du += first
    g, behind_g = _start_kept(g, first, width_g, stride_g, bits_g)
    u, behind_u = _start_kept(u, first, width_u, stride_u, bits_u)
    low_g, high_g = _words(g, bits_g)
    low_u, high_u = _words(u, bits_u)
    for row in range(HALF):
        offset = row * COLUMNS
        _backward_row(
            dh, g, u, dg, du, values_g, derivatives_g, values_u, derivatives_u, behind_g, width_g, stride_g,
            behind_u, width_u, stride_u, offset, left - offset, low_g >> (bits_g * row), low_u >> (bits_u * row),
            a, da, b, db, bits_g, bits_u, whole,
        )  # fmt: skip
        offset += HALF * COLUMNS
        _backward_row(
            dh, g, u, dg, du, values_g, derivatives_g, values_u, derivatives_u, behind_g, width_g, stride_g,
            behind_u, width_u, stride_u, offset, left - offset, high_g >> (bits_g * row),
            high_u >> (bits_u * row), a, da, b, db, bits_g, bits_u, whole,
        )  # fmt: skip


@jit
def _start_kept(kept, first, width, stride, bits: tl.constexpr):
    """Return what `_start` returns, for what is kept of an argument; codes have no rows."""
    if bits == 0:
        return _start(kept, first, width, stride)
    else:
        return kept + first // 8 * bits, 0


@jit
def gate_backward_tile(
    dh, g, u, dg, du, values_g, derivatives_g, values_u, derivatives_u, width_g, stride_g, width_u, stride_u, n,
    a: tl.constexpr, da: tl.constexpr, b: tl.constexpr, db: tl.constexpr, bits_g: tl.constexpr,
    bits_u: tl.constexpr,
):  # fmt: skip
    """Backward on the tile of this program: dh (n,) and what is kept → dg and du (n,), each None if not wanted.

    g, u: the arguments, or their codes if `bits` is not 0. values, derivatives: the tables for codes, else None;
    derivatives that are all 1 have no table. da, db: device functions, the derivatives of a and b; None for codes.
    """
    first = tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    if first + ROWS * COLUMNS <= n:
        _backward_rows(
            dh, g, u, dg, du, values_g, derivatives_g, values_u, derivatives_u, width_g, stride_g, width_u,
            stride_u, first, 0, a, da, b, db, bits_g, bits_u, True,
        )  # fmt: skip
    else:
        _backward_rows(
            dh, g, u, dg, du, values_g, derivatives_g, values_u, derivatives_u, width_g, stride_g, width_u,
            stride_u, first, (n - first).to(tl.int32), a, da, b, db, bits_g, bits_u, False,
        )  # fmt: skip


@jit
def _value_row(
    g, u, h, values_g, values_u, behind_g, width_g, stride_g, behind_u, width_u, stride_u, offset, left, word_g,
    word_u, a: tl.constexpr, b: tl.constexpr, bits_g: tl.constexpr, bits_u: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Write h of a row."""
    dtype: tl.constexpr = h.dtype.element_ty
    x = _kept(g, behind_g, offset, left, word_g, width_g, stride_g, bits_g, whole)
    y = _kept(u, behind_u, offset, left, word_u, width_u, stride_u, bits_u, whole)
    value_g = _number(x, values_g, a, bits_g).to(dtype).to(tl.float32)
    value_u = _number(y, values_u, b, bits_u).to(dtype).to(tl.float32)
    store_row(h + offset, value_g * value_u, left, whole)


@jit
def _value_rows(
    g, u, h, values_g, values_u, width_g, stride_g, width_u, stride_u, first, left, a: tl.constexpr,
    b: tl.constexpr, bits_g: tl.constexpr, bits_u: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Process the tile that begins at `first`; if it is not whole, it has `left` elements."""
    h += first
    g, behind_g = _start_kept(g, first, width_g, stride_g, bits_g)
    u, behind_u = _start_kept(u, first, width_u, stride_u, bits_u)
    low_g, high_g = _words(g, bits_g)
    low_u, high_u = _words(u, bits_u)
    for row in range(HALF):
        offset = row * COLUMNS
        _value_row(
            g, u, h, values_g, values_u, behind_g, width_g, stride_g, behind_u, width_u, stride_u, offset,
            left - offset, low_g >> (bits_g * row), low_u >> (bits_u * row), a, b, bits_g, bits_u, whole,
        )  # fmt: skip
        offset += HALF * COLUMNS
        _value_row(
            g, u, h, values_g, values_u, behind_g, width_g, stride_g, behind_u, width_u, stride_u, offset,
            left - offset, high_g >> (bits_g * row), high_u >> (bits_u * row), a, b, bits_g, bits_u, whole,
        )  # fmt: skip


@jit
def gate_value_tile(
    g, u, h, values_g, values_u, width_g, stride_g, width_u, stride_u, n, a: tl.constexpr, b: tl.constexpr,
    bits_g: tl.constexpr, bits_u: tl.constexpr,
):  # fmt: skip
    """Write h of the tile of this program from what is kept; the arguments are those of backward."""
    first = tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    if first + ROWS * COLUMNS <= n:
        _value_rows(
            g, u, h, values_g, values_u, width_g, stride_g, width_u, stride_u, first, 0, a, b, bits_g, bits_u, True
        )  # fmt: skip
    else:
        _value_rows(
            g, u, h, values_g, values_u, width_g, stride_g, width_u, stride_u, first, (n - first).to(tl.int32),
            a, b, bits_g, bits_u, False,
        )  # fmt: skip
