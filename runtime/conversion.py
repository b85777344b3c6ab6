"""Records of what a conversion does to a model, site by site; and the table that they print as."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fitact.text import columns

Kind = Literal["activation", "norm"]


@dataclass(frozen=True)
class Site:
    """A place in a model where an activation or a norm is.

    Attributes:
        name: path of the module in the model, e.g. `"encoder.layer.0.intermediate.intermediate_act_fn"`.
        kind: what is there.
        before: name of its class, or of the function, e.g. `"GELUActivation"`.
        after: what stands there now, e.g. `"gelu_fewbit3"` or `"MSLayerNorm"`; None if it is left alone.
        reason: why it is left alone, or what one should know; `""` if nothing.
        kept_before, kept_after: bytes that autograd keeps on account of it, as the model was and as it is after;
            None if they were not measured.
        shared: whether a later operation keeps the very storage of its output; None if that was not measured.

    """

    name: str
    kind: Kind
    before: str
    after: str | None
    reason: str = ""
    kept_before: int | None = None
    kept_after: int | None = None
    shared: bool | None = None


@dataclass(frozen=True)
class Conversion:
    """What was done to a model, or in a dry run would be.

    Attributes:
        sites: one for each place, in the model's own order.
        dry_run: whether the model is as it was.
        kept_before, kept_after: bytes that autograd keeps for the whole model; None if they were not measured.

    """

    sites: tuple[Site, ...]
    dry_run: bool = False
    kept_before: int | None = None
    kept_after: int | None = None

    @property
    def replaced(self) -> tuple[Site, ...]:
        """The sites where something else stands now, or would."""
        return tuple(site for site in self.sites if site.after is not None)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


MIB = 2**20
UNKNOWN = "-"


def _lines(conversion: Conversion) -> Iterator[str]:
    """Yield the lines of the table; what repeats, but for numbers in its path, is one row."""
    groups: dict[tuple[object, ...], list[Site]] = {}
    for site in conversion.sites:
        like = (_starred(site.name), site.before, site.after, _starred(site.reason), site.shared)
        groups.setdefault(like, []).append(site)
    measured = any(site.kept_before is not None for site in conversion.sites)
    head = ("site", "", "was", "would be" if conversion.dry_run else "is")
    rows = [head + (("kept", "then", "shared") if measured else ()) + ("note",)]
    rows += [_row(group, measured) for group in groups.values()]
    yield from columns(rows, "<><<>>" if measured else "<>")
    yield _summary(conversion)


def _row(group: Sequence[Site], measured: bool) -> tuple[str, ...]:
    site = group[0]
    alone = len(group) == 1
    name, reason = (text if alone else _starred(text) for text in (site.name, site.reason))
    times = "" if alone else f"×{len(group)}"
    row: tuple[str, ...] = (name, times, site.before, site.after or "left alone")
    if measured:
        shared = UNKNOWN if site.shared is None else "yes" if site.shared else "no"
        row += (_size([one.kept_before for one in group]), _size([one.kept_after for one in group]), shared)
    return (*row, reason)


def _starred(text: str) -> str:
    """Return a text with a star for each number that is a part of a path."""
    return re.sub(r"(?<![^\s.])\d+(?=\.\d*\.|\.[^\W\d]|$)", "*", text)


def _summary(conversion: Conversion) -> str:
    verb = "would be replaced" if conversion.dry_run else "replaced"
    text = f"{len(conversion.replaced)} of {len(conversion)} {verb}"
    if conversion.kept_before is None or conversion.kept_after is None:
        return text
    share = 100 * conversion.kept_after / max(conversion.kept_before, 1)
    before, after = _size([conversion.kept_before]), _size([conversion.kept_after])
    return f"{text}; the model keeps {after} for backward instead of {before}, {share:.1f} %"


def _size(counts: Sequence[int | None]) -> str:
    """Return bytes in MiB, small ones exactly."""
    known = [count for count in counts if count is not None]
    if not known:
        return UNKNOWN
    total = sum(known)
    return f"{total / MIB:,.1f} MiB" if total >= MIB else f"{total:,} bytes"
