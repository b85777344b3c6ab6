"""Making a plan: the costs of all ways, the programme for the budget, the check of its answer, and the front."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from fitact.arguments import real
from fitact.errors import UsageError, quote
from fitact.runtime.compare.report import DTYPES, MOST_GIB, OPTIMIZERS
from fitact.runtime.convert.choices import ERRORS
from fitact.runtime.plan.compiled import compiled_steps
from fitact.runtime.plan.costs import Cost, Costs, Step, measure, step
from fitact.runtime.plan.devices import USUAL, Device, device_of
from fitact.runtime.plan.subjects import Subject, of_model
from fitact.runtime.plan.ways import COMPILED, FULL, LOSS, OF_BLOCKS, SELECTIVE, STOCK, Way

from .programme import Option, Stage, fastest, least, peak, seconds
from .record import GIB, Group, Plan, Point

if TYPE_CHECKING:
    from torch import nn

TRIES = 6  # of budgets, until what the programme answers also fits as measured
MEASURING = 0.3  # of the work if the model is compiled, too
FRONT = 9  # budgets of each line of the front
EVERY = {2: "second", 3: "third", 4: "fourth"}  # block is checkpointed


def plan(
    model: nn.Module,
    *,
    gib: float,
    error: str = "rounding",
    example_inputs: Any,
    optimizer: str = "adamw",
    device: str | Device = USUAL,
    autocast: str | None = None,
    compiled: bool = False,
    front: bool = True,
) -> Plan:
    """Plan how to train each block of a model, so that a step fits a memory and takes the least time.

    The model is copied as fake tensors: this takes no memory, and does not change the model. Its repeated blocks
    may each be left as they are, convert their activations, gates and norms (see `fitact.convert`), or be
    checkpointed, fully or selectively. What each choice keeps, needs at its peak and computes again is counted by
    running the model. An integer programme finds the choices with the least time.

    Args:
        model: the model, with its adapters and frozen layers, in its dtype.
        gib: the memory of a step in GiB: parameters, gradients, the optimizer's state, and what is kept for
            backward and needed meanwhile. PyTorch's allocator and CUDA's context need some more.
        error: how far gradients may be off: `"exact"`, `"rounding"` or `"few-bit"`, as for `fitact.convert`.
        example_inputs: inputs to run the model with, as for `fitact.convert`. Backward starts from `output.loss`
            if there is one, else from all outputs; of a model of transformers keep the loss alone.
        optimizer: `"adamw"`, `"sgd"` (with momentum) or `"none"`.
        device: for which time is foretold: a name in `fitact.runtime.plan.devices.DEVICES`, or what `measured`
            there returns.
        autocast: `"bfloat16"` or `"float16"` if the model is trained with it.
        compiled: whether the plan may also compile the whole model, at one of a few memory budgets, with codes or
            without. To trace the model takes longer than all else.
        front: whether to find the least time for other memories, too.

    Returns:
        The plan, which prints, draws (`plot`), applies to a model (`apply`), and can be kept (`save`).

    Raises:
        UsageError: an argument is not valid, or the model cannot be run with fake tensors.

    """
    check(gib, error)
    made = planner(
        model,
        example_inputs=example_inputs,
        optimizer=optimizer,
        device=device,
        autocast=autocast,
        compiled=compiled,
    )
    return made.plan(gib, error, front=front)


def planner(
    model: nn.Module,
    *,
    example_inputs: Any,
    optimizer: str = "adamw",
    device: str | Device = USUAL,
    autocast: str | None = None,
    compiled: bool = False,
) -> Planner:
    """Measure once what each way to train each block of a model costs, for plans for several memories.

    Args:
        model: as for `plan`.
        example_inputs: as for `plan`.
        optimizer: as for `plan`.
        device: as for `plan`.
        autocast: as for `plan`.
        compiled: as for `plan`.

    Returns:
        The planner: `planner.plan(gib, error)` returns a plan, `planner.least(error)` the least bytes of a step.

    Raises:
        UsageError: an argument is not valid, or the model cannot be run with fake tensors.

    """
    where = device_of(device) if isinstance(device, str) else device
    if not isinstance(where, Device):
        raise UsageError(f"device {quote(device)}: expected a name or a Device")
    casting = None if autocast is None else DTYPES.get(autocast)
    if autocast is not None and casting is None:
        raise UsageError(f"autocast {quote(autocast)}: expected bfloat16 or float16")
    subject = of_model(model, example_inputs, casting, "cpu" if where.name.startswith("CPU") else "cuda")
    return Planner(subject, optimizer, where, compiled=compiled)


@dataclass(frozen=True)
class Words:
    """What a plan says of its model: what is trained, and the sizes of its inputs."""

    training: str = "what needs gradients is trained"
    inputs: str = "inputs as given"


class Planner:
    """The costs of a model, measured once, and plans for any memory and error; `fitact.planner` makes one.

    Args:
        subject: the model.
        optimizer: as for `plan`.
        device: for which time is foretold.
        words: what plans say of the model.
        compiled: as for `plan`.
        progress: called with the share of the measuring that is done.

    Raises:
        UsageError: the optimizer is unknown, nothing is trained, or the model cannot be run.

    """

    def __init__(
        self,
        subject: Subject,
        optimizer: str,
        device: Device,
        words: Words | None = None,
        compiled: bool = False,
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        if optimizer not in OPTIMIZERS:
            raise UsageError(f"optimizer {quote(optimizer)}: expected {', '.join(OPTIMIZERS)}")
        self.subject, self.optimizer, self.device, self.words = subject, optimizer, device, words or Words()
        parameters = list(subject.model.parameters())
        self.trained = sum(one.nbytes for one in parameters if one.requires_grad)
        if not self.trained:
            raise UsageError(f"{subject.name}: nothing in it is trained")
        state = OPTIMIZERS[optimizer] * self.trained
        self.fixed = sum(one.nbytes for one in (*parameters, *subject.model.buffers())) + state
        self.dtype = str(parameters[0].dtype).removeprefix("torch.")
        if subject.autocast is not None:
            self.dtype += f", autocast to {str(subject.autocast).removeprefix('torch.')}"
        share = MEASURING if compiled else 1.0
        self.costs = measure(subject, device, OF_BLOCKS, lambda done: progress(share * done))
        if compiled:
            try:
                steps = compiled_steps(
                    subject, device, COMPILED, lambda done: progress(share + (1 - share) * done)
                )
                self.costs = replace(self.costs, compiled=steps)
            except UsageError as error:
                self.costs = replace(self.costs, notes=(*self.costs.notes, str(error)))

    def plan(self, gib: float, error: str, *, front: bool = True) -> Plan:
        """Plan how to train each block, so that a step fits a memory and takes the least time.

        Args:
            gib: the memory of a step in GiB, as for `fitact.plan`.
            error: how far gradients may be off, as for `fitact.plan`.
            front: whether to find the least time for other memories, too; this is done once.

        Raises:
            UsageError: an argument is not valid.

        """
        check(gib, error)
        problem = Problem(self.costs, error)
        room = int(gib * GIB) - self.fixed
        groups, done = chosen(self.subject, self.device, problem, room)
        stock = self.costs.stock
        again = done.work - stock.work
        return Plan(
            model=self.subject.name,
            training=self.words.training,
            inputs=self.words.inputs,
            dtype=self.dtype,
            optimizer=self.optimizer,
            gib=float(gib),
            error=error,
            device=self.device.name,
            fixed=self.fixed,
            gradients=self.trained,
            peak=self.fixed + done.peak,
            kept=done.kept,
            seconds=done.work.seconds,
            flops_again=max(again.flops, 0),
            traffic_again=max(again.traffic, 0),
            stock_peak=self.fixed + stock.peak,
            stock_seconds=stock.work.seconds,
            groups=tuple(groups),
            points=self.points if front else (),
            notes=self.costs.notes,
        )

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """The baselines, and the front of each error."""
        return tuple(_points(self.costs, self.fixed))

    def least(self, error: str) -> int:
        """Return the least peak of a step in bytes, as measured, with the ways that an error allows.

        Args:
            error: how far gradients may be off, as for `fitact.plan`.

        Raises:
            UsageError: the error is unknown.

        """
        check_error(error)
        _, done = chosen(self.subject, self.device, Problem(self.costs, error), 0)
        return self.fixed + done.peak


def check(gib: float, error: str) -> None:
    """Raise UsageError unless these are a memory in GiB and an error of gradients."""
    real("gib", gib, 0, MOST_GIB)
    check_error(error)


def check_error(error: str) -> None:
    """Raise UsageError unless this is an error of gradients."""
    if error not in ERRORS:
        raise UsageError(f"error {quote(error)}: expected {', '.join(ERRORS)}")


Answer = list[list[int]]


class Problem:
    """The programme of a model's costs, with the ways that an error allows.

    Attributes:
        costs: the costs.
        ways: for each segment the ways, in the order of the stages' options.
        stages: the programme's stages.
        compiled: the steps of the compiled model.

    """

    def __init__(self, costs: Costs, error: str) -> None:
        self.costs = costs
        most = ERRORS.index(error)
        self.ways = [
            [way for way in (*OF_BLOCKS, LOSS) if way in one.costs and ERRORS.index(way.error) <= most]
            for one in costs.segments
        ]
        self.compiled = {way: done for way, done in costs.compiled.items() if ERRORS.index(way.error) <= most}
        self.stages = [
            Stage(one.count, one.grads, tuple(_option(one.costs[way]) for way in ways))
            for one, ways in zip(costs.segments, self.ways, strict=True)
        ]

    def all(self, way: Way) -> Answer:
        """Return the answer in which all blocks go one way, or stock's where they cannot."""
        return self.every(way, 1)

    def every(self, way: Way, n: int) -> Answer:
        """Return the answer in which every n-th block goes a way."""
        answer: Answer = []
        block = 0
        for segment, ways in zip(self.costs.segments, self.ways, strict=True):
            chosen = []
            for _ in range(segment.count):
                goes = way in ways and bool(segment.paths) and block % n == 0
                chosen.append(ways.index(way) if goes else 0)
                block += bool(segment.paths)
            answer.append(chosen)
        return answer

    def groups(self, answer: Answer) -> list[Group]:
        """Return the groups of blocks that go the same way, each in one part of the model."""
        paths = (path for segment in self.costs.segments for path in segment.paths)
        by_way = groupby(zip(self.taken(answer), paths, strict=True), itemgetter(0))
        found = [Group(way.name, tuple(path for _, path in some)) for way, some in by_way]
        return found if self.whole(answer) == STOCK else [*found, Group(LOSS.name, ("",))]

    def whole(self, answer: Answer) -> Way:
        """Return the way of the whole model, which is that of what follows its last block."""
        return self.ways[-1][answer[-1][0]]

    def taken(self, answer: Answer) -> list[Way]:
        """Return the way of each block."""
        return [
            ways[i]
            for segment, ways, chosen in zip(self.costs.segments, self.ways, answer, strict=True)
            for i in chosen[: len(segment.paths)]
        ]

    def frugal(self) -> Answer:
        """Return an answer with the lowest peak."""
        found = fastest(self.stages, slack(least(self.stages)))
        return found if found is not None else self.all(FULL)


