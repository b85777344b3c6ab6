"""Gates that tests fit, each of them in PyTorch's operators, and how near kernels have to be."""

from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F

from fitact.fitter.analysis.gate import Gate
from fitact.fitter.records.fit import GateFit
from tests.support.generated import load, wide

Baseline = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
EPS = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-6}


def recomputed(text: str, name: str) -> GateFit:
    return GateFit(name=name, method="gate_recompute", activation=Gate.of(text), error={})


def clamped(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    low = wide(g).clamp(max=7)
    a = (low * torch.sigmoid(1.702 * low)).to(g.dtype)
    return a * (wide(u).clamp(-7, 7) + 1).to(u.dtype)


FITS: dict[str, tuple[GateFit, Baseline]] = {
    "recompute": (recomputed("swiglu", "own_recompute"), lambda g, u: F.silu(g) * u),
    "recompute_gelu": (recomputed("geglu", "own_gelu"), lambda g, u: F.gelu(g) * u),
    "recompute_both": (recomputed("tanh(g)*silu(u)", "own_both"), lambda g, u: torch.tanh(g) * F.silu(u)),
    "recompute_clamped": (recomputed("swiglu_clamped", "own_clamped"), clamped),
}


@cache
def gate_module(name: str) -> ModuleType:
    return load(FITS[name][0])


def halves(dtype: torch.dtype, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of one tensor, as a fused projection gives them."""
    g, u = (3 * torch.randn(*shape[:-1], 2 * shape[-1])).to(dtype).chunk(2, -1)
    return g, u


def special(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    largest = torch.finfo(dtype).max
    numbers = [0.0, -0.0, 1.0, -1.0, 0.3, -7.0, 7.0, 30.0, -90.0, 1e-30, largest, -largest]
    numbers += [float("inf"), float("-inf"), float("nan")]
    x = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    return x.repeat(len(x)), x.repeat_interleave(len(x))


def near(each: torch.Tensor, other: torch.Tensor, reach: torch.Tensor) -> None:
    """Three roundings apart, or a millionth of `reach`, as terms cancel near a root; special where other is."""
    if not other.numel():  # not wanted, or nothing there
        assert not each.numel()
        return
    dtype = each.dtype
    assert (dtype, each.shape, each.stride()) == (other.dtype, other.shape, other.stride())
    # the largest number and infinity are one truncation apart
    wide = other.double().abs() < torch.finfo(dtype).max / 2
    tiny = 4 * torch.finfo(dtype).smallest_normal
    a, b = each.double()[wide], other.double()[wide]
    assert bool(((a - b).abs() <= 4 * EPS[dtype] * b.abs() + 1e-6 * reach[wide] + tiny).all())
    assert torch.equal(each.isnan(), other.isnan())
