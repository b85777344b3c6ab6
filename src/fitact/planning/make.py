"""Making a plan: the costs of policies, the programme for the budget, the check of its answer, and the front."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import count, groupby, product
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from fitact.base import JobError, UsageError, flags, integer, positive, quote
from fitact.runtime.choose import (
    BASELINE,
    DTYPES,
    FULL,
    MOVED,
    OF_BLOCKS,
    OPTIMIZERS,
    SELECTIVE,
    Cost,
    Costs,
    Policy,
    Segment,
    measure_costs,
    sharded,
    step,
)
from fitact.runtime.measure import USUAL, Device, Patterns, Subject, copied, device_of
from fitact.runtime.saving import ERRORS

from .capacity import MOST, largest_size
from .programme import Answer, fastest, least, peak, seconds
from .record import GIB, Group, Plan, Point

if TYPE_CHECKING:
    from torch import nn

MOST_GIB = 2**20  # a pebibyte
WORTH = 1e-3  # of a step's time: for less, a model that fits is not changed, and no larger error is taken
TRIES = 6  # of budgets, until what the programme answers also fits as measured
FRONT = 9  # budgets of each line of the front
EVERY = {2: "second", 3: "third", 4: "fourth"}  # of the blocks, which are checkpointed
ONE_BLOCK = (
    "no block repeats, so the whole model is one block: name its blocks with --blocks PATTERN, in Python blocks="
)
CACHE = (
    "what fails may do so because a cache of keys and values grows where a block runs again: "
    "plan with model.config.use_cache = False"
)

Answered = tuple[list[Group], Cost]  # an answer's groups, and its step as measured


def plan(
    model: nn.Module,
    *,
    gib: float,
    error: str = "rounding",
    example_inputs: Any,
    optimizer: str = "adamw",
    device: str | Device = USUAL,
    autocast: str | None = None,
    blocks: Patterns = None,
    host_gib: float = 0.0,
    fsdp: int = 1,
    ddp: bool = False,
    accumulate: bool = False,
    front: bool = False,
) -> Plan:
    """Plan how to train each block of a model, so that a step fits a memory and takes the least time.

    The model is copied as fake tensors: this takes no memory, and does not change the model. Each of its blocks
    may be left as it is, save less (see `fitact.saving`), or be checkpointed, fully or selectively. What each
    choice saves, needs at its peak and computes again is counted by running the model. An integer programme finds
    the choices with the least time. A model that reads values, such as experts whose shapes depend on their
    tokens, is copied with its values and run with the real inputs, which takes the memory of a training step.

    Args:
        model: the model, with its adapters and frozen layers, in its dtype.
        gib: the memory of a step in GiB: parameters, gradients, the optimizer's state, and what is saved for
            backward and needed meanwhile. PyTorch's allocator and CUDA's context need some more.
        error: how far gradients may be off: `"exact"`, `"rounding"` or `"coarse"`, as for `fitact.saving`.
        example_inputs: inputs to run the model with, as for `fitact.convert`. Backward starts from the
            output's `loss` if there is one, else from all outputs; of a model of transformers keep the loss alone.
        optimizer: `"adamw"`, `"sgd"` (with momentum) or `"none"`.
        device: for which time is predicted: a name in `fitact.runtime.measure.devices.DEVICES`, or what `measured`
            there returns.
        autocast: `"bfloat16"` or `"float16"` if the model is trained with it.
        blocks: patterns (fnmatch) of the paths of the blocks; by default the modules that the model repeats.
        host_gib: the memory of the host in GiB that may be pinned for what is saved; 0 to offload nothing.
        fsdp: how many ranks share the model by FSDP2, each block and then the model in `fully_shard`. The plan is
            that of each rank, and `example_inputs` are one rank's.
        ddp: whether the model is in DistributedDataParallel, whose buckets take the bytes of the gradients once
            more. With its `gradient_as_bucket_view=True` they are the gradients: say `accumulate` instead.
        accumulate: whether gradients of earlier batches are there already, which a step adds its own to.
        front: whether to find the least time for other memories, too.

    Returns:
        The plan, which prints, draws (`plot`), applies to a model (`apply`), and is written to a file (`save`).

    Raises:
        UsageError: an argument is not valid, or the model cannot be run.

    """
    _check(gib, error)
    flags(front=front)
    made = planner(
        model,
        example_inputs=example_inputs,
        optimizer=optimizer,
        device=device,
        autocast=autocast,
        blocks=blocks,
        host_gib=host_gib,
        fsdp=fsdp,
        ddp=ddp,
        accumulate=accumulate,
        error=error,
    )
    return made.plan(gib, error, front=front)


def planner(
    model: nn.Module,
    *,
    example_inputs: Any,
    optimizer: str = "adamw",
    device: str | Device = USUAL,
    autocast: str | None = None,
    blocks: Patterns = None,
    host_gib: float = 0.0,
    fsdp: int = 1,
    ddp: bool = False,
    accumulate: bool = False,
    error: str = ERRORS[-1],
) -> Planner:
    """Measure once what each policy costs for each block of a model, for plans for several memories.

    The arguments are those of `plan`; `error` is the largest that plans may allow.

    Returns:
        The planner: `planner.plan(gib, error)` returns a plan, `planner.least(error)` the least bytes of a step.

    Raises:
        UsageError: an argument is not valid, or the model cannot be run.

    """
    where = device_of(device) if isinstance(device, str) else device
    if not isinstance(where, Device):
        raise UsageError(f"device {quote(device)}: expected a name or a Device")
    casting = None if autocast is None else DTYPES.get(autocast)
    if autocast is not None and casting is None:
        raise UsageError(f"autocast {quote(autocast)}: expected bfloat16 or float16")
    integer("fsdp", fsdp, 1)
    flags(ddp=ddp, accumulate=accumulate)
    subject = copied(model, example_inputs, casting, where.kernels, blocks)
    subject = replace(subject, ranks=fsdp, ddp=ddp, accumulates=accumulate)
    return Planner(subject, optimizer, where, host_gib, error)


class Planner:
    """The costs of a model, measured once, and plans for any memory and error; `fitact.planner` makes one.

    Args:
        subject: the model.
        optimizer: as for `plan`.
        device: for which time is predicted.
        host_gib: as for `plan`.
        error: the largest error that plans may allow.
        progress: called with the share of the measuring that is done.

    Raises:
        UsageError: the optimizer is unknown, nothing is trained, or the model cannot be run.

    """

    def __init__(
        self,
        subject: Subject,
        optimizer: str,
        device: Device,
        host_gib: float = 0.0,
        error: str = ERRORS[-1],
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        errors = _errors(error)
        if optimizer not in OPTIMIZERS:
            raise UsageError(f"optimizer {quote(optimizer)}: expected {', '.join(OPTIMIZERS)}")
        if subject.ddp and subject.ranks > 1:
            raise UsageError(f"fsdp {subject.ranks}, ddp: expected one of them")
        if host_gib:
            positive("host_gib", host_gib, MOST_GIB)
            if device.link is None:
                raise UsageError(f"host_gib: {device.name} has no link to a host whose speed is known")
        self.host = int(host_gib * GIB)
        also = ["gradients accumulate"] * subject.accumulates + ["in DDP"] * subject.ddp
        self.training = "; ".join([subject.training, *also])
        self.subject, self.optimizer, self.device = subject, optimizer, device
        parameters = list(subject.model.parameters())
        self.trained = sharded((parameter for parameter in parameters if parameter.requires_grad), subject.ranks)
        if not self.trained:
            raise UsageError(f"{subject.name}: nothing in it is trained")
        state = OPTIMIZERS[optimizer] * self.trained
        buffers = sum(buffer.nbytes for buffer in subject.model.buffers())
        self.copies = (subject.accumulates + subject.ddp) * self.trained  # of gradients that stay
        self.gradients = (1 + subject.ddp) * self.trained
        self.fixed = sharded(parameters, subject.ranks) + buffers + state + self.copies
        self.dtype = str(parameters[0].dtype).removeprefix("torch.")
        if subject.autocast is not None:
            self.dtype += f", autocast to {str(subject.autocast).removeprefix('torch.')}"
        self.error = error
        policies = [policy for policy in OF_BLOCKS if policy.error in errors and (self.host or not policy.offload)]
        self.costs = measure_costs(subject, device, policies, progress)
        self.steps: dict[tuple[Policy, ...], Cost] = {}  # that were measured
        self.notes = self.costs.notes
        configs = (getattr(module, "config", None) for module in subject.model.modules())
        if self.notes and any(getattr(config, "use_cache", False) for config in configs):
            self.notes = (CACHE, *self.notes)
        if [run.paths for run in self.costs.runs] == [("",)]:
            self.notes = (ONE_BLOCK, *self.notes)

    def plan(self, gib: float, error: str, *, front: bool = False) -> Plan:
        """Plan how to train each block, so that a step fits a memory and takes the least time.

        Args:
            gib: the memory of a step in GiB, as for `fitact.plan`.
            error: how far gradients may be off, as for `fitact.plan`.
            front: whether to find the least time for other memories, too; this is done once.

        Raises:
            UsageError: an argument is not valid.

        """
        _check(gib, error, self.error)
        groups, done = self._chosen(error, int(gib * GIB) - self.fixed)
        baseline = self.costs.baseline
        again = done.work - baseline.work
        return Plan(
            model=self.subject.name,
            training=self.training,
            inputs=self.subject.inputs,
            dtype=self.dtype,
            optimizer=self.optimizer,
            gib=float(gib),
            host_gib=self.host / GIB,
            fsdp=self.subject.ranks,
            error=error,
            device=self.device.name,
            fixed=self.fixed - self.copies,
            gradients=self.gradients,
            peak=self.fixed + done.peak,
            saved=done.saved,
            host=done.host,
            seconds=done.work.seconds,
            flops_again=max(again.flops, 0),
            traffic_again=max(again.traffic, 0),
            baseline_peak=self.fixed + baseline.peak,
            baseline_seconds=baseline.work.seconds,
            groups=tuple(groups),
            points=self.points if front else (),
            notes=self.notes,
        )

    def least(self, error: str) -> int:
        """Return the least peak of a step in bytes, as measured, with the policies that an error allows.

        Args:
            error: how far gradients may be off, as for `fitact.plan`.

        Raises:
            UsageError: the error is unknown, or larger than that of the planner.

        """
        _errors(error, self.error)
        return self.fixed + self._chosen(error, 0)[1].peak

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """The baselines, and the front of each error, by the costs of single blocks.

        Times are scaled so that the baseline's is the measured one.
        """
        exact = allowed(self.costs, "exact")
        scale = self.costs.baseline.work.seconds / seconds(exact, every(exact, BASELINE))

        def point(name: str, segments: Sequence[Segment], answer: Answer, error: str = "exact") -> Point:
            return Point(name, error, self.fixed + peak(segments, answer), scale * seconds(segments, answer))

        baseline = point("baseline", exact, every(exact, BASELINE))
        ran = {policy for segment in self.costs.segments for policy in segment.costs}  # others failed
        uniform = [policy for policy in (FULL, SELECTIVE, MOVED) if policy in ran]
        points = [baseline, *(point(policy.name, exact, every(exact, policy)) for policy in uniform)]
        for n, name in EVERY.items() if FULL in ran else ():
            points.append(point(f"every {name} block {FULL.name}", exact, every(exact, FULL, n)))
        for error in _errors(self.error):
            segments = allowed(self.costs, error)
            low, high = least(segments, self.host), baseline.peak - self.fixed
            line: list[Point] = []
            for k in range(FRONT):
                answer = fastest(segments, slack(low + (high - low) * k // (FRONT - 1)), self.host)
                if answer is not None:
                    answered = point("plan", segments, answer, error)
                    line += [answered] if not line or answered.seconds < line[-1].seconds else []
            points += line
        return tuple(points)

    def _chosen(self, error: str, room: int) -> tuple[list[Group], Cost]:
        """Return the fastest plan that fits as measured, and its step; if none does, the step of least memory."""
        hosts = dict.fromkeys((0, self.host))
        answered: Answered | None = None
        for some, host in product(_errors(error), hosts):
            within = self._within(allowed(self.costs, some), room, host)
            if within is not None and (answered is None or _quicker(within[1], answered[1])):
                answered = within  # a larger error and memory of the host have to pay
        segments = allowed(self.costs, error)
        if answered is None:  # memory in flight may leave no room
            frugal = (fastest(segments, slack(least(segments, host)), host) for host in hosts)
            steps = [self._done(segments, answer or every(segments, FULL)) for answer in frugal]
            answered = min(steps, key=lambda both: both[1].peak)
        for _ in range(TRIES):  # of answers that need less as measured, though not by the sum
            less = self._within(segments, answered[1].peak - 1, self.host) if answered[1].peak > room else None
            if less is None:
                break
            answered = less
        if answered[1].peak <= room:
            return answered
        return [], min(answered[1], self.costs.baseline, key=lambda step: step.peak)

    def _within(self, segments: Sequence[Segment], room: int, host: int) -> Answered | None:
        """Return the fastest answer of a few that fits as measured, and its step; None if none of them does."""
        baseline = self.costs.baseline
        limit, pinned = room, host
        best: Answered | None = (
            (_groups(segments, every(segments, BASELINE)), baseline) if baseline.peak <= room else None
        )
        for _ in range(TRIES):
            answer = fastest(segments, limit, pinned)
            if answer is None:
                break
            groups, done = self._done(segments, answer)
            if done.peak <= room and done.host <= host:
                return (groups, done) if best is None or _quicker(done, best[1]) else best
            limit = peak(segments, answer) - max(done.peak - room, 0)  # less than it needs by the sum
            pinned -= max(done.host - host, 0)
        return best

    def _done(self, segments: Sequence[Segment], answer: Answer) -> Answered:
        policies = (*(policy for policy, _ in _blocks(segments, answer)), answer[-1][0])
        if policies not in self.steps:
            self.steps[policies] = step(self.subject, self.device, self.costs.runs, policies[:-1], policies[-1])
        return _groups(segments, answer), self.steps[policies]


def _quicker(candidate: Cost, other: Cost) -> bool:
    """Whether a step is quicker than another by what it is worth to change a model."""
    return candidate.work.seconds < other.work.seconds * (1 - WORTH)


def allowed(costs: Costs, error: str) -> list[Segment]:
    """Return a model's segments with the policies whose gradients are off by no more than an error."""
    errors = _errors(error)
    return [
        replace(segment, costs={policy: cost for policy, cost in segment.costs.items() if policy.error in errors})
        for segment in costs.segments
    ]


