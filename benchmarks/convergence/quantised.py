"""The rival: save the input of GELU itself, each group of 256 elements rounded at random to a few bits.

The scheme of ActNN (J. Chen et al., *ActNN: Reducing Training Memory Footprint via 2-Bit Activation Compressed
Training*, ICML 2021, section 3): of each group its least value and its range are saved, and each element as one of
2^b evenly spaced points, the upper or the lower neighbour at random so that the mean is the element. Backward is
exact, but at the restored input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

GROUP = 256  # elements
PACK = 8  # codes that fill whole bytes at any width


def quantise(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round a tensor at random to 2^bits points a group.

    Args:
        x: of any shape and floating dtype, not empty. Its elements are grouped in order; the last group is filled
            up with copies of the last element.
        bits: 1 to 4.

    Returns:
        Codes, packed, (groups, GROUP · bits / 8) of uint8; least value and range of each group, (groups, 1) of
        float32. Together bits + 0.25 bits an element. Draws from PyTorch's global generator of the device.

    """
    flat = x.detach().reshape(-1).float()
    flat = torch.cat([flat, flat[-1:].expand(-flat.numel() % GROUP)])
    groups = flat.view(-1, GROUP)
    least, most = groups.aminmax(dim=1, keepdim=True)
    spread = most - least
    top = (1 << bits) - 1
    places = (groups - least) / spread.where(spread > 0, 1) * top
    # places + a number below 1 may round up to top + 1
    codes = (places + torch.rand_like(places)).floor_().clamp_(0, top).to(torch.int32)
    words = (codes.view(len(codes), -1, PACK) << _shifts(PACK, bits, x.device)).sum(-1, dtype=torch.int32)
    planes = (words[..., None] >> _shifts(bits, 8, x.device)) & 0xFF
    return planes.flatten(1).to(torch.uint8), least, spread


def restore(packed: Tensor, least: Tensor, spread: Tensor, bits: int) -> Tensor:
    """Return the points that were rounded to, (groups, GROUP) of float32, from what `quantise` returns."""
    planes = packed.view(len(packed), -1, bits).to(torch.int32)
    words = (planes << _shifts(bits, 8, packed.device)).sum(-1, dtype=torch.int32)
    top = (1 << bits) - 1
    codes = (words[..., None] >> _shifts(PACK, bits, packed.device)) & top
    return codes.flatten(1) * (spread / top) + least


def _shifts(count: int, width: int, device: torch.device) -> Tensor:
    return torch.arange(0, count * width, width, dtype=torch.int32, device=device)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: int) -> Tensor:
        ctx.save_for_backward(*quantise(x, bits))
        ctx.bits = bits
        return F.gelu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        packed, least, spread = ctx.saved_tensors
        x = restore(packed, least, spread, ctx.bits).view(-1)[: dy.numel()].view(dy.shape).to(dy.dtype)
        return torch.ops.aten.gelu_backward(dy, x), None


class QuantisedGelu(nn.Module):
    """GELU that saves its input, rounded at random to `bits` bits an element, for backward."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def forward(self, x: Tensor) -> Tensor:
        """Return GELU, which is exact; shape and dtype of x."""
        y: Tensor = _Gelu.apply(x, self.bits)
        return y
