"""Records of what a conversion does to a model, site by site, and the table that shows them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fitact.text import columns

Kind = Literal["activation", "module"]


@dataclass(frozen=True)
class SiteRecord:
    """What was done at one site of a model: an activation, or a module that runs in a context.

    Attributes:
        name: path of the module in the model, e.g. `"encoder.layer.0.intermediate.intermediate_act_fn"`.
        kind: which of these it is.
        before: name of its class or function, e.g. `"GELUActivation"`.
        after: what stands there now, e.g. `"gelu_fewbit3"`, or the context that it runs in; None if left alone.
        reason: why it is left alone, or another note; `""` for neither.
        saved_before, saved_after: bytes that autograd saves for it, before and after; None if not measured.
        shared: whether a later operation saves the same storage as its output; None if not measured.

    """

    name: str
    kind: Kind
    before: str
    after: str | None
    reason: str = ""
    saved_before: int | None = None
    saved_after: int | None = None
    shared: bool | None = None


@dataclass(frozen=True)
class Unseen:
    """An activation that a module computes in its own `forward`, so that it cannot be replaced.

    Attributes:
        name: path of the module, or of several with a star for numbers, e.g. `"model.layers.*.mlp.experts"`.
        saved: bytes that only its pointwise operations save, for all such modules together.
        operations: PyTorch's functions that save them, those that save most first.

    """

    name: str
    saved: int
    operations: tuple[str, ...]

    def __str__(self) -> str:
        return f"not seen: {self.name} saves {_size([self.saved])} through {', '.join(self.operations)}"


@dataclass(frozen=True)
class ModuleRecord:
    """What autograd saves in the forward of a module, without what it saves in modules inside.

    Attributes:
        name: path of the module, or of several with a star for numbers, e.g. `"model.layers.*.mlp"`.
        count: how many such modules there are.
        before: bytes that all of them save as they are.
        after: bytes that they save in a context of `fitact.saving`.

    """

    name: str
    count: int
    before: int
    after: int


@dataclass(frozen=True)
class Gradient:
    """How far the gradient of all parameters is from the baseline's, in one forward and backward pass.

    Attributes:
        error: norm of the difference, as a share of the norm of the baseline's; None if not measured.
        cosine: cosine of the angle between both gradients; None if not measured.
        note: why it could not be measured; `""` if it was.

    """

    error: float | None = None
    cosine: float | None = None
    note: str = ""

    def __str__(self) -> str:
        if self.error is None or self.cosine is None:
            return f"the gradient could not be measured: {self.note}"
        if self.error == 0:
            return "the gradient equals the baseline's, bit for bit"
        return f"the gradient is off by {100 * self.error:.3g} % of its norm, cosine {self.cosine:.6f}"


@dataclass(frozen=True)
class Conversion:
    """What was done to a model, or in a dry run would be done.

    Attributes:
        sites: one record for each site, in the model's own order.
        dry_run: whether the model was left unchanged.
        saved_before, saved_after: bytes that autograd saves for the whole model; None if not measured.
        unseen: activations that no module holds, those that save most first, if measured.
        gradient: how far the gradient is from the baseline's; None if not requested.
        note: why there are no sites; `""` if there are some.
        modules: what each module saves in a context, if that was measured; those that saved most first.

    """

    sites: tuple[SiteRecord, ...]
    dry_run: bool = False
    saved_before: int | None = None
    saved_after: int | None = None
    unseen: tuple[Unseen, ...] = ()
    gradient: Gradient | None = None
    note: str = ""
    modules: tuple[ModuleRecord, ...] = ()

    @property
    def replaced(self) -> tuple[SiteRecord, ...]:
        """The sites where something was replaced, or would be."""
        return tuple(site for site in self.sites if site.after is not None)

    def __iter__(self) -> Iterator[SiteRecord]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


MIB = 2**20
UNKNOWN = "-"
ROWS = 12  # of the modules that saved most; one row for all others


def _lines(conversion: Conversion) -> Iterator[str]:
    """Yield the lines of the table; sites that differ only by numbers in their paths share a row."""
    groups: dict[tuple[object, ...], list[SiteRecord]] = {}
    for site in conversion.sites:
        like = (_starred(site.name), site.before, site.after, _starred(site.reason), site.shared)
        groups.setdefault(like, []).append(site)
    measured = any(site.saved_before is not None for site in conversion.sites)
    head = ("site", "", "was", "would be" if conversion.dry_run else "is")
    rows = [head + (("saved", "now", "shared") if measured else ()) + ("note",)]
    rows += [_row(group, measured) for group in groups.values()]
    if len(conversion) != 1 or conversion.sites[0].kind != "module" or conversion.sites[0].reason:
        yield from columns(rows, "<><<>>" if measured else "<>")
    else:
        (site,) = conversion.sites
        verb = "would run" if conversion.dry_run else "runs"
        yield f"{site.name or 'the model'}, {site.before}, {verb} in {site.after}"
    if conversion.modules:
        yield from columns([("module", "", "saved", "now"), *_module_rows(conversion.modules)], "<>>>")
    yield from map(str, conversion.unseen)
    if summary := "; ".join(_summary(conversion)):
        yield summary
    if conversion.gradient is not None:
        yield str(conversion.gradient)


def _module_rows(modules: Sequence[ModuleRecord]) -> Iterator[tuple[str, ...]]:
    """Yield rows of the modules that saved most, and one of all others."""
    large, rest = list(modules[:ROWS]), modules[ROWS:]
    if rest:
        count, before, after = (sum(getattr(one, name) for one in rest) for name in ("count", "before", "after"))
        large.append(ModuleRecord("all others", count, before, after))
    for one in large:
        times = f"×{one.count}" if one.count > 1 else ""
        yield one.name or "the model", times, _size([one.before]), _size([one.after])


def _row(group: Sequence[SiteRecord], measured: bool) -> tuple[str, ...]:
    site = group[0]
    alone = len(group) == 1
    name, reason = (text if alone else _starred(text) for text in (site.name, site.reason))
    times = "" if alone else f"×{len(group)}"
    row: tuple[str, ...] = (name or "the model", times, site.before, site.after or "left alone")
    if measured:
        shared = UNKNOWN if site.shared is None else "yes" if site.shared else "no"
        row += (_size([one.saved_before for one in group]), _size([one.saved_after for one in group]), shared)
    return (*row, reason)


def _starred(text: str) -> str:
    """Return a text with a star in place of each number in a path."""
    return re.sub(r"(?<![^\s.])\d+(?=\.\d*\.|\.[^\W\d]|$)", "*", text)


def _summary(conversion: Conversion) -> Iterator[str]:
    """Yield how many activations were replaced, and what the model saves, as far as that is known."""
    if not any(site.kind == "module" for site in conversion.sites):
        yield f"{len(conversion.replaced)} of {len(conversion)} {'would be ' * conversion.dry_run}replaced"
    if conversion.saved_before is not None and conversion.saved_after is not None:
        share = 100 * conversion.saved_after / max(conversion.saved_before, 1)
        before, after = _size([conversion.saved_before]), _size([conversion.saved_after])
        saves = "would save" if conversion.dry_run else "saves"
        yield f"the model {saves} {after} for backward instead of {before}, {share:.1f} %"


def _size(counts: Sequence[int | None]) -> str:
    """Return bytes in MiB; less than a MiB exactly."""
    known = [count for count in counts if count is not None]
    if not known:
        return UNKNOWN
    total = sum(known)
    return f"{total / MIB:,.1f} MiB" if total >= MIB else f"{total:,} bytes"
