"""The dtypes in which outputs are saved: their numbers, and rounding to them."""

from __future__ import annotations

import numpy as np

from fitact.fitter.analysis import FLOAT32, Activation
from fitact.fitter.expr import Array, Expr

DTYPES = ("bfloat16", "float16", "float32")


def halves(dtype: str) -> Array:
    """Return all finite numbers of a dtype of half precision, float64."""
    patterns = np.arange(1 << 16, dtype=np.uint32)
    numbers = (
        (patterns << 16).view(np.float32) if dtype == "bfloat16" else patterns.astype(np.uint16).view(np.float16)
    )
    return numbers[np.isfinite(numbers)].astype(np.float64)


def stored(activation: Activation, at: Array, dtype: str) -> Array:
    """Return f as a module computes and saves it: float64 numbers that the named dtype holds, shape of `at`.

    PyTorch's own functions are correct to one rounding; a formula is computed in float32, and rounded again.
    """
    known = activation.torch is not None
    return rounded(activation.value(at) if known else in_single(activation.formula, at), dtype)


def in_single(formula: Expr, at: Array) -> Array:
    """Return a formula in `atoms.x` as kernels compute it, in float32: float64 numbers, shape of `at`."""
    with np.errstate(all="ignore"):
        value = FLOAT32.evaluate(formula, at.astype(np.float32))
    return np.broadcast_to(value, at.shape).astype(np.float64)


def rounded(values: Array, dtype: str) -> Array:
    """Return float64 values rounded to the named dtype: to nearest, ties to even."""
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
        if dtype == "float32":
            return single.astype(np.float64)
        if dtype == "float16":
            return values.astype(np.float16).astype(np.float64)
    bits = single.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(single), np.nan, rounded.view(np.float32)).astype(np.float64)
