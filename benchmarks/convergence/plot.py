"""Three pictures: how losses fall, how far from exact training on the way, and what is left of it at the end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from .methods import EXACT, FAMILIES, FEW_BIT, LEARNED, METHODS, OTHER, RANDOM, STORED
from .summary import Comparison
from .tasks import TASKS
from .training import Run

BLACK, GREY = "#222222", "#888888"
COLORS = {
    FEW_BIT: ("#9ecae1", "#6baed6", "#3182bd", "#08306b"),
    OTHER: ("#7b3294", "#1b9e77", "#999999", "#b8860b", "#d6604d"),
    RANDOM: ("#fdbe85", "#fd8d3c", "#d94701", "#7f2704"),
    STORED: ("#08306b", "#3182bd", "#9ecae1", "#1b9e77", "#fd8d3c", "#7f2704", "#999999", "#b8860b"),
    LEARNED: ("#08306b",),
}
COLOR = {
    method.name: COLORS[family][i]
    for family in FAMILIES
    for i, method in enumerate(method for method in METHODS.values() if method.family == family)
}
METRICS = {"loss": "held-out loss, nats", "accuracy": "accuracy, percentage points"}
Curves = dict[str, dict[int, NDArray[np.float64]]]


def draw(runs: Sequence[Run], comparisons: Sequence[Comparison], steps: dict[str, int], path: Path) -> list[Path]:
    """Draw all beside a file of results, as PNG; without seeds enough to compare there is nothing to draw.

    Args:
        runs: all.
        comparisons: of them.
        steps: of each task.
        path: of the results.

    Returns:
        The paths of the pictures.

    """
    if not comparisons:
        return []
    figures = {"curves": curves(runs, steps), "gaps": gaps(runs, steps), "final": final(comparisons)}
    made = []
    for name, figure in figures.items():
        made.append(path.with_name(f"{path.stem}_{name}.png"))
        figure.savefig(made[-1], dpi=130)
    return made


def curves(runs: Sequence[Run], steps: dict[str, int]) -> Figure:
    """Draw the training losses: a row for each task, a column for each family, exact training in all."""
    figure, panels = _grid(runs, "Training loss: mean and range over seeds")
    for (task, family), axes in panels.items():
        curves = _curves(runs, task)
        for method in [EXACT.name, *(name for name in curves if METHODS[name].family == family)]:
            if method not in curves:
                continue
            losses = np.array(list(curves[method].values()))
            color = COLOR.get(method, BLACK)
            x = _steps(losses.shape[1], steps[task])
            axes.fill_between(x, losses.min(0), losses.max(0), color=color, alpha=0.15, linewidth=0)
            width, order = (1.8, 3) if method == EXACT.name else (1.1, 2)
            axes.plot(x, losses.mean(0), color=color, linewidth=width, zorder=order)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    for task, axes in _first(panels).items():
        axes.set_ylabel(f"{TASKS[task].title}\nloss, nats", fontsize=8)
    return figure


def gaps(runs: Sequence[Run], steps: dict[str, int]) -> Figure:
    """Draw each method's training loss less that of exact training, at the same step from the same seed."""
    figure, panels = _grid(runs, "Training loss less that of exact training: mean and range over seeds")
    for (task, family), axes in panels.items():
        curves = _curves(runs, task)
        exact = curves.get(EXACT.name, {})
        axes.axhline(0, color=BLACK, linewidth=1.2)
        for method in (name for name in curves if METHODS[name].family == family):
            seeds = [seed for seed in curves[method] if seed in exact]
            if not seeds:
                continue
            gap = np.array([curves[method][seed] - exact[seed] for seed in seeds])
            x = _steps(gap.shape[1], steps[task])
            axes.fill_between(x, gap.min(0), gap.max(0), color=COLOR[method], alpha=0.15, linewidth=0)
            axes.plot(x, gap.mean(0), color=COLOR[method], linewidth=1.3)
    for task, axes in _first(panels).items():
        axes.set_ylabel(f"{TASKS[task].title}\ndifference, nats", fontsize=8)
    return figure


