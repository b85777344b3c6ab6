"""The ways to train a block: what is replaced or rebuilt in it, and whether it is run again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fitact.errors import FitactError, UsageError, quote
from fitact.runtime.compare.baselines import UNSEEN, selectively
from fitact.runtime.convert.convert import convert
from fitact.runtime.convert.replacement import revert
from fitact.runtime.norms.dataflow import NormUsage
from fitact.runtime.norms.fold import merge_exactly
from fitact.runtime.norms.rewrite import share
from fitact.runtime.ops.registry import is_generated
from fitact.runtime.rebuild.calls import LOSSES
from fitact.runtime.rebuild.modules import ONLY, Rebuilding, swap
from fitact.runtime.restore import check_model
from fitact.runtime.torch_internals import FakeTensor, is_compiled, tree_iter

CHECKPOINTS = ("", "checkpointed", "checkpointed selectively")
AGAIN = {  # how blocks of these ways may also be run again
    **dict.fromkeys(("stock", "rebuilt", "codes of 8 bits"), CHECKPOINTS[1:]),
    "codes of 8 bits, also of norms": CHECKPOINTS[1:2],
}


@dataclass(frozen=True)
class Way:
    """A way to train a block.

    Attributes:
        name: in plans and tables.
        error: one of ERRORS, what it does to gradients.
        conversion: arguments of `fitact.convert`; None to replace and rebuild nothing.
        checkpoint: one of CHECKPOINTS: whether the block is run again in backward, wholly or but for matrix
            products, convolutions and fused attention.
        words: what it does, for a sentence.
        norms: its norms are merged into the next linear layers, as `fitact.runtime.norms.fold.merge_norms` does.
        loss: the whole model computes its loss a few rows at a time.

    """

    name: str
    error: str
    conversion: Mapping[str, Any] | None = field(default=None, compare=False)
    checkpoint: str = ""
    words: str = field(default="", compare=False)
    norms: bool = False
    loss: bool = False


def _converted() -> Iterator[Way]:
    yield Way("stock", "exact", None, words="as it is")
    yield Way("rebuilt", "exact", {"method": "rebuild"}, words="rebuilt outputs")
    yield Way("inverted", "rounding", {"method": "inverted"}, words="derivatives by the output")
    yield Way("exact", "rounding", {"method": "exact"}, words="derivatives by the output")
    eight: dict[str, Any] = {"method": "coded", "bits": 8}
    yield Way("codes of 8 bits", "rounding", eight, words="codes of 8 bits")
    of_norms = {"bits_norms": 8}
    few = {"method": "coded", "bits": 4, "bits_u": 8}  # of fits with fewer bits the fewest always keeps least
    yield Way("codes of 8 bits, also of norms", "few-bit", eight | of_norms, words="codes of 8 bits")
    yield Way("codes of 4 and 8 bits", "few-bit", few, words="codes of 4 bits")
    yield Way("codes of 4 and 8 bits, also of norms", "few-bit", few | of_norms, words="codes of 4 bits")
    yield Way("steps of 3 bits", "few-bit", {"method": "fewbit", "bits": 3}, words="derivatives in 3 bits")


def _all() -> Iterator[Way]:
    for way in _converted():
        yield way
        if way.name in AGAIN:
            for kind in AGAIN[way.name]:
                name = kind if way.conversion is None else f"{way.name}, {kind}"
                words = kind if way.conversion is None else f"{way.words}, {kind}"
                yield Way(name, way.error, way.conversion, kind, words)


# The ways that merged norms are combined with: with others no model was seen to keep less or to be faster.
BESIDE_NORMS = (
    *("stock", "checkpointed", "rebuilt", "inverted", "exact", "codes of 8 bits", "codes of 8 bits, checkpointed"),
    *("codes of 4 and 8 bits", "steps of 3 bits"),
)


def _merged() -> Iterator[Way]:
    for way in OF_BLOCKS:
        if way.name in BESIDE_NORMS:
            name = "merged norms" if way == STOCK else f"merged norms, {way.name}"
            words = "merged norms" if way == STOCK else f"merged norms, {way.words}"
            error = "rounding" if way.error == "exact" else way.error
            yield replace(way, name=name, error=error, words=words, norms=True)


OF_BLOCKS = tuple(_all())
STOCK = OF_BLOCKS[0]
MERGED = tuple(_merged())
LOSS = Way("loss by rows", "exact", loss=True, words="exact gradients")
WAYS: dict[str, Way] = {way.name: way for way in (*OF_BLOCKS, *MERGED, LOSS)}
FULL, SELECTIVE = WAYS[CHECKPOINTS[1]], WAYS[CHECKPOINTS[2]]


def put(block: nn.Module, way: Way) -> None:
    """Change a block, in place.

    Args:
        block: a stock block.
        way: what it becomes.

    Raises:
        UsageError: nothing in the block can be changed so.

    """
    if way.loss:
        swap(block, "Calls", "")
        vars(block)[ONLY] = LOSSES
    if way.conversion is not None:
        convert(block, **way.conversion)
    if way.checkpoint:
        inner: Any = type(block)
        block.__class__ = _class(way.checkpoint, inner)


def put_back(block: nn.Module) -> None:
    """Put a block back as it was before `put`."""
    if isinstance(block, Checkpointed):
        block.__class__ = block.fitact_inner
    revert(block)


@contextmanager
def changed(
    blocks: Sequence[nn.Module], ways: Sequence[Way], norms: Sequence[Mapping[str, NormUsage]] = ()
) -> Iterator[None]:
    """Change blocks until the context ends.

    Args:
        blocks: the blocks.
        ways: what each becomes.
        norms: of each block, those that can be merged; they become memory-sharing norms, and no values are moved.
            By default there are none.

    Raises:
        UsageError: nothing in a block can be changed so.

    """
    with ExitStack() as stack:
        for block, way, merged in zip(blocks, ways, norms or [{}] * len(blocks), strict=True):
            if way == STOCK:
                continue
            if way.norms and not merged:
                raise UsageError("no norm in it can be merged")
            for usage in merged.values() if way.norms else ():
                share(block, usage, stack)
            stack.callback(put_back, block)
            put(block, way)
        yield


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


def apply(
    model: nn.Module,
    groups: Sequence[tuple[str, Sequence[str]]],
    norms: Sequence[str] = (),
    example_inputs: Any = None,
) -> None:
    """Change the blocks of a model, in place; where one cannot be changed, the model stays as it was.

    Args:
        model: the model.
        groups: names of ways, each with the paths of the blocks that take it.
        norms: the paths of the norms that these ways merge.
        example_inputs: inputs to run the model with, where norms are merged.

    Raises:
        UsageError: the model has no such block, is changed already, a block cannot be changed so, or a norm cannot
            be merged.
        JobError: with merged norms the model computes something else.

    """
    check_model(model)
    if any(isinstance(one, (Checkpointed, Rebuilding)) or is_generated(type(one)) for one in model.modules()):
        raise UsageError("the model is converted or planned already: call fitact.revert_plan(model) first")
    if any(map(is_compiled, model.modules())):
        raise UsageError("the model is compiled already: apply the plan first, and compile it then")
    there = dict(model.named_modules())
    for path in (path for _, paths in groups for path in paths):
        if path not in there:
            raise UsageError(f"the model has no block {quote(path)}: the plan was made for another model")
    with ExitStack() as undo:
        if norms:
            undo.callback(_merged_norms(model, norms, example_inputs))
        for name, paths in groups:
            for path in paths:
                undo.callback(put_back, there[path])
                try:
                    put(there[path], WAYS[name])
                except UsageError as error:
                    raise UsageError(f"{path or 'the model'}: {name}: {error}") from None
        undo.pop_all()


def _merged_norms(model: nn.Module, norms: Sequence[str], example_inputs: Any) -> Callable[[], None]:
    """Merge norms, and return what undoes it."""
    if example_inputs is None:
        raise UsageError(
            f"the plan merges {len(norms)} norms, which runs the model: expected example_inputs, got none; "
            "one row of them will do"
        )
    try:
        return merge_exactly(model, example_inputs, norms)
    except FitactError as error:
        raise type(error)(f"the plan merges norms, and this failed: {error}; or plan without norms") from error


def revert_plan(model: nn.Module) -> None:
    """Put back in place what `Plan.apply` changed, and whatever else `fitact.revert` puts back.

    Args:
        model: the model, which is changed in place; one that is not changed stays as it is.

    """
    for module in [*model.modules()]:
        if isinstance(module, Checkpointed):
            put_back(module)
    revert(model)
