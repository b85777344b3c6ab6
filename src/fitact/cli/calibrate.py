"""The command `fitact calibrate`."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import click

from fitact.base import UsageError, write

from .names import check_place
from .options import FILE, progress, say


@click.command()
@click.argument("call", metavar="MODULE:CALLABLE")
@click.option("--batch", type=click.IntRange(1), default=1, metavar="N")
@click.option("--seq", type=click.IntRange(1), default=512, metavar="N", help="Tokens per row.")
@click.option("--most", type=click.IntRange(1), metavar="N", help="Run at most this many batches.")
@click.option(
    "--group", is_flag=True, help="One weight for all sites whose paths differ only in numbers, such as layers."
)
@click.option(
    "-o", "--output", type=FILE, default="weights.json", metavar="FILE", help="Where to write; ends in .json."
)
def calibrate(call: str, batch: int, seq: int, most: int | None, group: bool, output: Path) -> None:
    """Write what goes into a model's activations, as weights for fits.

    MODULE:CALLABLE is a function of yours that returns a model and its inputs: a tensor, a tuple or list of
    positional or a dictionary of named arguments; or a model and several such batches, as a generator or a
    DataLoader. It may take batch and seq. The model is run in the mode it is in, without gradients.

    \b
    Examples:
      fitact calibrate my_models:tiny --batch 8
      fitact calibrate my_models:tiny --most 20 --group -o layers.json
      fitact fit --fn gelu --bits 3 --weight "layers.json#act" --name gelu_layers
    """
    if output.suffix != ".json":
        raise UsageError(f"{output}: expected a file name that ends in .json, by which fitact fit knows it")
    check_place(call)
    from fitact.calibration import calibrate as run
    from fitact.runtime.measure import model_and_batches

    model, batches = model_and_batches(call, batch, seq)
    with progress(1, "running"):
        calibration = run(model, batches if most is None else islice(batches, most), group=group)
    write(output, calibration.to_json())
    say(str(calibration))
    say(f"wrote {output}")
