"""What fits: whether plans hold what they promise, then the largest batch and the longest sequence in 24 GiB.

The plans were made without a GPU: `fitact plan --hf llama --lora all --batch 8 --seq 2048 --device h200 --gib GIB
--error ERROR -o benchmarks/gpu/plans/ERROR_GIB.json`, the first one with `--front` and the one that offloads with
`--host-gib 48`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

import fitact
from benchmarks.gpu.models import Forward, Inputs, Loaded, make, names
from benchmarks.gpu.record import Record, Row
from benchmarks.gpu.timer import step_memory, step_times
from benchmarks.gpu.variants import VARIANTS, checkpointed, unchanged
from fitact.planning import GIB, Group, Plan

PLANS = Path(__file__).parent / "plans"
PLANNED = "LLaMA-7B, LoRA"
CHECKPOINTED = "checkpointed"  # among a plan's other ways to train the model
STEPS = 3
MEMORY = 24  # GiB
GROWING = {
    "LLaMA-7B, LoRA": ("tokens", 128),
    "BERT-large": ("batch", 1),
    "ViT-L": ("batch", 4),
}  # what, by how much
COMPARED = ("baseline", "exact", "rounding", "coarse", "checkpointing", "selective checkpointing")
TINY_GROWTH = "batch", 1
REHEARSED = ("baseline", "exact", "checkpointing")
REHEARSED_MIB = 4
MOST = 2**12  # units


def run(record: Record, device: str, tiny: bool) -> None:
    """Add a row for each plan, then one for each model and variant."""
    for path in sorted(PLANS.glob("*.json")):
        record.measure({"plan": path.stem}, partial(planned, path, device, tiny))
    record.measure({"plan": CHECKPOINTED}, partial(planned, None, device, tiny))
    for model in filter(GROWING.__contains__, names(tiny)):
        what, unit = TINY_GROWTH if tiny else GROWING[model]
        for variant in REHEARSED if tiny else COMPARED:
            row = {"model": model, "largest": what, "variant": variant}
            record.measure(row, partial(largest, model, variant, what, unit, device, tiny))


# ----------------------------------------------------------------------------------------------------------- plans


def planned(path: Path | None, device: str, tiny: bool) -> Row:
    """Train as planned, or with all blocks checkpointed; return the promised and the measured peak and time."""
    subject = make(PLANNED, device, tiny=tiny, whole=True)
    model = subject.model.get_base_model()  # of peft's model, the one that the plans were made for
    plan = shortened(fitact.load_plan(path or min(PLANS.glob("*.json"))), model)
    if path is None:
        (point,) = (each for each in plan.points if each.name == CHECKPOINTED)
        promised = {"promised_gib": point.peak / GIB, "promised_ms": 1e3 * point.seconds}
        forward = checkpointed(subject)
    else:
        promised = {"promised_gib": plan.peak / GIB, "promised_ms": 1e3 * plan.seconds}
        plan.apply(model)
        forward = unchanged(subject)
    return promised | followed(subject, forward, device)


def followed(subject: Loaded, forward: Forward, device: str) -> Row:
    """Return the time of steps, and the most memory of one, with the optimizer's state."""
    optimizer = torch.optim.AdamW([each for each in subject.model.parameters() if each.requires_grad])
    inputs = subject.inputs()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        forward(inputs).backward()

    step()
    optimizer.step()
    if device != "cuda":
        return step_times(step, device, STEPS)
    torch.cuda.reset_peak_memory_stats()
    times = step_times(step, device, STEPS, warm=1)
    return times | {"peak_gib": torch.cuda.max_memory_allocated() / GIB}


def shortened(plan: Plan, model: nn.Module) -> Plan:
    """Return a plan for the blocks that a model has: a rehearsal's has fewer."""
    there = {path for path, _ in model.named_modules()}
    return replace(
        plan, groups=tuple(Group(group.policy, tuple(there.intersection(group.blocks))) for group in plan.groups)
    )


# -------------------------------------------------------------------------------------------------- largest inputs


def largest(model: str, variant: str, what: str, unit: int, device: str, tiny: bool) -> Row:
    """Return the largest batch, or the longest sequence of one row, whose step fits the memory."""
    subject = make(model, device, tiny=tiny, whole=True)
    forward = VARIANTS[variant].prepare(subject)

    def fits(units: int) -> bool:
        inputs = subject.inputs(1, units * unit) if what == "tokens" else subject.inputs(units * unit)
        return step_fits(subject, forward, inputs, device)

    with limited(device):
        largest = most(fits)
    return {"size": largest * unit, "unit": unit, "gib": MEMORY}


def most(fits: Callable[[int], bool]) -> int:
    """Return the largest n up to `MOST` that fits, 0 if none: it is doubled while it does, then bisected."""
    low, high = 0, 1
    while high <= MOST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def step_fits(subject: Loaded, forward: Forward, inputs: Inputs, device: str) -> bool:
    """Return whether a step fits the memory; that of a rehearsal is 4 MiB."""
    try:
        memory = step_memory(subject.model, partial(forward, inputs), device)
    except torch.OutOfMemoryError:
        subject.model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        return False
    return device == "cuda" or memory["saved_mib"] <= REHEARSED_MIB


@contextmanager
def limited(device: str) -> Iterator[None]:
    """Let PyTorch allocate no more than the memory inside the context."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_per_process_memory_fraction(MEMORY * GIB / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
