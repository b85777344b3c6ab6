"""Norms, and activations of transformers: what their inputs are sums of is saved, once for all that read them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fitact import saving
from fitact.runtime.measure.prepare import imported
from fitact.runtime.measure.saved import count_saved
from tests.support.blocks import Own
from tests.support.saving import HALF, cast, differences, kept, observed, pair, train

WIDTH = 16


class Composed(nn.Module):
    """A norm of several operations, as transformers' are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        y: Tensor = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)
        return y


class Block(nn.Module):
    """Two residual sums, after norms of what is added or before them."""

    def __init__(self, norm: Callable[[int], nn.Module], after: bool, turned: bool, dropout: float) -> None:
        super().__init__()
        self.before = nn.ModuleList(norm(WIDTH) for _ in range(2))
        self.after = nn.ModuleList(norm(WIDTH) if after else nn.Identity() for _ in range(2))
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
        y: Tensor = x * self.weight
        return y


class Last(nn.Module):
    """A sum that is normed, as BERT's; the next block reads what the norm makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.drop, self.norm = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.drop(self.dense(x)) + x)
        return y


def stack(make: Callable[[], nn.Module], count: int = 2) -> nn.Module:
    return nn.Sequential(Scale(), *(make() for _ in range(count)), Last())


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: Block(nn.LayerNorm, False, False, 0.0),
    "RMSNorm": lambda: Block(nn.RMSNorm, False, True, 0.0),
    "composed": lambda: Block(Composed, False, False, 0.0),
    "composed, dropout": lambda: Block(Composed, False, True, 0.1),
    "norms of what is added": lambda: Block(Composed, True, False, 0.0),
    "LayerNorm of what is added": lambda: Block(nn.LayerNorm, True, True, 0.1),
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
PRECISIONS = {
    "float32": (torch.float32, None),
    "bfloat16": (HALF, None),
    "float16": (torch.float16, None),
    "autocast": (torch.float32, HALF),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", BLOCKS)
def test_sums_under_norms(name: str, precision: str) -> None:
    """The same bits; where it takes fewer bytes, what a norm's input is a sum of is saved."""
    dtype, autocast = PRECISIONS[precision]
    models = pair(lambda: stack(BLOCKS[name]), dtype)
    x, wide = torch.randn(3, 5, WIDTH).to(dtype), torch.randn(32, 128, WIDTH).to(dtype)
    with cast(autocast):
        assert not differences(*(observed(one, train, x) for one in models))
    with cast(autocast):
        before, after = (kept(one, wide) for one in models)
    assert after <= BYTES[name][[*PRECISIONS].index(precision)] * wide.numel() < before


def test_a_norm_saves_one_term_of_half_precision() -> None:
    """Of one block under autocast: x, what is added to it, and the statistics of a norm."""
    model = Block(nn.LayerNorm, False, False, 0.0)
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
        y: Tensor = F.softmax(q @ k.transpose(2, 3), -1) @ v
        return y


@pytest.mark.parametrize("precision", PRECISIONS)
def test_repeated_keys_and_values(precision: str) -> None:
    """They are saved once for all heads that read them."""
    dtype, autocast = PRECISIONS[precision]
    models = pair(Repeats, dtype)
    with cast(autocast):
        assert not differences(*(observed(one, train, torch.ones(2, 6, WIDTH).to(dtype)) for one in models))
    wide = torch.randn(2, 64, WIDTH).to(dtype)
    with cast(autocast):
        before, after = (kept(one, wide) for one in models)
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
    made: nn.Module = getattr(imported(f"transformers.models.{kind}.modeling_{kind}"), name)(*given)
    return made


MAKE: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(named, "activations", name) for name in NAMES},
    "own": Own,
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
    def __init__(self, act: nn.Module, around: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.act, self.fc, self.around = nn.Linear(WIDTH, WIDTH), act, nn.Linear(WIDTH, WIDTH), around

    def forward(self, x: Tensor) -> Tensor:
        return self.around(self, self.first(x))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # PyTorch's own
@pytest.mark.parametrize("setting", PRECISIONS)
@pytest.mark.parametrize("name", MAKE)
def test_order_of_sums(name: str, setting: str) -> None:
    """Gradients of what several operations read are added as PyTorch adds them."""
    dtype, autocast = PRECISIONS[setting]
    for how in AROUND.values():
        models = pair(lambda how=how: Around(MAKE[name](), how), dtype)
        for rows in (1, 7, 64):
            x = torch.randn(rows, WIDTH).to(dtype)
            with cast(autocast):
                expected, found = (observed(one, train, x) for one in models)
            assert not isinstance(expected, str)
            assert not differences(expected, found)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("name", ["llama", "t5", "gemma", "layer"])
def test_a_norm_saves_its_input(name: str, dtype: torch.dtype, trained: bool) -> None:
    """And nothing else, whether its parameters are trained or not; if it begins with `x - x.mean()`, that too."""

    def make() -> nn.Module:
        model = nn.Sequential(MAKE[name](), nn.Linear(WIDTH, WIDTH))
        model[0].requires_grad_(trained)
        return model

    _, model = pair(make, dtype)
    x = torch.randn(64, WIDTH).to(dtype)
    frozen = 4 * WIDTH * (name == "gemma" and not trained)  # 1 + weight
    assert kept(model, x) == x.nbytes * (2 if name == "layer" else 1) + frozen


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "one node, two edges": lambda x: x * x * torch.sigmoid(x),
    "two edges, two gradients": lambda x: torch.lerp(x, x, 0.3) / (torch.atan2(x, x) + x.abs() + 2),
    "an operation that is several": lambda x: torch.nn.functional.cosine_similarity(x, x.exp(), -1)[..., None] * x,
    "a list": lambda x: torch.stack([x, x.sin(), x]).prod(0),
    "a view": lambda x: x.t().sin().t() + x[:, :1] * x.flip(0),
    "many": lambda x: x.sin() + x.cos() * x.tanh() - x.exp() * 1e-3 + x.sigmoid(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    """One tensor read by one operation twice, in lists, as views."""
    function, weight, given = FUNCTIONS[name], torch.randn(WIDTH, WIDTH), torch.randn(20, WIDTH)
    for around in (
        lambda f, x: f(x) @ weight,
        lambda f, x: x.sin() * (f(x) @ weight) + x * 0.3,
        lambda f, x: x.cos() + f(x) * f(x * 1.0001) + x.cos() * f(x),
    ):
        found = []
        for context in nullcontext(), saving():
            x = given.clone().requires_grad_()
            with context:
                y = around(function, x.tanh() * 2)
            y.square().sum().backward()
            found.append(x.grad)
        assert not differences(*found)
