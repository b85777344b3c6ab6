"""Blocks that are run again in backward, wholly or but for products of matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fitact.runtime.measure import FLOPS, count_unseen
from fitact.runtime.saving import Amount
from fitact.runtime.saving import checkpoint as checkpoint_of_error
from fitact.runtime.torch_internals import FakeTensor, argument, saved_selectively, tree_iter

CHECKPOINTS = ("", "checkpointed", "checkpointed selectively")
# From 2.14 on, hooks of saved tensors can see what a selective checkpoint saves; this hides it from them.
UNSEEN = dict.fromkeys({"respect_saved_tensors_hooks"} & signature(checkpoint).parameters.keys(), False)


def selectively() -> tuple[Any, Any]:
    """Return contexts of a checkpoint that saves results of matrix products, convolutions and attention."""
    pair: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)
    return pair


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    costly = getattr(operation, "overloadpacket", operation) in FLOPS
    # Attention that drops draws random numbers. Saved, it would not draw them again, and what follows it would get
    # them in its place.
    saved = costly and not argument(operation, "dropout_p", args, kwargs)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True)
class Checkpoint:
    """Runs a block again in backward: saves only its arguments, or also the results of products."""

    kind: str  # one of CHECKPOINTS, but the first
    error: str = "exact"  # of what the block is given, as for `fitact.checkpoint`
    offload: Amount = False  # what of that is offloaded, likewise

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        given = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        pairs: list[tuple[Any, Any]] = []
        # fake tensors have no random numbers
        options: dict[str, Any] = {"preserve_rng_state": not any(isinstance(leaf, FakeTensor) for leaf in given)}

        def contexts() -> tuple[Any, Any]:
            pairs.append(selectively())
            return pairs[-1]

        if self.kind == CHECKPOINTS[2]:
            # the compiler takes a plain function alone
            options |= {"context_fn": selectively if torch.compiler.is_compiling() else contexts, **UNSEEN}
        if self.error != "exact" or self.offload:
            options |= {"error": self.error, "offload": self.offload}
        elif torch.is_grad_enabled():
            count_unseen(given)
        checked = checkpoint_of_error if "error" in options else checkpoint
        result = checked(run, *args, use_reentrant=False, **options, **kwargs)
        count_unseen(tensor for pair in pairs for tensor in saved_selectively(pair[0]))
        pairs.clear()
        return result
