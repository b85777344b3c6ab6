"""Pictures of fits: f′, the step function, and the error between them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .fit import StepFit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXACT, FITTED, ERROR = "#1f4e79", "#d1495b", "#6b705c"
COLUMNS = 4
MARGIN = 0.15  # of the span of the borders, drawn on either side of it
POINTS = 4001


def draw(fits: Sequence[StepFit], format: str = "png") -> bytes:
    """Draw fits beside each other, two panels each: derivative and step function above, error below.

    Args:
        fits: what to draw, four to a row.
        format: `png`, `svg` or `pdf`.

    Returns:
        The picture's bytes; the same fits give the same bytes.

    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(len(fits), COLUMNS)
    rows = -(-len(fits) // columns)
    width = 7.5 if columns == 1 else 4.5 * columns
    figure = Figure(figsize=(width, 5.2 * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2 * rows, columns, height_ratios=[2.2, 1] * rows)
    for i, fit in enumerate(fits):
        row, column = divmod(i, columns)
        upper = figure.add_subplot(grid[2 * row, column])
        lower = figure.add_subplot(grid[2 * row + 1, column], sharex=upper)
        _draw_step(fit, upper, lower)
    buffer = io.BytesIO()
    metadata = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[format]
    with rc_context({"svg.hashsalt": "fitact"}):  # identifiers in an SVG are random without it
        figure.savefig(buffer, format=format, metadata=metadata)
    return buffer.getvalue()


def _draw_step(fit: StepFit, upper: Axes, lower: Axes) -> None:
    low, high = _view(fit)
    borders = np.array(fit.borders)
    borders = np.union1d(-borders, borders) if fit.even else borders
    borders = borders[(low < borders) & (borders < high)]
    # each border twice, a hair apart, so that jumps are drawn upright and exactly there
    x = np.sort(np.concatenate([np.linspace(low, high, POINTS), borders, np.nextafter(borders, high)]))
    derivative, step = fit.activation.derivative(x), fit(x)
    label = fit.activation.name or fit.activation.expression
    of = "of |x|, " if fit.even else ""
    upper.plot(x, step, color=FITTED, linewidth=1.6, label=f"step function, {of}{len(fit.levels)} levels")
    upper.plot(x, derivative, color=EXACT, linewidth=1.8, label="$f\\,'$ exact")
    upper.set_title(f"{fit.name}:  $f$ = {label if len(label) < 40 else label[:37] + '...'}", fontsize=11, pad=22)
    upper.set_ylabel("derivative")
    # above the axes: inside them it would cover one curve or another
    upper.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, fontsize=9)
    upper.tick_params(labelbottom=False)
    error = derivative - step
    lower.fill_between(x, error, color=ERROR, alpha=0.35, linewidth=0)
    lower.plot(x, error, color=ERROR, linewidth=0.9)
    lower.axhline(0, color="black", linewidth=0.6)
    lower.set_ylabel("error")
    lower.set_xlabel(
        f"x\n$L$ = {fit.error['objective']:.4g},  max error = {fit.error['max']:.3g}", linespacing=1.5
    )
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(low, high)
        for border in borders:
            axes.axvline(border, color="black", alpha=0.12, linewidth=0.7)


def _view(fit: StepFit) -> tuple[float, float]:
    """Return the part of the domain to draw: where the step function steps, and some way beyond."""
    low, high = fit.domain
    first, last = (-fit.borders[-1] if fit.even else fit.borders[0]), fit.borders[-1]
    reach = max(last - first, (high - low) / 4)
    middle = (first + last) / 2
    half = reach / 2 * (1 + 2 * MARGIN)
    return max(low, middle - half), min(high, middle + half)
