"""Training steps of a few blocks at their published widths: time, the host's time, and memory of each variant."""

from __future__ import annotations

from functools import partial

from benchmarks.gpu.models import make, names
from benchmarks.gpu.record import Record, Row
from benchmarks.gpu.timer import graphed, step_memory, step_times
from benchmarks.gpu.variants import VARIANTS, variants_of

STEPS = 10
COMPILED_IN_REHEARSAL = ("ViT-L", "fitact.compile")  # one is enough there: each takes longer than all else


def run(record: Record, device: str, tiny: bool) -> None:
    """Add a row for each model and variant; what is compiled comes last, since it takes longest."""
    for compiled in (False, True):
        for model in names(tiny):
            for variant in variants_of(model, compiled):
                if not (tiny and compiled) or (model, variant) == COMPILED_IN_REHEARSAL:
                    row = {"model": model, "variant": variant}
                    record.measure(row, partial(measured, model, variant, device, tiny))


def measured(model: str, variant: str, device: str, tiny: bool) -> Row:
    """Return the memory and the times of a step."""
    subject = make(model, device, tiny=tiny)
    forward = VARIANTS[variant].prepare(subject)
    inputs = subject.inputs()

    def step() -> None:
        subject.model.zero_grad(set_to_none=True)
        forward(inputs).backward()

    step()  # compiles
    memory = step_memory(subject.model, partial(forward, inputs), device)
    times = step_times(step, device, 1 if tiny else STEPS, 0 if tiny else 3)
    if VARIANTS[variant].graphed:
        times |= graphed(step, device)
    size = {"batch": subject.size.batch, "tokens": subject.size.tokens, "blocks": len(subject.blocks())}
    return size | times | memory
