"""The ways to train a block: how it saves tensors, and whether it is run again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fitact.errors import UsageError, quote
from fitact.runtime.kernels.registry import is_generated
from fitact.runtime.restore import check_model
from fitact.runtime.saving import ERRORS, baseline, saving
from fitact.runtime.saving.modules import attach, has_context
from fitact.runtime.torch_internals import FakeTensor, is_compiled, tree_iter

from .baselines import UNSEEN, selectively
from .convert import convert
from .replacement import revert

CHECKPOINTS = ("", "checkpointed", "checkpointed selectively")


@dataclass(frozen=True)
class Way:
    """A way to train a block.

    Attributes:
        name: in plans and tables.
        error: one of `fitact.saving`'s, what it does to gradients.
        context: what the block's forward runs in; None for nothing.
        method: of `fitact.convert`, by which its activations are replaced; None to replace none.
        checkpoint: one of CHECKPOINTS: whether the block is run again in backward, wholly or but for matrix
            products, convolutions and fused attention.

    """

    name: str
    error: str = "exact"
    context: Callable[[], AbstractContextManager[Any]] | None = None
    method: str | None = None
    checkpoint: str = ""


def _of_blocks() -> Iterator[Way]:
    yield Way("stock")
    yield from (Way(kind, checkpoint=kind) for kind in CHECKPOINTS[1:])
    for error in ERRORS:
        for kind in CHECKPOINTS:
            yield Way(", ".join(filter(None, (error, kind))), error, partial(saving, error), checkpoint=kind)
    yield Way("derivatives by the output", "rounding", method="exact")
    yield Way("derivatives by the output and a bit", "rounding", method="inverted")
    yield Way("derivatives in 3 bits", "coarse", method="fewbit")


OF_BLOCKS = tuple(_of_blocks())
STOCK, FULL, SELECTIVE = OF_BLOCKS[:3]
REST = Way("exact outside of the blocks", context=partial(saving, "exact"))  # of the whole model
WAYS: dict[str, Way] = {way.name: way for way in (*OF_BLOCKS, REST)}


def put(block: nn.Module, way: Way) -> None:
    """Change a block, in place.

    Args:
        block: a stock block, or the whole model.
        way: what it becomes.

    Raises:
        UsageError: nothing in the block can be changed so.

    """
    if way.context is not None:
        attach(block, way.context)
    if way.method is not None and not convert(block, way.method).replaced:
        raise UsageError("it holds no activation that can be replaced")
    if way.checkpoint:
        inner: Any = type(block)
        block.__class__ = _class(way.checkpoint, inner)


def put_back(block: nn.Module) -> None:
    """Put a block back as it was before `put`."""
    if isinstance(block, Checkpointed):
        block.__class__ = block.fitact_inner
    revert(block)


@contextmanager
def changed(blocks: Sequence[nn.Module], ways: Sequence[Way], model: nn.Module, whole: Way) -> Iterator[None]:
    """Change blocks, and what is outside of them, until the context ends.

    Args:
        blocks: the blocks.
        ways: what each becomes.
        model: the whole model.
        whole: what it becomes.

    Raises:
        UsageError: nothing in a block can be changed so.

    """
    with ExitStack() as stack:
        stack.callback(put_back, model)
        for block, way in zip(blocks, ways, strict=True):
            stack.callback(put_back, block)
            put(block, _inside(way, whole))
        put(model, whole)
        yield


def _inside(way: Way, whole: Way) -> Way:
    """Return a way for a block of a model that has a way itself: one that is to stay as it is must leave it."""
    return replace(STOCK, context=baseline) if whole == REST and way == STOCK else way


class Checkpointed:
    """A block that is run again in backward; its class is a subclass of the block's own, with the same name.

    Attributes:
        fitact_inner: the class that the block had.
        fitact_checkpoint: one of CHECKPOINTS.

    """

    fitact_inner: type[Any]
    fitact_checkpoint: str

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Do what the block does, and keep only its arguments, or also the results of products."""
        fake = any(isinstance(leaf, FakeTensor) for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor))
        options: dict[str, Any] = {"preserve_rng_state": not fake}  # fake tensors have no random numbers
        if self.fitact_checkpoint == CHECKPOINTS[2]:
            options |= {"context_fn": selectively, **UNSEEN}
        run = partial(self.fitact_inner.forward, self)
        return checkpoint(run, *args, use_reentrant=False, **options, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to make the block again: its class is nowhere to be imported from."""
        return _again, (self.fitact_checkpoint, self.fitact_inner), self.__dict__.copy()


@cache
def _class(kind: str, inner: Any) -> Any:
    names = {"fitact_inner": inner, "fitact_checkpoint": kind}
    names |= {"__module__": inner.__module__, "__qualname__": inner.__qualname__}
    return type(inner.__name__, (Checkpointed, inner), names)


def _again(kind: str, inner: Any) -> Any:
    made = _class(kind, inner)
    return made.__new__(made)


def apply(model: nn.Module, groups: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Change the blocks of a model, in place; where one cannot be changed, the model stays as it was.

    Args:
        model: the model.
        groups: names of ways, each with the paths of the blocks that take it.

    Raises:
        UsageError: the model has no such block, is changed already, or a block cannot be changed so.

    """
    check_model(model)
    modules = [*model.modules()]
    if any(isinstance(one, Checkpointed) or has_context(one) or is_generated(type(one)) for one in modules):
        raise UsageError("the model is converted or planned already: call fitact.revert_plan(model) first")
    if any(map(is_compiled, modules)):
        raise UsageError("the model is compiled already: apply the plan first, and compile it then")
    there = dict(model.named_modules())
    for path in (path for _, paths in groups for path in paths):
        if path not in there:
            raise UsageError(f"the model has no block {quote(path)}: the plan was made for another model")
    whole = next((WAYS[name] for name, _ in groups if WAYS[name] == REST), STOCK)
    with ExitStack() as undo:
        for name, paths in groups:
            for path in paths:
                undo.callback(put_back, there[path])
                try:
                    put(there[path], _inside(WAYS[name], whole))
                except UsageError as error:
                    raise UsageError(f"{path or 'the model'}: {name}: {error}") from None
        undo.pop_all()


def revert_plan(model: nn.Module) -> None:
    """Put back in place what `Plan.apply` changed, and whatever else `fitact.revert` puts back.

    Args:
        model: the model, which is changed in place; one that is not changed stays as it is.

    """
    for module in [*model.modules()]:
        if isinstance(module, Checkpointed):
            put_back(module)
    revert(model)