def every(segments: Sequence[Segment], policy: Policy, n: int = 1) -> Answer:
    """Return the answer in which every n-th block has a policy, where it can; the others stay as they are."""
    places = count()
    return [
        [policy if next(places) % n == 0 and policy in segment.costs else BASELINE for _ in segment.paths]
        or [BASELINE]  # of what lies between
        for segment in segments
    ]


def _blocks(segments: Sequence[Segment], answer: Answer) -> list[tuple[Policy, str]]:
    """Return the policy and the path of each block."""
    pairs = zip(segments, answer, strict=True)
    return [both for segment, chosen in pairs for both in zip(chosen, segment.paths, strict=False)]


def _groups(segments: Sequence[Segment], answer: Answer) -> list[Group]:
    """Return the groups of blocks of the same policy, each in one part of the model."""
    by_policy = groupby(_blocks(segments, answer), itemgetter(0))
    groups = [Group(policy.name, tuple(path for _, path in some)) for policy, some in by_policy]
    rest = answer[-1][0]  # the policy of the whole model is that of what follows its last block
    return groups if rest == BASELINE else [*groups, Group(rest.name, ("",))]


def slack(room: int) -> int:
    """Return a little more room than is needed, for the solver's tolerance."""
    return room + room // 10**5


def largest(
    planner: Callable[[int], Planner],
    *,
    gib: float,
    error: str,
    here: int,
    limit: int | None = None,
    degree: int = 1,
    front: bool = False,
) -> tuple[int, Plan]:
    """Find the largest size with which a step fits a memory, and plan it; JobError if not even a size of 1 fits.

    `planner` returns that of a size; `here` is a size to begin with, `limit` the largest possible one. Bytes are a
    polynomial of a batch of degree 1, of the length of a sequence of degree 2. The others are those of `plan`.
    """
    _check(gib, error)
    planners = cache(planner)
    needed = cache(lambda size: planners(size).least(error))
    limit = limit or MOST
    start = max(1, min(here, limit // (degree + 1)))
    sizes = [start * k for k in range(1, degree + 2) if start * k <= limit]
    size = largest_size(needed, int(gib * GIB), sizes, limit)
    if not size:
        raise JobError(f"not even 1 fits {gib:g} GiB: that takes at least {needed(1) / GIB:.3g} GiB")
    return size, planners(size).plan(gib, error, front=front)


def _check(gib: float, error: str, most: str = ERRORS[-1]) -> None:
    """Raise UsageError unless these are a memory in GiB and an error of gradients, up to the largest allowed."""
    positive("gib", gib, MOST_GIB)
    _errors(error, most)


def _errors(error: str, most: str = ERRORS[-1]) -> tuple[str, ...]:
    """Return the errors of gradients up to one; UsageError if it is none, or beyond the largest allowed."""
    allowed = ERRORS[: ERRORS.index(most) + 1]
    if error not in allowed:
        raise UsageError(f"error {quote(error)}: expected {', '.join(allowed)}")
    return ERRORS[: ERRORS.index(error) + 1]
