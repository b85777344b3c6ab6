"""Records of what a conversion does to a model, site by site, and the table that shows them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

from fitact.base import Bars, Shown, UsageError, columns


@dataclass(frozen=True)
class SiteRecord:
    """What was done at one site of a model: an activation, or a module that runs in a context.

    Attributes:
        name: path of the module in the model, e.g. `"encoder.layer.0.intermediate.intermediate_act_fn"`.
        kind: which of these it is.
        before: name of its class or function, e.g. `"GELUActivation"`.
        after: what stands there now, e.g. `"gelu_fewbit3"`, or the context that it runs in; None if left alone.
        reason: why it is left alone, or another note; `""` for neither.

    """

    name: str
    kind: Literal["activation", "module"]
    before: str
    after: str | None
    reason: str = ""


@dataclass(frozen=True)
class ModuleRecord:
    """What autograd saves in the forward of a module, without what it saves in modules inside.

    Attributes:
        name: path of the module, or of several with a star for numbers, e.g. `"model.layers.*.mlp"`.
        count: how many such modules there are.
        before: bytes that all of them save as they are.
        after: bytes that they save converted.
        storages: of what they save in a context, those of most bytes first: `"recomputed"`, `"8 bits"`,
            `"mask in bits"`, `"index in fewer bytes"`, `"its shape"`, `"itself"`; without a context none.

    """

    name: str
    count: int
    before: int
    after: int
    storages: tuple[str, ...] = ()


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
class Conversion(Shown):
    """What was done to a model, or in a dry run would be done.

    Attributes:
        sites: one record for each site, in the model's own order.
        dry_run: whether the model was left unchanged.
        saved_before, saved_after: bytes that autograd saves for the whole model; None if not measured.
        gradient: how far the gradient is from the baseline's; None if not requested.
        note: why there are no sites; `""` if there are some.
        modules: what each module saves, if that was measured; those that saved most first.

    """

    sites: tuple[SiteRecord, ...]
    dry_run: bool = False
    saved_before: int | None = None
    saved_after: int | None = None
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

    def bars(self) -> Bars:
        """Return what modules save, before and now; UsageError if that was not measured."""
        if not self.modules:
            raise UsageError("nothing was measured: give example_inputs to fitact.convert")
        inside, large = _large(self.modules)
        named = {f"{module.name or 'the model'} {_times(module)}".rstrip(): module for module in large}
        rows = tuple((name, (module.before, module.after)) for name, module in named.items())
        title = "; ".join(_summary(self))
        now = "as converted" if self.dry_run else "now"
        return Bars(title[0].upper() + title[1:], f"saved for backward{inside}", ("before", now), rows)


MIB = 2**20
ROWS = 12  # of the modules that saved most; one row for all others


def _lines(conversion: Conversion) -> Iterator[str]:
    """Yield the lines of the tables; sites that differ only by numbers in their paths share a row."""
    groups: dict[tuple[object, ...], list[SiteRecord]] = {}
    for site in conversion.sites:
        like = (_starred(site.name), site.before, site.after, _starred(site.reason))
        groups.setdefault(like, []).append(site)
    if conversion.note:
        yield conversion.note
    elif len(conversion) != 1 or conversion.sites[0].kind != "module" or conversion.sites[0].reason:
        site_head = ("site", "", "was", "would be" if conversion.dry_run else "is", "note")
        yield from columns([site_head, *map(_row, groups.values())])
    else:
        (site,) = conversion.sites
        verb = "would run" if conversion.dry_run else "runs"
        yield f"{site.name or 'the model'}, {site.before}, {verb} in {site.after}"
    if conversion.modules:
        stored = ("how it is stored now",) if any(module.storages for module in conversion.modules) else ()
        inside, large = _large(conversion.modules)
        head = (f"module{inside}", "", "saved", "now", *stored)
        yield from columns([head, *(_module_row(module, bool(stored)) for module in large)], "<>>><")
        if any("itself" in module.storages and module.after for module in conversion.modules):
            yield "itself: nothing cheap gives it; inputs and products of matrices are not recomputed"
    if summary := "; ".join(_summary(conversion)):
        yield summary
    if conversion.gradient is not None:
        yield str(conversion.gradient)


def _module_row(module: ModuleRecord, stored: bool) -> tuple[str, ...]:
    storages = (", ".join(module.storages),) if stored else ()
    return module.name or "the model", _times(module), _size(module.before), _size(module.after), *storages


def _large(modules: Sequence[ModuleRecord]) -> tuple[str, list[ModuleRecord]]:
    """Return the path that the modules that saved most have in common, as words; them, and all others as one."""
    large, rest = modules[:ROWS], modules[ROWS:]
    steps = zip(*(module.name.split(".")[:-1] for module in large), strict=False)
    inside = [step[0] for step in takewhile(lambda step: len({*step}) == 1, steps)]
    inside = [] if {*inside} == {"*"} else inside
    rows = [replace(module, name=".".join(module.name.split(".")[len(inside) :])) for module in large]
    if rest:
        sums = (sum(getattr(module, name) for module in rest) for name in ("count", "before", "after"))
        rows.append(ModuleRecord("all others", *sums))
    return f" in {'.'.join(inside)}" if inside else "", rows


def _times(module: ModuleRecord) -> str:
    return f"×{module.count}" if module.count > 1 else ""


def _row(group: Sequence[SiteRecord]) -> tuple[str, ...]:
    site = group[0]
    alone = len(group) == 1
    name, reason = (text if alone else _starred(text) for text in (site.name, site.reason))
    return name or "the model", "" if alone else f"×{len(group)}", site.before, site.after or "left alone", reason


def _starred(text: str) -> str:
    """Return a text with a star in place of each number in a path."""
    return re.sub(r"(?<![^\s.])\d+(?=\.\d*\.|\.[^\W\d]|$)", "*", text)


def _summary(conversion: Conversion) -> Iterator[str]:
    """Yield how many activations were replaced, and what the model saves, as far as that is known."""
    if any(site.kind == "activation" for site in conversion.sites):
        yield f"{len(conversion.replaced)} of {len(conversion)} {'would be ' * conversion.dry_run}replaced"
    before, after = conversion.saved_before, conversion.saved_after
    if before is not None and after is not None:
        saves = "would save" if conversion.dry_run else "saves"
        if before == after:
            yield f"the model {saves} {_size(after)} for backward as before, 0 % less"
        else:
            share = 100 * after / max(before, 1)
            yield f"the model {saves} {_size(after)} for backward instead of {_size(before)}, {share:.1f} %"


def _size(count: int) -> str:
    """Return bytes in MiB; less than a MiB exactly."""
    return f"{count / MIB:,.1f} MiB" if count >= MIB else f"{count:,} bytes"
