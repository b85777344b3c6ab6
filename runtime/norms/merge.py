"""A norm merged into the linear layers that read it, with which it then shares memory (Approx-BP, section 5)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from fitact.base import UsageError

from .modules import MSLayerNorm, MSRMSNorm

Norm = MSLayerNorm | MSRMSNorm


@torch.no_grad()
def merge_norm(norm: nn.Module, layers: Sequence[nn.Linear]) -> Norm:
    """Put a norm's α and β into the linear layers that read it: W·diag(α) and b + W·β.

    The caller puts what is returned where the norm stood. Norm and layers then compute what they did, up to
    rounding. Only these layers may read the norm's output.

    Args:
        norm: over the last dimension: `nn.LayerNorm`, `nn.RMSNorm`, or a module that computes one of them with
            `weight` or 1 + `weight`, such as those of transformers' LLaMA and Gemma.
        layers: all that read its output, adapters included; changed in place. One without bias gets one for β. No
            other module may have their weights, as an embedding that is tied to a head.

    Returns:
        The norm without α and β, which saves its output for backward.

    Raises:
        UsageError: the module computes neither norm, or a layer does not fit it; nothing is changed then.

    """
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    made = _made(norm, weight, bias) if isinstance(weight, Tensor) and weight.dim() == 1 else None
    if made is None:
        raise UsageError(f"norm: expected a LayerNorm or RMSNorm over the last dimension, got {norm}")
    shared, alpha = made
    given: Sequence[Any] = layers  # of any type, and without a bias, whatever their types say
    for layer in given:
        if not isinstance(layer, nn.Linear) or layer.weight.shape[-1:] != alpha.shape:
            raise UsageError(f"layers: expected linear layers of {alpha.numel()} inputs, got {layer}")
    for layer in dict.fromkeys(given):
        if bias is not None:
            moved, own = layer.weight @ bias.to(layer.weight), layer.bias
            if own is None:
                layer.bias = nn.Parameter(moved, layer.weight.requires_grad)
            else:
                own += moved
        layer.weight *= alpha.to(layer.weight)
    return shared


def _made(norm: nn.Module, weight: Tensor, bias: Tensor | None) -> tuple[Norm, Tensor] | None:
    """Return the norm without α and β, and α; None if the module computes something else."""
    x = torch.randn(4, weight.numel(), generator=torch.Generator().manual_seed(0))
    x = torch.cat([x, 1e-3 * x]).to(weight.device)  # the second rows show eps
    expected = copy.deepcopy(norm).float()(x)
    kinds, n = (MSLayerNorm, MSRMSNorm), weight.numel()
    numbers = [value for value in vars(norm).values() if type(value) is float]
    shares = [kind(n, eps) for eps in numbers for kind in kinds] or [kind(n) for kind in kinds]
    for shared, alpha in product(shares, (weight, 1 + weight)):
        output = shared(x) * alpha.float() + (0 if bias is None else bias.float())
        if torch.allclose(output, expected, rtol=1e-4, atol=1e-5):
            return shared, alpha
    return None
