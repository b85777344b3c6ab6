"""Pictures of fits: f′, the step function, and the error between them."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from .expression import Array, evaluate
from .fit import AnyFit, ExactFit, InvertedFit, StepFit
from .storage import DTYPES, halves, rounded, stored

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXACT, FITTED, ERROR, SECOND = "#1f4e79", "#d1495b", "#6b705c", "#e09f3e"
LEAST = 1e-8  # of an error that is drawn
COLUMNS = 4
MARGIN = 0.15  # of the span of the borders, drawn on either side of it
POINTS = 4001
REACH = 6.0  # of x, where there is no domain


def draw(fits: Sequence[AnyFit], format: str = "png", dpi: int = 150) -> bytes:
    """Draw fits beside each other: f′ and what stands for it above, the error below; of mixtures f too.

    Args:
        fits: what to draw, four pairs of panels to a row.
        format: `png`, `svg` or `pdf`.
        dpi: dots per inch, of a PNG.

    Returns:
        The picture's bytes; the same fits give the same bytes.

    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [panel for fit in fits for panel in _panels(fit)]
    columns = min(len(panels), COLUMNS)
    rows = -(-len(panels) // columns)
    width = 7.5 if columns == 1 else 4.5 * columns
    figure = Figure(figsize=(width, 5.2 * rows), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2 * rows, columns, height_ratios=[2.2, 1] * rows)
    for i, panel in enumerate(panels):
        row, column = divmod(i, columns)
        upper = figure.add_subplot(grid[2 * row, column])
        panel(upper, figure.add_subplot(grid[2 * row + 1, column], sharex=upper))
    buffer = io.BytesIO()
    metadata = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[format]
    with rc_context({"svg.hashsalt": "fitact"}):  # identifiers in an SVG are random without it
        figure.savefig(buffer, format=format, metadata=metadata)
    return buffer.getvalue()


def _panels(fit: AnyFit) -> list[Callable[[Axes, Axes], None]]:
    """Return what draws the pairs of panels of a fit."""
    if isinstance(fit, ExactFit):
        return [partial(_draw_exact, fit)]
    if isinstance(fit, InvertedFit):
        return [partial(_draw_over_output, fit), partial(_draw_over_input, fit)]
    if fit.method == "relumix":
        return [partial(_draw_primitive, fit), partial(_draw_step, fit)]
    return [partial(_draw_step, fit)]


def _draw_primitive(fit: StepFit, upper: Axes, lower: Axes) -> None:
    low, high = _view(fit)
    borders = np.array(fit.borders)
    x = np.union1d(np.linspace(*fit.domain, 4 * POINTS), borders)
    value = fit.activation.value(x)
    # the broken line through f at the left end of the domain: its slopes are exact between the borders
    middle = (x[:-1] + x[1:]) / 2
    line = value[0] + np.concatenate([[0.0], np.cumsum(np.diff(x) * fit(middle))])
    shown = (low <= x) & (x <= high)
    upper.plot(x[shown], line[shown], color=FITTED, linewidth=1.6, label=f"mixture of {len(borders)} ReLUs")
    upper.plot(x[shown], value[shown], color=EXACT, linewidth=1.8, label="$f$ exact")
    _error(lower, x[shown], (value - line)[shown])
    _mark(borders, low, high, upper, lower)
    norm, most = fit.error["primitive_norm"], fit.error["primitive_max"]
    _dress(fit, upper, lower, f"norm of the error = {norm:.4g}\nmax error = {most:.3g}")
    upper.set_ylabel("value")


def _draw_step(fit: StepFit, upper: Axes, lower: Axes) -> None:
    low, high = _view(fit)
    borders = np.array(fit.borders)
    borders = np.union1d(-borders, borders) if fit.even else borders
    borders = borders[(low < borders) & (borders < high)]
    # each border twice, a hair apart, so that jumps are drawn upright and exactly there
    x = np.sort(np.concatenate([np.linspace(low, high, POINTS), borders, np.nextafter(borders, high)]))
    derivative, step = fit.activation.derivative(x), fit(x)
    of = "of |x|, " if fit.even else ""
    upper.plot(x, step, color=FITTED, linewidth=1.6, label=f"step function, {of}{len(fit.levels)} levels")
    upper.plot(x, derivative, color=EXACT, linewidth=1.8, label="$f\\,'$ exact")
    _error(lower, x, derivative - step)
    _mark(borders, low, high, upper, lower)
    norm = "$L$" if fit.method == "fewbit" else f"{fit.options.get('objective', '')} objective"
    _dress(fit, upper, lower, f"{norm} = {fit.error['objective']:.4g}\nmax error = {fit.error['max']:.3g}")


def _error(axes: Axes, x: Array, error: Array) -> None:
    axes.fill_between(x, error, color=ERROR, alpha=0.35, linewidth=0)
    axes.plot(x, error, color=ERROR, linewidth=0.9)


def _mark(borders: Array, low: float, high: float, *panels: Axes) -> None:
    for axes in panels:
        axes.set_xlim(low, high)
        for border in borders:
            axes.axvline(border, color="black", alpha=0.12, linewidth=0.7)


def _draw_exact(fit: ExactFit, upper: Axes, lower: Axes) -> None:
    x = np.linspace(-REACH, REACH, POINTS)
    derivative, y = fit.activation.derivative(x), fit.activation.value(x)
    for dtype, color in (("bfloat16", FITTED), ("float16", ERROR)):
        found = evaluate(fit.form, rounded(y, dtype))
        upper.plot(x, found, color=color, linewidth=1.6, label=f"from $y$ in {dtype}")
        lower.plot(x, (found - derivative) / np.maximum(1, np.abs(derivative)), color=color, linewidth=0.8)
    upper.plot(x, derivative, color=EXACT, linewidth=1.8, label="$f\\,'$ exact")
    for axes in (upper, lower):
        axes.set_xlim(-REACH, REACH)
    form = f"$f\\,'$ = {fit.derivative if len(fit.derivative) < 50 else 'g(y)'}"
    errors = f"max error = {fit.error['bfloat16']:.2g} (bfloat16), {fit.error['float16']:.2g} (float16)"
    _dress(fit, upper, lower, f"{form}\n{errors}")
    lower.set_ylabel("error / max(1, |$f\\,'$|)", fontsize=8)


def _draw_over_output(fit: InvertedFit, upper: Axes, lower: Axes) -> None:
    x = _inputs(fit, "float32")
    y, code = fit.activation.value(x), fit.code(x)
    derivative, found = fit.activation.derivative(x), fit.evaluate(y, code).astype(np.float64)
    for s in range(len(fit.forms["float32"])):
        of = code == s
        first = s == 0
        upper.plot(y[of], derivative[of], color=EXACT, linewidth=3.2, alpha=0.45, label="$f\\,'$ exact" * first)
        upper.plot(y[of], found[of], color=FITTED, linewidth=1.2, label="fitted, for each code" * first)
        lower.semilogy(y[of], _size(found - derivative)[of], color=FITTED, linewidth=0.7)
    _floor(lower, fit, "float32")
    error, floor = fit.error["float32"], fit.floor["float32"]
    _dress(fit, upper, lower, f"max error = {error:.2g} (float32), floor = {floor:.2g}", along="y = f(x)")
    lower.set_ylabel("|error|")


def _draw_over_input(fit: InvertedFit, upper: Axes, lower: Axes) -> None:
    x = _inputs(fit, "float32")
    upper.plot(x, fit.activation.derivative(x), color=EXACT, linewidth=3.2, alpha=0.45, label="$f\\,'$ exact")
    for dtype, color in (("bfloat16", FITTED), ("float16", SECOND), ("float32", ERROR)):
        at = x if dtype == "float32" else halves(dtype)
        at = np.sort(at[(at >= x[0]) & (at <= x[-1])])
        y = stored(fit.activation, at, dtype)
        found = fit.evaluate(y, fit.code(at, dtype), dtype)
        upper.plot(at, found, color=color, linewidth=0.9, label=f"$y$ in {dtype}")
        off = _size(found - fit.activation.derivative(at))
        lower.semilogy(at, off, color=color, linewidth=0.6)
        _floor(lower, fit, dtype, color)
    for split in fit.splits["bfloat16"]:
        for axes in (upper, lower):
            axes.axvline(split, color="black", alpha=0.25, linewidth=0.7)
    errors = ", ".join(f"{fit.error[dtype]:.2g}" for dtype in DTYPES)
    _dress(fit, upper, lower, f"max error = {errors}\ndashed: no function of that $y$ and code is nearer")
    lower.set_ylabel("|error|")


def _inputs(fit: InvertedFit, dtype: str) -> Array:
    """Return x to draw: evenly spaced, and densely beside the splits."""
    low, high = fit.domain or (-REACH, REACH)
    low, high = max(low, -10 * REACH), min(high, 10 * REACH)
    near = np.concatenate([split + np.linspace(-0.1, 0.1, 801) for split in (*fit.splits[dtype], low, high)])
    x = np.union1d(np.linspace(low, high, POINTS), near)
    return x[(x >= low) & (x <= high)].astype(np.float32).astype(np.float64)


def _size(error: Array) -> Array:
    """Return |error|, no smaller than what a logarithmic axis shows."""
    return np.maximum(np.abs(error), LEAST)


def _floor(axes: Axes, fit: InvertedFit, dtype: str, color: str = FITTED) -> None:
    axes.axhline(max(fit.floor[dtype], LEAST), color=color, linewidth=1.0, linestyle=(0, (4, 3)))


def _dress(fit: AnyFit, upper: Axes, lower: Axes, message: str, along: str = "x") -> None:
    """Add what all panels have: title, legend, labels."""
    label = fit.activation.name or fit.activation.expression
    upper.set_title(f"{fit.name}:  $f$ = {label if len(label) < 40 else label[:37] + '...'}", fontsize=11, pad=22)
    upper.set_ylabel("derivative")
    # above the axes: inside them it would cover one curve or another
    legend = {"ncols": 4, "columnspacing": 1.0, "handlelength": 1.4, "frameon": False, "fontsize": 9}
    upper.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), **legend)
    upper.tick_params(labelbottom=False)
    if lower.get_yscale() == "linear":
        lower.axhline(0, color="black", linewidth=0.6)
    lower.set_ylabel("error")
    lower.set_xlabel(f"{along}\n{message}", linespacing=1.5)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)


def _view(fit: StepFit) -> tuple[float, float]:
    """Return the part of the domain to draw: where the step function steps, and some way beyond."""
    low, high = fit.domain
    first, last = (-fit.borders[-1] if fit.even else fit.borders[0]), fit.borders[-1]
    reach = max(last - first, (high - low) / 4)
    middle = (first + last) / 2
    half = reach / 2 * (1 + 2 * MARGIN)
    return max(low, middle - half), min(high, middle + half)
