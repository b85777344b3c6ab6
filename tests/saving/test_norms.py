"""Norms: what their inputs are sums of is saved, once for all that read them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fitact import saving
from fitact.runtime.measure.saved import count_saved
from tests.support.blocks import Gemma, Of, RMSNorm
from tests.support.saving import HALF, SETTINGS, cast, pair, precisions, saves, saving_less

WIDTH = 16


def block(norm: Callable[[], nn.Module], after: bool, turned: bool, p: float) -> nn.Module:
    def call(m: Any, x: Tensor) -> Tensor:
        for before, layer, after in zip(m.before, m.layers, m.after, strict=True):
            y = after(F.dropout(layer(before(x)), p, m.training))
            x = y + x if turned else x + y
        return x

    kinds = {"before": norm, "layers": partial(nn.Linear, WIDTH, WIDTH), "after": norm if after else nn.Identity}
    return Of(call, **{name: nn.ModuleList(make() for _ in range(2)) for name, make in kinds.items()})


def last() -> nn.Module:
    """Return a sum that is normed, as BERT's; the next block reads what the norm makes of it."""
    parts = {"dense": nn.Linear(WIDTH, WIDTH), "drop": nn.Dropout(0.1), "norm": nn.LayerNorm(WIDTH)}
    return Of(lambda m, x: m.norm(m.drop(m.dense(x)) + x), **parts)


def stack(make: Callable[[], nn.Module]) -> nn.Module:
    """Return blocks after the beginning of a residual stream, which under autocast is in float32."""
    scale = Of(lambda m, x: x * m.weight, weight=nn.Parameter(torch.linspace(0.5, 2, WIDTH)))
    return nn.Sequential(scale, make(), make(), last())


LAYER_NORM = partial(nn.LayerNorm, WIDTH)
# Bytes an element of x that are saved, by precision. A CPU composes nn.RMSNorm of operations that are not seen.
BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[float, ...]]] = {
    "LayerNorm": (partial(block, LAYER_NORM, False, False, 0.0), (26.7, 13.4, 13.4, 18.7)),
    "RMSNorm": (partial(block, partial(nn.RMSNorm, WIDTH), False, True, 0.0), (41.7, 45.4, 45.4, 33.7)),
    "composed": (partial(block, RMSNorm, False, False, 0.0), (24.7, 12.4, 12.4, 16.7)),
    "composed, dropout": (partial(block, RMSNorm, False, True, 0.1), (25.2, 12.9, 12.9, 17.2)),
    "norms of what is added": (partial(block, RMSNorm, True, False, 0.0), (24.9, 14.7, 14.7, 15.2)),
    "LayerNorm of what is added": (partial(block, LAYER_NORM, True, True, 0.1), (29.2, 14.9, 14.9, 19.2)),
    "last": (last, (17.9, 9.2, 9.2, 11.9)),
}


@pytest.mark.parametrize(("place", "precision"), [*enumerate(("float32", "bfloat16", "float16", "autocast"))])
@pytest.mark.parametrize("name", BLOCKS)
def test_sums_under_norms(name: str, place: int, precision: str) -> None:
    """The same bits; where it takes fewer bytes, what a norm's input is a sum of is saved."""
    (dtype, autocast), (make, most) = SETTINGS[precision], BLOCKS[name]
    wide = torch.randn(32, 128, WIDTH)
    before, after = saving_less(partial(stack, make), wide=wide, dtype=dtype, autocast=autocast)
    assert after <= most[place] * wide.numel() < before


def test_a_norm_saves_one_term_of_half_precision() -> None:
    model = block(LAYER_NORM, False, False, 0.0)
    x = torch.randn(256, WIDTH, requires_grad=True)
    with cast(HALF), count_saved(model) as saved, saving():
        y = model(x)
    assert y.dtype == torch.float32
    statistics = 2 * 256 * 4  # mean and 1/σ of a norm, in float32
    assert saved.bytes == 256 * WIDTH * (4 + 2) + 2 * statistics


@precisions
def test_repeated_keys_and_values(dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        q = m.q(x).view(len(x), -1, 4, 8).transpose(1, 2)
        k, v = (layer(x).view(len(x), -1, 2, 8).transpose(1, 2) for layer in (m.k, m.v))
        k = k * torch.linspace(0.5, 1, 8, dtype=m.k.weight.dtype)
        k, v = (one[:, :, None].expand(-1, -1, 2, -1, -1).reshape(len(x), 4, -1, 8) for one in (k, v))
        return F.softmax(q @ k.transpose(2, 3), -1) @ v

    def make() -> nn.Module:
        return Of(call, **{name: nn.Linear(WIDTH, size) for name, size in {"q": 32, "k": 16, "v": 16}.items()})

    x, wide = torch.ones(2, 6, WIDTH), torch.randn(2, 64, WIDTH)
    before, after = saving_less(make, x, wide, dtype=dtype, autocast=autocast)
    assert before - after >= 2 * 2 * 64 * (32 - 16) * (autocast or dtype).itemsize


def centred() -> nn.Module:
    def call(m: Any, x: Tensor) -> Tensor:
        z = x - x.mean(-1, keepdim=True)
        return m.weight * (z / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()) + m.bias

    return Of(call, weight=nn.Parameter(torch.rand(WIDTH)), bias=nn.Parameter(torch.rand(WIDTH)))


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("make", [RMSNorm, Gemma, centred])
def test_a_norm_saves_its_input(make: Callable[[], nn.Module], dtype: torch.dtype, trained: bool) -> None:
    """And nothing else, whether its parameters are trained or not."""
    _, model = pair(lambda: nn.Sequential(make().requires_grad_(trained), nn.Linear(WIDTH, WIDTH)), dtype)
    x = torch.randn(64, WIDTH).to(dtype)
    frozen = 4 * WIDTH * (make is Gemma and not trained)  # 1 + weight
    assert saves((model, model), x)[0] == x.nbytes + frozen
