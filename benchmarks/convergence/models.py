"""A small pre-norm transformer: causal over characters, or over an image's patches, with their mean read out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and MLP, (batch, length, width) → the same. Methods replace its activation and its norms."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.attention_norm: nn.Module = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_norm: nn.Module = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activation: nn.Module = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """Return x with what attention and MLP add to it."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = self.down(self.activation(self.up(self.mlp_norm(x))))
        return x + added


class Transformer(nn.Module):
    """Blocks between an embedding and a linear head.

    Args:
        embedding: inputs (batch, length, …) → (batch, length, width).
        length: at most, of the inputs.
        width, heads, layers: of the blocks.
        outputs: logits at each place; of the mean over places if not causal.
        causal: whether a place sees only those before it.

    """

    def __init__(
        self, embedding: nn.Module, *, length: int, width: int, heads: int, layers: int, outputs: int, causal: bool
    ) -> None:
        super().__init__()
        self.embedding, self.position, self.causal = embedding, nn.Embedding(length, width), causal
        self.blocks = nn.ModuleList(Block(width, heads, causal=causal) for _ in range(layers))
        self.norm: nn.Module = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits: (batch, length, outputs), or (batch, outputs) if not causal."""
        x = self.embedding(inputs) + self.position(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits: Tensor = self.head(x if self.causal else x.mean(1))
        return logits
