"""The command `fitact codegen`."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import click

from fitact.base import FitactError, UsageError, read_start, read_text, write

from .options import FOLDER, PATH, fit_paths, read_fits, say

# The digest of what the last run read and wrote, in a folder: if nothing has changed, there is nothing to do.
REMEMBERED = Path("__pycache__", "fitact-codegen")


@click.command()
@click.argument("fits", nargs=-1, type=PATH, metavar="[FITS]...")
@click.option(
    "--out", type=FOLDER, metavar="DIR", help="Folder to write.  [default: generated, standalone or hub]"
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
    folder = out or Path("hub" if hub else "standalone" if standalone else "generated")
    prune = not fits
    places = fit_paths(fits)
    remembers = not (check or standalone or hub)
    if remembers and _remembered(folder) == _digest(places, folder, prune):
        say(f"{folder}: nothing to do, {len(places)} modules are up to date")
        return
    read = read_fits(fits)
    from fitact.codegen import MODULES, bundle, drift, generate, plan

    files = bundle.plan(read, hub=hub) if standalone or hub else plan(read)
    layout = bundle.HUB if hub else bundle.STANDALONE if standalone else MODULES
    if check:
        difference = drift(files, folder, prune=prune, layout=layout)
        if difference:
            say(difference, nl=False)
            raise FitactError(f"{folder}: differs from what its fits generate; run {layout.command}")
        say(f"{folder}: {len(read)} modules are what their fits generate")
        return
    changed = generate(files, folder, prune=prune, layout=layout)
    if remembers:
        with suppress(FitactError):  # it only saves the next run a second
            write(folder / REMEMBERED, _digest(places, folder, prune))
    for path in changed:
        say(f"{'wrote' if layout.header(path).exists() else 'removed'} {path}")
    if not changed:
        say(f"{folder}: nothing to do, {len(read)} modules are up to date")


def _remembered(folder: Path) -> str:
    path = folder / REMEMBERED
    return read_text(path, 1000) if path.is_file() else ""


def _digest(fits: Sequence[Path], folder: Path, prune: bool) -> str:
    """Return a digest of all that decides what a run does: fitact itself, the fits, and what is in the folder."""
    parts = ("fitact.base", "fitact.fitter", "fitact.codegen")
    specs = filter(None, map(find_spec, parts))
    sources = [Path(place) for spec in specs for place in spec.submodule_search_locations or ()]
    paths = [path for place in sources for path in sorted(place.rglob("*")) if path.suffix in (".py", ".j2")]
    digest = hashlib.sha256(repr((sys.version, version("sympy"), version("jinja2"), prune)).encode())
    for path in [*paths, *fits, *sorted(folder.glob("*.py"))]:
        digest.update(repr((str(path), hashlib.sha256(read_start(path)).hexdigest())).encode())
    return digest.hexdigest()
