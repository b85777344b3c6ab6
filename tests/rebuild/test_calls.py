"""Calls in a module's own `forward`: the output and all gradients are stock's, bit for bit, and less is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fitact
from fitact.errors import UsageError
from fitact.runtime.memory.saved import gpu_kernels
from fitact.runtime.rebuild.calls import HANDLERS, _handlers, here
from fitact.runtime.torch_internals import innermost_mode

from .test_rebuild import AROUND, HALF, SETTINGS, RMSNorm, Step, X, cast, differences, kept, observed, train

WIDE = 48


class Feed(nn.Module):
    """An MLP that calls its activation; `call` is of the first layer's output."""

    def __init__(self, call: Callable[[Tensor], Tensor] = F.gelu, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.call, self.p = nn.LayerNorm(16), call, p
        self.fc1, self.fc2 = nn.Linear(16, WIDE), nn.Linear(WIDE, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(F.dropout(self.call(self.fc1(self.norm(x))), self.p, self.training))
        return y


class Experts(nn.Module):
    """As transformers': all weights in two parameters, and each expert has rows of its own."""

    def __init__(self, gate: Callable[[Tensor], Tensor], linear: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.gate, self.linear = RMSNorm(), gate, linear
        self.up = nn.Parameter(torch.randn(3, 2 * WIDE, 16) / 4)
        self.down = nn.Parameter(torch.randn(3, 16, WIDE) / 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, -2)
        output = torch.zeros_like(rows)
        for i in range(3):
            index = torch.arange(i, len(rows) - 1, 2)
            y = self.linear(self.gate(self.linear(rows[index], self.up[i])), self.down[i])
            output.index_add_(0, index, (y * rows[index].mean(-1, keepdim=True)).to(output.dtype))
        return output.view(x.shape)


def gated(both: Tensor) -> Tensor:
    g, u = both.chunk(2, -1)
    return F.silu(g) * u


def clamped(both: Tensor) -> Tensor:
    g, u = both[..., ::2].clamp(max=0.7), both[..., 1::2].clamp(-0.9, 0.9)
    return (u + 1) * (g * torch.sigmoid(1.7 * g))


class Attention(nn.Module):
    """Norms of q and k, rotary embedding, two heads of q for one of k and v."""

    def __init__(self, call: Callable[..., Tensor], norm: Callable[[], nn.Module] = RMSNorm) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(16, 64), nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(64, 16)
        self.q_norm, self.k_norm, self.call = norm(), norm(), call
        self.register_buffer("angles", torch.arange(64.0)[:, None] / torch.tensor([1.0, 3.0, 9.0, 27.0] * 4))

    def rotated(self, x: Tensor) -> Tensor:
        cos, sin = (one[: x.shape[-2]].to(x.dtype) for one in (self.angles.cos(), self.angles.sin()))
        first, second = x[..., :8], x[..., 8:]
        return (x * cos) + (torch.cat((-second, first), dim=-1) * sin)

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:-1], -1, 16)
        q = self.q_norm(self.q(x).view(heads)).transpose(1, 2)
        k = self.k_norm(self.k(x).view(heads)).transpose(1, 2)
        y = self.call(self.rotated(q), self.rotated(k), self.v(x).view(heads).transpose(1, 2))
        z: Tensor = self.o(y.transpose(1, 2).reshape(*x.shape[:-1], 64))
        return z


def repeated(x: Tensor) -> Tensor:
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, 2, s, d).reshape(b, 2 * h, s, d)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask, scale=0.3)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, repeated(k).transpose(2, 3)) * 0.25
    return torch.matmul(F.softmax(scores, -1, dtype=torch.float32).to(v.dtype), repeated(v))


