"""Device functions, run by Triton's interpreter."""

import torch

from fitact.runtime.kernels.tiles import jit, tl

SIZE = 2**18


@jit
def _apply(x, y, n, function: tl.constexpr, size: tl.constexpr):
    at = tl.arange(0, size)
    u = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(y + at, function(u).to(y.dtype.element_ty), mask=at < n)


def apply(function: object, x: torch.Tensor) -> torch.Tensor:
    """Return a device function's values, in the dtype of x."""
    assert x.numel() <= SIZE
    y = torch.zeros_like(x)
    _apply[(1,)](x, y, x.numel(), function, 1 << max(x.numel() - 1, 1).bit_length())
    return y
