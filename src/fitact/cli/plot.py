"""The command `fitact plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from fitact.base import format_of, write

from .options import FILE, PATH, read_fits, say


@click.command()
@click.argument("fits", nargs=-1, type=PATH, metavar="[FITS]...")
@click.option(
    "-o",
    "--output",
    type=FILE,
    metavar="FILE",
    help="PNG, SVG or PDF.  [default: NAME.png, or fits.png for several]",
)
def plot(fits: Sequence[Path], output: Path | None) -> None:
    """Draw derivative, step function and error of fits.

    FITS are fit files, by default all in generated/fits. All are drawn in one figure.

    \b
    Examples:
      fitact plot
      fitact plot generated/fits/gelu_fewbit3.json -o gelu.svg
    """
    if output is not None:
        format_of(output)
    read = read_fits(fits)
    from fitact.fitter.plot import draw

    path = output or Path(f"{read[0].name}.png" if len(read) == 1 else "fits.png")
    write(path, draw(read, format_of(path)))
    say(f"wrote {path}")