class Cast(nn.Module):
    """An adapter in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.base = RMSNorm(), nn.Linear(16, 16)
        self.a, self.b = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        wide = F.linear(F.linear(y.to(torch.float64), self.a.weight.double()), self.b.weight.double())
        z: Tensor = self.base(y) + wide.to(y.dtype)
        return z


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gelu": Feed,
    "gelu, dropout": partial(Feed, p=0.3),
    "squared relu": partial(Feed, lambda x: F.relu(x).square()),
    "experts": partial(Experts, gated, F.linear),
    "clamped experts": partial(Experts, clamped, lambda x, w: x @ w.t().contiguous()),
    "experts the other way": partial(Experts, gated, lambda x, w: torch.addmm(x.new_ones(len(w)), x, w.t())),
    "attention": partial(Attention, partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)),
    "masked attention": partial(Attention, masked),
    "attention by hand": partial(Attention, by_hand),
    "attention after LayerNorm": partial(Attention, masked, lambda: nn.LayerNorm(16)),
    "adapter": Cast,
    "block": lambda: nn.Sequential(
        MODELS["attention"](), MODELS["experts"](), MODELS["gelu, dropout"](), MODELS["adapter"]()
    ),
}


def pair(
    make: Callable[[], Any], dtype: torch.dtype = torch.float32, x: Tensor = X, gains: bool = True
) -> tuple[Any, Any]:
    """Return a model as it is and rebuilt; if it gains, at least one module's calls keep less."""
    torch.manual_seed(0)
    stock = make().to(dtype).train()
    rebuilt = copy.deepcopy(stock)
    done = fitact.rebuild(rebuilt, example_inputs=(x.to(dtype),))
    calls = [site.after for site in done if site.kind == "calls"]
    assert all(calls) and (calls or not gains)
    return stock, rebuilt


def agree(
    make: Callable[[], Any],
    step: Step = train,
    x: Tensor = X,
    dtype: torch.dtype = torch.float32,
    gains: bool = True,
) -> None:
    stock, rebuilt = pair(make, dtype, x, gains)
    expected, found = (observed(one, step, x.to(dtype)) for one in (stock, rebuilt))
    assert not isinstance(expected, str) and not differences(expected, found)
    assert not here.on and not here.pushed and innermost_mode() is None


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_bytes(name: str, setting: str) -> None:
    dtype, autocast, early = SETTINGS[setting]
    with cast(autocast if early else None):
        stock, rebuilt = pair(MODELS[name], dtype, gains=dtype != torch.float64)
    x = X.to(dtype)
    for seed in range(2):  # the second gradient is added to the first
        with cast(autocast):
            expected, found = (observed(one, train, x, seed) for one in (stock, rebuilt))
        assert not isinstance(expected, str)
        assert not differences(expected, found)
    if dtype == torch.float64:  # the norms keep nothing of float64 themselves
        return
    wide = torch.randn(16, 32, 16).to(dtype)
    modules = copy.deepcopy(stock)
    with suppress(UsageError):  # experts have no linear layers
        fitact.rebuild(modules)
    with cast(autocast):
        before, without, after = (kept(one, wide) for one in (stock, modules, rebuilt))
    assert after < without <= before


# ----------------------------------------------------------------------------------------------- each function

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(F, name) for name in ("gelu", "silu", "mish", "hardswish", "hardsigmoid", "softplus", "glu")},
    **{name: getattr(F, name) for name in ("leaky_relu", "elu", "selu", "celu", "hardtanh", "relu6", "relu")},
    "gelu, tanh": partial(F.gelu, approximate="tanh"),
    "clamp": lambda x: x.clamp(-0.5, max=0.7),
    "clamp, a tensor": lambda x: x.clamp(min=x.mean().detach()),
    "clip": lambda x: torch.clip(x, max=0.7),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "pow": lambda x: x**3,
    "power of it": lambda x: 2**x,
    "square": torch.square,
    "sigmoid": torch.sigmoid,
    "tanh": Tensor.tanh,
    "exp": torch.exp,
    "neg": lambda x: -x,
    "sum": lambda x: x + x.flip(0),
    "sum with itself": lambda x: torch.add(x, x, alpha=3),
    "difference": lambda x: 1 - x,
    "product with itself": lambda x: x * x,
    "product of slices": lambda x: x[..., :24] * x[..., 24:],
    "product with a number": lambda x: 3 * x,
    "product with a tensor": lambda x: x * torch.linspace(0, 1, x.shape[-1]).to(x.dtype),
    "quotient": lambda x: x / (1 + x.exp()),
    "quotient by a number": lambda x: x / 3,
    "quotient of a number": lambda x: 1 / (x + 9),
    "cat": lambda x: torch.cat((-x[..., :24], x[..., 24:]), -1),
    "stack": lambda x: torch.stack((x, x * 2), -1).flatten(-2)[..., ::2],
    "clone": Tensor.clone,
    "turned": lambda x: x.transpose(0, 1).contiguous(),
    "reshaped": lambda x: x.transpose(0, 1).reshape(-1, WIDE),
    "cast": lambda x: x.double().to(x.dtype),
    "type_as": lambda x: x.to(torch.float64).type_as(x),
    "rows": lambda x: x[torch.tensor([1, 0, 0])],
    "rows and columns": lambda x: x[torch.tensor([2, 0]), torch.tensor([1, 4])],
    "rows by a mask": lambda x: x[x.mean(-1) > 0],
    "rows, selected": lambda x: x.index_select(1, torch.tensor([3, 3, 1])),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "in place": lambda x: F.silu(x.clone(), inplace=True),
    "changed afterwards": lambda x: F.gelu(x).mul_(2),
    "a view changed": lambda x: _halved(F.gelu(x)),
    "softmax": lambda x: x.softmax(-1) * x,
    "composed": lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x**3))),
}


