"""Pictures of fits: f′, what stands in its place, and the error between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fitact.base import UsageError, blank, check_format, defaults, literal, save
from fitact.fitter.expr import Array, evaluate
from fitact.fitter.numerics import DTYPES, halves, rounded, stored
from fitact.fitter.records import AnyFit, GateFit, InvertedFit, LearnedFit, OutputFit, StepFit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXACT, FITTED, ERROR, SECOND = "#1f4e79", "#d1495b", "#6b705c", "#e09f3e"
LEAST = 1e-8  # of an error that is drawn
LARGEST = 1e30  # of a value that is drawn: the axes' own arithmetic stays in float64
COLUMNS = 4
TITLE = 0.8  # of a column's width, for a title at most
MARGIN = 0.15  # of the span of the borders, drawn on either side of it
POINTS = 4001
REACH = 6.0  # of x, where there is no domain


@defaults()
def draw(fits: Sequence[AnyFit], format: str = "png", dpi: int = 150) -> bytes:
    """Draw fits beside each other: f′ and its approximation above, the error below; for mixtures also f.

    Args:
        fits: the fits to draw, four pairs of panels to a row.
        format: `png`, `svg` or `pdf`.
        dpi: dots per inch of a PNG.

    Returns:
        The picture's bytes; the same fits give the same bytes. Values that are infinite, undefined or too large
        are left out.

    Raises:
        UsageError: there is nothing to draw, or the format is another one.

    """
    check_format(format)
    panels = [partial(panel, fit) for fit in fits for panel in _PANELS[fit.method]]
    if not panels:
        raise UsageError("nothing to draw: expected one fit or more")
    columns = min(len(panels), COLUMNS)
    rows = -(-len(panels) // columns)
    width = 7.5 if columns == 1 else 4.5 * columns
    figure = blank(format, (width, 5.2 * rows), dpi)
    grid = figure.add_gridspec(2 * rows, columns, height_ratios=[2.2, 1] * rows)
    for i, panel in enumerate(panels):
        row, column = divmod(i, columns)
        upper = figure.add_subplot(grid[2 * row, column])
        with np.errstate(all="ignore"):
            panel(upper, figure.add_subplot(grid[2 * row + 1, column], sharex=upper))
        share = TITLE * figure.bbox.width / columns / upper.title.get_window_extent().width
        if share < 1:
            upper.title.set_fontsize(share * float(upper.title.get_fontsize()))
    return save(figure, format)


def _draw_factor(fit: GateFit, upper: Axes, lower: Axes, *, name: str, argument: str) -> None:
    """Draw a factor that is recomputed: its value above, its derivative below."""
    factor = getattr(fit.activation, name)
    x = np.linspace(-REACH, REACH, POINTS)
    _line(upper, x, factor.value(x), color=EXACT, linewidth=1.8, label=f"${name}$ exact")
    _line(lower, x, factor.derivative(x), color=EXACT, linewidth=1.8)
    upper.set_xlim(-REACH, REACH)
    _dress(fit, upper, lower, f"{argument}\n${argument}$ is saved: no error", "value", "derivative")


def _draw_formula(fit: LearnedFit, upper: Axes, lower: Axes) -> None:
    """Draw a formula at the start of its learned parameters: its value above, its derivatives below."""
    formula = fit.activation
    x = np.linspace(-REACH, REACH, POINTS)
    _line(upper, x, formula.at_start(formula.formula, x), color=EXACT, linewidth=1.8, label="$f$ at the start")
    _line(lower, x, formula.at_start(formula.derivative_formula, x), color=EXACT, linewidth=1.8, label="in $x$")
    for name, gradient in zip(formula.names, formula.gradient_formulas, strict=True):
        _line(lower, x, formula.at_start(gradient, x), linewidth=1.2, label=f"in {name}")
    upper.set_xlim(-REACH, REACH)
    lower.legend(fontsize=7, ncols=2, frameon=False)
    _dress(fit, upper, lower, "x\n$x$ is saved: no error", "value", "derivatives")


def _draw_primitive(fit: StepFit, upper: Axes, lower: Axes) -> None:
    low, high = _view(fit)
    borders = np.array(fit.borders)
    x = np.union1d(np.linspace(*fit.domain, 4 * POINTS), borders)
    value = fit.activation.value(x)
    # the broken line through f at the left end of the domain: its slopes are exact between the borders
    middle = (x[:-1] + x[1:]) / 2
    line = value[0] + np.concatenate([[0.0], np.cumsum(np.diff(x) * fit(middle))])
    shown = (low <= x) & (x <= high)
    _line(upper, x[shown], line[shown], color=FITTED, linewidth=1.6, label=f"mixture of {len(borders)} ReLUs")
    _line(upper, x[shown], value[shown], color=EXACT, linewidth=1.8, label="$f$ exact")
    _error(lower, x[shown], (value - line)[shown])
    _mark(borders, low, high, upper, lower)
    norm, most = fit.error["primitive_norm"], fit.error["primitive_max"]
    _dress(fit, upper, lower, f"x\nnorm of the error = {norm:.4g}\nmax error = {most:.3g}", "value")


def _draw_step(fit: StepFit, upper: Axes, lower: Axes) -> None:
    low, high = _view(fit)
    borders = np.array(fit.borders)
    borders = np.union1d(-borders, borders) if fit.even else borders
    borders = borders[(low < borders) & (borders < high)]
    # each border twice, a hair apart, so that jumps are drawn upright and exactly there
    x = np.sort(np.concatenate([np.linspace(low, high, POINTS), borders, np.nextafter(borders, high)]))
    derivative, step = fit.activation.derivative(x), fit(x)
    of = "of |x|, " if fit.even else ""
    _line(upper, x, step, color=FITTED, linewidth=1.6, label=f"step function, {of}{len(fit.levels)} levels")
    _line(upper, x, derivative, color=EXACT, linewidth=1.8, label="$f\\,'$ exact")
    _error(lower, x, derivative - step)
    _mark(borders, low, high, upper, lower)
    norm = "$L$" if fit.method == "fewbit" else f"{literal(str(fit.options.get('objective', '')))} objective"
    _dress(fit, upper, lower, f"x\n{norm} = {fit.error['objective']:.4g}\nmax error = {fit.error['max']:.3g}")


def _line(axes: Axes, x: Array, y: NDArray[Any], **style: Any) -> None:
    axes.plot(_shown(x), _shown(y), **style)


def _shown(values: NDArray[Any]) -> NDArray[Any]:
    """Return values, NaN for those that cannot be drawn."""
    return np.where(np.abs(values) <= LARGEST, values, np.nan)


def _error(axes: Axes, x: Array, error: Array) -> None:
    axes.fill_between(x, _shown(error), color=ERROR, alpha=0.35, linewidth=0)
    _line(axes, x, error, color=ERROR, linewidth=0.9)


def _mark(borders: Array, low: float, high: float, *panels: Axes) -> None:
    panels[0].set_xlim(low, high)
    for axes in panels:
        for border in borders:
            axes.axvline(border, color="black", alpha=0.12, linewidth=0.7)


def _draw_output(fit: OutputFit, upper: Axes, lower: Axes) -> None:
    x = np.linspace(-REACH, REACH, POINTS)
    derivative, y = fit.activation.derivative(x), fit.activation.value(x)
    for dtype, color in (("bfloat16", FITTED), ("float16", ERROR)):
        computed = evaluate(fit.formula, rounded(y, dtype))
        _line(upper, x, computed, color=color, linewidth=1.6, label=f"from $y$ in {dtype}")
        _line(lower, x, (computed - derivative) / np.maximum(1, np.abs(derivative)), color=color, linewidth=0.8)
    _line(upper, x, derivative, color=EXACT, linewidth=1.8, label="$f\\,'$ exact")
    upper.set_xlim(-REACH, REACH)
    approximant = f"$f\\,'$ = {literal(fit.derivative, 50) if len(fit.derivative) < 50 else 'g(y)'}"
    errors = f"max error = {fit.error['bfloat16']:.2g} (bfloat16), {fit.error['float16']:.2g} (float16)"
    _dress(fit, upper, lower, f"x\n{approximant}\n{errors}")
    lower.set_ylabel("error / max(1, |$f\\,'$|)", fontsize=8)


def _draw_over_output(fit: InvertedFit, upper: Axes, lower: Axes) -> None:
    x = _inputs(fit, "float32")
    y, code = fit.activation.value(x), fit.code(x)
    derivative, fitted = fit.activation.derivative(x), fit.evaluate(y, code).astype(np.float64)
    lower.set_yscale("log")
    for s in range(len(fit.approximants["float32"])):
        of = code == s
        first = s == 0
        _line(upper, y[of], derivative[of], color=EXACT, linewidth=3.2, alpha=0.45, label="$f\\,'$ exact" * first)
        _line(upper, y[of], fitted[of], color=FITTED, linewidth=1.2, label="fitted, for each code" * first)
        _line(lower, y[of], _size(fitted - derivative)[of], color=FITTED, linewidth=0.7)
    _floor(lower, fit, "float32")
    error, floor = fit.error["float32"], fit.floor["float32"]
    message = f"y = f(x)\nmax error = {error:.2g} (float32), floor = {floor:.2g}"
    _dress(fit, upper, lower, message, below="|error|")


def _draw_over_input(fit: InvertedFit, upper: Axes, lower: Axes) -> None:
    x = _inputs(fit, "float32")
    lower.set_yscale("log")
    _line(upper, x, fit.activation.derivative(x), color=EXACT, linewidth=3.2, alpha=0.45, label="$f\\,'$ exact")
    for dtype, color in (("bfloat16", FITTED), ("float16", SECOND), ("float32", ERROR)):
        at = x if dtype == "float32" else halves(dtype)
        at = np.sort(at[(at >= x[0]) & (at <= x[-1])])
        y = stored(fit.activation, at, dtype)
        fitted = fit.evaluate(y, fit.code(at, dtype), dtype)
        _line(upper, at, fitted, color=color, linewidth=0.9, label=f"$y$ in {dtype}")
        off = _size(fitted - fit.activation.derivative(at))
        _line(lower, at, off, color=color, linewidth=0.6)
        _floor(lower, fit, dtype, color)
    for border in fit.borders["bfloat16"]:
        for axes in (upper, lower):
            axes.axvline(border, color="black", alpha=0.25, linewidth=0.7)
    errors = ", ".join(f"{fit.error[dtype]:.2g}" for dtype in DTYPES)
    message = f"x\nmax error = {errors}\ndashed: no function of that $y$ and code is nearer"
    _dress(fit, upper, lower, message, below="|error|")


def _inputs(fit: InvertedFit, dtype: str) -> Array:
    """Return x to draw: evenly spaced, and densely beside the borders; for a wide domain only the part near 0."""
    low, high = fit.domain or (-REACH, REACH)
    width = 10 * max(REACH, low / 10, -high / 10)  # from 0, or from a domain that is far from it
    low, high = max(low, min(high, 0.0) - width), min(high, max(low, 0.0) + width)
    near = np.concatenate([border + np.linspace(-0.1, 0.1, 801) for border in (*fit.borders[dtype], low, high)])
    x = np.union1d(np.linspace(low, high, POINTS), near)
    return x[(x >= low) & (x <= high)].astype(np.float32).astype(np.float64)


def _size(error: Array) -> Array:
    """Return |error|, and at least the least number that the logarithmic axis shows."""
    return np.maximum(np.abs(error), LEAST)


def _floor(axes: Axes, fit: InvertedFit, dtype: str, color: str = FITTED) -> None:
    axes.axhline(max(fit.floor[dtype], LEAST), color=color, linewidth=1.0, linestyle=(0, (4, 3)))


def _dress(
    fit: AnyFit, upper: Axes, lower: Axes, xlabel: str, above: str = "derivative", below: str = "error"
) -> None:
    """Add what all panels have: title, legend, labels."""
    label = literal(fit.activation.name or fit.activation.expression)
    upper.set_title(f"{fit.name}:  $f$ = {label}", fontsize=11, pad=22)
    upper.set_ylabel(above)
    # above the axes: inside them it would cover one curve or another
    legend = {"ncols": 4, "columnspacing": 1.0, "handlelength": 1.4, "frameon": False, "fontsize": 9}
    upper.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), **legend)
    upper.tick_params(labelbottom=False)
    if lower.get_yscale() == "linear":
        lower.axhline(0, color="black", linewidth=0.6)
    lower.set_ylabel(below)
    lower.set_xlabel(xlabel, linespacing=1.5)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)


def _view(fit: StepFit) -> tuple[float, float]:
    """Return the part of the domain to draw: where the step function steps, and some way beyond.

    If the largest error lies elsewhere, as of a wave with more crests than steps, that is all of it.
    """
    low, high = fit.domain
    first, last = (-fit.borders[-1] if fit.even else fit.borders[0]), fit.borders[-1]
    reach = max(last - first, (high - low) / 4)
    middle = (first + last) / 2
    half = reach / 2 * (1 + 2 * MARGIN)
    view = max(low, middle - half), min(high, middle + half)
    x = np.linspace(low, high, POINTS)
    error = np.abs(fit.activation.derivative(x) - fit(x))
    inside = (view[0] <= x) & (x <= view[1])
    return view if error[~inside].max(initial=0.0) <= 1.1 * error[inside].max(initial=0.0) else (low, high)


# The panels of a fit, by the method that made it.
_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "fewbit": (_draw_step,),
    "relumix": (_draw_primitive, _draw_step),
    "output": (_draw_output,),
    "inverted": (_draw_over_output, _draw_over_input),
    "gate_recompute": (
        partial(_draw_factor, name="a", argument="g"),
        partial(_draw_factor, name="b", argument="u"),
    ),
    "learned_recompute": (_draw_formula,),
}
