"""Records of what a compiled graph saves, and the table that shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain

import torch

from fitact.base import columns
from fitact.runtime.saving import blocks


@dataclass(frozen=True)
class SavedRecord:
    """One tensor that a forward graph hands to its backward graph.

    Attributes:
        operation: of PyTorch, that computed it, such as `"mm"`.
        shape: its shape; sizes that vary by name.
        dtype: its dtype.
        before, after: bytes saved, without codes and with them; of sizes that vary, as when the graph was traced.
        kind: `"gate"`, `"activation"`, `"norm"`, `"linear"`, `"attention"`, `"mask"`, or `""`.
        bits: of an element's code; 1 for a mask, None if it is left as it is.
        reason: why it is left as it is.

    """

    operation: str
    shape: tuple[str, ...]
    dtype: torch.dtype
    before: int
    after: int
    kind: str
    bits: int | None
    reason: str = ""

    @property
    def error(self) -> float:
        """Relative root mean square error of normally distributed elements; 0 if nothing changes."""
        return _error(self.bits) if self.bits in blocks.BITS else 0.0


@cache
def _error(bits: int) -> float:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    decoded = blocks.decode(*blocks.encode(x, bits), x.shape, x.dtype)
    return float((decoded - x).norm() / x.norm())


@dataclass
class CompileReport:
    """What became codes, graph by graph; empty until the compiled model has run forward with gradients.

    Attributes:
        graphs: the records of each graph that was compiled. Graphs that come from PyTorch's cache have none.

    """

    graphs: list[tuple[SavedRecord, ...]] = field(default_factory=list)

    @property
    def before(self) -> int:
        """Bytes that the compiled graphs would save without codes, parameters and inputs among them."""
        return sum(record.before for record in chain(*self.graphs))

    @property
    def after(self) -> int:
        """Bytes that they save."""
        return sum(record.after for record in chain(*self.graphs))

    def __str__(self) -> str:
        if not self.graphs:
            return (
                "no graph was compiled: run the model forward with gradients. PyTorch's cache hides those it has"
            )
        groups: dict[SavedRecord, list[SavedRecord]] = {}  # of records that differ by their bytes alone
        for record in chain(*self.graphs):
            groups.setdefault(replace(record, before=0, after=0), []).append(record)
        head = ("saved", "", "shape", "dtype", "bytes", "then", "kind", "stored", "error")
        lines = columns([head, *map(_row, groups.values())], "<><<>><<>")
        share = f"{100 * self.after / max(self.before, 1):.1f} %"
        return "\n".join([*lines, f"saved for backward: {self.after:,} bytes instead of {self.before:,}, {share}"])


def _row(group: Sequence[SavedRecord]) -> tuple[str, ...]:
    first = group[0]
    count = f"×{len(group)}" if len(group) > 1 else ""
    dtype = str(first.dtype).removeprefix("torch.")
    before, after = (f"{sum(getattr(record, what) for record in group):,}" for what in ("before", "after"))
    stored = f"as it is: {first.reason}" if first.bits is None else f"{first.bits} bits" if first.error else "bits"
    error = f"{100 * first.error:.2g} %" if first.error else ""
    return first.operation, count, "×".join(first.shape), dtype, before, after, first.kind, stored, error
