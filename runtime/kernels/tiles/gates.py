"""The Triton tile loops of gates h = a(g)·b(u).

Both factors are recomputed in backward. The arguments may be views: rows of `width` elements, at least
COLUMNS, that begin `stride` elements apart; `width` is None where they are contiguous. All other tensors are
contiguous.

Values are rounded as PyTorch rounds them in two steps: each factor to the dtype, and then the product.
"""

from __future__ import annotations

from .activations import COLUMNS, ROWS, load, store
from .triton import constexpr, jit, tl

HALF = constexpr(4)  # rows of half a tile: a trip has one of each half, so that their reads overlap


@jit
def _start(view, first):
    """Return the address from which the tile at `first` is read, and how many elements after it the tile begins.

    With a width, that is the start of a row. Dividing 64-bit numbers is slow, so it is done once a tile.
    """
    x, width, stride = view
    if width is None:
        return x + first, 0
    else:
        row = first // width
        return x + row * stride, (first - row * width).to(tl.int32)


@jit
def _load(view, start, offset, inside, whole: tl.constexpr):
    """Return a row of elements, float32, 0 where the tensor has ended.

    start: what `_start` returns. offset: of the row in its tile.
    """
    _, width, stride = view
    x, behind = start
    column = tl.arange(0, COLUMNS)
    if width is None:
        at = x + offset + column
    else:
        begin = behind + offset
        rows = begin // width
        within = begin - rows * width + column
        at = x + rows.to(tl.int64) * stride + within + tl.where(within >= width, stride - width, 0)
    return load(at, inside, whole)


@jit
def _forward_rows(g, u, h, first, left, a: tl.constexpr, b: tl.constexpr, whole: tl.constexpr):
    """Process the tile that begins at `first`; if it is not whole, it has `left` elements."""
    start_g, start_u = _start(g, first), _start(u, first)
    h += first
    dtype: tl.constexpr = h.dtype.element_ty
    column = tl.arange(0, COLUMNS)
    for row in range(HALF):
        for half in tl.static_range(2):
            offset = row * COLUMNS + half * HALF * COLUMNS
            inside = column < left - offset
            x, y = _load(g, start_g, offset, inside, whole), _load(u, start_u, offset, inside, whole)
            value = a(x).to(dtype).to(tl.float32) * b(y).to(dtype).to(tl.float32)
            store(h + offset + column, value, inside, whole)


@jit
def gate_forward_tile(g, u, h, width_g, stride_g, width_u, stride_u, n, a: tl.constexpr, b: tl.constexpr):
    """Write h of the tile of this program: g and u (n,) → h (n,).

    a, b: device functions, float32 → float32.
    """
    g, u = (g, width_g, stride_g), (u, width_u, stride_u)
    first = tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    if first + ROWS * COLUMNS <= n:
        _forward_rows(g, u, h, first, 0, a, b, True)
    else:
        _forward_rows(g, u, h, first, (n - first).to(tl.int32), a, b, False)


@jit
def _backward_rows(
    dh, g, u, dg, du, first, left, a: tl.constexpr, da: tl.constexpr, b: tl.constexpr, db: tl.constexpr,
    whole: tl.constexpr,
):  # fmt: skip
    """Process the tile that begins at `first`; if it is not whole, it has `left` elements.

    Of a row, everything is read before anything is written, so each tensor is read once.
    """
    dh += first
    if dg is not None:
        dg += first
    if du is not None:
        du += first
    start_g, start_u = _start(g, first), _start(u, first)
    dtype: tl.constexpr = dh.dtype.element_ty
    column = tl.arange(0, COLUMNS)
    for row in range(HALF):
        for half in tl.static_range(2):
            offset = row * COLUMNS + half * HALF * COLUMNS
            inside = column < left - offset
            grad = load(dh + offset + column, inside, whole)
            x, y = _load(g, start_g, offset, inside, whole), _load(u, start_u, offset, inside, whole)
            if dg is not None:
                passed = (grad * b(y).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
                value = passed * da(x)
                store(dg + offset + column, value, inside, whole)
            if du is not None:
                passed = (grad * a(x).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
                value = passed * db(y)
                store(du + offset + column, value, inside, whole)


@jit
def gate_backward_tile(
    dh, g, u, dg, du, width_g, stride_g, width_u, stride_u, n, a: tl.constexpr, da: tl.constexpr,
    b: tl.constexpr, db: tl.constexpr,
):  # fmt: skip
    """Backward on the tile of this program: dh, g and u (n,) → dg and du (n,), each None if not wanted.

    da, db: device functions, the derivatives of a and b.
    """
    g, u = (g, width_g, stride_g), (u, width_u, stride_u)
    first = tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    if first + ROWS * COLUMNS <= n:
        _backward_rows(dh, g, u, dg, du, first, 0, a, da, b, db, True)
    else:
        left = (n - first).to(tl.int32)
        _backward_rows(dh, g, u, dg, du, first, left, a, da, b, db, False)
