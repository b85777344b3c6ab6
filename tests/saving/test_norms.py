"""Norms, and activations of transformers: what their inputs are sums of is saved, once for all that read them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fitact import saving
from fitact.runtime.measure.prepare import imported
from fitact.runtime.measure.saved import count_saved
from tests.support.blocks import Own, RMSNorm
from tests.support.saving import HALF, SETTINGS, agree, cast, pair, saves

WIDTH = 16


class Block(nn.Module):
    """Two residual sums, after norms of what is added or before them."""

    def __init__(self, norm: Callable[[], nn.Module], after: bool, turned: bool, dropout: float) -> None:
        super().__init__()
        self.before = nn.ModuleList(norm() for _ in range(2))
        self.after = nn.ModuleList(norm() if after else nn.Identity() for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.drop, self.turned = nn.Dropout(dropout), turned

    def forward(self, x: Tensor) -> Tensor:
        for before, layer, after in zip(self.before, self.layers, self.after, strict=True):
            y = after(self.drop(layer(before(x))))
            x = y + x if self.turned else x + y
        return x


class Scale(nn.Module):
    """A residual stream begins; under autocast it is in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Last(nn.Module):
    """A sum that is normed, as BERT's; the next block reads what the norm makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.drop, self.norm = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.drop(self.dense(x)) + x)


def stack(make: Callable[[], nn.Module], count: int = 2) -> nn.Module:
    return nn.Sequential(Scale(), *(make() for _ in range(count)), Last())


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: Block(partial(nn.LayerNorm, WIDTH), False, False, 0.0),
    "RMSNorm": lambda: Block(partial(nn.RMSNorm, WIDTH), False, True, 0.0),
    "composed": lambda: Block(RMSNorm, False, False, 0.0),
    "composed, dropout": lambda: Block(RMSNorm, False, True, 0.1),
    "norms of what is added": lambda: Block(RMSNorm, True, False, 0.0),
    "LayerNorm of what is added": lambda: Block(partial(nn.LayerNorm, WIDTH), True, True, 0.1),
    "last": Last,
}
# Bytes an element of x that are saved, by precision. A CPU composes nn.RMSNorm of operations that are
# not seen.
BYTES = {
    "LayerNorm": (26.7, 13.4, 13.4, 18.7),
    "RMSNorm": (41.7, 45.4, 45.4, 33.7),
    "composed": (24.7, 12.4, 12.4, 16.7),
    "composed, dropout": (25.2, 12.9, 12.9, 17.2),
    "norms of what is added": (24.9, 14.7, 14.7, 15.2),
    "LayerNorm of what is added": (29.2, 14.9, 14.9, 19.2),
    "last": (17.9, 9.2, 9.2, 11.9),
}
PRECISIONS = {name: SETTINGS[name] for name in ("float32", "bfloat16", "float16", "autocast")}
precisions = pytest.mark.parametrize(("dtype", "autocast"), PRECISIONS.values(), ids=PRECISIONS)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", BLOCKS)
def test_sums_under_norms(name: str, precision: str) -> None:
    """The same bits; where it takes fewer bytes, what a norm's input is a sum of is saved."""
    dtype, autocast = PRECISIONS[precision]
    models = agree(lambda: stack(BLOCKS[name]), dtype=dtype, autocast=autocast)
    wide = torch.randn(32, 128, WIDTH).to(dtype)
    before, after = saves(models, wide, autocast)
    assert after <= BYTES[name][[*PRECISIONS].index(precision)] * wide.numel() < before


def test_a_norm_saves_one_term_of_half_precision() -> None:
    """Of one block under autocast: x, what is added to it, and the statistics of a norm."""
    model = Block(partial(nn.LayerNorm, WIDTH), False, False, 0.0)
    x = torch.randn(256, WIDTH, requires_grad=True)
    with cast(HALF), count_saved(model) as saved, saving():
        y = model(x)
    assert y.dtype == torch.float32
    statistics = 2 * 256 * 4  # mean and 1/σ of a norm, in float32
    assert saved.bytes == 256 * WIDTH * (4 + 2) + 2 * statistics


