"""The picture of a plan: memory against time."""

from __future__ import annotations

from typing import Any

from fitact.base import blank, defaults, literal, save

from .record import GIB, Plan

LINES = {"exact": "#1f4e79", "rounding": "#2a9d8f", "coarse": "#e09f3e"}
GREY, RED = "#5c677d", "#d1495b"  # of what is no plan, and of this plan and its memory
MARKS = ("o", "s", "D", "^", "v", "P", "X", "*", "<", ">")


@defaults()
def draw(plan: Plan, format: str = "png") -> bytes:
    """Draw the least time for each memory, a line for each error, and one policy for all blocks as points."""
    figure = blank(format, (11, 5.4))
    axes = figure.add_subplot()
    baseline = plan.baseline_seconds

    def mark(peak: int, time: float, label: str, **style: Any) -> None:
        axes.plot([peak / GIB], [time], linestyle="none", label=label, **style)

    for error, color in LINES.items():
        line = [p for p in plan.points if p.name == "plan" and p.error == error]
        if line:
            xs, ys = [p.peak / GIB for p in line], [p.seconds / baseline for p in line]
            axes.plot(xs, ys, label=f"plans, gradients {error}", color=color, linewidth=2, marker=".")
    others = [p for p in plan.points if p.name != "plan"]
    for marker, p in zip(MARKS, others, strict=False):
        mark(p.peak, p.seconds / baseline, literal(p.name), marker=marker, color=GREY)
    if plan.groups:
        ring = {"color": RED, "marker": "o", "markersize": 11, "markerfacecolor": "none", "markeredgewidth": 2}
        mark(plan.peak, plan.seconds / baseline, f"this plan, gradients {plan.error}", **ring)
    if not any(p.name == "baseline" for p in others):
        mark(plan.baseline_peak, 1.0, "baseline", marker="o", color=GREY)
    if not plan.fits:
        label = f"the least of a step, {plan.peak / GIB:.3g} GiB"
        axes.axvline(plan.peak / GIB, color=GREY, linewidth=1, linestyle=":", label=label)
    axes.axvline(plan.gib, color=RED, linewidth=1, linestyle="--")
    axes.annotate(f" {plan.gib:g} GiB", (plan.gib, 0.98), xycoords=("data", "axes fraction"), va="top", color=RED)
    rest = (plan.fixed + plan.gradients) / GIB
    axes.axvspan(0, rest, color="#eeeeee", zorder=0, label="parameters, gradients, optimizer")
    peaks = [plan.peak, plan.baseline_peak, *(p.peak for p in plan.points)]
    axes.set_xlim(0, 1.05 * max(plan.gib, max(peaks) / GIB))
    axes.set_xlabel("peak of a training step, GiB")
    axes.set_ylabel("time of a step, of the baseline's")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.spines[["top", "right"]].set_visible(False)
    title = literal(f"{plan.model}: memory against time on {plan.device}", 90)
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11)
    axes.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(1.02, 1))
    return save(figure, format)
