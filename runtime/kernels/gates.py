"""The Triton tile loops of gates h = a(g)·b(u).

The layouts of codes and the tables are those of `coded`. A factor without codes gets its argument itself, and is
computed again. The arguments may be views: rows of `width` elements, at least COLUMNS, that begin `stride`
elements apart; `width` is None where they are contiguous. All else is contiguous.

Values are rounded as PyTorch rounds them in two steps: each factor to the dtype, and then the product.
"""

from __future__ import annotations

from .coded import HALF, code_of, load_words, store_words
from .tiles import COLUMNS, ROWS
from .triton_compat import jit, tl


@jit
def _load(x, start, left, width, stride, whole: tl.constexpr):
    """Return a row of elements from `start` on as they are stored, 0 where the tensor has ended."""
    column = tl.arange(0, COLUMNS)
    if width is None:
        if whole:
            return tl.load(x + start + column)
        else:
            return tl.load(x + start + column, mask=column < left, other=0.0)
    else:
        row = start // width
        within = (start - row * width).to(tl.int32) + column
        at = x + row * stride + within + tl.where(within >= width, stride - width, 0)
        if whole:
            return tl.load(at)
        else:
            return tl.load(at, mask=column < left, other=0.0)


@jit
def _store(x, start, left, values, whole: tl.constexpr):
    """Write a row of elements from `start` on."""
    column = tl.arange(0, COLUMNS)
    if whole:
        tl.store(x + start + column, values.to(x.dtype.element_ty))
    else:
        tl.store(x + start + column, values.to(x.dtype.element_ty), mask=column < left)


@jit
def _coded(x, codes, start, left, first, borders, bits: tl.constexpr, steps: tl.constexpr, whole: tl.constexpr):
    """Return the codes of a row for a word, 0 where the tensor has ended; those of 8 bits are written, too."""
    column = tl.arange(0, COLUMNS)
    if bits == 0:
        return tl.zeros((COLUMNS,), tl.int32)
    else:
        code = code_of(x, first, borders, steps)
        if bits == 8:
            _store(codes, start, left, code, whole)
            return code
        elif whole:
            return code
        else:
            return tl.where(column < left, code, 0)


