"""Functions of float32 for device code, where Triton has none or an inaccurate one.

Written in operations that Triton's interpreter has too: no libdevice, no inline assembly.
"""

from __future__ import annotations

from .language import jit, tl


@jit
def expm1(u):
    """exp(u) − 1: Taylor's series where the subtraction would cancel, to 1e−8 relative."""
    series = 1.0 / 40320 * u + 1.0 / 5040
    series = series * u + 1.0 / 720
    series = series * u + 1.0 / 120
    series = series * u + 1.0 / 24
    series = series * u + 1.0 / 6
    series = series * u + 0.5
    series = series * u + 1.0
    return tl.where(tl.abs(u) < 0.5, series * u, tl.exp(u) - 1.0)


@jit
def log1p(u):
    """log(1 + u): the logarithm of the rounded sum, and what the rounding dropped."""
    total = 1.0 + u
    dropped = u - (total - 1.0)
    # beyond 2^24 nothing is dropped, and at infinity the difference would be NaN
    return tl.log(total) + tl.where(tl.abs(u) < 16777216.0, dropped / total, 0.0)


@jit
def softplus(u):
    """log(1 + exp(u)), without overflow."""
    return tl.where(u > 0, u, 0.0) + log1p(tl.exp(-tl.abs(u)))


@jit
def tanh(u):
    """Tanh u = −t/(2 + t) with t = exp(−2|u|) − 1 and the sign of u: no overflow, no cancellation."""
    t = expm1(-2.0 * tl.abs(u))
    positive = -t / (2.0 + t)
    return tl.where(u < 0, -positive, positive)


@jit
def relu(u):
    """max(u, 0), NaN for NaN."""
    return tl.where(u < 0, 0.0, u)


@jit
def sign(u):
    """−1, 0 or 1."""
    return tl.where(u > 0, 1.0, tl.where(u < 0, -1.0, 0.0))


@jit
def power(u, n: tl.constexpr):
    """U to the power of a positive integer, by repeated squaring."""
    if n == 1:
        return u
    else:
        half = power(u, n // 2)
        if n % 2 == 0:
            return half * half
        else:
            return half * half * u