class Repeats(nn.Module):
    """Attention whose keys and values are shared by heads, after a product with float32."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(len(x), -1, 4, 8).transpose(1, 2)
        k, v = (layer(x).view(len(x), -1, 2, 8).transpose(1, 2) for layer in (self.k, self.v))
        k = k * torch.linspace(0.5, 1, 8, dtype=self.k.weight.dtype)
        k, v = (one[:, :, None].expand(-1, -1, 2, -1, -1).reshape(len(x), 4, -1, 8) for one in (k, v))
        return F.softmax(q @ k.transpose(2, 3), -1) @ v


@precisions
def test_repeated_keys_and_values(dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    """They are saved once for all heads that read them."""
    models = agree(Repeats, x=torch.ones(2, 6, WIDTH), dtype=dtype, autocast=autocast)
    before, after = saves(models, torch.randn(2, 64, WIDTH).to(dtype), autocast)
    assert before - after >= 2 * 2 * 64 * (32 - 16) * (autocast or dtype).itemsize


# ------------------------------------------------------------------------------------------ alone, and read twice

NAMES = ("gelu_new", "quick_gelu", "gelu_fast", "gelu_accurate", "relu2")


class Layer(nn.Module):
    """A LayerNorm of its own, of several operations."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(size)), nn.Parameter(torch.rand(size))
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        z = x - x.mean(-1, keepdim=True)
        return self.weight * (z / (x.var(-1, keepdim=True, unbiased=False) + self.eps).sqrt()) + self.bias


def named(kind: str, name: str, *given: int) -> nn.Module:
    """Return an activation or a norm of transformers."""
    imported("transformers")
    if kind == "activations":
        return imported("transformers.activations").ACT2FN[name]
    return getattr(imported(f"transformers.models.{kind}.modeling_{kind}"), name)(*given)


MAKE: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(named, "activations", name) for name in NAMES},
    "gelu": nn.GELU,
    "own": Own,
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "llama": lambda: named("llama", "LlamaRMSNorm", WIDTH),
    "t5": lambda: named("t5", "T5LayerNorm", WIDTH),
    "gemma": lambda: named("gemma", "GemmaRMSNorm", WIDTH),
    "rms": lambda: nn.RMSNorm(WIDTH),
    "layer": lambda: Layer(WIDTH),
}
AROUND: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "alone": lambda m, x: m.fc(m.act(x)),
    "residual": lambda m, x: x + m.fc(m.act(x)),
    "residual after": lambda m, x: m.fc(m.act(x)) + x,
    "before": lambda m, x: x.exp() * 1e-3 + (x * x).sin() + m.fc(m.act(x)),
    "after": lambda m, x: m.fc(m.act(x)) * x.sin() + x * 0.37,
    "both": lambda m, x: x.cos() * m.fc(m.act(x)) + (x * 1.3).tanh() + x,
    "twice": lambda m, x: m.fc(m.act(x)) + x.sin() * m.fc(m.act(x)),
}


class Around(nn.Module):
    def __init__(self, act: Callable[[], nn.Module], around: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.fc, self.around = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), around
        self.act = act()

    def forward(self, x: Tensor) -> Tensor:
        return self.around(self, self.first(x))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # PyTorch's own
@precisions
@pytest.mark.parametrize("name", MAKE)
def test_order_of_sums(name: str, dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    """Gradients of what several operations read are added as PyTorch adds them."""
    for how in AROUND.values():
        for rows in (1, 7, 64):
            make = partial(Around, MAKE[name], how)
            agree(make, x=torch.randn(rows, WIDTH), dtype=dtype, autocast=autocast)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("name", ["llama", "t5", "gemma", "layer"])
def test_a_norm_saves_its_input(name: str, dtype: torch.dtype, trained: bool) -> None:
    """And nothing else, whether its parameters are trained or not."""

    def make() -> nn.Module:
        model = nn.Sequential(MAKE[name](), nn.Linear(WIDTH, WIDTH))
        model[0].requires_grad_(trained)
        return model

    _, model = pair(make, dtype)
    x = torch.randn(64, WIDTH).to(dtype)
    frozen = 4 * WIDTH * (name == "gemma" and not trained)  # 1 + weight
    assert saves((model, model), x)[0] == x.nbytes + frozen
