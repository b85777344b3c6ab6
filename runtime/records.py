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
        after: what stands there now, e.g. `"gelu_fewbit3"` or `"rebuilt"`; None if it is left alone.
        reason: why it is left alone, or another note; `""` for neither.
        kept_before, kept_after: bytes that autograd keeps for it, before and after; None if not measured.
        shared: whether a later operation keeps the same storage as its output; None if not measured.

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
class Unseen:
    """An activation that a module computes in its own `forward`, so that it cannot be replaced.

    Attributes:
        name: path of the module, or of several with a star for numbers, e.g. `"model.layers.*.mlp.experts"`.
        kept: bytes that only its pointwise operations keep, for all such modules together.
        operations: PyTorch's functions that keep them, those that keep most first.

    """

    name: str
    kept: int
    operations: tuple[str, ...]

    def __str__(self) -> str:
        return f"not seen: {self.name} keeps {_size([self.kept])} through {', '.join(self.operations)}"


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
    """How far the gradient of all parameters is from stock's, in one forward and backward pass.

    Attributes:
        error: norm of the difference, as a share of the norm of stock's gradient; None if not measured.
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
            return "the gradient equals stock's, bit for bit"
        return f"the gradient is off by {100 * self.error:.3g} % of its norm, cosine {self.cosine:.6f}"


@dataclass(frozen=True)
class Conversion:
    """What was done to a model, or in a dry run would be done.

    Attributes:
        sites: one record for each site, in the model's own order.
        dry_run: whether the model was left unchanged.
        kept_before, kept_after: bytes that autograd keeps for the whole model; None if not measured.
        unseen: activations that no module holds, those that keep most first, if measured.
        gradient: how far the gradient is from stock's; None if not requested.
        note: why there are no sites; `""` if there are some.
        modules: what each module saves in a context, if that was measured; those that saved most first.

    """

    sites: tuple[SiteRecord, ...]
    dry_run: bool = False
    kept_before: int | None = None
    kept_after: int | None = None
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
SMALL = 100  # modules that saved less than a hundredth have no row of their own


def _lines(conversion: Conversion) -> Iterator[str]:
    """Yield the lines of the table; sites that differ only by numbers in their paths share a row."""
    groups: dict[tuple[object, ...], list[SiteRecord]] = {}
    for site in conversion.sites:
        like = (_starred(site.name), site.before, site.after, _starred(site.reason), site.shared)
        groups.setdefault(like, []).append(site)
    measured = any(site.kept_before is not None for site in conversion.sites)
    head = ("site", "", "was", "would be" if conversion.dry_run else "is")
    rows = [head + (("kept", "then", "shared") if measured else ()) + ("note",)]
    rows += [_row(group, measured) for group in groups.values()]
    yield from columns(rows, "<><<>>" if measured else "<>")
    if conversion.modules:
        yield from columns([("module", "", "saved", "now"), *_module_rows(conversion.modules)], "<>>>")
    yield from map(str, conversion.unseen)
    yield _summary(conversion)
    if conversion.gradient is not None:
        yield str(conversion.gradient)


def _module_rows(modules: Sequence[ModuleRecord]) -> Iterator[tuple[str, ...]]:
    """Yield rows of the modules that saved most, and one of all others."""
    total = sum(one.before for one in modules)
    large = [one for one in modules if one.before * SMALL >= total]
    rest = [one for one in modules if one not in large]
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
        row += (_size([one.kept_before for one in group]), _size([one.kept_after for one in group]), shared)
    return (*row, reason)


def _starred(text: str) -> str:
    """Return a text with a star in place of each number in a path."""
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
    """Return bytes in MiB; less than a MiB exactly."""
    known = [count for count in counts if count is not None]
    if not known:
        return UNKNOWN
    total = sum(known)
    return f"{total / MIB:,.1f} MiB" if total >= MIB else f"{total:,} bytes"