def slack(room: int) -> int:
    """Return a little more room than is needed, for the solver's tolerance."""
    return room + room // 10**5


def _option(cost: Cost) -> Option:
    return Option(cost.keep, cost.high, cost.work.seconds)


def chosen(subject: Subject, device: Device, problem: Problem, room: int) -> tuple[list[Group], Step]:
    """Return the groups of the fastest plan that fits as measured, and its step; or none, and the least."""
    answer, done = _answer(subject, device, problem, room)
    choices = [] if answer is None else [(problem.groups(answer), done)]
    choices += [([Group(way.name, ("",))], one) for way, one in problem.compiled.items() if one.peak <= room]
    if choices:
        return min(choices, key=lambda choice: choice[1].work.seconds)
    return [], min([done, *problem.compiled.values()], key=lambda one: one.peak)


def _answer(subject: Subject, device: Device, problem: Problem, room: int) -> tuple[Answer | None, Step]:
    """Return the fastest answer that fits as measured, and its step; else None, and the lowest peak's step."""
    stock = problem.costs.stock
    runs = problem.costs.runs
    limit = room
    best: tuple[Answer, Step] | None = (problem.all(STOCK), stock) if stock.peak <= room else None
    for _ in range(TRIES):
        answer = fastest(problem.stages, limit)
        if answer is None:
            break
        done = step(subject, device, runs, problem.taken(answer), problem.whole(answer))
        if done.peak <= room:
            if best is None or done.work.seconds < best[1].work.seconds:
                best = answer, done
            break
        limit = peak(problem.stages, answer) - (done.peak - room)  # less than what this answer needs by the sum
    if best is not None:
        return best
    answer = problem.frugal()
    done = step(subject, device, runs, problem.taken(answer), problem.whole(answer))
    if done.peak <= room:
        return answer, done
    return None, min(done, stock, key=lambda one: one.peak)


