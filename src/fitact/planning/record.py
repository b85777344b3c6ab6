"""The record of a plan: what it prints, its JSON, and putting it into a model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fitact.base import Bars, Kind, Shown, UsageError, binary, columns, quote, read_record, readable, three, write

if TYPE_CHECKING:
    from torch import nn

FILE = Kind("fitact.plan/3", "a plan", 1 << 25)
GIB = 2**30


@readable
@dataclass(frozen=True)
class Group:
    """Blocks of the same policy.

    Attributes:
        policy: its name, one of `fitact.runtime.choose.policies.POLICIES`.
        blocks: the paths of the blocks in the model; `""` is the model itself.

    """

    policy: str
    blocks: tuple[str, ...]


@readable
@dataclass(frozen=True)
class Point:
    """The whole model with one policy, or a plan for one budget.

    Attributes:
        name: of the policy, such as `"baseline"`; `"plan"` for plans.
        error: what it does to gradients: `"exact"`, `"rounding"` or `"coarse"`.
        peak: the most bytes of a step, parameters and the optimizer's state among them.
        seconds: of a step, by the model of the device.

    """

    name: str
    error: str
    peak: int
    seconds: float


@readable
@dataclass(frozen=True)
class Plan(Shown):
    """How to train each block of a model, so that a step fits a memory and takes the least time.

    Attributes:
        model, training: names of the model and of what is trained.
        inputs: sizes of the inputs, such as `"batch 8, seq 2048"`.
        dtype: of the parameters; with autocast also its dtype.
        optimizer: whose state must fit.
        gib: the memory, in GiB.
        host_gib: the memory of the host that may be pinned, in GiB; 0 if nothing is offloaded.
        fsdp: how many ranks share the model by FSDP2; bytes are those of one.
        error: the largest error of gradients that was allowed.
        device: the device for which time was predicted.
        fixed: bytes of parameters, buffers and the optimizer's state.
        gradients: bytes of the gradients.
        peak: the most bytes of a step, `fixed` among them; if nothing fits, the least that a step needs.
        host: bytes of the host that are pinned at the end of the forward pass.
        saved: bytes saved for backward at the end of the forward pass.
        seconds: of a forward and backward pass, by the model of the device, which waits for the link included.
        flops_again, traffic_again: FLOPs of products, and bytes read and written, beyond those of the baseline.
        baseline_peak, baseline_seconds: the same of the baseline.
        groups: how each block is trained; empty if nothing fits.
        points: the model with one policy for all blocks, and the least time for other memories.
        notes: further remarks.

    """

    model: str
    training: str
    inputs: str
    dtype: str
    optimizer: str
    gib: float
    host_gib: float
    fsdp: int
    error: str
    device: str
    fixed: int
    gradients: int
    peak: int
    host: int
    saved: int
    seconds: float
    flops_again: int
    traffic_again: int
    baseline_peak: int
    baseline_seconds: float
    groups: tuple[Group, ...]
    points: tuple[Point, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether a step fits the memory."""
        return self.peak <= self.gib * GIB

    @property
    def slower(self) -> float:
        """How much longer a step takes than the baseline's, as a share; below 0 if it is faster."""
        return self.seconds / self.baseline_seconds - 1

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def to_json(self) -> str:
        """Return the plan as JSON; the same plan gives the same text."""
        return json.dumps({"schema": FILE.schema, **asdict(self)}, indent=2, sort_keys=True) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, for `load_plan`."""
        write(Path(path), self.to_json())

    def bars(self) -> Bars:
        """Return the peaks of a step, and the memory that it has to fit."""
        rows = [("baseline", self.baseline_peak), ("this plan" if self.fits else "the least", self.peak)]
        rows += [("weights, gradients, optimizer", self.fixed + self.gradients), ("memory", round(self.gib * GIB))]
        title = f"{self.model} {sentence(self)}"
        return Bars(title, "peak of a training step", ("",), tuple((name, (size,)) for name, size in rows))

    def draw(self, format: str) -> bytes:
        """Draw memory against time: the plans for each error, and other policies as points."""
        from .picture import draw

        return draw(self, format)

    def apply(self, model: nn.Module) -> None:
        """Change the blocks of a model as planned, in place; `fitact.revert` puts them back.

        Add adapters, freeze layers, and choose the dtype first.

        Args:
            model: the model that the plan was made for, or one with the same blocks.

        Raises:
            UsageError: the plan does not fit its memory, the model has no such block, or a block cannot be changed
                so; the model is then unchanged.

        """
        from fitact.runtime.choose import apply

        if not self.fits:
            raise UsageError(f"the plan {sentence(self)}: there is nothing to apply")
        apply(model, [(group.policy, group.blocks) for group in self.groups])


def sentence(plan: Plan) -> str:
    """Return in a few words whether a step fits, and what it costs."""
    from fitact.runtime.choose import POLICIES
    from fitact.runtime.saving import ERRORS

    if not plan.fits:
        least, rest = binary(plan.peak), binary(plan.fixed + plan.gradients)
        return f"does not fit: a step takes at least {least}, {rest} of it weights, gradients and optimizer"
    used = [POLICIES[group.policy] for group in plan.groups]
    wide = max(used, key=lambda policy: ERRORS.index(policy.error))
    if all(group.policy == "baseline" for group in plan.groups):
        return "fits as it is"
    prefix = "fits as it is, and " if plan.baseline_peak <= plan.gib * GIB else "fits "
    words = "exact gradients" if wide.error == "exact" else wide.name
    pace = f"{three(abs(100 * plan.slower))} % {'faster' if plan.slower < 0 else 'slower'}"
    return f"{prefix}with {words}, {pace}"


def _advice(plan: Plan) -> str:
    """Return what to do, in a line."""
    if not plan.fits:
        host = "" if plan.host_gib else "memory of the host (--host-gib), "
        batch = "a smaller batch (fitact plan --largest batch finds it)"
        return f"to do: take {batch}, {host}a larger error, or train less"
    counts: Counter[str] = Counter()
    for group in plan.groups:
        counts[group.policy] += len(group.blocks)
    if {*counts} == {"baseline"}:
        return "to do: nothing, train the model as it is"
    made = "; ".join(f"{n} {policy}" for policy, n in counts.most_common())
    return f"to do: plan.apply(model), which makes {made}"


def _lines(plan: Plan) -> Iterator[str]:
    yield f"{plan.model}: {plan.inputs}, {plan.dtype}; {plan.training}; {plan.optimizer}"
    ranks = f" for each of {plan.fsdp} ranks" if plan.fsdp > 1 else ""
    yield f"{plan.gib:g} GiB{ranks}, gradients {plan.error}, time on {plan.device}: {sentence(plan)}"
    yield _advice(plan)
    yield ""
    if plan.groups:
        rows = [(group.policy, f"×{len(group.blocks)}", _span(group.blocks)) for group in plan.groups]
        yield from columns(rows, "<><")
        yield ""
    yield f"peak of a step {binary(plan.peak)}, baseline {binary(plan.baseline_peak)}"
    yield (
        f"of it {binary(plan.fixed)} parameters and optimizer, {binary(plan.gradients)} gradients, "
        f"{binary(plan.saved)} saved for backward at the end of forward"
    )
    if plan.groups:
        yield (
            f"{three(1e3 * plan.seconds)} ms a step, baseline {three(1e3 * plan.baseline_seconds)} ms; "
            f"recomputed: {three(plan.flops_again / 1e12)} TFLOP of products; "
            f"moved again: {binary(plan.traffic_again)}"
        )
    if plan.host:
        yield f"offloaded to the host: {binary(plan.host)} of pinned memory, of {plan.host_gib:g} GiB"
    if plan.points:
        yield ""
        head = ("", "gradients", "peak", "time, of baseline")
        shares = ((p, f"{three(100 * p.seconds / plan.baseline_seconds)} %") for p in plan.points)
        yield from columns([head, *((p.name, p.error, binary(p.peak), share) for p, share in shares)], "<<>>")
    for note in plan.notes:
        yield f"note: {note}"


def _span(blocks: Sequence[str]) -> str:
    if len(blocks) == 1:
        return blocks[0] or "the whole model"
    return f"{blocks[0]} to {blocks[-1]}"


def load_plan(path: str | Path) -> Plan:
    """Read a plan from the file that `Plan.save` or `fitact plan -o` wrote. This runs no code of the file.

    Args:
        path: the file.

    Returns:
        The plan, checked.

    Raises:
        UsageError: the file is not a plan, or cannot be read; the message names what is wrong.

    """
    return FILE.read(Path(path), from_json)


def from_json(text: str) -> Plan:
    """Return the plan of a JSON text; UsageError if it is not one, naming what is wrong."""
    from fitact.runtime.choose import POLICIES
    from fitact.runtime.saving import ERRORS

    plan = read_record(Plan, FILE.record(text), {str: _printable})
    seen: set[str] = set()
    for i, group in enumerate(plan.groups):
        if group.policy not in POLICIES:
            raise UsageError(f"groups[{i}].policy: expected {', '.join(POLICIES)}, got {quote(group.policy)}")
        for path in group.blocks:
            if path in seen:
                raise UsageError(f"groups[{i}].blocks: {quote(path)} is there twice")
            seen.add(path)
        if not group.blocks:
            raise UsageError(f"groups[{i}].blocks: expected some paths, got none")
    for where, error in (("error", plan.error), *((f"points[{i}]", p.error) for i, p in enumerate(plan.points))):
        if error not in ERRORS:
            raise UsageError(f"{where}: expected {', '.join(ERRORS)}, got {quote(error)}")
    if not plan.baseline_seconds > 0:
        raise UsageError(f"baseline_seconds: expected a number above 0, got {quote(plan.baseline_seconds)}")
    if plan.fits and not plan.groups:
        raise UsageError("groups: expected some, since its peak fits its memory")
    return plan


def _printable(value: object, what: str) -> str:
    if not (isinstance(value, str) and value.isprintable()):
        raise UsageError(f"{what}: expected a printable text, got {quote(value)}")
    return value
