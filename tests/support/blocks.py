"""Small models of what saving is about: MLPs, norms with several readers, gates, experts, attention, adapters."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .built import built

WIDE = 48


class MLP(nn.Module):
    def __init__(self, act: Callable[[], nn.Module] = nn.GELU, p: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.fc1, self.act, self.drop = nn.Linear(16, 32, bias=bias), act(), nn.Dropout(p)
        self.fc2 = nn.Linear(32, 16, bias=bias)

    def hidden(self, x: Tensor) -> Tensor:
        return self.act(self.fc1(self.norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(self.hidden(x)))


class Read(MLP):
    """An MLP whose output is a function `reads` of the model, of x and of what the activation returned."""

    def __init__(self, reads: Callable[[Any, Tensor, Tensor], Tensor], **given: Any) -> None:
        super().__init__(**given)
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        return self.reads(self, x, self.hidden(x))


class RMSNorm(nn.Module):
    """As LLaMA's: in float32, with the weight after the cast."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(16) + 0.5), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        z = x.float()
        return self.weight * (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Gemma(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        z = x.float()
        z = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + self.eps)
        return (z * (1.0 + self.weight.float())).to(x.dtype)


class QKV(nn.Module):
    """Three readers of one norm, between a residual; `drop` is an adapter's dropout, of each reader its own."""

    def __init__(self, norm: Callable[[], nn.Module] = RMSNorm, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 16), norm()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=i > 1) for i in range(4))
        self.drops = nn.ModuleList(nn.Dropout(p) for _ in "qkv")

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.norm(x)
        q, k, v = (layer(drop(y)) for layer, drop in zip((self.q, self.k, self.v), self.drops, strict=True))
        return x + self.o(q.sin() * k.cos() + v)


class Gate(nn.Module):
    """x + out(drop(f(g) · u)), with g and u of two layers, or the halves of a layer's, in either order."""

    def __init__(self, act: Callable[[], nn.Module] = nn.SiLU, p: float = 0.0, halves: int = 0) -> None:
        super().__init__()
        self.pre, self.act, self.drop, self.halves = RMSNorm(), act(), nn.Dropout(p), halves
        widths = [80] if halves else [40, 40]
        self.both = nn.ModuleList(nn.Linear(16, width, bias=False) for width in widths)
        self.out = nn.Linear(40, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.pre(x)
        g, u = self.both[0](z).chunk(2, dim=-1)[:: self.halves] if self.halves else [each(z) for each in self.both]
        return x + self.out(self.drop(self.act(g) * u))


# As models write them: what is saved first is a function of x, which is saved later, or not at all.
BY_HAND: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "silu, turned": lambda x: torch.sigmoid(x) * x,
    "silu, a quotient": lambda x: x / (1 + torch.exp(-x)),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": lambda x: x * 0.5 * (1.0 + torch.erf(x / 2**0.5)),
    "gelu, turned": lambda x: 0.5 * (1.0 + torch.erf(x / 2**0.5)) * x,
    "laplace": lambda x: x * 0.5 * (1 + torch.erf((x - 0.7) / 0.4)),
    "tanh": lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0)))),
    "fast gelu": lambda x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))),
    "softplus": lambda x: F.softplus(0.7 * x) * x,
    "hardswish": lambda x: x * F.relu6(x + 3) / 6,
    "a square": lambda x: torch.sigmoid(x) ** 2 * x,
    "three": lambda x: torch.sigmoid(x) + torch.tanh(x) + torch.exp(x),
}


def hand(name: str) -> nn.Module:
    return built(lambda _, x: BY_HAND[name](x))


Own = partial(hand, "tanh")


