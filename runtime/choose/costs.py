"""What each policy costs for each block: bytes saved, bytes at its peak, time; measured by running the model.

A pass runs the whole model once, forward and backward, with one policy for all blocks that take it. In each run of
equal blocks the third is measured: its neighbours are changed like it. Where more than four blocks in a row have
the same policy, four run, and the third is counted for those that are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from operator import attrgetter
from unittest import mock

import torch
from torch import Tensor, nn

from fitact.base import FitactError, UsageError, one_line
from fitact.runtime.measure import (
    ROW,
    Device,
    Meter,
    MeteredLink,
    Moment,
    Run,
    Subject,
    Work,
    cut,
    filled,
    hooked,
    runs_of,
    skipped,
)
from fitact.runtime.restore import differentiate, generators
from fitact.runtime.saving import DEPTH, LINKS, META

from .policies import BASELINE, REST, Policy, changed

MOVING = 2 * DEPTH + 1  # more blocks run where some offload: the queue fills first, and what is last stays


@dataclass(frozen=True)
class Cost:
    """What a training step takes, or that of one block with a policy, as measured."""

    saved: int  # bytes that stay alive from its forward pass to its backward pass
    peak: int  # the most bytes alive in both passes, beyond those before it ran
    work: Work  # of both passes
    host: int = 0  # bytes of the host that it pins

    def like(self, other: Cost) -> bool:
        """Return whether another step is the same to a ten-thousandth; what a first run caches is much less."""
        numbers = [(step.saved, step.peak, *astuple(step.work)) for step in (self, other)]
        return all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(*numbers, strict=True))


@dataclass(frozen=True)
class Segment:
    """A run of equal blocks, or what lies between two of them, which has no paths and occurs once."""

    paths: tuple[str, ...]
    grads: int  # bytes of the gradients that the backward pass of one block leaves
    # Between runs only the baseline's, and after the last run also that with less saved there.
    costs: Mapping[Policy, Cost]

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return max(len(self.paths), 1)


@dataclass(frozen=True)
class Costs:
    """A model's runs of blocks, and what lies before, between and after them, in the order of the forward pass."""

    segments: tuple[Segment, ...]
    baseline: Cost  # of the whole step
    runs: tuple[Run, ...]
    notes: tuple[str, ...] = ()  # policies that fail, and why


