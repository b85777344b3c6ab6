"""Small models that call functions in a `forward` of their own: MLPs, experts, attention, adapters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import RMSNorm

WIDE = 48


class Feed(nn.Module):
    """An MLP that calls its activation; `call` is of the first layer's output."""

    def __init__(self, call: Callable[[Tensor], Tensor] = F.gelu, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.call, self.p = nn.LayerNorm(16), call, p
        self.fc1, self.fc2 = nn.Linear(16, WIDE), nn.Linear(WIDE, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.dropout(self.call(self.fc1(self.norm(x))), self.p, self.training))


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
        return self.o(y.transpose(1, 2).reshape(*x.shape[:-1], 64))


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
        return self.base(y) + wide.to(y.dtype)


CALLS: dict[str, Callable[[], nn.Module]] = {
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
        CALLS["attention"](), CALLS["experts"](), CALLS["gelu, dropout"](), CALLS["adapter"]()
    ),
}