class Layer(nn.Module):
    """A transformer's, of 64 features, with four heads."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.drop = nn.Dropout(p)
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.second, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.drop(F.gelu(self.up(self.second(x)))))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": MLP,
    "dropout": lambda: MLP(p=0.3),
    "no bias": lambda: MLP(bias=False, act=nn.SiLU),
    "composed": lambda: MLP(Own),
    "qkv": QKV,
    "qkv of LayerNorm": lambda: QKV(lambda: nn.LayerNorm(16)),
    "qkv of nn.RMSNorm": lambda: QKV(lambda: nn.RMSNorm(16)),
    "plain norm": lambda: QKV(lambda: nn.LayerNorm(16, elementwise_affine=False)),
    "norm without bias": lambda: QKV(lambda: nn.LayerNorm(16, bias=False)),
    "adapters": lambda: QKV(p=0.1),
    "gate": Gate,
    "gate of GELU, dropout": lambda: Gate(nn.GELU, 0.2),
    "gate first": lambda: Gate(halves=1),
    "gate last": lambda: Gate(halves=-1, p=0.2),
    "block": lambda: nn.Sequential(QKV(), Gate(), MLP(p=0.1)),
}


def feed(call: Callable[[Tensor], Tensor] = F.gelu, p: float = 0.0) -> nn.Module:
    return built(
        lambda m, x: m.fc2(F.dropout(call(m.fc1(m.norm(x))), p, m.training)),
        norm=nn.LayerNorm(16),
        fc1=nn.Linear(16, WIDE),
        fc2=nn.Linear(WIDE, 16),
    )


def experts(gate: Callable[[Tensor], Tensor], linear: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """Return experts as transformers': all weights in two parameters, and each expert has rows of its own."""

    def call(m: Any, x: Tensor) -> Tensor:
        rows = m.norm(x).flatten(0, -2)
        output = torch.zeros_like(rows)
        for i in range(3):
            index = torch.arange(i, len(rows) - 1, 2)
            y = linear(gate(linear(rows[index], m.up[i])), m.down[i])
            output.index_add_(0, index, (y * rows[index].mean(-1, keepdim=True)).to(output.dtype))
        return output.view(x.shape)

    up, down = (nn.Parameter(torch.randn(3, *sizes) / 4) for sizes in ((2 * WIDE, 16), (16, WIDE)))
    return built(call, norm=RMSNorm(), up=up, down=down)


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
        cos, sin = (each[: x.shape[-2]].to(x.dtype) for each in (self.angles.cos(), self.angles.sin()))
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


def adapter() -> nn.Module:
    def call(m: Any, x: Tensor) -> Tensor:
        y = m.norm(x)
        wide = F.linear(F.linear(y.to(torch.float64), m.a.weight.double()), m.b.weight.double())
        return m.base(y) + wide.to(y.dtype)

    a, b = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
    return built(call, norm=RMSNorm(), base=nn.Linear(16, 16), a=a, b=b)


CALLS: dict[str, Callable[[], nn.Module]] = {
    "gelu": feed,
    "gelu, dropout": partial(feed, p=0.3),
    "squared relu": partial(feed, lambda x: F.relu(x).square()),
    "experts": partial(experts, gated, F.linear),
    "clamped experts": partial(experts, clamped, lambda x, w: x @ w.t().contiguous()),
    "experts the other way": partial(experts, gated, lambda x, w: torch.addmm(x.new_ones(len(w)), x, w.t())),
    "attention": partial(Attention, partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)),
    "masked attention": partial(Attention, masked),
    "attention by hand": partial(Attention, by_hand),
    "attention after LayerNorm": partial(Attention, masked, lambda: nn.LayerNorm(16)),
    "adapter": adapter,
    "block": lambda: nn.Sequential(
        CALLS["attention"](), CALLS["experts"](), CALLS["gelu, dropout"](), CALLS["adapter"]()
    ),
}
SMALL = MODELS | {f"calls: {name}": make for name, make in CALLS.items()}
RANDOM = torch.Generator().manual_seed(4)
IMAGES = {n: torch.randn(3, 8, *(9, 8, 7)[:n], generator=RANDOM) for n in (1, 2, 3)}
CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def turned() -> nn.Module:
    parts = {"fc": nn.Linear(8, 16), "act": nn.SiLU(), "conv": nn.Conv2d(8, 4, 3, padding=1)}
    return built(lambda m, x: m.conv(m.act(m.fc(x)).transpose(2, 3)[:, :, ::2]), **parts)


def unit(norm: Callable[[], nn.Module], act: Callable[[], nn.Module], n: int = 2) -> nn.Module:
    return nn.Sequential(CONVOLUTIONS[n](8, 16, 3, padding=1), norm(), act(), CONVOLUTIONS[n](16, 8, 3, padding=1))


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
