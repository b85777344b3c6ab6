"""Choosing a replacement for each activation by a method, and keeping those that pay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral

from torch import nn

from fitact.errors import UsageError, quote
from fitact.runtime.kernels.registry import registered

from .detect import ActivationSite, Found, recipe, shipped_class
from .replacement import Replacement, plan
from .trials import Plan, Trace, Usage

METHODS = ("fewbit", "relumix", "inverted", "exact")
WIDTHS = range(1, 5)

Substitutes = Mapping[type[nn.Module], type[nn.Module]]
Measure = Callable[[Sequence[Plan]], list[Trace]]


def check_bits(method: str, bits: object) -> None:
    """Raise a UsageError if a method's fits cannot have this number of bits."""
    known = type(bits) is not bool and isinstance(bits, Integral) and bits in WIDTHS
    if bits is not None and (method == "exact" or not known):
        some = f"{', '.join(map(str, WIDTHS[:-1]))} or {WIDTHS[-1]}"
        expected = "none for exact, which keeps no bits" if method == "exact" else some
        raise UsageError(f"bits {quote(bits)}: expected {expected}")


@dataclass(frozen=True)
class Policy:
    """A rule that chooses replacements.

    Attributes:
        method: one of METHODS; None to replace only by `substitutes`.
        bits: the most bits kept per element; None for the method's default.
        substitutes: generated classes by the classes they replace; they come before the method.

    """

    method: str | None
    bits: int | None = None
    substitutes: Substitutes = field(default_factory=dict)

    def replacements(self, sites: Sequence[ActivationSite]) -> list[Replacement]:
        """Return the replacement for each site."""
        return [self._replacement(site) for site in sites]

    def _replacement(self, site: ActivationSite) -> Replacement:
        found = site.found
        if found.converted:
            return Replacement(reason=f"already {found.before}")
        if found.refusal:
            return Replacement(reason=found.refusal)
        given = self.substitutes.get(type(site.held))
        if given is not None:
            return _in_place(Replacement(given, bool(getattr(site.held, "inplace", False))), found)
        if self.method is None:
            return Replacement()
        kind = None if site.activation is None else shipped_class(site.activation, self.method, self.bits)
        if kind is None:
            return Replacement(reason=missing(found, self.method, self.bits), missing=True)
        width = registered(kind).bits
        narrow = self.bits is not None and 0 < width < self.bits
        note = f"{width} bit{'s' if width > 1 else ''}: none of {self.bits} is shipped" if narrow else ""
        return _in_place(Replacement(kind, found.in_place, note), found)


def _in_place(replacement: Replacement, found: Found) -> Replacement:
    """Refuse an in-place replacement where it is of no use."""
    if not replacement.in_place or replacement.kind is None:
        return replacement
    if registered(replacement.kind).keeps_output:
        return Replacement(reason="in place: a method that keeps the output needs another tensor for it")
    if not found.keeps_input:
        return Replacement(reason="in place: it keeps only its output, as most layers do")
    return replacement


def missing(found: Found, method: str, bits: int | None) -> str:
    """Return why nothing is shipped for an activation, and how to make it."""
    command = recipe(found, method, bits)
    if found.activation is None and not found.formula:
        return "fitact does not know it: fit its formula with fitact fit, and pass replace={its class: yours}"
    if found.activation and not found.parameters:
        return f"{method}: nothing is shipped for {found.activation}; if there is a fit, {command} makes it"
    return f"not shipped: {command}; then fitact codegen, and pass replace={{its class: yours}}"


def lasting(replacements: Sequence[Replacement], trace: Trace) -> list[Replacement]:
    """Leave sites alone where backward would need an output that something overwrites.

    Args:
        replacements: one for each site.
        trace: the trace of the model with them.

    """
    return [
        Replacement(reason="a later operation overwrites its output, so no method can keep the output")
        if replacement.kind and registered(replacement.kind).keeps_output and usage.overwritten
        else replacement
        for replacement, usage in zip(replacements, trace.usages, strict=True)
    ]


def paying(
    sites: Sequence[ActivationSite],
    replacements: Sequence[Replacement],
    substitutes: Substitutes,
    before: Trace,
    measure: Measure,
) -> tuple[list[Replacement], Trace]:
    """Return the replacements that can be used and keep no more than stock, and what the model keeps with them.

    Args:
        sites: where the activations are.
        replacements: one for each of them.
        substitutes: as in Policy; they stay even where they keep more, because the user chose them.
        before: the trace of the stock model.
        measure: runs the model with each of several plans.

    """
    given = [type(site.held) in substitutes for site in sites]

    def left(found: Sequence[Replacement], after: Trace, gains: Callable[[Usage], int]) -> list[Replacement]:
        seen = zip(found, given, before.usages, after.usages, strict=True)
        return [
            one
            if wanted or not one.kind or now.kept <= gains(was)
            else Replacement(reason=_more(one.kind, was, now))
            for one, wanted, was, now in seen
        ]

    while True:
        (after,) = measure([plan(replacements)])
        kept = left(lasting(replacements, after), after, lambda was: was.kept)
        if kept == replacements and after.kept > before.kept:  # others keep what they shared with these
            kept = left(kept, after, lambda was: was.alone)
        if kept == replacements:
            return kept, after
        replacements = kept


def _more(kind: type[nn.Module], was: Usage, now: Usage) -> str:
    """Return why a replacement keeps more than stock."""
    if registered(kind).keeps_output and not now.shared:
        return "it would save more than the baseline: nothing that follows saves its output"
    if was.alone:
        return "it would save more than the baseline: it has few elements, and codes are padded to 8192"
    return "it would save more than the baseline: neighbouring operations save its tensor anyway"
