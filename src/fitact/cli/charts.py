"""The chart that `fitact memory` draws of a report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fitact.base import blank, defaults, save

if TYPE_CHECKING:
    from fitact.runtime.choose import Report, Row
from .memory_tables import GIB, MIB, sizes

# What fitact changes comes first, in the strongest colour.
COLORS = {
    "activation": "#d1495b",
    "product": "#e8998d",
    "norm": "#e09f3e",
    "attention": "#2a9d8f",
    "linear": "#1f4e79",
    "convolution": "#4f86b8",
    "dropout": "#8d99ae",
    "embedding": "#b5c99a",
    "loss": "#7a6c9d",
    "weights": "#c8b6a6",
    "other": "#cfcfcf",
    "checkpoint": "#5c677d",
    "graph": "#b08968",
}
LABELS = {
    "product": "product of a gate",
    "weights": "weights in another dtype",
    "checkpoint": "saved by checkpointing",
    "graph": "saved by the compiler",
}
LEAST = 0.005  # share of the baseline bytes from which a kind is drawn on its own
WIDEST, WIDEST_BELOW = 84, 122  # the most letters of the title, and of the line below it
LETTER = 0.0095  # width of a label's letter, as a share of the axis


@defaults()
def draw(report: Report, format: str = "png") -> bytes:
    """Draw what the baseline, each method, checkpointing and the compiler save, as stacked bars by kind.

    Args:
        report: what to draw.
        format: `png`, `svg` or `pdf`.

    Returns:
        The picture's bytes; the same report gives the same bytes.

    Raises:
        UsageError: the format is another one.

    """
    rows = list(reversed(report.rows))  # baseline on top
    baseline = report.rows[0].bytes
    unit, name = (GIB, "GiB") if baseline >= 2 * GIB else (MIB, "MiB")
    kinds = [kind for kind in COLORS if any(row.kinds.get(kind, 0) > LEAST * baseline for row in rows)]
    parts = [{kind: row.kinds.get(kind, 0) / unit for kind in kinds if kind != "other"} for row in rows]
    for row, part in zip(rows, parts, strict=True):
        part["other"] = row.bytes / unit - sum(part.values())
    if "other" not in kinds and any(part["other"] > LEAST * baseline / unit for part in parts):
        kinds.append("other")
    figure = blank(format, (9.5, 2.0 + 0.42 * len(rows)))
    axes = figure.add_subplot()
    left = [0.0] * len(rows)
    for kind in kinds:
        widths = [part[kind] for part in parts]
        label = LABELS.get(kind, kind)
        style: dict[str, Any] = {"height": 0.72, "color": COLORS[kind], "edgecolor": "white", "linewidth": 0.5}
        axes.barh([row.name for row in rows], widths, left=left, label=label, **style)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    reach = 0.0
    for i, row in enumerate(rows):
        label = f"{row.bytes / unit:,.1f} {name}, {_label(row, baseline)}"
        end = (row.bytes / unit, i)
        axes.annotate(label, end, xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5)
        reach = max(reach, row.bytes / unit / (1 - LETTER * (len(label) + 1)))
    axes.set_xlim(0, reach)
    axes.set_xlabel(f"saved for backward, {name}")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    title = f"What {report.model} saves for backward: the baseline, and each way to save less"
    axes.set_title(_cut(title, WIDEST), loc="left", fontweight="bold", fontsize=11, pad=20, parse_math=False)
    below: dict[str, Any] = {"xycoords": "axes fraction", "xytext": (0, 6), "textcoords": "offset points"}
    axes.annotate(_cut(sizes(report), WIDEST_BELOW), (0, 1), fontsize=8.5, parse_math=False, **below)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8.5)
    return save(figure, format)


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def _label(row: Row, baseline: int) -> str:
    share = f"{100 * row.bytes / baseline:.0f} %"
    return f"{share}, +{100 * row.flops:.0f} % of the forward FLOPs" if row.flops >= 0.005 else share
