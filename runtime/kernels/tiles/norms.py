"""The Triton kernels of the memory-sharing norms.

A row that fits a block is read once and stays in registers; several short rows make a block. A longer row is read
block by block, once for each of its statistics and once to be written; after the first time, mostly from a cache.
The variance is the mean of the squared distances from the mean: unlike E[x²] − E[x]², it does not cancel.

Statistics and arithmetic are in float32 for every storage dtype.
"""

from __future__ import annotations

from .triton import jit, tl


@jit
def _load(tensor, at, inside):
    return tl.load(tensor + at, mask=inside, other=0.0).to(tl.float32)


@jit
def _store(tensor, at, value, inside):
    tl.store(tensor + at, value.to(tensor.dtype.element_ty), mask=inside)


@jit
def _mean(value, columns):
    """Return the mean of each row, (rows, 1), of values that are 0 outside of the row."""
    return (tl.sum(value, 1) / columns)[:, None]


@jit
def ms_norm_forward(
    x, z, scale, rows, columns, eps, centred: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
    whole: tl.constexpr,
):  # fmt: skip
    """Forward: x (rows, columns) → z of that shape and scale = 1/σ (rows,) of float32; height rows a program."""
    row = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)
    start = row[:, None] * columns
    column = tl.arange(0, width)[None, :]
    exists = (row < rows)[:, None]
    if whole:
        inside = exists & (column < columns)
        value = _load(x, start + column, inside)
        if centred:
            value = tl.where(inside, value - _mean(value, columns), 0.0)
        inverse = tl.rsqrt(_mean(value * value, columns) + eps)
        _store(z, start + column, value * inverse, inside)
    else:
        mean = tl.zeros((height, 1), tl.float32)
        if centred:
            total = tl.zeros((height, width), tl.float32)
            for first in range(0, columns, width):
                at = first + column
                total += _load(x, start + at, exists & (at < columns))
            mean = _mean(total, columns)
        total = tl.zeros((height, width), tl.float32)
        for first in range(0, columns, width):
            at = first + column
            inside = exists & (at < columns)
            value = tl.where(inside, _load(x, start + at, inside) - mean, 0.0)
            total += value * value
        inverse = tl.rsqrt(_mean(total, columns) + eps)
        for first in range(0, columns, width):
            at = first + column
            inside = exists & (at < columns)
            _store(z, start + at, (_load(x, start + at, inside) - mean) * inverse, inside)
    tl.store(scale + row[:, None], inverse, mask=exists)


@jit
def ms_norm_backward(
    dz, z, scale, dx, rows, columns, centred: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
    whole: tl.constexpr,
):  # fmt: skip
    """Backward: dx = (dz − mean(dz) − z·mean(z·dz))·scale; mean(dz) is left out unless centred."""
    row = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)
    start = row[:, None] * columns
    column = tl.arange(0, width)[None, :]
    exists = (row < rows)[:, None]
    inverse = tl.load(scale + row[:, None], mask=exists, other=0.0)
    if whole:
        inside = exists & (column < columns)
        gradient = _load(dz, start + column, inside)
        value = _load(z, start + column, inside)
        slope = _mean(gradient * value, columns)
        if centred:
            gradient -= _mean(gradient, columns)
        _store(dx, start + column, (gradient - value * slope) * inverse, inside)
    else:
        total = tl.zeros((height, width), tl.float32)
        products = tl.zeros((height, width), tl.float32)
        for first in range(0, columns, width):
            at = first + column
            gradient = _load(dz, start + at, exists & (at < columns))
            products += gradient * _load(z, start + at, exists & (at < columns))
            if centred:
                total += gradient
        slope = _mean(products, columns)
        mean = _mean(total, columns)
        for first in range(0, columns, width):
            at = first + column
            inside = exists & (at < columns)
            gradient = _load(dz, start + at, inside) - mean
            _store(dx, start + at, (gradient - _load(z, start + at, inside) * slope) * inverse, inside)
