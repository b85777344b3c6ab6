"""The Triton kernels of the memory-sharing norms.

A row that fits a block is read once and stays in registers; several short rows make a block. A longer row is read
block by block, once for each of its statistics and once to be written; after the first time, mostly from a cache.
The variance is the mean of the squared distances from the mean: unlike E[x²] − E[x]², it does not cancel.

Statistics and arithmetic are in float32 for every storage dtype.
"""

from __future__ import annotations

from .activations import load, store
from .triton import jit, tl


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
        value = load(x + (start + column), inside, False)
        if centred:
            value = tl.where(inside, value - _mean(value, columns), 0.0)
        inverse = tl.rsqrt(_mean(value * value, columns) + eps)
        store(z + (start + column), value * inverse, inside, False)
    else:
        mean = tl.zeros((height, 1), tl.float32)
        if centred:
            total = tl.zeros((height, width), tl.float32)
            for first in range(0, columns, width):
                at = first + column
                total += load(x + (start + at), exists & (at < columns), False)
            mean = _mean(total, columns)
        total = tl.zeros((height, width), tl.float32)
        for first in range(0, columns, width):
            at = first + column
            inside = exists & (at < columns)
            value = tl.where(inside, load(x + (start + at), inside, False) - mean, 0.0)
            total += value * value
        inverse = tl.rsqrt(_mean(total, columns) + eps)
        for first in range(0, columns, width):
            at = first + column
            inside = exists & (at < columns)
            store(z + (start + at), (load(x + (start + at), inside, False) - mean) * inverse, inside, False)
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
        gradient = load(dz + (start + column), inside, False)
        value = load(z + (start + column), inside, False)
        slope = _mean(gradient * value, columns)
        if centred:
            gradient -= _mean(gradient, columns)
        store(dx + (start + column), (gradient - value * slope) * inverse, inside, False)
    else:
        total = tl.zeros((height, width), tl.float32)
        products = tl.zeros((height, width), tl.float32)
        for first in range(0, columns, width):
            at = first + column
            gradient = load(dz + (start + at), exists & (at < columns), False)
            products += gradient * load(z + (start + at), exists & (at < columns), False)
            if centred:
                total += gradient
        slope = _mean(products, columns)
        mean = _mean(total, columns)
        for first in range(0, columns, width):
            at = first + column
            inside = exists & (at < columns)
            gradient, value = load(dz + (start + at), inside, False) - mean, load(z + (start + at), inside, False)
            store(dx + (start + at), (gradient - value * slope) * inverse, inside, False)
