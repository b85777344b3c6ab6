"""What `fitact memory` prints and draws of a report."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from fitact.text import columns

if TYPE_CHECKING:
    from fitact.runtime.memory_records import Report, Row

KIB = 2**10
MIB = 2**20
GIB = 2**30
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
    "checkpoint": "kept by checkpointing",
    "graph": "kept by the compiler",
}

LEAST = 0.005  # of the stock bytes, that a kind needs to be drawn on its own
WIDEST, WIDEST_BELOW = 84, 122  # letters of the title, and of the line below it
LETTER = 0.0095  # of the axis, that a letter of a label takes


def show(report: Report, *, exact: bool = False) -> None:
    """Print a report's tables; sizes in MiB, those of small models in KiB, or, if `exact`, in bytes."""
    for line in lines(report, exact=exact):
        click.echo(line)


def lines(report: Report, *, exact: bool = False) -> list[str]:
    """Return the lines that `show` prints."""
    block = sum(report.block.values())
    exact = exact or report.rows[0].bytes < MIB
    unit, name = (MIB, "MiB") if block >= MIB else (KIB, "KiB")

    def size(count: int) -> str:
        return f"{count:,}" if exact else f"{count / unit:,.1f} {name}"

    which = f"one of {report.blocks} {report.block_name}" if report.blocks > 1 else f"{report.block_name}"
    text = [
        f"{report.model}: {_sizes(report)}",
        "",
        f"{which} keeps {size(block)}{' bytes' if exact else ''}",
    ]
    text += columns([(kind, size(count), _percent(count / block)) for kind, count in report.block.items()], "<>>")
    if report.closed_form is not None:
        scores = report.closed_form["scores"]
        whole = sum(report.closed_form.values())
        wide = "float32" in (report.autocast or report.dtype)
        form = f"by the count {'66bsh + 9bs²a, 34bsh + 5bs²a in 16 bits' if wide else '34bsh + 5bs²a'}"
        text += [
            f"{form}, with three dropouts: {size(whole)}; without the scores, "
            f"which fused attention does not keep: {size(whole - scores)}, {_percent(scores / whole)} less"
        ]
    text += ["", *columns(*_table(report, size))]
    if any(row.batch is not None or row.seq is not None for row in report.rows):
        text += _room(report)
    return text + [f"note: {note}" for note in report.notes]


def _table(report: Report, size: Callable[[int], str]) -> tuple[list[tuple[str, ...]], str]:
    """Return the rows of the remedies, and how their columns are aligned."""
    head = ["", "kept", "of stock", "replaced", "FLOPs again", "traffic again"]
    peaks = any(row.peak is not None for row in report.rows)
    batches = any(row.batch is not None for row in report.rows)
    lengths = any(row.seq is not None for row in report.rows)
    head += ["peak"] * peaks + ["batch"] * batches + ["seq"] * lengths
    table = [tuple(head)]
    for row in report.rows:
        again = "checkpoint" in row.kinds or "graph" in row.kinds
        line = [row.name, size(row.bytes), _percent(row.bytes / report.rows[0].bytes)]
        line += ["" if row.replaced is None else f"{row.replaced} of {report.sites}"]
        line += [_percent(row.flops) if again else ""]
        line += ["" if not again else "-" if row.traffic is None else _percent(row.traffic)]
        mark = "~" if row.scaled else ""
        line += ["" if row.peak is None else size(row.peak)] * peaks
        line += ["" if row.batch is None else f"{mark}{row.batch:,}"] * batches
        line += ["" if row.seq is None else f"{mark}{row.seq:,}"] * lengths
        table.append(tuple(line))
    return table, "<" + ">" * (len(head) - 1)


def _room(report: Report) -> list[str]:
    fixed = {
        "parameters": report.parameter_bytes,
        "gradients": report.gradient_bytes,
        report.optimizer: report.optimizer_bytes,
    }
    parts = " + ".join(f"{count / GIB:.2f} GiB {name}" for name, count in fixed.items() if count)
    scaled = "; ~: scaled from stock, not measured" if any(row.scaled for row in report.rows) else ""
    return [
        f"batch, seq: the largest, each with the other as above, that fits {report.gib:g} GiB with {parts}{scaled}"
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def draw(report: Report, format: str = "png") -> bytes:
    """Draw what is kept, stock and with each remedy, as stacked bars by kind.

    Args:
        report: what to draw.
        format: `png`, `svg` or `pdf`.

    Returns:
        The picture's bytes; the same report gives the same bytes.

    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = list(reversed(report.rows))  # stock on top
    stock = report.rows[0].bytes
    unit, name = (GIB, "GiB") if stock >= 2 * GIB else (MIB, "MiB")
    kinds = [kind for kind in COLORS if any(row.kinds.get(kind, 0) > LEAST * stock for row in rows)]
    parts = [{kind: row.kinds.get(kind, 0) / unit for kind in kinds if kind != "other"} for row in rows]
    for row, part in zip(rows, parts, strict=True):
        part["other"] = row.bytes / unit - sum(part.values())
    if "other" not in kinds and any(part["other"] > LEAST * stock / unit for part in parts):
        kinds.append("other")
    figure = Figure(figsize=(9.5, 2.0 + 0.42 * len(rows)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
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
        label = f"{row.bytes / unit:,.1f} {name}, {_label(row, stock)}"
        end = (row.bytes / unit, i)
        axes.annotate(label, end, xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5)
        reach = max(reach, row.bytes / unit / (1 - LETTER * (len(label) + 1)))
    axes.set_xlim(0, reach)
    axes.set_xlabel(f"kept for backward, {name}")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    title = f"What {report.model} keeps for backward, and what each remedy leaves of it"
    axes.set_title(_cut(title, WIDEST), loc="left", fontweight="bold", fontsize=11, pad=20)
    below: dict[str, Any] = {"xycoords": "axes fraction", "xytext": (0, 6), "textcoords": "offset points"}
    axes.annotate(_cut(_sizes(report), WIDEST_BELOW), (0, 1), fontsize=8.5, **below)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8.5)
    buffer = io.BytesIO()
    metadata: dict[str, None] = {
        "png": {"Software": None},
        "svg": {"Date": None},
        "pdf": {"CreationDate": None},
    }[format]
    with rc_context({"svg.hashsalt": "fitact"}):  # identifiers in an SVG are random without it
        figure.savefig(buffer, format=format, metadata=metadata)
    return buffer.getvalue()


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def _label(row: Row, stock: int) -> str:
    share = f"{100 * row.bytes / stock:.0f} %"
    return f"{share}, +{100 * row.flops:.0f} % of the forward FLOPs" if row.flops >= 0.005 else share


def _sizes(report: Report) -> str:
    sizes = [
        f"{name} {size}, " for name, size in (("batch", report.batch), ("seq", report.seq)) if size is not None
    ]
    dtype = report.dtype + (f", autocast to {report.autocast}" if report.autocast else "")
    part = "" if report.trained == report.parameters else f" ({_count(report.trained)} trained)"
    return f"{''.join(sizes)}{dtype}; {_count(report.parameters)} parameters{part}, {report.training}"


def _count(number: int) -> str:
    return f"{number / 1e6:,.1f} million" if number >= 1e6 else f"{number:,}"
