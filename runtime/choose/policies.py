"""The policies of modules: how each saves, and whether it is run again; applied to models, and reverted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fitact.base import UsageError, quote
from fitact.runtime.kernels import is_generated
from fitact.runtime.restore import check_model
from fitact.runtime.saving import (
    CHECKPOINT,
    CONTEXT,
    ERRORS,
    Amount,
    attach,
    baseline,
    detach,
    is_attached,
    saving,
)
from fitact.runtime.torch_internals import is_compiled

from .checkpoints import CHECKPOINTS, Checkpoint
from .convert import convert
from .records import Conversion, SiteRecord
from .replacement import inner, revert_replacements


@dataclass(frozen=True)
class Policy:
    """How a module is trained."""

    name: str  # in plans and tables
    error: str = "exact"  # one of `fitact.saving`'s, what it does to gradients
    context: AbstractContextManager[Any] | None = None  # what the module's forward runs in
    method: str | None = None  # of `fitact.convert`, by which its activations are replaced
    bits: int | None = None  # of the method; None for its default
    checkpoint: str = ""  # one of CHECKPOINTS; what the module is given is stored by the error, too
    offload: Amount = False  # what of the saved is offloaded; of a checkpoint, of what it is given


SHARES: dict[str, str | float] = {"a quarter offloaded": 0.25, "half offloaded": 0.5, "offloaded": "all"}


def _of_blocks() -> Iterator[Policy]:
    few = [Policy("baseline"), *(Policy(kind, checkpoint=kind) for kind in CHECKPOINTS[1:])]
    for error in ERRORS:
        for kind in CHECKPOINTS[:2]:
            name = ", ".join(filter(None, (error, kind)))
            few.append(Policy(name, error, saving(error), checkpoint=kind))
    yield from few
    yield Policy("derivatives by the output", "rounding", method="output")
    yield Policy("derivatives by the output and a bit", "rounding", method="inverted")
    yield Policy("derivatives in 3 bits", "coarse", method="fewbit")
    for error in ERRORS:
        for share, amount in SHARES.items():
            yield Policy(f"{error}, {share}", error, saving(error, offload=amount), offload=amount)
    for policy in few:
        if policy.checkpoint == CHECKPOINTS[1]:
            yield replace(policy, name=f"{policy.name}, offloaded", offload="all")


OF_BLOCKS = tuple(_of_blocks())
BASELINE, FULL, SELECTIVE = OF_BLOCKS[:3]
# A checkpoint's inputs as they are.
MOVED = next(policy for policy in OF_BLOCKS if policy.checkpoint and policy.offload)
REST = Policy("exact outside of the blocks", context=saving("exact"))  # of the whole model
POLICIES: dict[str, Policy] = {policy.name: policy for policy in (*OF_BLOCKS, REST)}


def apply_policy(module: nn.Module, policy: Policy) -> int:
    """Apply a policy to a module, in place, and return how many activations it replaces; UsageError if none."""
    replaced = 0
    if policy.context is not None:
        attach(module, policy.context)
    if policy.method is not None:
        replaced = len(convert(module, policy.method, policy.bits).replaced)
        if not replaced:
            raise UsageError("it holds no activation that can be replaced")
    if policy.checkpoint:
        attach(module, checkpoint=Checkpoint(policy.checkpoint, policy.error, policy.offload))
    return replaced


@contextmanager
def changed(modules: Sequence[nn.Module], policies: Sequence[Policy]) -> Iterator[int]:
    """Change modules by policies until the context ends; the whole model, if it is among them, stands last.

    The context gives how many activations are replaced. UsageError if nothing in a module can be changed so.
    """
    with ExitStack() as stack:
        replaced, rest = 0, REST in policies
        for module, policy in zip(modules, policies, strict=True):
            stack.callback(revert, module)
            replaced += apply_policy(module, _inside(policy, rest))
        yield replaced


def _inside(policy: Policy, rest: bool) -> Policy:
    """Return a block's policy: a baseline block must leave a context that the rest of the model runs in."""
    return replace(BASELINE, context=baseline()) if rest and policy == BASELINE else policy


def apply(model: nn.Module, groups: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Change the blocks of a model, in place, by the names of policies, each with the paths of its blocks.

    UsageError if it has no such block, is changed already, or a block cannot be changed so; it is then unchanged.
    """
    check_model(model)
    there = dict(model.named_modules())
    if any(is_attached(module) or is_generated(type(module)) for module in there.values()):
        raise UsageError("the model is converted or planned already: call fitact.revert(model) first")
    if any(map(is_compiled, there.values())):
        raise UsageError("the model is compiled already: apply the plan first, and compile it then")
    for path in (path for _, paths in groups for path in paths):
        if path not in there:
            raise UsageError(f"the model has no block {quote(path)}: the plan was made for another model")
    rest = any(name == REST.name for name, _ in groups)
    with ExitStack() as undo:
        undo.callback(revert, model)
        for name, paths in groups:
            for path in paths:
                try:
                    apply_policy(there[path], _inside(POLICIES[name], rest))
                except UsageError as error:
                    raise UsageError(f"{path or 'the model'}: {name}: {error}") from None
        undo.pop_all()


def revert(model: nn.Module) -> Conversion:
    """Revert, in place, what `convert` and `Plan.apply` changed.

    Args:
        model: the model, which is changed in place; a model that is not changed stays as it is. Each activation
            becomes the same module or function as before.

    Returns:
        What was reverted.

    Raises:
        UsageError: the model is not an nn.Module.

    """
    model = inner(model)
    checkpoints = _detached(model, "checkpoint", CHECKPOINT)
    replacements = revert_replacements(model)
    return Conversion((*checkpoints, *replacements, *_detached(model, "context", CONTEXT)))


def _detached(model: nn.Module, name: str, what: str) -> list[SiteRecord]:
    """Let all modules run without their contexts or checkpoints, and return what was done."""
    return [
        SiteRecord(path, "module", type(module).__name__, f"no {name}")
        for path, module in model.named_modules()
        if detach(module, what)
    ]
