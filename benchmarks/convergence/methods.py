"""What is compared: how each method changes a model that is made of PyTorch's modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fitact
from fitact.runtime.norms import MSLayerNorm

from ..rivals import BITS, in_place_of_block_codes
from .models import Block, Transformer
from .quantised import QuantisedGelu


@dataclass(frozen=True)
class Method:
    """One way to save less for backward.

    Attributes:
        name: in files and options.
        label: in pictures and sentences.
        family: what it is drawn with.
        activation: makes what takes the place of GELU; None leaves the activation as it is.
        norm: makes, of a shape and ε, what takes the place of LayerNorm, whose affine part is merged into the next
            linear layer and no longer trained by itself; None leaves norms as they are.
        policy: arguments of `fitact.saving`, in which the model is called; None calls it without.
        rival: what takes the place of block codes there, by its name.
        conversion: converts the model, whatever its activation and its norms are; None leaves it as it is.

    """

    name: str
    label: str
    family: str
    activation: Callable[[], nn.Module] | None = None
    norm: Callable[[tuple[int, ...], float], nn.Module] | None = None
    policy: Mapping[str, Any] | None = None
    rival: str = ""
    conversion: Callable[[Transformer], object] | None = None

    @contextmanager
    def around(self, model: Transformer) -> Iterator[Callable[[Tensor], Tensor]]:
        """Return what is called in training, which happens inside this context."""
        with in_place_of_block_codes(self.rival) if self.rival else nullcontext():
            yield model if self.policy is None else fitact.saving(**self.policy)(model)

    def apply(self, model: Transformer) -> None:
        """Change a model in place; it goes on computing the same function, up to rounding."""
        for block in model.blocks:
            assert isinstance(block, Block)
            if self.activation is not None:
                if block.gate is not None:
                    raise ValueError(f"{self.name}: expected an MLP with GELU, got a gated one")
                block.activation = self.activation()
        if self.norm is not None:
            for owner, name, linear in _norms(model):
                norm = getattr(owner, name)
                _merge(norm, linear)
                setattr(owner, name, self.norm(norm.normalized_shape, norm.eps))
        if self.conversion is not None:
            self.conversion(model)


def _norms(model: Transformer) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield the owner and the name of each norm, and the linear layer after it (or after a mean over places)."""
    for block in model.blocks:
        assert isinstance(block, Block)
        yield block, "attention_norm", block.qkv
        yield block, "mlp_norm", block.up
    yield model, "norm", model.head


@torch.no_grad()
def _merge(norm: nn.LayerNorm, linear: nn.Linear) -> None:
    """Put a norm's α and β into the linear layer as well: W·diag(α) and W·β + b."""
    linear.bias.add_(linear.weight @ norm.bias)
    linear.weight.mul_(norm.weight)


def _plural(bits: int) -> str:
    return f"{bits} bit{'s' if bits > 1 else ''}"


def _shipped(method: str, bits: int) -> Callable[[], nn.Module]:
    return partial(fitact.activation, "gelu", method=method, bits=bits)


FAMILIES = FEW_BIT, OTHER, RANDOM, STORED, LEARNED = (
    "Few-Bit",
    "other methods",
    "stochastic quantisation of the input",
    "everything quantised",
    "with learned parameters",
)
EXACT = Method("exact", "exact", "exact")
METHODS = {
    method.name: method
    for method in (
        EXACT,
        *(Method(f"fewbit{k}", f"Few-Bit, {_plural(k)}", FEW_BIT, _shipped("fewbit", k)) for k in (1, 2, 3, 4)),
        Method("relumix2", "ReLU mixture, 2 bits", OTHER, _shipped("relumix", 2)),
        Method("inverted1", "inverted, 1 bit", OTHER, _shipped("inverted", 1)),
        # what is left of a difference beside the next one comes of merging, not of what is saved
        Method(
            "norms-baseline",
            "PyTorch's norms, affine merged",
            OTHER,
            norm=partial(nn.LayerNorm, elementwise_affine=False),
        ),
        Method("norms", "memory-sharing norms", OTHER, norm=MSLayerNorm),
        Method("norms-fewbit3", "sharing norms + Few-Bit, 3 bits", OTHER, _shipped("fewbit", 3), MSLayerNorm),
        *(
            Method(f"stochastic{k}", f"stochastic, {_plural(k)}", RANDOM, partial(QuantisedGelu, k))
            for k in (1, 2, 3, 4)
        ),
        *(
            Method(f"blocks{bits}", f"block codes, {bits} bits", STORED, policy={"bits": bits})
            for bits in (8, 6, 4)
        ),
        Method("coarse", "coarse", STORED, policy={"error": "coarse"}),
        *(Method(name, name, STORED, policy={"bits": bits}, rival=name) for name, bits in BITS.items()),
        Method("recompute", "recomputed", LEARNED, conversion=fitact.convert),
    )
}


def methods_of(setting: str) -> tuple[str, ...]:
    """Return which methods tasks are trained with in a setting, by their names."""
    families = {"stored": (STORED,), "learned": (LEARNED,)}.get(setting, (FEW_BIT, OTHER, RANDOM))
    return tuple(name for name, method in METHODS.items() if method.family in (EXACT.family, *families))
