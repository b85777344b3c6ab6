"""Functions that PyTorch lacks, in its operators: for the PyTorch path of activations it has no function for."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
