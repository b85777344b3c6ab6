"""The tables that `fitact memory` prints of a report."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fitact.base import binary, columns

if TYPE_CHECKING:
    from .compare import Report


KIB = 2**10
MIB = 2**20


def lines(report: Report, *, exact: bool = False) -> list[str]:
    """Return a report's tables, with sizes in MiB, for small models in KiB or bytes, and if `exact`, in bytes."""
    block = sum(report.block.values())
    exact = exact or report.rows[0].bytes < MIB
    unit, name = (MIB, "MiB") if block >= MIB else (KIB, "KiB")

    def size(count: int) -> str:
        return f"{count:,}" if exact else f"{count / unit:,.1f} {name}"

    which = f"one of {report.blocks} {report.block_name}" if report.blocks > 1 else f"{report.block_name}"
    text = [
        f"{report.model}: {sizes(report)}",
        "",
        f"{which} saves {size(block)}{' bytes' if exact else ''}",
    ]
    text += columns([(kind, size(count), _percent(count / block)) for kind, count in report.block.items()], "<>>")
    text += ["", *columns(*_table(report, size)), _fixed(report)]
    return text + [f"note: {note}" for note in report.notes]


def _table(report: Report, size: Callable[[int], str]) -> tuple[list[tuple[str, ...]], str]:
    """Return the rows, and the alignment of their columns."""
    head = ["", "saved", "of baseline", "replaced", "FLOPs again", "traffic again", "peak"]
    table = [tuple(head)]
    for row in report.rows:
        again = row.traffic != 0
        line = [row.name, size(row.bytes), _percent(row.bytes / report.rows[0].bytes)]
        line += ["" if row.replaced is None else f"{row.replaced} of {report.sites}"]
        line += [_percent(row.flops) if again else ""]
        line += ["" if not again else "-" if row.traffic is None else _percent(row.traffic)]
        line += ["-" if row.peak is None else size(row.peak)]
        table.append(tuple(line))
    return table, "<" + ">" * (len(head) - 1)


def _fixed(report: Report) -> str:
    """Return the line on what peaks hold."""
    fixed = {
        "parameters": report.parameter_bytes,
        "gradients": report.gradient_bytes,
        report.optimizer: report.optimizer_bytes,
    }
    parts = " + ".join(f"{binary(count)} {name}" for name, count in fixed.items() if count)
    return f"peak: of a training step, with {parts}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def sizes(report: Report) -> str:
    """Return the line that states a report's sizes, dtype and parameters."""
    sizes = [
        f"{name} {size}, " for name, size in (("batch", report.batch), ("seq", report.seq)) if size is not None
    ]
    dtype = report.dtype + (f", autocast to {report.autocast}" if report.autocast else "")
    part = "" if report.trained == report.parameters else f" ({_count(report.trained)} trained)"
    return f"{''.join(sizes)}{dtype}; {_count(report.parameters)} parameters{part}, {report.training}"


def _count(number: int) -> str:
    return f"{number / 1e6:,.1f} million" if number >= 1e6 else f"{number:,}"
