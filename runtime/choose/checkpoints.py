"""Blocks that are run again in backward, wholly or but for products of matrices."""

from __future__ import annotations

from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fitact.runtime.measure import FLOPS, count_unseen
from fitact.runtime.saving import Amount
from fitact.runtime.saving import checkpoint as checkpoint_of_error
from fitact.runtime.torch_internals import FakeTensor, saved_selectively, tree_iter

CHECKPOINTS = ("", "checkpointed", "checkpointed selectively")
Kind = tuple[str, str, Amount]
# From 2.14 on, hooks of saved tensors can see what a selective checkpoint saves; this hides it from them.
UNSEEN = (
    {"respect_saved_tensors_hooks": False}
    if "respect_saved_tensors_hooks" in signature(checkpoint).parameters
    else {}
)


def selectively() -> tuple[Any, Any]:
    """Return contexts of a checkpoint that saves results of matrix products, convolutions and attention."""
    pair: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)
    return pair


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    costly = getattr(operation, "overloadpacket", operation) in FLOPS
    return CheckpointPolicy.MUST_SAVE if costly else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed:
    """A block that is run again in backward; its class is a subclass of the block's own, with the same name.

    Attributes:
        fitact_inner: the class that the block had.
        fitact_checkpoint: one of CHECKPOINTS, the error of what it is given, and what of that is offloaded.

    """

    fitact_inner: type[Any]
    fitact_checkpoint: Kind

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Do what the block does, and save only its arguments, or also the results of products."""
        given = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        pairs: list[tuple[Any, Any]] = []
        # fake tensors have no random numbers
        options: dict[str, Any] = {"preserve_rng_state": not any(isinstance(leaf, FakeTensor) for leaf in given)}

        def contexts() -> tuple[Any, Any]:
            pairs.append(selectively())
            return pairs[-1]

        kind, error, offload = self.fitact_checkpoint
        if kind == CHECKPOINTS[2]:
            options |= {"context_fn": contexts, **UNSEEN}
        run = partial(self.fitact_inner.forward, self)
        if error != "exact" or offload:
            options |= {"error": error, "offload": offload}
        elif torch.is_grad_enabled():
            count_unseen(given)
        checked = checkpoint_of_error if "error" in options else checkpoint
        result = checked(run, *args, use_reentrant=False, **options, **kwargs)
        count_unseen(tensor for pair in pairs for tensor in saved_selectively(pair[0]))
        pairs.clear()
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to make the block again: its class is nowhere to be imported from."""
        return _again, (self.fitact_checkpoint, self.fitact_inner), self.__dict__.copy()


@cache
def _class(kind: Kind, inner: Any) -> Any:
    names = {"fitact_inner": inner, "fitact_checkpoint": kind}
    names |= {"__module__": inner.__module__, "__qualname__": inner.__qualname__}
    return type(inner.__name__, (Checkpointed, inner), names)


def _again(kind: Kind, inner: Any) -> Any:
    made = _class(kind, inner)
    return made.__new__(made)


def check_in(block: nn.Module, kind: str, error: str = "exact", offload: Amount = False) -> None:
    """Let a block be run again in backward, in place.

    Args:
        block: the block.
        kind: one of CHECKPOINTS, but the first.
        error: of what the block is given, as for `fitact.checkpoint`.
        offload: what of that goes to the host, likewise.

    """
    inner: Any = type(block)
    block.__class__ = _class((kind, error, offload), inner)


def check_out(block: nn.Module) -> bool:
    """Let a block be run once again, in place; returns whether it was run again in backward."""
    if not isinstance(block, Checkpointed):
        return False
    block.__class__ = block.fitact_inner
    return True
