"""Small models of what saving is about: MLPs, norms with several readers, gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
        z: Tensor = self.o(q.sin() * k.cos() + v)
        return x + z


class Gate(nn.Module):
    """down(drop(f(g) · u)), by names that nobody knows."""

    def __init__(self, act: Callable[[], nn.Module] = nn.SiLU, p: float = 0.0, halves: int = 0) -> None:
        super().__init__()
        self.pre, self.halves = RMSNorm(), halves
        self.inner = self.Inner(act, p, halves)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.pre(x))

    class Inner(nn.Module):
        def __init__(self, act: Callable[[], nn.Module], p: float, halves: int) -> None:
            super().__init__()
            self.halves, self.zap, self.sieve = halves, act(), nn.Dropout(p)
            self.wig = nn.Linear(16, 80 if halves else 40, bias=False)
            if not halves:
                self.wam = nn.Linear(16, 40, bias=False)
            self.out = nn.Linear(40, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            g = self.wig(x)
            if self.halves:
                g, u = g.chunk(2, dim=-1)[:: self.halves]
            else:
                u = self.wam(x)
            return self.out(self.sieve(self.zap(g) * u))


class Own(nn.Module):
    """GELU's approximation, as several operations."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


# As models write them: what is saved first is a function of x, which is saved later, or not at all.
BY_HAND: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "silu, turned": lambda x: torch.sigmoid(x) * x,
    "silu, a quotient": lambda x: x / (1 + torch.exp(-x)),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": lambda x: x * 0.5 * (1.0 + torch.erf(x / 2**0.5)),
    "gelu, turned": lambda x: 0.5 * (1.0 + torch.erf(x / 2**0.5)) * x,
    "laplace": lambda x: x * 0.5 * (1 + torch.erf((x - 0.7) / 0.4)),
    "fast gelu": lambda x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))),
    "softplus": lambda x: F.softplus(0.7 * x) * x,
    "hardswish": lambda x: x * F.relu6(x + 3) / 6,
    "a square": lambda x: torch.sigmoid(x) ** 2 * x,
    "three": lambda x: torch.sigmoid(x) + torch.tanh(x) + torch.exp(x),
}


class Hand(nn.Module):
    """Such an activation."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return BY_HAND[self.name](x)


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