def _points(costs: Costs, fixed: int) -> list[Point]:
    """Return the baselines, and the front of each error, by the costs of single blocks."""
    problem = Problem(costs, "exact")

    def point(name: str, answer: Answer, error: str = "exact", of: Problem = problem) -> Point:
        return Point(name, error, fixed + peak(of.stages, answer), seconds(of.stages, answer))

    points = [
        point("stock", problem.all(STOCK)),
        point(FULL.name, problem.all(FULL)),
        point(SELECTIVE.name, problem.all(SELECTIVE)),
        *(point(f"every {name} block {FULL.name}", problem.every(FULL, n)) for n, name in EVERY.items()),
    ]
    points += (
        Point(way.name, way.error, fixed + one.peak, one.work.seconds) for way, one in costs.compiled.items()
    )
    for error in ERRORS:
        points += line_of(Problem(costs, error), error, points[0].peak - fixed, fixed)
    return points


def line_of(problem: Problem, error: str, high: int, fixed: int) -> list[Point]:
    """Return the least time for a few memories up to `high`."""
    low = min([least(problem.stages), *(one.peak for one in problem.compiled.values())])
    line: list[Point] = []
    for k in range(FRONT):
        room = slack(low + (high - low) * k // (FRONT - 1))
        found = [(one.work.seconds, one.peak) for one in problem.compiled.values() if one.peak <= room]
        answer = fastest(problem.stages, room)
        if answer is not None:
            found.append((seconds(problem.stages, answer), peak(problem.stages, answer)))
        time, most = min(found)
        if not line or time < line[-1].seconds:
            line.append(Point("plan", error, fixed + most, time))
    return line
