"""The command `fitact codegen`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from fitact.base import FitactError, UsageError

from .options import FOLDER, PATH, read_fits, say


@click.command()
@click.argument("fits", nargs=-1, type=PATH, metavar="[FITS]...")
@click.option(
    "--out",
    type=FOLDER,
    metavar="DIR",
    help="Folder to write.  [default: generated, standalone or hub]",
)
@click.option("--check", is_flag=True, help="Write nothing; show what would change, and fail if anything would.")
@click.option(
    "--standalone",
    is_flag=True,
    help="For each fit, write a folder that needs PyTorch but not fitact, to copy into another project.",
)
@click.option(
    "--hub",
    is_flag=True,
    help="For each fit, write a folder with a kernel for the Hugging Face Hub and its library `kernels`.",
)
def codegen(fits: Sequence[Path], out: Path | None, check: bool, standalone: bool, hub: bool) -> None:
    """Generate a PyTorch module from each fit.

    FITS are fit files, by default all in generated/fits. With the default, modules whose fit is gone are removed.

    \b
    Examples:
      fitact codegen
      fitact codegen --check
      fitact codegen my_fit.json --out my_package
      fitact codegen --standalone
      fitact codegen my_fit.json --standalone --out my_project
      fitact codegen my_fit.json --hub
    """
    if standalone and hub:
        raise UsageError("--standalone, --hub: expected only one; what --hub writes needs no fitact either")
    read = read_fits(fits)
    from fitact.codegen import MODULES, bundle, drift, generate, plan

    files = bundle.plan(read, hub=hub) if standalone or hub else plan(read)
    layout = bundle.HUB if hub else bundle.STANDALONE if standalone else MODULES
    folder = out or Path("hub" if hub else "standalone" if standalone else "generated")
    prune = not fits
    if check:
        difference = drift(files, folder, prune=prune, layout=layout)
        if difference:
            say(difference, nl=False)
            raise FitactError(f"{folder}: differs from what its fits generate; run {layout.command}")
        say(f"{folder}: {len(read)} modules are what their fits generate")
        return
    changed = generate(files, folder, prune=prune, layout=layout)
    for path in changed:
        say(f"{'wrote' if layout.header(path).exists() else 'removed'} {path}")
    if not changed:
        say(f"{folder}: nothing to do, {len(read)} modules are up to date")
