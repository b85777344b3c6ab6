"""The command `fitact plan`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from fitact.base import JobError, UsageError

from .memory import Asked, of_a_model
from .options import finish, progress, say, writing

MOST_GIB = 2**20  # a pebibyte, the limit of `fitact.plan`


@click.command()
@of_a_model
@click.option(
    "--gib",
    type=click.FloatRange(0, MOST_GIB, min_open=True),
    metavar="G",
    help="Memory of a step, in GiB.  [default: the device's, if the table has it]",
)
@click.option(
    "--error",
    type=click.Choice(["exact", "rounding", "coarse"]),
    default="rounding",
    help="How far gradients may be off.",
)
@click.option(
    "--device",
    type=click.Choice(["a100", "h100", "h200", "gh200", "b200", "mi300x", "rtx4090", "rtx3090", "t4"]),
    default="a100",
    help="Device to predict time for.",
)
@click.option("--measure", "measures", is_flag=True, help="Measure this machine's device instead, in ten seconds.")
@click.option(
    "--largest",
    type=click.Choice(["batch", "seq"]),
    help="Plan for the largest batch, or the longest sequence, that fits; takes a few times as long.",
)
@click.option(
    "--blocks",
    multiple=True,
    metavar="PATTERN",
    help="Paths of the blocks, e.g. 'features.*'. Repeatable.  [default: the modules that the model repeats]",
)
@click.option(
    "--host-gib",
    type=click.FloatRange(0, MOST_GIB),
    default=0.0,
    show_default=False,
    metavar="G",
    help="Memory of the host, in GiB, that offloading may pin; takes three times as long.  [default: none]",
)
@click.option(
    "--fsdp",
    type=click.IntRange(1, 2**20),
    default=1,
    show_default=False,
    metavar="N",
    help="Of N ranks that share the model by FSDP2, plan for one.",
)
@click.option("--ddp", is_flag=True, help="The model is in DistributedDataParallel, which has buckets.")
@click.option("--accumulate", is_flag=True, help="Gradients of earlier batches are there already.")
@click.option(
    "--front", is_flag=True, help="Also plans for other memories, and checkpointing; --plot draws these."
)
@writing("the plan, for fitact.load_plan,", "memory against time")
def plan(
    asked: Asked,
    gib: float | None,
    error: str,
    device: str,
    measures: bool,
    largest: str | None,
    blocks: tuple[str, ...],
    host_gib: float,
    fsdp: int,
    ddp: bool,
    accumulate: bool,
    front: bool,
    output: Path | None,
    picture: Path | None,
) -> None:
    """Plan how to train each block, so that a step fits a memory.

    Each block may be left as it is, save less, offload, or be checkpointed, fully or selectively. Of the
    plans that fit, the fastest is chosen; time is predicted by a model of the device. The model and its inputs are
    built without memory, and nothing is downloaded.
    MODULE:CALLABLE is a function of yours that returns a model and its inputs; it may take batch and seq. If no
    plan fits, the command says what a step takes at least, writes no plan, and exits with status 1.

    \b
    Examples:
      fitact plan --hf llama --lora all --batch 8 --seq 2048 --gib 24
      fitact plan --hf bert --batch 32 --gib 16 --error exact --device t4 -o plan.json
      fitact plan my_models:tiny --batch 8 --gib 4 --measure --plot plan.png
      fitact plan --hf gpt2 --gib 12 --error exact --largest batch
    """
    asked.check()
    from fitact.planning import GIB, Planner
    from fitact.planning import largest as largest_of
    from fitact.runtime.choose import DTYPES
    from fitact.runtime.measure import Subject, device_of, measured, prepare

    where = measured() if measures else device_of(device)
    if gib is None:
        if where.memory is None:
            raise UsageError(f"{where.name}: its memory is not known: give --gib")
        gib = where.memory / GIB
    source = asked.source
    of = DTYPES[asked.dtype or ("bfloat16" if asked.autocast is None else "float32")]
    if largest is not None and largest not in source.varies:
        raise UsageError(f"--largest {largest}: {source.name} takes none")
    sizes = {"batch": asked.batch, "seq": asked.seq}
    front = front or picture is not None

    def prepared(**others: int) -> Subject:
        return replace(
            prepare(source, asked.training, **sizes | others, dtype=of),
            autocast=DTYPES[asked.autocast] if asked.autocast else None,
            device=where.kernels,
            blocks=blocks,
            ranks=fsdp,
            ddp=ddp,
            accumulates=accumulate,
        )

    subject = prepared()

    def planner(size: int | None = None) -> Planner:
        """Return the planner of the sizes that are given, or of another one in place of the largest."""
        of_size = subject if size is None else prepared(**{str(largest): size})
        with progress(1, "planning" if size is None else f"{largest} {size}") as advance:
            return Planner(of_size, asked.optimizer, where, host_gib, error, advance)

    if largest is None:
        result = planner().plan(gib, error, front=front)
    else:
        limit, degree = (source.longest(subject.model), 2) if largest == "seq" else (None, 1)
        size, result = largest_of(
            planner, gib=gib, error=error, here=sizes[largest], limit=limit, degree=degree, front=front
        )
        say(f"the largest {largest} that fits is {size}")
    finish(result, str(result), output if result.fits else None, picture)
    if not result.fits:
        raise JobError(f"no plan fits {gib:g} GiB: a step takes at least {result.peak / GIB:.3g} GiB")