def final(comparisons: Sequence[Comparison]) -> Figure:
    """Draw the final differences to exact training with their 95 % intervals, a panel for each task and metric."""
    kinds = list(dict.fromkeys((test.task, test.metric) for test in comparisons))
    methods = [name for name in METHODS if any((o.method, o.family) == (name, "exact") for o in comparisons)]
    rows = math.ceil(len(kinds) / 2)
    figure = Figure(figsize=(7, rows * (1.2 + 0.17 * len(methods)) + 0.8), layout="constrained")
    grid = figure.subplots(rows, 2, sharey=True, squeeze=False)
    for axes in grid.flat[len(kinds) :]:
        axes.set_axis_off()
    for axes, (task, metric) in zip(grid.flat, kinds, strict=False):
        axes.axvline(0, color=BLACK, linewidth=1.2)
        for test in comparisons:
            if (test.task, test.metric, test.family) == (task, metric, "exact"):
                _interval(axes, test, methods.index(test.method))
        axes.set_title(TASKS[task].title, fontsize=8)
        axes.set_xlabel(f"{METRICS[metric]}\n{'worse →' if metric == 'loss' else '← worse'}", fontsize=8)
        axes.grid(axis="x", color="#e5e5e5", linewidth=0.6)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.tick_params(labelsize=8)
        axes.tick_params(axis="y", length=0)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
    grid[0, 0].set_yticks(range(len(methods)), [METHODS[name].label for name in methods])
    grid[0, 0].set_ylim(len(methods) - 0.5, -0.5)
    marks = [
        Line2D([], [], marker="o", linestyle="", color=GREY, label="distinguishable from exact (Holm, 5 %)"),
        Line2D([], [], marker="o", linestyle="", color=GREY, markerfacecolor="white", label="not distinguishable"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.suptitle("After training, less exact training from the same seeds: mean and 95 % interval", fontsize=10)
    return figure


def _interval(axes: Axes, test: Comparison, place: int) -> None:
    color = COLOR[test.method]
    if test.difference is None or test.half is None:
        axes.text(
            0,
            place,
            f" diverged, {test.diverged} of {test.pairs}",
            color=color,
            fontsize=7,
            va="center",
        )
        return
    face = color if test.distinguishable else "white"
    axes.errorbar(
        test.difference,
        place,
        xerr=test.half,
        fmt="o",
        color=color,
        markerfacecolor=face,
        markersize=5,
        capsize=2,
    )


def _grid(runs: Sequence[Run], title: str) -> tuple[Figure, dict[tuple[str, str], Axes]]:
    """Return panels by task and family, where there are any runs, with the legend of a family over its first."""
    there = {(run.task, METHODS[run.method].family) for run in runs}
    tasks = [name for name in TASKS if any(name == task for task, _ in there)]
    families = [family for family in FAMILIES if any(family == shown for _, shown in there)]
    figure = Figure(figsize=(max(6.5, 3.5 * len(families)), 2.3 * len(tasks) + 1.5), layout="constrained")
    grid = figure.subplots(len(tasks), len(families), sharey="row", squeeze=False)
    panels, labelled = {}, set()
    for (i, task), (j, family) in itertools.product(enumerate(tasks), enumerate(families)):
        axes = grid[i, j]
        if (task, family) not in there:
            axes.set_axis_off()
            continue
        panels[task, family] = axes
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7)
        if task == tasks[-1]:
            axes.set_xlabel("step", fontsize=8)
        if family not in labelled:
            labelled.add(family)
            names = [EXACT, *(method for method in METHODS.values() if method.family == family)]
            lines = [Line2D([], [], color=COLOR.get(m.name, BLACK), linewidth=1.8, label=m.label) for m in names]
            axes.set_title(family, fontsize=9, pad=8 + 11 * math.ceil(len(lines) / 2))
            axes.legend(
                handles=lines, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, fontsize=7
            )
    figure.suptitle(title, fontsize=11)
    return figure, panels


def _first(panels: dict[tuple[str, str], Axes]) -> dict[str, Axes]:
    """Return the leftmost panel of each task."""
    first: dict[str, Axes] = {}
    for (task, _), axes in panels.items():
        first.setdefault(task, axes)
    return first


def _curves(runs: Sequence[Run], task: str) -> Curves:
    """Return the curves of a task by method and seed, NaN where the loss was not finite."""
    curves: Curves = {}
    for name in METHODS:
        of = {run.seed: np.array(run.curve, dtype=float) for run in runs if (run.task, run.method) == (task, name)}
        if of:
            curves[name] = of
    return curves


def _steps(points: int, steps: int) -> NDArray[np.float64]:
    """Return the middle of the steps that each point of a curve is the mean of."""
    return (np.arange(points) + 0.5) * steps / points
