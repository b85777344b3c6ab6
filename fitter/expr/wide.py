"""NumPy's functions with the same last bit on every CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def in_long_double(function: Callable[..., Any], limit: float = np.inf) -> Callable[..., Array]:
    """Return a NumPy function that computes in long double and rounds once to the dtype of its arguments.

    In float32 and float64 NumPy and the C library choose their kernels by CPU, and these differ in the last bit.
    Arguments beyond a limit are computed as the limit: the rounded result must be the same there.
    """

    def rounded(*arguments: Array) -> Array:
        dtype = np.result_type(*arguments)
        if limit < np.inf:
            arguments = tuple(np.minimum(np.maximum(u, -limit), limit) for u in arguments)
        return np.asarray(function(*(np.asarray(u, dtype=np.longdouble) for u in arguments)), dtype=dtype)

    return rounded


def special(name: str) -> Callable[[Array], Array]:
    """Return a function of `scipy.special`, which is imported when it is called: that takes long."""

    def function(u: Array) -> Array:
        from scipy import special

        return np.asarray(getattr(special, name)(u))

    return function


def geometric(low: float, high: float, count: int) -> Array:
    """Return numbers from low to high in geometric progression, (count,)."""
    return np.geomspace(np.longdouble(low), np.longdouble(high), count).astype(np.float64)


# exp of more is infinite or 0 in float64; a long double that overflows takes seven times as long
BEYOND = 1000.0
exp, expm1, sinh, cosh = (in_long_double(function, BEYOND) for function in (np.exp, np.expm1, np.sinh, np.cosh))
log, log1p, hypot, power = map(in_long_double, (np.log, np.log1p, np.hypot, np.power))
tanh, asinh, sin, cos, tan, atan = map(in_long_double, (np.tanh, np.arcsinh, np.sin, np.cos, np.tan, np.arctan))


def sigmoid(u: Array) -> Array:
    """Return 1/(1 + exp(−u))."""
    e = exp(-np.abs(u))
    return np.where(u >= 0, 1.0, e) / (1.0 + e)


def softplus(u: Array) -> Array:
    """Return log(1 + exp(u))."""
    return np.maximum(u, 0.0) + log1p(exp(-np.abs(u)))


def sech2(u: Array) -> Array:
    """Return 1/cosh² u."""
    e = exp(-2 * np.abs(u))
    return np.asarray(4 * e / (1 + e) ** 2)


def tsech2(u: Array) -> Array:
    """Return u/cosh² u."""
    bounded = np.clip(u, -400.0, 400.0)  # beyond, it is below 1e-340
    return np.asarray(bounded * sech2(bounded))


def logcosh(u: Array) -> Array:
    """Return log(cosh u)."""
    a = np.abs(u)
    tail = a + log1p(exp(-2 * a)) - log(np.asarray(2.0, a.dtype))
    return np.asarray(np.where(a < 1, log1p(2 * sinh(np.minimum(a, 1.0) / 2) ** 2), tail))


def hypot1(u: Array) -> Array:
    """Return √(1 + u²)."""
    return hypot(u, np.ones((), u.dtype))


def isru(u: Array) -> Array:
    """Return u/√(1 + u²)."""
    return np.where(np.isinf(u), np.sign(u), u / hypot1(u))


def squareplus(u: Array) -> Array:
    """Return (u + √(u² + 4))/2."""
    s = hypot(u, np.asarray(2.0, u.dtype))
    return np.where(u > 0, u / 2 + s / 2, 2 / (s - u))
