"""Gates that tests fit, and how near kernels have to be."""

from __future__ import annotations

import torch

from fitact.fitter.analysis.gate import Gate
from fitact.fitter.records.fit import GateFit

EPS = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-6}


def rebuilt(text: str, name: str) -> GateFit:
    return GateFit(name=name, method="gate_rebuild", activation=Gate.of(text), error={})


def near(one: torch.Tensor, other: torch.Tensor, reach: torch.Tensor) -> None:
    """Up to three roundings apart, at numbers that are not subnormal; and special where the other is.

    Where a derivative has a root, what is added up cancels: a millionth of `reach` is allowed too.
    """
    if not other.numel():  # not wanted, or nothing there
        assert not one.numel()
        return
    dtype = one.dtype
    assert (dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    # the largest number and infinity are one truncation apart
    wide = other.double().abs() < torch.finfo(dtype).max / 2
    tiny = 4 * torch.finfo(dtype).smallest_normal
    a, b = one.double()[wide], other.double()[wide]
    assert bool(((a - b).abs() <= 4 * EPS[dtype] * b.abs() + 1e-6 * reach[wide] + tiny).all())
    assert torch.equal(one.isnan(), other.isnan())
