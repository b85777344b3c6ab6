"""Small models of convolutions, with norms and activations between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .blocks import Of

RANDOM = torch.Generator().manual_seed(4)
IMAGES = {n: torch.randn(3, 8, *(9, 8, 7)[:n], generator=RANDOM) for n in (1, 2, 3)}
KINDS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def turned() -> nn.Module:
    parts = {"fc": nn.Linear(8, 16), "act": nn.SiLU(), "conv": nn.Conv2d(8, 4, 3, padding=1)}
    return Of(lambda m, x: m.conv(m.act(m.fc(x)).transpose(2, 3)[:, :, ::2]), **parts)


def unit(norm: Callable[[], nn.Module], act: Callable[[], nn.Module], n: int = 2) -> nn.Module:
    return nn.Sequential(KINDS[n](8, 16, 3, padding=1), norm(), act(), KINDS[n](16, 8, 3, padding=1))


UNITS: dict[str, Callable[[], nn.Module]] = {
    "turned": turned,
    "group norm": lambda: unit(lambda: nn.GroupNorm(4, 16), nn.SiLU),
    "group norm, plain": lambda: unit(lambda: nn.GroupNorm(2, 16, affine=False), nn.GELU),
    "batch norm": lambda: unit(lambda: nn.BatchNorm2d(16), nn.ReLU),
    "batch norm, plain": lambda: unit(lambda: nn.BatchNorm2d(16, affine=False), nn.Tanh),
    "batch norm, averaged": lambda: unit(lambda: nn.BatchNorm2d(16, momentum=None), nn.SiLU),
    "batch norm, not tracked": lambda: unit(lambda: nn.BatchNorm2d(16, track_running_stats=False), nn.SiLU),
    "in place": lambda: unit(lambda: nn.BatchNorm2d(16), partial(nn.ReLU, inplace=True)),
    "in place, input saved": lambda: unit(lambda: nn.BatchNorm2d(16), partial(nn.Hardswish, inplace=True)),
    "in place, group norm": lambda: unit(lambda: nn.GroupNorm(4, 16), partial(nn.LeakyReLU, 0.1, inplace=True)),
    "two": lambda: nn.Sequential(*(unit(lambda: nn.BatchNorm2d(16), nn.ReLU6) for _ in range(2))),
}
