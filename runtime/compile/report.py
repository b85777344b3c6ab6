"""Records of what became codes in compiled graphs, and the table that shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fitact.text import columns


@dataclass(frozen=True)
class KeptRecord:
    """One tensor that a forward graph hands to its backward graph.

    Attributes:
        operation: of PyTorch, that computed it, such as `"mm"`.
        shape: its shape; sizes that vary by name.
        dtype: its dtype.
        before, after: bytes kept, without the code and with it; of sizes that vary, as when the graph was traced.
        code: name of the fit, or `"bits"` for a mask; None if it is left as it is.
        error: relative root mean square error of what backward computes from it alone; 0 for a mask.
        reason: why it is left as it is, or why the error is that of the numbers themselves.

    """

    operation: str
    shape: tuple[str, ...]
    dtype: torch.dtype
    before: int
    after: int
    code: str | None
    error: float
    reason: str = ""


@dataclass
class CompileReport:
    """What became codes, graph by graph; empty until the compiled model has run forward with gradients.

    Attributes:
        graphs: the records of each graph that was compiled. Graphs that come from PyTorch's cache have none.

    """

    graphs: list[tuple[KeptRecord, ...]] = field(default_factory=list)

    @property
    def before(self) -> int:
        """Bytes that the compiled graphs would keep without codes, parameters and inputs among them."""
        return sum(record.before for records in self.graphs for record in records)

    @property
    def after(self) -> int:
        """Bytes that they keep."""
        return sum(record.after for records in self.graphs for record in records)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(report: CompileReport) -> Iterator[str]:
    if not report.graphs:
        yield "no graph was compiled: run the model forward with gradients. PyTorch's cache hides those it has"
        return
    groups: dict[tuple[object, ...], list[KeptRecord]] = {}
    for record in (record for records in report.graphs for record in records):
        like = (record.operation, record.shape, record.dtype, record.code, record.reason)
        groups.setdefault(like, []).append(record)
    head = ("kept", "", "shape", "dtype", "bytes", "then", "code", "error", "note")
    yield from columns([head, *map(_row, groups.values())], "<><<>><><")
    share = 100 * report.after / max(report.before, 1)
    yield f"kept for backward: {report.after:,} bytes instead of {report.before:,}, {share:.1f} %"


def _row(group: Sequence[KeptRecord]) -> tuple[str, ...]:
    first = group[0]
    sizes = [f"{sum(numbers):,}" for numbers in zip(*((one.before, one.after) for one in group), strict=True)]
    return (
        first.operation,
        f"×{len(group)}" if len(group) > 1 else "",
        "×".join(first.shape),
        str(first.dtype).removeprefix("torch."),
        *sizes,
        first.code or "left alone",
        f"{100 * first.error:.2g} %" if first.error else "",
        first.reason,
    )
