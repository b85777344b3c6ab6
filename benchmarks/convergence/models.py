"""A small pre-norm transformer: causal over characters, or over an image's patches, with their mean read out.

Its MLPs have GELU or another activation, or are gated by SiLU. In place of its norms it may have layers with
learned parameters.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Swish(nn.Module):
    """x·σ(βx), elementwise, with a learned β that starts at 1, as SiLU."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return the values; shape and dtype of x."""
        return x * torch.sigmoid(self.beta * x)


class DyT(nn.Module):
    """γ·tanh(αx) + β, (…, width) → the same, in place of a norm.

    J. Zhu et al., *Transformers without Normalization*, arXiv 2503.10622; at the start α = 0.5.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the values; shape and dtype of x."""
        return self.weight * torch.tanh(self.alpha * x) + self.bias


class Derf(DyT):
    """γ·erf(αx + s) + β, (…, width) → the same, in place of a norm.

    M. Chen et al., *Stronger Normalization-Free Transformers*, arXiv 2512.10938; at the start α = 0.5 and s = 0.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the values; shape and dtype of x."""
        return self.weight * torch.erf(self.alpha * x + self.shift) + self.bias


class Block(nn.Module):
    """Attention and MLP, (batch, length, width) → the same.

    Methods replace its activation and its norms.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool,
        gated: bool = False,
        activation: Callable[[], nn.Module] = nn.GELU,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.attention_norm = norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_norm = norm(width)
        hidden = 8 * width // 3 if gated else 4 * width  # as many weights
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.activation: nn.Module = nn.SiLU() if gated else activation()
        self.gate = nn.Linear(width, hidden) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        """Return x with what attention and MLP add to it."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))

    def mlp(self, x: Tensor) -> Tensor:
        """Return what the MLP adds for normed x."""
        g, u = (self.up(x), None) if self.gate is None else (self.gate(x), self.up(x))
        y = self.activation(g)
        z: Tensor = self.down(y if u is None else y * u)
        return z


class Transformer(nn.Module):
    """Blocks between an embedding and a linear head.

    Args:
        embedding: inputs (batch, length, …) → (batch, length, width).
        length: at most, of the inputs.
        width, heads, layers: of the blocks.
        outputs: logits at each place; of the mean over places if not causal.
        causal: whether a place sees only those before it.
        gated: whether MLPs are down(silu(gate(x)) · up(x)) rather than down(activation(up(x))).
        activation: makes the activation of MLPs that are not gated.
        norm: makes, of a width, what each block begins its two parts with, and what the head follows.

    """

    def __init__(
        self,
        embedding: nn.Module,
        *,
        length: int,
        width: int,
        heads: int,
        layers: int,
        outputs: int,
        causal: bool,
        gated: bool = False,
        activation: Callable[[], nn.Module] = nn.GELU,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.embedding, self.position, self.causal = embedding, nn.Embedding(length, width), causal
        self.blocks = nn.ModuleList(
            Block(width, heads, causal=causal, gated=gated, activation=activation, norm=norm)
            for _ in range(layers)
        )
        self.norm = norm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits: (batch, length, outputs), or (batch, outputs) if not causal."""
        x = self.embedding(inputs) + self.position(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits: Tensor = self.head(x if self.causal else x.mean(1))
        return logits
