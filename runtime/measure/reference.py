"""Models with published counts of saved bytes, to check the counting and to compare methods and baselines.

Each function returns a model and its input, as `fitact memory MODULE:FUNCTION` expects:

    fitact memory fitact.runtime.measure.reference:gelu_mlp --batch 2 --seq 4096
    fitact memory fitact.runtime.measure.reference:gelu_mlp --batch 2 --seq 4096 --freeze "down.*"
    fitact memory fitact.runtime.measure.reference:swiglu_mlp --batch 2 --seq 4096
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN = 1024
EXPANSION = 4


class MLP(nn.Sequential):
    """up → activation → down → dropout."""

    def __init__(self, activation: nn.Module, hidden: int = HIDDEN, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, EXPANSION * hidden)
        self.activation = activation
        self.down = nn.Linear(EXPANSION * hidden, hidden)
        self.dropout = nn.Dropout(dropout)


class GatedMLP(nn.Module):
    """down(activation(gate) · up): with SiLU, SwiGLU."""

    def __init__(self, activation: nn.Module, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, EXPANSION * hidden)
        self.up = nn.Linear(hidden, EXPANSION * hidden)
        self.activation = activation
        self.down = nn.Linear(EXPANSION * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, of the shape of x."""
        y: Tensor = self.down(self.activation(self.gate(x)) * self.up(x))
        return y


class ReLUSquared(nn.Module):
    """relu(x)², as PyTorch composes it."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, of the shape of x."""
        return F.relu(x).square()


class Attention(nn.Module):
    """Self-attention of all positions, fused or composed of operations."""

    def __init__(self, heads: int, hidden: int, fused: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.score_dropout, self.dropout = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, of the shape of x."""
        batch, seq, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.score_dropout.p)
        else:
            scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
            mixed = self.score_dropout(scores.softmax(-1)) @ v
        y: Tensor = self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, seq, hidden)))
        return y


class Block(nn.Module):
    """Pre-norm attention and MLP, each with its residual."""

    def __init__(
        self, activation: nn.Module, heads: int = 2, hidden: int = HIDDEN, fused: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(heads, hidden, fused, dropout)
        self.mlp = MLP(activation, hidden, dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, of the shape of x."""
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


Example = tuple[nn.Module, Tensor]


def gelu_mlp(batch: int = 2, seq: int = 4096) -> Example:
    """1024 → 4096 → 1024 with GELU."""
    return MLP(nn.GELU()), torch.randn(batch, seq, HIDDEN)


def relu_mlp(batch: int = 2, seq: int = 4096) -> Example:
    """1024 → 4096 → 1024 with ReLU."""
    return MLP(nn.ReLU()), torch.randn(batch, seq, HIDDEN)


def relu2_mlp(batch: int = 2, seq: int = 4096) -> Example:
    """1024 → 4096 → 1024 with relu(x)²."""
    return MLP(ReLUSquared()), torch.randn(batch, seq, HIDDEN)


def swiglu_mlp(batch: int = 2, seq: int = 4096) -> Example:
    """1024 → 4096 → 1024 with a SiLU gate."""
    return GatedMLP(nn.SiLU()), torch.randn(batch, seq, HIDDEN)


def gelu_block(batch: int = 2, seq: int = 4096) -> Example:
    """Block with GELU, fused attention of 2 heads, hidden 1024, no dropout."""
    return Block(nn.GELU()), torch.randn(batch, seq, HIDDEN)


def relu_block(batch: int = 2, seq: int = 4096) -> Example:
    """Block with ReLU, fused attention of 2 heads, hidden 1024, no dropout."""
    return Block(nn.ReLU()), torch.randn(batch, seq, HIDDEN)


def composed_block(batch: int = 1, seq: int = 2048) -> Example:
    """Block of the formula 34bsh + 5bs²a: attention not fused, 16 heads, hidden 1024, three dropouts."""
    return Block(nn.GELU(), 16, HIDDEN, fused=False, dropout=0.1), torch.randn(batch, seq, HIDDEN)


def closed_form(batch: int, seq: int, hidden: int, heads: int) -> dict[str, int]:
    """Return the bytes that a transformer layer saves, by term: 34bsh + 5bs²a of elements of 2 bytes.

    Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, arXiv 2205.05198,
    section 4.1: attention that is not fused, an MLP that expands 4 times, three dropouts with masks of one byte
    per element. The mean and deviation that a norm saves for each row are not counted.
    """
    unit, scores = batch * seq * hidden, batch * seq * seq * heads
    return {
        "attention": 11 * unit,  # the inputs of q, k, v and of the projection, q, k, v, a mask
        "scores": 5 * scores,  # softmax, its dropout, a mask: fused attention does not save these
        "mlp": 19 * unit,  # its input, the activation's input and output, a mask
        "norms": 4 * unit,
    }
