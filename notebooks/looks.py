"""What the notebooks share: tables, the looks of figures, published figures, and fits by name."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from fitact.fitter.plot import EXACT, FITTED
from fitact.fitter.records import AnyFit, StepFit, read

HERE = Path(__file__).resolve().parent
OURS = HERE / "fits"
POINTS = 2001

# of libraries whose progress bars would be livelier with ipywidgets; none is shown here
warnings.filterwarnings("ignore", "IProgress not found")


class Table:
    """A table that notebooks render, and that reads well as plain text too.

    Args:
        header: names of the columns.
        rows: cells, shown by `str`; the first column is aligned to the left, numbers to the right.

    """

    def __init__(self, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        self.rows = [list(header), *([str(cell) for cell in row] for row in rows)]

    def _repr_markdown_(self) -> str:
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in self.rows]
        lines.insert(1, "|" + "|".join([":---", *["---:"] * (len(self.rows[0]) - 1)]) + "|")
        return "\n".join(lines)

    def __repr__(self) -> str:
        widths = [max(len(row[i]) for row in self.rows) for i in range(len(self.rows[0]))]
        lines = (
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in self.rows
        )
        return "\n".join(lines)


def published(name: str) -> dict[str, Any]:
    """Return figures that a paper prints, from `tests/reference/NAME.json`; its `source` says which paper."""
    figures: dict[str, Any] = json.loads((HERE.parent / "tests" / "reference" / f"{name}.json").read_text())
    return figures


def fit(name: str) -> AnyFit:
    """Return a fit that ships with fitact, or else one of `notebooks/fits`, which `refit.py` makes."""
    shipped = Path(str(files("fitact.generated") / "fits" / f"{name}.json"))
    return read(shipped if shipped.exists() else OURS / f"{name}.json")


def style() -> None:
    """Set how figures look."""
    plt.rcParams.update(
        {
            "figure.dpi": 150,
            "figure.constrained_layout.use": True,
            "font.family": "DejaVu Sans",
            "font.size": 8,
            "axes.titlesize": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": False,
            "legend.frameon": False,
            "lines.linewidth": 1.4,
        }
    )


def draw_steps(axes: Axes, fit: StepFit, low: float, high: float) -> None:
    """Draw f′ and the step function that replaces it, the levels joined where they change."""
    x = np.linspace(low, high, POINTS)
    axes.plot(x, fit.activation.derivative(x), color=EXACT, label="$f\\,'$ exact")
    borders = np.array(fit.borders)
    borders = np.union1d(-borders, borders) if fit.even else borders
    borders = borders[(low < borders) & (borders < high)]
    edges = np.concatenate([[low], borders, [high]])
    levels = fit((edges[:-1] + edges[1:]) / 2)
    axes.plot(np.repeat(edges, 2)[1:-1], np.repeat(levels, 2), color=FITTED, label="step function")