def _halved(x: Tensor) -> Tensor:
    x[..., 1:4] *= 0.5
    return x


class One(nn.Module):
    """A function after a linear layer, and after a norm, and linear functions of what it returns."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call, self.norm = call, nn.LayerNorm(WIDE)
        self.fc1, self.fc2 = nn.Linear(16, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        y, z = self.call(x), self.call(self.norm(x))
        weight = self.fc2.weight[:, : y.shape[-1]]
        both = y * z if y.shape == z.shape else z  # not of rows by a mask
        sums = F.linear(F.gelu(y), weight), F.linear(z, weight), F.linear(both, weight, self.fc2.bias)
        return torch.cat([*sums, F.linear(self.call(F.gelu(x)), weight) * x.mean()])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("name", UNARY)
def test_functions(name: str, dtype: torch.dtype) -> None:
    agree(partial(One, UNARY[name]), dtype=dtype)


class Multiplied(nn.Module):
    """A function of an activation's output and of a square weight."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.product, self.fc1, self.weight = product, nn.Linear(16, WIDE), nn.Parameter(torch.randn(WIDE, WIDE))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(F.gelu(self.fc1(x)), self.weight)


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: x @ w.t(),
        lambda x, w: torch.matmul(x, w),
        lambda x, w: torch.mm(x.flatten(0, 1), w.t()),
        lambda x, w: torch.bmm(x, w.expand(len(x), *w.shape)),
        lambda x, w: torch.baddbmm(x, x, w.expand(len(x), *w.shape).transpose(1, 2), beta=0.5),
        lambda x, w: x.flatten(0, 1).addmm(x.flatten(0, 1), w),
        lambda x, w: F.linear(x, w.t()),
        lambda x, w: F.linear(input=x, weight=w, bias=w[0]),
        lambda x, w: F.linear(x[0, 0], w),
        lambda x, w: w @ x.transpose(1, 2),
        lambda x, w: F.linear(x, w.detach()) + F.linear(x.detach(), w),
        lambda x, w: F.linear(x, F.gelu(w)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF, None])
def test_products(product: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype | None) -> None:
    """None is bfloat16 by autocast."""
    with cast(None if dtype else HALF):
        agree(partial(Multiplied, product), dtype=dtype or torch.float32)


@pytest.mark.parametrize("product", [lambda x, w: F.linear(x[:, 1:], w, w[0]), lambda x, w: x.transpose(0, 1) @ w])
def test_products_of_copies(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    """PyTorch multiplies a copy that it makes itself and keeps: nothing is gained, and nothing said to be."""
    with pytest.raises(UsageError, match="nothing to rebuild"):
        fitact.rebuild(Multiplied(product), example_inputs=(X,))


# ------------------------------------------------------------------------------------------ what surrounds it


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(
    "name",
    ["experts", "attention", "gelu, dropout"]
    + [
        pytest.param(one, marks=pytest.mark.full)
        for one in ("clamped experts", "masked attention", "adapter", "block")
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_surroundings(name: str, around: str) -> None:
    if around == "partial" and "experts" in name:  # it asks for weights of two dimensions
        return
    agree(MODELS[name], AROUND[around])


def test_functions_are_found_whatever_stands_in_their_place() -> None:
    with gpu_kernels():
        assert F.scaled_dot_product_attention not in HANDLERS
        assert _handlers().keys() == HANDLERS.keys()
