"""The blocks of a model in the order in which they run, and steps cut short: some of many equal blocks run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fitact.runtime.restore import generators
from fitact.runtime.torch_internals import tree_iter

from .meter import Meter, Moment, Work
from .subjects import Subject, blocks_of


@dataclass(frozen=True)
class Run:
    """Equal blocks that follow one another.

    Attributes:
        paths: their paths in the model, in the order they run in.
        blocks: the modules.
        steady: whether all do the same work, and return a tensor like the first that they are given. Then some of
            them may be measured in place of the others.

    """

    paths: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    steady: bool = False


def runs_of(subject: Subject) -> list[Run]:
    """Return the blocks of a model by runs; a model whose blocks do not run once each is one run of itself.

    Raises:
        UsageError: the model cannot be run, or has no such blocks.

    """
    # the path, the block, what equal ones have in common, the work, and whether the output is like the input
    calls: list[tuple[str, nn.Module, Any, Work, bool]] = []
    meter = Meter([*subject.model.parameters(), *subject.model.buffers()])

    def leave(path: str, block: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        meter.mark("out")
        inputs = tuple(_kind(leaf) for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor))
        same = isinstance(out, Tensor) and inputs[:1] == (_kind(out),)
        calls.append((path, block, (_signature(block), inputs), meter.marks[-1].work, same))

    with ExitStack() as stack:
        for path, block in blocks_of(subject.model, subject.blocks):
            stack.callback(block.register_forward_pre_hook(lambda *_: meter.mark("in")).remove)
            stack.callback(block.register_forward_hook(partial(leave, path), with_kwargs=True).remove)
        with generators(subject.model), subject.environment(), meter:
            subject.forward()
    if not calls or len({path for path, *_ in calls}) < len(calls):
        return [Run(("",), (subject.model,))]
    runs = []
    for _, some in groupby(calls, itemgetter(2)):
        paths, blocks, _, works, same = zip(*some, strict=True)
        runs.append(Run(paths, blocks, subject.mode is not None and all(same) and len({*works}) == 1))
    return runs


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def first_tensor(*args: Any, **kwargs: Any) -> Tensor:
    """Return the first tensor among arguments."""
    return next(leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor))


def _signature(block: nn.Module) -> Any:
    """Return what equal blocks have in common."""
    modules = tuple((path, type(module).__qualname__) for path, module in block.named_modules())
    parameters = ((name, _kind(each), each.requires_grad) for name, each in block.named_parameters())
    return type(block), modules, tuple(parameters)


@contextmanager
def hooked(blocks: Mapping[int, nn.Module], mark: Callable[[str, int], None]) -> Iterator[None]:
    """Call a function when blocks' forward and backward passes begin and end, until the context ends.

    It gets `"in"` and `"out"` in the forward pass, `"grad out"` and `"grad in"` in the backward pass, and the
    block's place, its key in `blocks`.
    """

    def watch(what: str, i: int, tree: Any) -> None:
        for leaf in tree_iter(tree):
            if isinstance(leaf, Tensor) and leaf.requires_grad and not isinstance(leaf, nn.Parameter):
                leaf.register_hook(lambda _: mark(what, i))

    def enter(i: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        mark("in", i)
        watch("grad in", i, (args, kwargs))

    def leave(i: int, _: nn.Module, args: Any, output: Any) -> None:
        mark("out", i)
        watch("grad out", i, output)

    with ExitStack() as stack:
        for i, block in blocks.items():
            stack.callback(block.register_forward_pre_hook(partial(enter, i), with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(partial(leave, i)).remove)
        yield


# ------------------------------------------------------------------------------------------------------ cut short

ROW = 4  # blocks of a row that run: the first two, one whose neighbours are like itself, and the last


def cut(runs: Sequence[Run], policies: Sequence[Any], row: int = ROW, last: int = 1) -> dict[int, int]:
    """Return for how many of the blocks after it a block is counted, by its place.

    Where more in a row have the same policy, or whatever tells blocks apart, `row` of them run: `last` of these
    after the one that is counted for others.
    """
    places: dict[int, int] = {}
    place = 0
    for run in runs:
        end = place + len(run.blocks)
        for _, some in groupby(policies[place:end]):
            count = len(list(some))
            if run.steady and count > row:
                places[place + row - 1 - last] = count - row
            place += count
    return places


@contextmanager
def skipped(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Let blocks return their input until the context ends."""
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(mock.patch.object(block, "forward", first_tensor))
        yield


def filled(marks: Sequence[Moment], standing: Mapping[int, int]) -> list[Moment]:
    """Return the marks of a step as if skipped blocks had done what the block did that `cut` counts for them."""
    start = Moment("start", -1, 0, 0, Work())
    moments = [  # with the changes of the level and of the host's, and the peak's rise above the level before
        replace(mark, level=mark.level - last.level, peak=mark.peak - last.level, host=mark.host - last.host)
        for last, mark in pairwise([start, *marks])
    ]
    for block, count in standing.items():
        places: dict[tuple[str, int], int] = {}
        for i, mark in enumerate(moments):
            places.setdefault((mark.what, mark.block), i)
        begin, end = places.get(("grad out", block)), places.get(("grad out", block - 1))
        if begin is not None and end is not None:  # what is frozen has no backward pass
            part = moments[begin + 1 : end + 1]
            copies = [_moved(mark, block, k) for k in range(count, 0, -1) for mark in part]
            moments[begin : begin + 1] = [_moved(moments[begin], block, count), *copies]
        begin, end = places["out", block - 1], places["out", block]
        part = moments[begin + 1 : end + 1]
        moments[end + 1 : end + 1] = [_moved(mark, block, k) for k in range(1, count + 1) for mark in part]
    level, host, result = 0, 0, []
    for mark in moments:
        host += mark.host
        result.append(replace(mark, level=level + mark.level, peak=level + mark.peak, host=host))
        level += mark.level
    return result


def _moved(mark: Moment, block: int, by: int) -> Moment:
    """Return a mark of a block, or of its neighbour, as that of a later block."""
    return replace(mark, block=mark.block + by) if mark.block >= block - 1 else mark
