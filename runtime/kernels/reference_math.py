"""Functions that PyTorch lacks, in its operators, for the PyTorch path of activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import reference


def hypot1(u: Tensor) -> Tensor:
    """Return √(1 + u²), without overflow."""
    return torch.hypot(u, u.new_ones(()))


def isru(u: Tensor) -> Tensor:
    """Return u / √(1 + u²), ±1 at ±∞."""
    return torch.where(u.isinf(), u.sign(), u / hypot1(u))


def squareplus(u: Tensor) -> Tensor:
    """Return (u + √(u² + 4)) / 2, without cancellation for negative u."""
    s = 2 * hypot1(0.5 * u)
    return torch.where(u > 0, 0.5 * u + 0.5 * s, 2 / (s - u))


def sech2(u: Tensor) -> Tensor:
    """Return 1 / cosh² u, without cancellation."""
    t = torch.exp(-2 * u.abs())
    return 4 * t / (1 + t).square()


def tsech2(u: Tensor) -> Tensor:
    """Return u / cosh² u, 0 where u overflows."""
    bounded = u.clamp(-400, 400)
    return bounded * sech2(bounded)


def logcosh(u: Tensor) -> Tensor:
    """Return log(cosh u), without overflow and without cancellation near 0."""
    a = u.abs()
    near = torch.log1p(2 * torch.sinh(a.clamp(max=1) / 2).square())
    return torch.where(a < 1, near, a - math.log(2) + torch.log1p(torch.exp(-2 * a)))


def radical(d: Tensor, order: int, side: int) -> Tensor:
    """Return max(d, 0)^(1/order); for −d if `side` is −1; if `side` is 0, the root of |d| with the sign of d."""
    size = d.abs() if side == 0 else (d if side > 0 else -d).clamp(min=0)
    if order == 2:
        size = size.sqrt()
    elif order > 2:
        size = torch.exp2(torch.log2(size) * (1 / order))
    return torch.copysign(size, d) if side == 0 else size


def quotient(
    t: Tensor, code: Tensor, ends: Sequence[float], numerator: Sequence[float], denominator: Sequence[float],
    size: int,
) -> Tensor:  # fmt: skip
    """Return p/q at the clamped t, with each element's coefficients chosen by its code.

    Args:
        t: a one-dimensional tensor.
        code: int32, with the shape of t; unused if `size` is 1.
        ends: the lower ends of the intervals to clamp to, by code, then the upper ends.
        numerator: coefficients of p, a row of `size` for each power, the highest first.
        denominator: coefficients of q, likewise.
        size: how many codes there are.

    """

    def of(c: int) -> Tensor:
        at = t.clamp(ends[c], ends[size + c])
        p = _horner(at, numerator[c::size])
        return p if len(denominator) == size else p.div_(_horner(at, denominator[c::size]))

    value = of(0)
    for c in range(1, size):
        own = torch.eq(code, c, out=torch.empty_like(t))
        value.lerp_(of(c), own)  # one of the two
    return value


def _horner(t: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Return the polynomial at t, NaN for NaN, in one pass over the memory for each power."""
    while len(coefficients) > 2 and not coefficients[0]:
        coefficients = coefficients[1:]
    leading, *others = coefficients if len(coefficients) > 1 else (0.0, *coefficients)
    constants = [torch.scalar_tensor(c, dtype=t.dtype, device=t.device) for c in others]
    value = torch.add(constants[0], t, alpha=leading)
    for constant in constants[1:]:
        torch.addcmul(constant, value, t, out=value)
    return value


def in_float32(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap an activation made of several operators so that half precision is rounded only at its end."""

    def value(x: Tensor) -> Tensor:
        return function(x.to(reference.arithmetic_dtype(x))).to(x.dtype)

    return value
