"""Making a plan: the costs of all ways, the programme for the budget, the check of its answer, and the front."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fitact.arguments import flags, positive
from fitact.errors import UsageError, quote
from fitact.runtime.choose.compare import DTYPES, MOST_GIB, OPTIMIZERS
from fitact.runtime.choose.costs import Costs, measure, measure_more
from fitact.runtime.choose.subjects import Subject, of_model
from fitact.runtime.choose.ways import OF_BLOCKS, Way
from fitact.runtime.measure.devices import USUAL, Device, device_of
from fitact.runtime.saving import ERRORS

from .problem import Problem, chosen, points_of
from .record import GIB, Plan, Point

if TYPE_CHECKING:
    from torch import nn


def plan(
    model: nn.Module,
    *,
    gib: float,
    error: str = "rounding",
    example_inputs: Any,
    optimizer: str = "adamw",
    device: str | Device = USUAL,
    autocast: str | None = None,
    front: bool = True,
) -> Plan:
    """Plan how to train each block of a model, so that a step fits a memory and takes the least time.

    The model is copied as fake tensors: this takes no memory, and does not change the model. Each of its repeated
    blocks may be left as it is, save less (see `fitact.saving`), or be checkpointed, fully or selectively. What
    each choice saves, needs at its peak and computes again is counted by running the model. An integer programme
    finds the choices with the least time.

    Args:
        model: the model, with its adapters and frozen layers, in its dtype.
        gib: the memory of a step in GiB: parameters, gradients, the optimizer's state, and what is kept for
            backward and needed meanwhile. PyTorch's allocator and CUDA's context need some more.
        error: how far gradients may be off: `"exact"`, `"rounding"` or `"coarse"`, as for `fitact.saving`.
        example_inputs: inputs to run the model with, as for `fitact.convert`. Backward starts from the
            output's `loss` if there is one, else from all outputs; of a model of transformers keep the loss alone.
        optimizer: `"adamw"`, `"sgd"` (with momentum) or `"none"`.
        device: for which time is predicted: a name in `fitact.runtime.measure.devices.DEVICES`, or what `measured`
            there returns.
        autocast: `"bfloat16"` or `"float16"` if the model is trained with it.
        front: whether to find the least time for other memories, too.

    Returns:
        The plan, which prints, draws (`plot`), applies to a model (`apply`), and can be kept (`save`).

    Raises:
        UsageError: an argument is not valid, or the model cannot be run with fake tensors.

    """
    check(gib, error)
    flags(front=front)
    made = planner(
        model,
        example_inputs=example_inputs,
        optimizer=optimizer,
        device=device,
        autocast=autocast,
        error=ERRORS[-1] if front else error,
    )
    return made.plan(gib, error, front=front)


def planner(
    model: nn.Module,
    *,
    example_inputs: Any,
    optimizer: str = "adamw",
    device: str | Device = USUAL,
    autocast: str | None = None,
    error: str = ERRORS[-1],
) -> Planner:
    """Measure once what each way to train each block of a model costs, for plans for several memories.

    Args:
        model: as for `plan`.
        example_inputs: as for `plan`.
        optimizer: as for `plan`.
        device: as for `plan`.
        autocast: as for `plan`.
        error: the ways that it allows are measured at once, others when a plan may take them.

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
    return Planner(subject, optimizer, where, error=error)


@dataclass(frozen=True)
class Words:
    """What a plan says about its model: what is trained, and the sizes of its inputs."""

    training: str = "what needs gradients is trained"
    inputs: str = "inputs as given"


class Planner:
    """The costs of a model, measured once, and plans for any memory and error; `fitact.planner` makes one.

    Args:
        subject: the model.
        optimizer: as for `plan`.
        device: for which time is predicted.
        words: what plans say about the model.
        error: the ways that it allows are measured at once, others when a plan may take them.
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
        error: str = ERRORS[-1],
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        check_error(error)
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
        self._error = error
        ways = self._allowed(error)
        self._costs = measure(subject, device, ways, progress)

    @property
    def costs(self) -> Costs:
        """The costs of all ways."""
        return self._costs_of(ERRORS[-1])

    def _allowed(self, error: str) -> list[Way]:
        """Return the ways that an error allows."""
        return [way for way in OF_BLOCKS if ERRORS.index(way.error) <= ERRORS.index(error)]

    def _costs_of(self, error: str) -> Costs:
        """Return the costs, among them those of all ways that an error allows."""
        there = self._allowed(self._error)
        if ways := [way for way in self._allowed(error) if way not in there]:
            self._costs = measure_more(self._costs, self.subject, self.device, ways)
            self._error = error
        return self._costs

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
        costs = self.costs if front else self._costs_of(error)
        problem = Problem(costs, error)
        room = int(gib * GIB) - self.fixed
        groups, done = chosen(self.subject, self.device, problem, room)
        stock = costs.stock
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
            notes=costs.notes,
        )

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """The baselines, and the front of each error."""
        return tuple(points_of(self.costs, self.fixed))

    def least(self, error: str) -> int:
        """Return the least peak of a step in bytes, as measured, with the ways that an error allows.

        Args:
            error: how far gradients may be off, as for `fitact.plan`.

        Raises:
            UsageError: the error is unknown.

        """
        check_error(error)
        _, done = chosen(self.subject, self.device, Problem(self._costs_of(error), error), 0)
        return self.fixed + done.peak


def check(gib: float, error: str) -> None:
    """Raise UsageError unless these are a memory in GiB and an error of gradients."""
    positive("gib", gib, MOST_GIB)
    check_error(error)


def check_error(error: str) -> None:
    """Raise UsageError unless this is an error of gradients."""
    if error not in ERRORS:
        raise UsageError(f"error {quote(error)}: expected {', '.join(ERRORS)}")
