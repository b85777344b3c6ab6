"""What each policy costs for each block: bytes saved, bytes at its peak, time; measured by running the model.

A pass runs the whole model once, forward and backward, with several policies at once: blocks that are alike
follow one another, and each policy gets two of them. The second is measured: its neighbour is changed like it.
Where more than four blocks in a row have the same policy, four run, and the third is counted for those that are
skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fitact.base import FitactError, UsageError, one_line
from fitact.runtime.measure import (
    ROW,
    Device,
    Mark,
    Meter,
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

from .policies import BASELINE, REST, Policy, changed


@dataclass(frozen=True)
class Cost:
    """What a policy costs for one block.

    Attributes:
        saved: bytes that stay alive from its forward pass to its backward pass.
        high: the most bytes alive in its own forward and backward pass, beyond those before it ran.
        work: of both passes.

    """

    saved: int
    high: int
    work: Work


@dataclass(frozen=True)
class Segment:
    """A run of blocks that are alike, or what lies between two of them.

    Attributes:
        paths: of the blocks; empty for what lies between, which occurs once.
        grads: bytes of the gradients that the backward pass of one block leaves.
        costs: by policy; for what lies between only the baseline's, and after the last run also that with less
            saved there.

    """

    paths: tuple[str, ...]
    grads: int
    costs: dict[Policy, Cost]

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return max(len(self.paths), 1)


@dataclass(frozen=True)
class Costs:
    """A model's segments, in the order in which the forward pass reaches them.

    Attributes:
        segments: the runs of blocks, and what lies between, before and after.
        baseline: the step of the baseline.
        runs: the runs of blocks among them.
        notes: policies that a block refuses, and why.

    """

    segments: tuple[Segment, ...]
    baseline: Step
    runs: tuple[Run, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """A training step as measured.

    Attributes:
        saved: bytes alive at the end of the forward pass.
        peak: the most bytes alive, without parameters, buffers and inputs.
        work: of both passes.

    """

    saved: int
    peak: int
    work: Work

    def like(self, other: Step) -> bool:
        """Return whether another step is the same to a ten-thousandth; what a first run caches is much less."""
        numbers = [
            (one.saved, one.peak, one.work.seconds, one.work.flops, one.work.traffic) for one in (self, other)
        ]
        return all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(*numbers, strict=True))


def measure_costs(
    subject: Subject,
    device: Device,
    policies: Sequence[Policy],
    progress: Callable[[float], None] = lambda share: None,
) -> Costs:
    """Measure what each policy costs in each run of blocks.

    Args:
        subject: the model.
        device: how long operations take.
        policies: the policies, baseline first.
        progress: called with the share that is done.

    Returns:
        The costs. Policies that a block refuses are left out; those that fail are noted, too.

    Raises:
        UsageError: the baseline cannot be run.

    """
    runs, marks = baseline_step(subject, device)
    parts = _Parts(marks, [len(run.blocks) for run in runs])
    segments, end = [_between(parts.between[0])], 0
    for run, after in zip(runs, parts.between[1:], strict=True):
        end += len(run.blocks)
        span = parts.blocks[end - (len(run.blocks) + 1) // 2]
        segments += [Segment(run.paths, span.grads, {BASELINE: span.cost}), _between(after)]
    segments[-1] = _with_rest(subject, device, runs, segments[-1])
    notes: list[str] = []
    wanted = [_possible(run, [policy for policy in policies if policy != BASELINE]) for run in runs]
    passes = max(-(-len(some) // _slots(run)) for run, some in zip(runs, wanted, strict=True))
    progress(1 / (1 + passes))
    for i in range(passes):
        given = [
            some[i * _slots(run) : (i + 1) * _slots(run)] or [BASELINE]
            for run, some in zip(runs, wanted, strict=True)
        ]
        for found in _tried(subject, device, runs, given, notes):
            for at, new in zip(range(1, len(segments), 2), found, strict=True):  # runs, and what lies between
                segments[at] = replace(segments[at], costs=new | segments[at].costs)
        progress((2 + i) / (1 + passes))
    return Costs(tuple(segments), _step(marks), tuple(runs), tuple(notes))


def step(
    subject: Subject, device: Device, runs: Sequence[Run], policies: Sequence[Policy], whole: Policy = BASELINE
) -> Step:
    """Measure a training step of a model, with a policy for each block of its runs, and one for the whole."""
    return _step(_marks(subject, device, runs, policies, whole=whole))


def _with_rest(subject: Subject, device: Device, runs: Sequence[Run], end: Segment) -> Segment:
    """Return what lies after the last run, with what it costs if that takes less memory in a context."""
    if any(block is subject.model for run in runs for block in run.blocks):
        return end
    marks = _marks(subject, device, runs, _baseline(runs), whole=REST)
    cost, baseline = _Parts(marks, [len(run.blocks) for run in runs]).between[-1].cost, end.costs[BASELINE]
    if cost.saved >= baseline.saved and cost.high >= baseline.high:
        return end
    return replace(end, costs={**end.costs, REST: cost})


def baseline_step(subject: Subject, device: Device) -> tuple[list[Run], list[Mark]]:
    """Return the runs of a model, steady only if a step cut short foretells a longer one; and the baseline marks.

    The rest of a model may depend on the number of blocks, such as a loss that reads them all.

    Raises:
        UsageError: the baseline cannot be run.

    """
    runs = runs_of(subject)
    baseline = _baseline(runs)
    if cut(runs, baseline):
        try:
            longer, marks = (_marks(subject, device, runs, baseline, row) for row in (ROW + 1, ROW))
        except UsageError:  # a block that is skipped breaks the model
            longer = marks = []
        if marks and _step(marks).like(_step(longer)):
            return runs, marks
        runs = [replace(run, steady=False) for run in runs]
    return runs, _marks(subject, device, runs, baseline)


def _baseline(runs: Sequence[Run]) -> list[Policy]:
    return [BASELINE for run in runs for _ in run.blocks]


def _step(marks: Sequence[Mark]) -> Step:
    (loss,) = (mark for mark in marks if mark.what == "loss")
    return Step(loss.level, max(mark.peak for mark in marks), sum((mark.work for mark in marks), Work()))


def _between(span: _Span) -> Segment:
    return Segment((), span.grads, {BASELINE: span.cost})


def _possible(run: Run, policies: Sequence[Policy]) -> list[Policy]:
    """Return the policies that the blocks of a run do not refuse."""
    found = []
    for policy in policies:
        try:
            with changed(run.blocks[:1], [policy]):
                found.append(policy)
        except UsageError:  # there is nothing in the block that it changes
            continue
    return found


def _slots(run: Run) -> int:
    """Return how many policies a run measures at once."""
    return max(len(run.blocks) // 2, 1)


# --------------------------------------------------------------------------------------------------------- a pass


@dataclass(frozen=True)
class _Span:
    """A part of a step: what a block, or what lies between, does in both passes."""

    cost: Cost
    grads: int


def _tried(
    subject: Subject, device: Device, runs: Sequence[Run], given: Sequence[Sequence[Policy]], notes: list[str]
) -> Iterator[list[dict[Policy, Cost]]]:
    """Yield what passes measure; if one fails, each of its policies gets a pass of its own."""
    try:
        yield _pass(subject, device, runs, given)
        return
    except FitactError:
        every = list(dict.fromkeys(policy for some in given for policy in some))
        if every == [BASELINE]:
            raise
    for policy in every:
        try:
            yield _pass(subject, device, runs, [[policy] if policy in some else [BASELINE] for some in given])
        except FitactError as error:
            if policy == BASELINE:
                raise
            notes.append(f"{policy.name}: it fails: {one_line(error.__cause__ or error)}")


def _pass(
    subject: Subject, device: Device, runs: Sequence[Run], given: Sequence[Sequence[Policy]]
) -> list[dict[Policy, Cost]]:
    """Return the costs that a pass measures, in each run of each policy."""
    policies = _baseline(runs)
    where: list[dict[Policy, int]] = []
    first = 0
    for run, some in zip(runs, given, strict=True):
        width = min(len(run.blocks), 2)
        begin = first + min(len(run.blocks) - width * len(some), 1)  # the first two blocks of a model may differ
        for i, policy in enumerate(some):
            policies[begin + width * i : begin + width * (i + 1)] = [policy] * width
        where.append({policy: begin + width * (i + 1) - 1 for i, policy in enumerate(some)})
        first += len(run.blocks)
    parts = _Parts(_marks(subject, device, runs, policies), [len(run.blocks) for run in runs])
    return [{policy: parts.blocks[i].cost for policy, i in found.items()} for found in where]


def _marks(
    subject: Subject,
    device: Device,
    runs: Sequence[Run],
    policies: Sequence[Policy],
    row: int = ROW,
    whole: Policy = BASELINE,
) -> list[Mark]:
    """Run a step, with at most `row` consecutive blocks of the same policy, and return its moments."""
    model = subject.model
    standing = cut(runs, policies, row)
    without = {place + k for place, count in standing.items() for k in range(1, count + 1)}
    every = dict(enumerate(block for run in runs for block in run.blocks))
    running = {i: block for i, block in every.items() if i not in without}
    with (
        generators(model),
        subject.environment(),
        changed([*running.values()], [policies[i] for i in running], model, whole),
        skipped([every[i] for i in without]),
    ):
        meter = Meter([*model.parameters(), *model.buffers()], device)
        with meter, hooked(running, meter.mark):
            meter.mark("start")
            outputs = subject.forward()
            meter.mark("loss")
            differentiate(subject.name, outputs)
            meter.mark("end")
        model.zero_grad(set_to_none=True)
    return filled(meter.marks, standing)


class _Parts:
    """The parts of a step, found by its marks.

    Attributes:
        blocks: a part for each block.
        between: parts before, between and after the runs.

    """

    def __init__(self, marks: Sequence[Mark], sizes: Sequence[int]) -> None:
        self.marks = marks
        self.places: dict[tuple[str, int], int] = {}
        for i, mark in enumerate(marks):
            self.places.setdefault((mark.what, mark.block), i)
        firsts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.blocks: list[_Span] = []
        self.between: list[_Span] = []
        forwards: list[tuple[int, int]] = []  # of both kinds, in the order of the forward pass
        backwards: list[tuple[int, int]] = []  # in the order of the backward pass
        left = self._at("start")
        for first, size in zip(firsts, sizes, strict=True):
            forwards.append((left, self._at("in", first)))
            left = self._at("in", first)
            for i in range(first, first + size):
                forwards.append((left, self._at("out", i)))
                left = self._at("out", i)
        forwards.append((left, self._at("loss")))
        begin, end = self._at("loss"), self._at("end")
        for first, size in reversed([*zip(firsts, sizes, strict=True)]):
            backwards.append((begin, begin := self.places.get(("grad out", first + size - 1), begin)))
            for i in reversed(range(first, first + size)):
                what = ("grad in", i) if i == first else ("grad out", i - 1)
                before = self.places.get(("grad out", i - 1), end)
                backwards.append((begin, begin := max(begin, self.places.get(what, before))))
        backwards.append((begin, end))
        spans = iter(
            self._span(forward, backward) for forward, backward in zip(forwards, reversed(backwards), strict=True)
        )
        for size in sizes:
            self.between.append(next(spans))
            self.blocks += (next(spans) for _ in range(size))
        self.between.append(next(spans))

    def _at(self, what: str, block: int = -1) -> int:
        return self.places[what, block]

    def _peak(self, begin: int, end: int) -> int:
        return max([self.marks[begin].level, *(mark.peak for mark in self.marks[begin + 1 : end + 1])])

    def _span(self, forward: tuple[int, int], backward: tuple[int, int]) -> _Span:
        """Return a part by the places where its passes begin and end."""
        (a, b), (c, d) = forward, backward
        level = [mark.level for mark in self.marks]
        saved = level[b] - level[a]
        high = max(self._peak(a, b) - level[a], self._peak(c, d) - level[c] + saved)
        work = sum((mark.work for i, j in (forward, backward) for mark in self.marks[i + 1 : j + 1]), Work())
        return _Span(Cost(saved, high, work), (level[d] - level[a]) - (level[c] - level[b]))