@jit
def _forward_row(
    g, u, h, codes_g, first_g, borders_g, codes_u, first_u, borders_u, width_g, stride_g, width_u, stride_u,
    at, left, a: tl.constexpr, b: tl.constexpr, bits_g: tl.constexpr, steps_g: tl.constexpr, bits_u: tl.constexpr,
    steps_u: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Write h of a row and return the codes of g and u."""
    x = _load(g, at, left, width_g, stride_g, whole)
    y = _load(u, at, left, width_u, stride_u, whole)
    dtype: tl.constexpr = h.dtype.element_ty
    product = a(x.to(tl.float32)).to(dtype).to(tl.float32) * b(y.to(tl.float32)).to(dtype).to(tl.float32)
    _store(h, at, left, product, whole)
    code_g = _coded(x, codes_g, at, left, first_g, borders_g, bits_g, steps_g, whole)
    code_u = _coded(y, codes_u, at, left, first_u, borders_u, bits_u, steps_u, whole)
    return code_g, code_u


@jit
def _forward_rows(
    g, u, h, codes_g, first_g, borders_g, codes_u, first_u, borders_u, width_g, stride_g, width_u, stride_u,
    first, left, a: tl.constexpr, b: tl.constexpr, bits_g: tl.constexpr, steps_g: tl.constexpr,
    bits_u: tl.constexpr, steps_u: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Do the tile that begins at `first`, of which `left` elements are there if it is not whole."""
    low_g, high_g = tl.zeros((COLUMNS,), tl.int32), tl.zeros((COLUMNS,), tl.int32)
    low_u, high_u = tl.zeros((COLUMNS,), tl.int32), tl.zeros((COLUMNS,), tl.int32)
    for row in range(HALF):
        at, rest = first + row * COLUMNS, left - row * COLUMNS
        code_g, code_u = _forward_row(
            g, u, h, codes_g, first_g, borders_g, codes_u, first_u, borders_u, width_g, stride_g, width_u,
            stride_u,
            at, rest, a, b, bits_g, steps_g, bits_u, steps_u, whole,
        )  # fmt: skip
        low_g |= code_g << (bits_g * row)
        low_u |= code_u << (bits_u * row)
        at, rest = at + HALF * COLUMNS, rest - HALF * COLUMNS
        code_g, code_u = _forward_row(
            g, u, h, codes_g, first_g, borders_g, codes_u, first_u, borders_u, width_g, stride_g, width_u,
            stride_u,
            at, rest, a, b, bits_g, steps_g, bits_u, steps_u, whole,
        )  # fmt: skip
        high_g |= code_g << (bits_g * row)
        high_u |= code_u << (bits_u * row)
    if bits_g > 0 and bits_g < 8:
        store_words(codes_g + first // 8 * bits_g, low_g, high_g, bits_g)
    if bits_u > 0 and bits_u < 8:
        store_words(codes_u + first // 8 * bits_u, low_u, high_u, bits_u)


@jit
def gate_forward_tile(
    g,
    u,
    h,
    codes_g,
    first_g,
    borders_g,
    codes_u,
    first_u,
    borders_u,
    width_g,
    stride_g,
    width_u,
    stride_u,
    n,
    a: tl.constexpr,
    b: tl.constexpr,
    bits_g: tl.constexpr,
    steps_g: tl.constexpr,
    bits_u: tl.constexpr,
    steps_u: tl.constexpr,
):
    """Forward on the tile of this program: g and u (n,) → h (n,) and codes.

    a, b: device functions, float32 → float32. bits: of codes; 0 without,
    then what belongs to these is None.
    first, borders, steps: as `code_of` takes them.
    """
    first = tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    if first + ROWS * COLUMNS <= n:
        _forward_rows(
            g, u, h, codes_g, first_g, borders_g, codes_u, first_u, borders_u, width_g, stride_g, width_u,
            stride_u,
            first, 0, a, b, bits_g, steps_g, bits_u, steps_u, True,
        )  # fmt: skip
    else:
        _forward_rows(
            g, u, h, codes_g, first_g, borders_g, codes_u, first_u, borders_u, width_g, stride_g, width_u,
            stride_u,
            first, (n - first).to(tl.int32), a, b, bits_g, steps_g, bits_u, steps_u, False,
        )  # fmt: skip


@jit
def _words(codes, first, bits: tl.constexpr):
    """Return the words of a tile; without words, zeros."""
    if bits > 0 and bits < 8:
        return load_words(codes + first // 8 * bits, bits)
    else:
        return tl.zeros((COLUMNS,), tl.int32), tl.zeros((COLUMNS,), tl.int32)


@jit
def _factor(
    kept, at, left, word, table, width, stride, function: tl.constexpr, bits: tl.constexpr, whole: tl.constexpr
):
    """Return the numbers of a row: looked up in a table by codes, or `function` of the argument that was kept.

    Codes without a table stand for 1.
    """
    column = tl.arange(0, COLUMNS)
    if bits == 0:
        return function(_load(kept, at, left, width, stride, whole).to(tl.float32))
    elif table is None:
        return tl.full((COLUMNS,), 1.0, tl.float32)
    elif bits < 8:
        return tl.load(table + (word & ((1 << bits) - 1)))
    elif whole:
        return tl.load(table + tl.load(kept + at + column).to(tl.int32))
    else:
        return tl.load(table + tl.load(kept + at + column, mask=column < left, other=0).to(tl.int32))


@jit
def _backward_row(
    dh, g, u, dg, du, values_g, derivatives_g, values_u, derivatives_u, width_g, stride_g, width_u, stride_u,
    at, left, word_g, word_u, a: tl.constexpr, da: tl.constexpr, b: tl.constexpr, db: tl.constexpr,
    bits_g: tl.constexpr, bits_u: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Write dg and du of a row."""
    dtype: tl.constexpr = dh.dtype.element_ty
    grad = _load(dh, at, left, None, None, whole).to(tl.float32)
    if dg is not None:
        value = _factor(u, at, left, word_u, values_u, width_u, stride_u, b, bits_u, whole)
        passed = (grad * value.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        slope = _factor(g, at, left, word_g, derivatives_g, width_g, stride_g, da, bits_g, whole)
        _store(dg, at, left, passed * slope, whole)
    if du is not None:
        value = _factor(g, at, left, word_g, values_g, width_g, stride_g, a, bits_g, whole)
        passed = (grad * value.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        slope = _factor(u, at, left, word_u, derivatives_u, width_u, stride_u, db, bits_u, whole)
        _store(du, at, left, passed * slope, whole)


@jit
def _backward_rows(
    dh, g, u, dg, du, values_g, derivatives_g, values_u, derivatives_u, width_g, stride_g, width_u, stride_u,
    first, left, a: tl.constexpr, da: tl.constexpr, b: tl.constexpr, db: tl.constexpr,
    bits_g: tl.constexpr, bits_u: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Do the tile that begins at `first`, of which `left` elements are there if it is not whole."""
    low_g, high_g = _words(g, first, bits_g)
    low_u, high_u = _words(u, first, bits_u)
    for row in range(HALF):
        at, rest = first + row * COLUMNS, left - row * COLUMNS
        _backward_row(
            dh, g, u, dg, du, values_g, derivatives_g, values_u, derivatives_u, width_g, stride_g, width_u,
            stride_u, at, rest, low_g >> (bits_g * row), low_u >> (bits_u * row), a, da, b, db, bits_g, bits_u,
            whole,
        )  # fmt: skip
        at, rest = at + HALF * COLUMNS, rest - HALF * COLUMNS
        _backward_row(
            dh, g, u, dg, du, values_g, derivatives_g, values_u, derivatives_u, width_g, stride_g, width_u,
            stride_u, at, rest, high_g >> (bits_g * row), high_u >> (bits_u * row), a, da, b, db, bits_g, bits_u,
            whole,
        )  # fmt: skip


@jit
def gate_backward_tile(
    dh, g, u, dg, du, values_g, derivatives_g, values_u, derivatives_u, width_g, stride_g, width_u, stride_u, n,
    a: tl.constexpr, da: tl.constexpr, b: tl.constexpr, db: tl.constexpr, bits_g: tl.constexpr,
    bits_u: tl.constexpr,
):  # fmt: skip
    """Backward on the tile of this program: dh (n,) and what is kept → dg and du (n,), each None if not wanted.

    g, u: the arguments, or their codes if `bits` is not 0. values, derivatives: the tables of these, else None;
    derivatives that are all 1 have none. da, db: device functions like a and b, their derivatives; None where
    codes are kept.
    """
    first = tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    if first + ROWS * COLUMNS <= n:
        _backward_rows(
            dh, g, u, dg, du, values_g, derivatives_g, values_u, derivatives_u, width_g, stride_g, width_u,
            stride_u,
            first, 0, a, da, b, db, bits_g, bits_u, True,
        )  # fmt: skip
    else:
        _backward_rows(
            dh, g, u, dg, du, values_g, derivatives_g, values_u, derivatives_u, width_g, stride_g, width_u,
            stride_u,
            first, (n - first).to(tl.int32), a, da, b, db, bits_g, bits_u, False,
        )  # fmt: skip


@jit
def _value_row(
    g, u, h, values_g, values_u, width_g, stride_g, width_u, stride_u, at, left, word_g, word_u, a: tl.constexpr,
    b: tl.constexpr, bits_g: tl.constexpr, bits_u: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Write h of a row."""
    dtype: tl.constexpr = h.dtype.element_ty
    x = _factor(g, at, left, word_g, values_g, width_g, stride_g, a, bits_g, whole).to(dtype).to(tl.float32)
    y = _factor(u, at, left, word_u, values_u, width_u, stride_u, b, bits_u, whole).to(dtype).to(tl.float32)
    _store(h, at, left, x * y, whole)


@jit
def _value_rows(
    g, u, h, values_g, values_u, width_g, stride_g, width_u, stride_u, first, left, a: tl.constexpr,
    b: tl.constexpr,
    bits_g: tl.constexpr, bits_u: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Do the tile that begins at `first`, of which `left` elements are there if it is not whole."""
    low_g, high_g = _words(g, first, bits_g)
    low_u, high_u = _words(u, first, bits_u)
    for row in range(HALF):
        at, rest = first + row * COLUMNS, left - row * COLUMNS
        _value_row(
            g, u, h, values_g, values_u, width_g, stride_g, width_u, stride_u, at, rest, low_g >> (bits_g * row),
            low_u >> (bits_u * row), a, b, bits_g, bits_u, whole,
        )  # fmt: skip
        at, rest = at + HALF * COLUMNS, rest - HALF * COLUMNS
        _value_row(
            g, u, h, values_g, values_u, width_g, stride_g, width_u, stride_u, at, rest, high_g >> (bits_g * row),
            high_u >> (bits_u * row), a, b, bits_g, bits_u, whole,
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
            g, u, h, values_g, values_u, width_g, stride_g, width_u, stride_u, first, (n - first).to(tl.int32), a,
            b,
            bits_g, bits_u, False,
        )  # fmt: skip
