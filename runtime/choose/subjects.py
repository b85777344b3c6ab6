"""A model to plan for: without memory, with what runs it, and its blocks in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from fitact.errors import UsageError
from fitact.runtime.measure.devices import Device
from fitact.runtime.measure.meter import Timeline, Work
from fitact.runtime.measure.prepare import Inputs, Prepared, Statistics, blocks_of, starts, without_packing
from fitact.runtime.measure.saved import gpu_kernels
from fitact.runtime.measure.twins import Twins
from fitact.runtime.restore import check_model, explained, runner
from fitact.runtime.torch_internals import FakeTensorMode, quiet_fake_tensors, tree_iter
from fitact.text import one_line

from .trials import faked_run


@dataclass(frozen=True)
class Subject:
    """A model with what runs it.

    Attributes:
        name: its name in tables.
        model: the model, in training mode.
        forward: runs it forward; returns what backward starts from.
        mode: the mode of its fake tensors; None if they are real.
        autocast: the dtype of autocast; None if it is off.
        device: `"cuda"` to keep what a GPU's kernels keep, or `"cpu"`.

    """

    name: str
    model: nn.Module
    forward: Callable[[], list[Tensor]]
    mode: FakeTensorMode | None
    autocast: torch.dtype | None = None
    device: str = "cuda"

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Enter what surrounds a step."""
        with ExitStack() as stack:
            stack.enter_context(self.mode or nullcontext())
            stack.enter_context(quiet_fake_tensors())
            stack.enter_context(gpu_kernels() if self.device == "cuda" else nullcontext())
            yield

    def casting(self) -> AbstractContextManager[Any]:
        """Return a context of the subject's autocast."""
        if self.autocast is None:
            return nullcontext()
        kind = next((one.device.type for one in self.model.parameters()), "cpu")
        return torch.autocast(kind, dtype=self.autocast)

    def run(self) -> list[Tensor]:
        """Run forward, and return what backward starts from."""
        with explained(self.name, "forward"), self.casting():
            return self.forward()


def of_prepared(
    prepared: Prepared, inputs: Inputs, autocast: torch.dtype | None = None, device: str = "cuda"
) -> Subject:
    """Return a prepared model as a subject."""
    run = partial(prepared.run, inputs)
    return Subject(prepared.name, prepared.model, run, prepared.mode, autocast, device)


def of_model(model: nn.Module, example_inputs: Any, autocast: torch.dtype | None, device: str) -> Subject:
    """Return a user's model as a subject, copied as fake tensors; the model is not changed.

    Args:
        model: the model.
        example_inputs: as for `fitact.convert`.
        autocast: the dtype of autocast; None if it is off.
        device: as in `Subject`.

    Raises:
        UsageError: it is no nn.Module, or cannot be copied as fake tensors.

    """
    check_model(model)
    run = runner(example_inputs)
    name = type(model).__name__
    try:
        twin, mode = Twins().of(model)
        faked = faked_run(run, mode)
    except Exception as error:
        raise UsageError(f"{name}: it cannot be copied without memory: {one_line(error)}") from error
    twin.train()

    def forward() -> list[Tensor]:
        with mode, Statistics(), without_packing():
            return starts(faked(twin), name)

    return Subject(name, twin, forward, mode, autocast, device)


# --------------------------------------------------------------------------------------------------------- blocks


@dataclass(frozen=True)
class Run:
    """Blocks that are alike and follow one another.

    Attributes:
        paths: their paths in the model, in the order they run in.
        blocks: the modules.
        steady: whether all do the same work, and return a tensor like the first that they are given. Then some of
            them may stand for the others.

    """

    paths: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    steady: bool = False


def runs_of(subject: Subject, device: Device) -> list[Run]:
    """Return the repeated blocks of a model by runs; a model that repeats nothing is one run of itself."""
    found = blocks_of(subject.model)
    calls: list[_Call] = []
    timeline = Timeline(device, [*subject.model.parameters(), *subject.model.buffers()])
    with ExitStack() as stack:
        for i, (_, block) in enumerate(found):
            stack.callback(block.register_forward_pre_hook(partial(_enter, timeline, i), with_kwargs=True).remove)
            leave = partial(_leave, timeline, calls, i)
            stack.callback(block.register_forward_hook(leave, with_kwargs=True).remove)
        with subject.environment(), torch.no_grad(), timeline:
            _forward_untrained(subject)
    order = [one.block for one in calls]
    if len({*order}) != len(order) or not order:
        return [Run(("",), (subject.model,))]
    runs: list[list[_Call]] = []
    for _, some in groupby(calls, lambda one: (_signature(found[one.block][1]), one.inputs)):
        runs.append(list(some))
    return [
        Run(
            tuple(found[one.block][0] for one in run),
            tuple(found[one.block][1] for one in run),
            all(one.same and one.work == run[0].work for one in run),
        )
        for run in runs
    ]


@dataclass(frozen=True)
class _Call:
    """A call of a block: what it was given, what it did, and whether it returned a tensor like the first given."""

    block: int
    inputs: Any
    work: Work
    same: bool


def _enter(timeline: Timeline, i: int, *_: Any) -> None:
    timeline.mark("in", i)


def _leave(timeline: Timeline, calls: list[_Call], i: int, _: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
    timeline.mark("out", i)
    inputs = tuple(_kind(leaf) for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor))
    same = isinstance(out, Tensor) and bool(inputs) and _kind(out) == _kind(first_tensor(*args, **kwargs))
    calls.append(_Call(i, inputs, timeline.marks[-1].work, same))


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def first_tensor(*args: Any, **kwargs: Any) -> Tensor:
    """Return the first tensor among arguments."""
    return next(leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor))


def _forward_untrained(subject: Subject) -> None:
    """Run forward without gradients; that no output needs one does not matter here."""
    try:
        subject.run()
    except UsageError as error:
        if "no output depends" not in str(error):
            raise


def _signature(block: nn.Module) -> Any:
    """Return what blocks that are alike have in common."""
    modules = tuple((path, type(module).__qualname__) for path, module in block.named_modules())
    parameters = tuple(
        (name, tuple(one.shape), one.dtype, one.requires_grad) for name, one in block.named_parameters()
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
