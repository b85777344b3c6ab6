"""The ways to train a model that are compared: one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch._functorch.config
from torch.utils.checkpoint import checkpoint

import fitact
from benchmarks.gpu.models import SIZES, Forward, Inputs, Loaded, loss_of
from fitact.runtime.choose import selectively


def unchanged(subject: Loaded) -> Forward:
    """Return the forward pass of the model as it is."""
    return lambda inputs: loss_of(subject.model(**inputs))


def converted(subject: Loaded, *arguments: Any, **options: Any) -> Forward:
    """Return the forward pass after `fitact.convert`; its gradients are another part's."""
    inputs = subject.inputs(batch=1)
    fitact.convert(subject.model, *arguments, example_inputs=inputs, gradients=False, **options)
    return unchanged(subject)


def checkpointed(subject: Loaded, **options: Any) -> Forward:
    """Return the forward pass with every block checkpointed."""
    for block in subject.blocks():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
    return unchanged(subject)


def compiled(subject: Loaded, budget: float) -> Forward:
    """Return the forward pass compiled under a memory budget."""
    model = torch.compile(subject.model, dynamic=False)

    def forward(inputs: Inputs) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return loss_of(model(**inputs))

    return forward


def compiled_by_fitact(subject: Loaded, **options: Any) -> Forward:
    """Return the forward pass compiled by `fitact.compile`."""
    model = fitact.compile(subject.model, dynamic=False, **options)
    return lambda inputs: loss_of(model(**inputs))


def with_liger(subject: Loaded, prepare: Callable[[Loaded], Forward] = unchanged) -> Forward:
    """Return the forward pass with Liger's gates, norms and fused loss, after `prepare`."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    model = subject.model.get_base_model() if subject.size.lora else subject.model
    classes = vars(import_module(type(model).__module__))
    before = dict(classes)
    apply_liger_kernel_to_llama(rope=False, fused_linear_cross_entropy=True, model=model)
    classes.update(before)  # it changes the module too, from which the next model is made
    return prepare(subject)


@dataclass(frozen=True)
class Variant:
    """A way to train a model.

    Attributes:
        prepare: changes the model and returns its forward pass.
        exact: whether gradients are those of the baseline, bit for bit.
        compiled: whether the model is compiled, which takes much longer than all else.
        graphed: whether a step is captured as a CUDA graph too.
        kind: the only kind of model that it is for, if not all.

    """

    prepare: Callable[[Loaded], Forward]
    exact: bool = False
    compiled: bool = False
    graphed: bool = True
    kind: str | None = None


VARIANTS = {
    "baseline": Variant(unchanged, exact=True),
    "exact": Variant(partial(converted, error="exact"), exact=True),
    "rounding": Variant(partial(converted, error="rounding")),
    "coarse": Variant(partial(converted, error="coarse")),
    "exact, offloaded": Variant(partial(converted, error="exact", offload="all"), exact=True),
    "rounding, offloaded": Variant(partial(converted, error="rounding", offload="all")),
    "Few-Bit, 3 bits": Variant(partial(converted, method="fewbit", bits=3)),
    "checkpointing": Variant(checkpointed, exact=True),
    "selective checkpointing": Variant(partial(checkpointed, context_fn=selectively), exact=True),
    "Liger": Variant(with_liger, kind="llama", graphed=False),
    "Liger, exact": Variant(partial(with_liger, prepare=converted), kind="llama", graphed=False),
    "baseline, again": Variant(unchanged, exact=True),  # its difference from the first is the noise
    "torch.compile": Variant(partial(compiled, budget=1.0), compiled=True),
    "torch.compile, budget 0.7": Variant(partial(compiled, budget=0.7), compiled=True),
    "fitact.compile": Variant(compiled_by_fitact, compiled=True),
    "fitact.compile, coarse": Variant(partial(compiled_by_fitact, error="coarse"), compiled=True),
}


def variants_of(model: str, compiled: bool) -> list[str]:
    """Return the names of the variants of a model: those that compile it, or the others."""
    return [
        name
        for name, variant in VARIANTS.items()
        if variant.compiled == compiled and variant.kind in (None, SIZES[model].kind)
    ]
