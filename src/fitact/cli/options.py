"""What several commands share: options, reading fits, progress bars."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fitact.base import UsageError, format_of, printable, quote, write

if TYPE_CHECKING:
    from fitact.fitter.numerics import Weight
    from fitact.fitter.records import AnyFit
    from fitact.planning import Plan
    from fitact.runtime.choose import Report


FITS = Path("generated/fits")
PATH = click.Path(path_type=Path)
Value = TypeVar("Value")


class Finite(click.types.FloatParamType):
    """A number that is neither infinite nor NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert a text to a number, or fail."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"expected a finite number, got {value}", param, ctx)
        return number


class _Place(click.Path):
    """The path of a file to write, or of a folder if that will do."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        what = "folder" if self.dir_okay else "file"
        if value in ("", "-") or (what == "file" and str(value).endswith(("/", os.sep))):
            self.fail(f"expected the name of a {what}, got {quote(value)}", param, ctx)
        if what == "file" and os.path.isdir(value):
            self.fail(f"expected the name of a file, and {quote(value)} is a folder", param, ctx)
        return super().convert(value, param, ctx)


FILE = _Place(dir_okay=False, path_type=Path)
FOLDER = _Place(path_type=Path)


def say(text: str = "", *, nl: bool = True, err: bool = False) -> None:
    """Print a text, which may hold names of files."""
    click.echo(printable(text), nl=nl, err=err)


def once(values: Sequence[Value]) -> list[Value]:
    """Return the values of a repeatable option without duplicates."""
    return list(dict.fromkeys(values))


def named(option: str, pairs: Iterable[tuple[str, Value]]) -> dict[str, Value]:
    """Return the names and values that an option gives; UsageError if a name is given twice."""
    values: dict[str, Value] = {}
    for name, value in pairs:
        if name in values:
            raise UsageError(f"{option} {name}: given twice")
        values[name] = value
    return values


def fit_paths(paths: Sequence[Path]) -> list[Path]:
    """Return the given files of fits, each once, by default all in generated/fits; each is there and is a fit."""
    from fitact.fitter.files import FIT

    files = list({os.path.abspath(path): path for path in paths}.values()) or sorted(FITS.glob("*.json"))
    if not files:
        raise UsageError(f"{FITS}: no fits there; make one first, for example: fitact fit --fn gelu --bits 3")
    for path in files:
        FIT.check(path)
    return files


def read_fits(paths: Sequence[Path]) -> list[AnyFit]:
    """Read the fits of `fit_paths`."""
    files = fit_paths(paths)
    from fitact.fitter.records import read

    return [read(path) for path in files]


def check_weight(given: str) -> None:
    """Raise UsageError if `--weight` is surely wrong: no formula, or no file of `fitact calibrate`."""
    from fitact.fitter.files import WEIGHTS
    from fitact.fitter.syntax import Syntax

    file, _, _ = given.partition("#")
    if file.endswith(".json"):
        WEIGHTS.check(Path(file))
    elif not given.startswith(("normal", "student")) and "histogram" not in given:
        Syntax(given, "weight").check_names(("x",))


def read_weight(given: str) -> Weight:
    """Return the weight that `--weight` names: a text, or `FILE.json#SITE` of `fitact calibrate`."""
    from fitact.fitter.numerics import Weight
    from fitact.fitter.records import read_weights

    file, mark, site = given.partition("#")
    if not file.endswith(".json"):
        return Weight(given)
    weights = read_weights(Path(file))
    try:
        return weights.weight(site if mark else None)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None


def completing(names: Callable[[], Iterable[str]]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return what completes a word in the shell to one of these names, which are asked for only then."""
    return lambda ctx, param, word: [name for name in names() if name.startswith(word)]


def finish(report: Plan | Report, text: str, output: Path | None, picture: Path | None) -> None:
    """Write a report as JSON and as a picture, where that is asked for, and print its text."""
    if output is not None:
        write(output, report.to_json())
    if picture is not None:
        report.plot(picture)
    say(text)
    for path in (output, picture):
        if path is not None:
            say(f"wrote {path}")


def writing(result: str, drawn: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options `-o`, for its result as JSON, and `--plot`, for a picture of it."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @click.option("-o", "--output", type=FILE, metavar="FILE", help=f"Write {result} as JSON.")
        @click.option("--plot", "picture", type=FILE, metavar="FILE", help=f"Draw {drawn}: a PNG, SVG or PDF.")
        @wraps(command)
        def checked(*args: Any, output: Path | None, picture: Path | None, **options: Any) -> None:
            if picture is not None:
                format_of(picture)
            if output is not None and output == picture:
                raise UsageError(f"-o and --plot: expected two files, got {output} for both")
            if output is not None and output.suffix.lower() in (".png", ".svg", ".pdf"):
                raise UsageError(f"{output}: -o writes JSON, draw with --plot")
            command(*args, output=output, picture=picture, **options)

        return checked

    return decorate


STEPS = 1000  # of the progress bar per fit
EVERY = 10.0  # seconds between two lines where there is no terminal


@contextmanager
def progress(jobs: int, label: str) -> Iterator[Callable[[float], None]]:
    """Show a progress bar over this many jobs on a terminal; elsewhere, print a line every ten seconds.

    The context gives what is called with the number of jobs that are done, whole ones and a share of the next.
    """
    hidden, done = not sys.stderr.isatty(), threading.Event()
    with click.progressbar(length=jobs * STEPS, label=label, file=sys.stderr, hidden=hidden) as bar:

        def tell() -> None:
            started = time.monotonic()
            while not done.wait(EVERY):
                share = f", {100 * bar.pos / (jobs * STEPS):.0f} %" if bar.pos else ""
                say(f"fitact: {label}{share}, {time.monotonic() - started:.0f} s", err=True)

        thread = threading.Thread(target=tell, daemon=True)
        if hidden:
            thread.start()
        try:
            yield lambda whole: bar.update(max(0, round(whole * STEPS) - bar.pos))
        finally:
            done.set()
            if hidden:
                thread.join()
