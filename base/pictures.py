"""What all pictures share: how text is put into them, and how they are saved."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import UsageError, quote
from .text import one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# No picture holds its date or the version that drew it: the same figure gives the same bytes.
METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}


def check_format(format: str) -> None:
    """Raise UsageError unless pictures can be drawn here and saved in this format."""
    if format not in METADATA:
        raise UsageError(f"format: expected png, svg or pdf, got {quote(format)}")
    _check_installed()


def _check_installed() -> None:
    if find_spec("matplotlib") is None:
        raise UsageError('pictures need matplotlib, which is not installed: pip install "fitact[plot]"')


@contextmanager
def defaults() -> Iterator[None]:
    """Draw under matplotlib's own parameters, whatever its configuration files say; also a decorator."""
    _check_installed()
    try:
        from matplotlib import rc_context, rcdefaults
    except UnicodeError as error:  # of a configuration file, which it reads at once
        raise UsageError(f"matplotlib cannot be imported: {one_line(error)}") from None
    with rc_context():
        rcdefaults()
        yield


def blank(format: str, size: tuple[float, float], dpi: int = 150) -> Figure:
    """Return an empty figure of a size in inches; UsageError unless it can be drawn and saved in this format."""
    check_format(format)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def format_of(path: Path) -> str:
    """Return the format that the ending of a file's name asks for; UsageError if no picture can be saved so."""
    ending = path.suffix[1:].lower()
    if ending not in METADATA:
        raise UsageError(f"{path}: expected a file name that ends in .png, .svg or .pdf")
    check_format(ending)
    return ending


def literal(text: str, limit: int = 40) -> str:
    """Return a text that matplotlib draws literally: one line, cut to `limit`, no part of it read as a formula."""
    plain = text if text.isprintable() else ascii(text)[1:-1]
    plain = plain if len(plain) < limit else f"{plain[: limit - 3]}..."
    return plain.replace("$", r"\$")


def save(figure: Figure, format: str) -> bytes:
    """Return a figure as a PNG, SVG or PDF; letters that the font lacks are drawn as boxes."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    # identifiers in an SVG are random without a salt
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": "fitact"}):
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(buffer, format=format, metadata=METADATA[format])
    return buffer.getvalue()
