"""The blocks of a model in the order in which they run, and steps cut short: some of many equal blocks run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
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


@dataclass(frozen=True)
class _Call:
    """A call of a block: what it was given, what it did, and whether it returned a tensor like the first given."""

    block: int
    inputs: Any
    work: Work
    same: bool


def runs_of(subject: Subject) -> list[Run]:
    """Return the blocks of a model by runs; a model whose blocks do not run once each is one run of itself.

    Raises:
        UsageError: the model cannot be run, or has no such blocks.

    """
    blocks = blocks_of(subject.model, subject.blocks)
    calls: list[_Call] = []
    meter = Meter([*subject.model.parameters(), *subject.model.buffers()])

    def leave(i: int, _: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        meter.mark("out", i)
        inputs = tuple(_kind(leaf) for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor))
        same = isinstance(out, Tensor) and bool(inputs) and _kind(out) == _kind(first_tensor(*args, **kwargs))
        calls.append(_Call(i, inputs, meter.marks[-1].work, same and subject.mode is not None))

    with ExitStack() as stack:
        for i, (_, block) in enumerate(blocks):
            stack.callback(block.register_forward_pre_hook(lambda *_: meter.mark("in")).remove)
            stack.callback(block.register_forward_hook(partial(leave, i), with_kwargs=True).remove)
        with generators(subject.model), subject.environment(), torch.no_grad(), meter:
            subject.forward()
    order = [call.block for call in calls]
    if len({*order}) != len(order) or not order:
        return [Run(("",), (subject.model,))]
    runs = [
        list(some) for _, some in groupby(calls, lambda call: (_signature(blocks[call.block][1]), call.inputs))
    ]
    return [
        Run(
            tuple(blocks[call.block][0] for call in run),
            tuple(blocks[call.block][1] for call in run),
            all(call.same and call.work == run[0].work for call in run),
        )
        for run in runs
    ]


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def first_tensor(*args: Any, **kwargs: Any) -> Tensor:
    """Return the first tensor among arguments."""
    return next(leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor))


def _signature(block: nn.Module) -> Any:
    """Return what equal blocks have in common."""
    modules = tuple((path, type(module).__qualname__) for path, module in block.named_modules())
    parameters = tuple(
        (name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in block.named_parameters()
    )
    return type(block), modules, parameters


@contextmanager
def hooked(blocks: Mapping[int, nn.Module], mark: Callable[[str, int], None]) -> Iterator[None]:
    """Call a function when blocks' forward and backward passes begin and end, until the context ends.

    Args:
        blocks: the blocks, by their places.
        mark: called with `"in"` and `"out"` in the forward pass, with `"grad out"` and `"grad in"` in the backward
            pass, and with the block's place.

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

    Args:
        runs: the runs of blocks.
        policies: the policy of each block, or whatever tells blocks apart.
        row: how many blocks run where more in a row have the same policy.
        last: how many of these run after the one that is counted for others.

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
    """Return the marks of a step as if skipped blocks had done what the block did that is counted for them.

    Args:
        marks: of the step, without marks of the skipped blocks.
        standing: as `cut` returns it.

    """
    # with the changes of the level and of the host's, and the peak's rise above the level before
    moments: list[tuple[Moment, int, int, int]] = []
    level = host = 0
    for mark in marks:
        moments.append((mark, mark.level - level, mark.host - host, mark.peak - level))
        level, host = mark.level, mark.host
    for block, count in standing.items():
        places: dict[tuple[str, int], int] = {}
        for i, (mark, *_) in enumerate(moments):
            places.setdefault((mark.what, mark.block), i)
        begin, end = places.get(("grad out", block)), places.get(("grad out", block - 1))
        if begin is not None and end is not None:  # what is frozen has no backward pass
            part = moments[begin + 1 : end + 1]
            copies = [_moved(moment, block, k) for k in range(count, 0, -1) for moment in part]
            moments[begin : begin + 1] = [_moved(moments[begin], block, count), *copies]
        begin, end = places["out", block - 1], places["out", block]
        part = moments[begin + 1 : end + 1]
        moments[end + 1 : end + 1] = [_moved(moment, block, k) for k in range(1, count + 1) for moment in part]
    level, host, result = 0, 0, []
    for mark, change, on_host, rise in moments:
        host += on_host
        result.append(replace(mark, level=level + change, peak=level + rise, host=host))
        level += change
    return result


def _moved(moment: tuple[Moment, int, int, int], block: int, by: int) -> tuple[Moment, int, int, int]:
    """Return a mark of a block, or of its neighbour, as that of a later block."""
    mark = moment[0]
    return (replace(mark, block=mark.block + by) if mark.block >= block - 1 else mark), *moment[1:]