def measure_costs(
    subject: Subject,
    device: Device,
    policies: Sequence[Policy],
    progress: Callable[[float], None] = lambda share: None,
) -> Costs:
    """Measure what each policy costs in each run of blocks; UsageError if the baseline cannot be run.

    Policies that a block refuses are left out; those that fail are noted, too.
    """
    runs, parts = baseline_step(subject, device)
    segments, end = [_segment(*parts.between[0])], 0
    for run, after in zip(runs, parts.between[1:], strict=True):
        end += len(run.blocks)
        segments += [_segment(*parts.blocks[end - (len(run.blocks) + 1) // 2], run.paths), _segment(*after)]
    segments[-1] = _with_rest(subject, device, runs, segments[-1])
    notes: list[str] = []
    others = [policy for policy in policies if policy != BASELINE]
    for i, policy in enumerate(others):
        progress((1 + i) / (1 + len(others)))
        try:
            measured = _pass(subject, device, runs, policy)
        except FitactError as error:
            notes.append(f"{policy.name}: it fails: {one_line(error.__cause__ or error)}")
            continue
        for at, cost in measured.items():
            segments[at] = replace(segments[at], costs={**segments[at].costs, policy: cost})
    progress(1.0)
    return Costs(tuple(segments), parts.step, tuple(runs), tuple(notes))


def step(
    subject: Subject, device: Device, runs: Sequence[Run], policies: Sequence[Policy], whole: Policy = BASELINE
) -> Cost:
    """Measure a training step of a model, with a policy for each block of its runs, and one for the whole."""
    return _run(subject, device, runs, policies, whole=whole).step


def _with_rest(subject: Subject, device: Device, runs: Sequence[Run], end: Segment) -> Segment:
    """Return what lies after the last run, with what it costs if that takes less memory in a context."""
    if any(block is subject.model for run in runs for block in run.blocks):
        return end
    (cost, _), baseline = _run(subject, device, runs, _baseline(runs), whole=REST).between[-1], end.costs[BASELINE]
    if cost.saved >= baseline.saved and cost.peak >= baseline.peak:
        return end
    return replace(end, costs={**end.costs, REST: cost})


def baseline_step(subject: Subject, device: Device) -> tuple[list[Run], _Parts]:
    """Return the runs of a model, steady only if a step cut short foretells a longer one; and the baseline's.

    The rest of a model may depend on the number of blocks, such as a loss that reads them all.
    """
    runs = runs_of(subject)
    baseline = _baseline(runs)
    if cut(runs, baseline):
        with suppress(UsageError):  # a block that is skipped breaks the model
            longer, parts = (_run(subject, device, runs, baseline, row) for row in (ROW + 1, ROW))
            if parts.step.like(longer.step):
                return runs, parts
        runs = [replace(run, steady=False) for run in runs]
    return runs, _run(subject, device, runs, baseline)


def _baseline(runs: Sequence[Run]) -> list[Policy]:
    return [BASELINE for run in runs for _ in run.blocks]


def _segment(cost: Cost, grads: int, paths: tuple[str, ...] = ()) -> Segment:
    return Segment(paths, grads, {BASELINE: cost})


def _pass(subject: Subject, device: Device, runs: Sequence[Run], policy: Policy) -> dict[int, Cost]:
    """Return what a policy costs in the runs whose blocks do not refuse it, by their places among the segments."""
    policies = _baseline(runs)
    places: dict[int, int] = {}
    first = 0
    for i, run in enumerate(runs):
        count = len(run.blocks)
        with suppress(UsageError), changed(run.blocks[:1], [policy]):  # or nothing in the block can be changed so
            policies[first : first + count] = [policy] * count
            # where some offload, the queue is full
            third = max(min(ROW + MOVING, count) - DEPTH - 3, 0) if policy.offload else min(count - 1, 2)
            places[2 * i + 1] = first + third  # something lies between runs
        first += count
    if not places:
        return {}
    parts = _run(subject, device, runs, policies)
    return {at: parts.cost(block, policy) for at, block in places.items()}


def _run(
    subject: Subject,
    device: Device,
    runs: Sequence[Run],
    policies: Sequence[Policy],
    row: int = ROW,
    whole: Policy = BASELINE,
) -> _Parts:
    """Run a step, with at most `row` consecutive blocks of the same policy, and return its parts."""
    model = subject.model
    moves = any(policy.offload for policy in policies)
    standing = cut(runs, policies, row + MOVING * moves, 1 + (DEPTH + 1) * moves)
    without = {place + k for place, count in standing.items() for k in range(1, count + 1)}
    every = dict(enumerate(block for run in runs for block in run.blocks))
    running = {i: block for i, block in every.items() if i not in without}
    with (
        generators(model),
        subject.environment(),
        changed([*running.values(), model], [*(policies[i] for i in running), whole]),
        skipped([every[i] for i in without]),
    ):
        there = [*model.parameters(), *model.buffers()]
        if subject.accumulates and subject.ranks == 1:
            for parameter in filter(attrgetter("requires_grad"), model.parameters()):
                parameter.grad = torch.zeros_like(parameter)
                there.append(parameter.grad)
        meter = Meter(there, device)
        with meter, _linked(subject, meter) if moves else nullcontext(), hooked(running, meter.mark):
            meter.mark("start")
            outputs = subject.forward()
            meter.mark("loss")
            differentiate(subject.name, outputs)
            meter.mark("end")
        model.zero_grad(set_to_none=True)
    return _Parts(subject, runs, filled(meter.marks, standing))


@contextmanager
def _linked(subject: Subject, meter: Meter) -> Iterator[None]:
    """Let what is offloaded take a link on the meter's clock, until the context ends."""
    assert meter.device.link is not None
    kind = META if subject.mode else next(subject.model.parameters()).device
    with mock.patch.dict(LINKS, {kind: MeteredLink(meter, meter.device.link)}):
        yield


def sharded(parameters: Iterable[Tensor], ranks: int) -> int:
    """Return the bytes of parameters that each of several ranks has: FSDP2 cuts the first dimension, padded."""
    rows = [
        (parameter.shape[0] if parameter.ndim and len(parameter) else 1, parameter.nbytes)
        for parameter in parameters
    ]
    return sum(-(-count // ranks) * (size // count) for count, size in rows)


@dataclass(frozen=True)
class _Extra:
    """What FSDP2 adds on each rank while a part of a step runs, in bytes; nothing in a single process."""

    forward: int = 0
    backward: int = 0
    freed: int = 0  # of the gradients that the part leaves, which are on other ranks then


def _extras(subject: Subject, owners: Sequence[nn.Module | None]) -> list[_Extra]:
    """Return what FSDP2 adds to parts of a step, where each block and then the model is in `fully_shard`.

    What is outside of the blocks is whole throughout, and its gradients are scattered at the end. A block that
    runs forward is there twice: as it was gathered, until the next one is, and in place. In the backward pass it
    is there once, beside the one that is gathered next and the gradients of the one before, which are being
    scattered. Where gradients accumulate, no rank gets more of them. See PyTorch's `FSDPParamGroup`. The `owners`
    are the block of each part, in the order of the forward pass; None for what lies between.
    """
    n = subject.ranks
    if n == 1:
        return [_Extra() for _ in owners]
    of = [[] if owner is None else [*owner.parameters()] for owner in owners]
    inside = {id(parameter) for some in of for parameter in some}
    root = n * sharded((parameter for parameter in subject.model.parameters() if id(parameter) not in inside), n)
    whole = [n * sharded(some, n) for some in of]
    grads = [n * sharded((parameter for parameter in some if parameter.requires_grad), n) for some in of]
    extras = []
    for i, (own, left) in enumerate(zip(whole, grads, strict=True)):
        before, after = (next(filter(None, some), 0) for some in (whole[:i][::-1], grads[i + 1 :]))
        forward = root + own + (own or before or root)
        share = 0 if subject.accumulates else left // n
        extras.append(_Extra(forward, root + own + before + after, left - share))
    return extras


class _Parts:
    """The parts of a step, found by its marks; under FSDP2, of each rank.

    Attributes:
        firsts: the first block of each run.
        parts: of the step in order, with the block, what FSDP2 adds, and where both passes begin and end.
        blocks, between: the cost and the bytes of gradients of each block, and of what lies around the runs.
        step: the cost of the whole step.

    """

    def __init__(self, subject: Subject, runs: Sequence[Run], marks: Sequence[Moment]) -> None:
        self.marks = marks
        self.places: dict[tuple[str, int], int] = {}
        for i, mark in enumerate(marks):
            self.places.setdefault((mark.what, mark.block), i)
        start, loss, end = (self.places[what, -1] for what in ("start", "loss", "end"))
        forward, backward = [start], [loss]  # where parts begin and end in either pass
        owners: list[nn.Module | None] = []
        self.firsts: list[int] = []
        first = 0
        for run in runs:
            self.firsts.append(first)
            owners += [None, *run.blocks]
            last = first + len(run.blocks)
            forward += [self.places["in", first], *(self.places["out", i] for i in range(first, last))]
            first = last
        owners.append(None)
        for run in reversed(runs):
            last, first = first - 1, first - len(run.blocks)
            backward.append(self.places.get(("grad out", last), backward[-1]))
            for i in range(last, first - 1, -1):
                what = ("grad in", i) if i == first else ("grad out", i - 1)
                before = self.places.get(("grad out", i - 1), end)
                after = self.places.get(what, before) if ("grad out", i) in self.places else 0  # or it has none
                backward.append(max(backward[-1], after))
        there, back = pairwise([*forward, loss]), reversed([*pairwise([*backward, end])])
        self.parts = parts = [*zip(owners, _extras(subject, owners), there, back, strict=True)]
        self.blocks = [self._span(*part[1:]) for part in parts if part[0] is not None]
        self.between = [self._span(*part[1:]) for part in parts if part[0] is None]
        most = freed = 0
        for _, extra, ahead, behind in reversed(parts):
            most = max(most, self._peak(*ahead) + extra.forward, self._peak(*behind) + extra.backward - freed)
            freed += extra.freed
        work = sum((mark.work for mark in marks), Work())
        self.step = Cost(marks[loss].level, most, work, marks[loss].host)

    def cost(self, i: int, policy: Policy) -> Cost:
        """Return what a policy costs for a block; where it offloads, memory that is on its way is there, too."""
        cost, _ = self.blocks[i]
        if not policy.offload:
            return cost
        first = max(first for first in self.firsts if first <= i)
        before = self.marks[self.places["in", first]].level + (i - first) * cost.saved
        at = i + sum(first <= i for first in self.firsts)  # a part lies before each run
        _, extra, there, back = self.parts[at]
        grads = sum(self._span(*part[1:])[1] + part[1].freed for part in self.parts[at + 1 :])
        peaks = self._peak(*there) + extra.forward, self._peak(*back) + extra.backward - grads
        return replace(cost, peak=max(peaks) - before)

    def _peak(self, begin: int, end: int) -> int:
        return max([self.marks[begin].level, *(mark.peak for mark in self.marks[begin + 1 : end + 1])])

    def _span(self, extra: _Extra, forward: tuple[int, int], backward: tuple[int, int]) -> tuple[Cost, int]:
        """Return a part's cost and gradients, by the places where its passes begin and end."""
        (a, b), (c, d) = forward, backward
        level = [mark.level for mark in self.marks]
        saved = level[b] - level[a]
        there, back = self._peak(a, b) - level[a], self._peak(c, d) - level[c] + saved
        work = sum((mark.work for i, j in (forward, backward) for mark in self.marks[i + 1 : j + 1]), Work())
        peak = max(there + extra.forward, back + extra.backward)
        cost = Cost(saved, peak, work, self.marks[b].host - self.marks[a].host)
        return cost, level[d] - level[c] + saved - extra.freed
