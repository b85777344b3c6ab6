"""Choosing a replacement for each activation: by a method, or by measuring what keeps least."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from typing import Any, TypeVar

from torch import nn

from fitact.errors import UsageError, quote
from fitact.runtime.norms import linear as layers
from fitact.runtime.norms.linear import Norm
from fitact.runtime.ops.registry import registered
from fitact.runtime.rebuild.codes import Codes, LearnedCodes, NormCodes
from fitact.runtime.rebuild.modules import original_class

from .detect import MODULES, ActivationSite, Found, recipe, recognise, shipped_class, stated_errors
from .measure import Plan, Trace, Usage
from .replacement import Replacement, plan

METHODS = ("fewbit", "relumix", "inverted", "exact")
WIDTHS = {"coded": range(3, 9), "auto": range(1, 9)}
ERRORS = ("exact", "rounding", "few-bit")  # what auto may choose among; each allows all before it
# Piecewise linear: their derivatives are step functions, so Few-Bit and exact give PyTorch's own gradients.
PIECEWISE = frozenset(
    ("hardshrink", "hardsigmoid", "hardtanh", "leaky_relu", "relu", "relu6", "softshrink", "threshold")
)
STEPS = 3  # bits of Few-Bit by default
CODES, FEW_CODES = 8, 6  # bits of codes by default, and with error="few-bit"

Substitutes = Mapping[type[nn.Module], type[nn.Module]]
Measure = Callable[[Sequence[Plan]], list[Trace]]
State = TypeVar("State")


def check_bits(method: str, bits: object) -> None:
    """Raise a UsageError if a method's fits cannot have this number of bits."""
    widths = WIDTHS.get(method, range(1, 5))
    known = type(bits) is not bool and isinstance(bits, Integral) and bits in widths
    none = method in ("exact", "rebuild")
    if bits is not None and (none or not known):
        *first, last = widths
        some = f"{', '.join(map(str, first))} or {last}"
        expected = f"none for {method}, which keeps no bits" if none else some
        raise UsageError(f"bits {quote(bits)}: expected {expected}")


def check_coded(method: str, error: str | None, name: str, bits: object) -> None:
    """Raise a UsageError if nothing can keep codes of the identity of this number of bits.

    Args:
        method: of `convert`.
        error: likewise.
        name: of the argument.
        bits: its value; None for its default.

    """
    if bits is None:
        return
    if method not in ("coded", "auto") or error == "exact":
        raise UsageError(f'{name} {quote(bits)}: nothing keeps codes by this method: expected method="coded"')
    widths = WIDTHS["coded"]
    if type(bits) is bool or not isinstance(bits, Integral) or bits not in widths:
        raise UsageError(f"{name} {quote(bits)}: expected {', '.join(map(str, widths[:-1]))} or {widths[-1]}")
    if shipped_class("identity", "coded", int(bits)) is None:
        raise UsageError(f"{name} {quote(bits)}: no code of the identity of so few bits is shipped")


@dataclass(frozen=True)
class Policy:
    """A rule that chooses replacements.

    Attributes:
        methods: some of METHODS; the widest fit is taken, and the first of equals; none to leave all alone.
        bits: the most bits kept per element; None for each method's default.
        substitutes: generated classes by the classes they replace; they come before any method.
        most: fits with more bits than this are left out.
        measured: whether the gain is measured.
        linear: whether only piecewise linear activations are replaced.
        same: whether only PyTorch's own modules and functions are replaced; others may round differently.

    """

    methods: tuple[str, ...]
    bits: int | None = None
    substitutes: Substitutes = field(default_factory=dict)
    most: int | None = None
    measured: bool = False
    linear: bool = False
    same: bool = False

    def replacements(self, sites: Sequence[ActivationSite]) -> list[Replacement]:
        """Return the replacement for each site."""
        return [self._replacement(site) for site in sites]

    def _replacement(self, site: ActivationSite) -> Replacement:
        found = site.found
        if found.converted:
            return Replacement(reason=f"already {found.before}")
        if found.refusal:
            return Replacement(reason=found.refusal)
        given = self.substitutes.get(original_class(site.held))
        if given is not None:
            return self._in_place(Replacement(given, bool(getattr(site.held, "inplace", False))), found)
        if found.learned is not None:  # it is rebuilt, or keeps codes, as it stands
            other = self.methods != ("coded",) and bool(self.methods) and not self.measured
            return Replacement(reason="its parameters are learned: only rebuild and coded keep less" * other)
        if site.activation and not (self.methods and self._allows(site)):
            return Replacement()
        method = self.methods[0] if self.methods else "fewbit"
        kinds = [] if site.activation is None else self._kinds(site.activation)
        if not kinds:
            return Replacement(reason=missing(found, method, self.bits), missing=True)
        kind = max(kinds, key=lambda kind: registered(kind).bits)
        width = registered(kind).bits
        narrow = self.bits is not None and 0 < width < self.bits and not self.measured
        note = f"{width} bit{'s' if width > 1 else ''}: none of {self.bits} is shipped" if narrow else ""
        if method == "coded":
            note = "; ".join(filter(None, (note, stated_errors(registered(kind).name))))
        return self._in_place(Replacement(kind, found.in_place, note), found)

    def _allows(self, site: ActivationSite) -> bool:
        own = isinstance(site.held, nn.Module) and original_class(site.held) not in MODULES
        return not (self.linear and site.activation not in PIECEWISE) and not (self.same and own)

    def _kinds(self, activation: str) -> list[type[nn.Module]]:
        kinds = [shipped_class(activation, method, self.bits) for method in self.methods]
        return [kind for kind in kinds if kind and (self.most is None or registered(kind).bits <= self.most)]

    def _in_place(self, replacement: Replacement, found: Found) -> Replacement:
        """Refuse an in-place replacement where it is of no use."""
        if not replacement.in_place or replacement.kind is None:
            return replacement
        if registered(replacement.kind).keeps_output:
            return Replacement(reason="in place: a method that keeps the output needs another tensor for it")
        if not found.keeps_input and not self.measured:
            return Replacement(
                reason='in place: it keeps only its output, as most layers do; method="auto" measures this'
            )
        return replacement


def missing(found: Found, method: str, bits: int | None) -> str:
    """Return why nothing is shipped for an activation, and how to make it."""
    command = recipe(found, method, bits)
    if found.activation is None and not found.formula:
        return "fitact does not know it: fit its formula with fitact fit, and pass replace={its class: yours}"
    if found.activation and not found.parameters:
        return f"{method}: nothing is shipped for {found.activation}; if there is a fit, {command} makes it"
    return f"not shipped: {command}; then fitact codegen, and pass replace={{its class: yours}}"


# ------------------------------------------------------------------------------------------------------------ auto


def best(
    sites: Sequence[ActivationSite],
    bits: int | None,
    error: str,
    substitutes: Substitutes,
    measure: Measure,
    stock: Trace,
) -> tuple[list[Replacement], Trace]:
    """Return the replacement that keeps least for each site, and what the model keeps with these.

    Each candidate is measured at all sites at once, and each site takes the one that keeps least there. The
    candidates are leaving it alone, exact, inverted and Few-Bit, as far as the error allows; the first of equals
    wins. What one activation keeps depends a little on the others, so the mixture is measured too. If a single
    method keeps less than the mixture, it is taken.

    Args:
        sites: where the activations are.
        bits: the most bits kept per element; 3 by default.
        error: one of ERRORS, how much gradients may change.
        substitutes: as in Policy; they are always taken.
        measure: runs the model with each of several plans.
        stock: the trace of the stock model.

    """
    policies, singles = _policies(STEPS if bits is None else bits, error, substitutes)
    options = [one.replacements(sites) for one in (*policies, *singles)]
    runs = _Runs(measure, {((None, False),) * len(sites): stock})
    measured = runs(options)
    options = [lasting(replacements, trace) for replacements, trace in zip(options, measured, strict=True)]
    options[0] = [
        one if one.kind else replace(one, reason=one.reason or _nothing(usage, error))
        for one, usage in zip(options[0], stock.usages, strict=True)
    ]
    if error == "exact":  # under autocast, a replacement that keeps its output rounds it to the autocast dtype
        for found, trace in zip(options, measured, strict=True):
            for i, (was, now) in enumerate(zip(stock.usages, trace.usages, strict=True)):
                if was.dtypes != now.dtypes:
                    found[i] = options[0][i]
    measured = runs(options)
    mixed = []
    for i in range(len(sites)):
        kept = [trace.usages[i].kept for trace in measured[: len(policies)]]  # equal for all sites of one module
        mixed.append(options[kept.index(min(kept))][i])
    (whole,) = runs([mixed])
    single = min(range(len(options)), key=lambda k: measured[k].kept)
    if measured[single].kept < whole.kept:
        return options[single], measured[single]
    return mixed, whole


def _policies(width: int, error: str, substitutes: Substitutes) -> tuple[list[Policy], list[Policy]]:
    """Return the policies to choose from at each site, and further ones to compare the mixture with."""
    policy = partial(Policy, substitutes=substitutes, measured=True)
    alone = policy((), width)
    if error == "exact":
        same = partial(policy, linear=True, same=True)
        return [alone, same(("exact",)), same(("fewbit",), width)], []
    most = [alone, policy(("exact",)), policy(("inverted",), most=width)]
    if error == "rounding":
        return [*most, policy(("fewbit",), width, linear=True)], []
    return [*most, policy(("fewbit", "relumix"), width)], [policy(("fewbit",), width)]


@dataclass(frozen=True)
class Coding:
    """Codes that may be kept in place of inputs and outputs.

    Attributes:
        bits: the most bits of a code.
        least: codes with fewer bits are left out.
        bits_u: the most bits of a code of the factor u of a gate; None to keep u.
        bits_norms: the most bits of a code of a norm's normalised rows; None to keep its input.

    """

    bits: int
    least: int = 1
    bits_u: int | None = None
    bits_norms: int | None = None

    def code(
        self, sites: Sequence[ActivationSite], group: Collection[int], state: tuple[Sequence[Replacement], Any]
    ) -> tuple[tuple[Replacement, ...], Any]:
        """Let a group of sites, given by their places, keep codes."""
        now, rebuilt = state
        coded = Policy(("coded",), self.bits, measured=True).replacements(sites)
        replacements = (
            one if i in group and one.kind and registered(one.kind).bits >= self.least else was
            for i, (one, was) in enumerate(zip(coded, now, strict=True))
        )
        return tuple(replacements), rebuilt

    def codes(self, activation: Any) -> Codes | LearnedCodes | NormCodes | None:
        """Return the codes for a gate with an activation, one with learned numbers, or a norm; or None."""
        found = recognise(activation)
        norm = None if found is not None or self.bits_norms is None else layers.recognise(activation)
        if isinstance(norm, Norm):
            of_rows = shipped_class("identity", "coded", self.bits_norms)
            return None if of_rows is None else NormCodes.of(norm, registered(of_rows).key)
        if found is not None and found.learned is not None:
            formula = None if found.refusal else found.learned.coded(self.bits, self.least)
            return None if formula is None else LearnedCodes(formula.key, found.learned)
        name = None if found is None or found.parameters or found.refusal else found.activation
        kind = None if name is None else shipped_class(name, "coded", self.bits)
        if kind is None or registered(kind).bits < self.least:
            return None
        of_u = None if self.bits_u is None else shipped_class("identity", "coded", self.bits_u)
        return Codes(registered(kind).key, None if of_u is None else registered(of_u).key)


def codings(
    method: str, error: str, bits: int | None, bits_u: int | None = None, bits_norms: int | None = None
) -> list[Coding]:
    """Return the codes that a conversion may keep, each to be compared with what the earlier ones keep.

    Codes of 8 bits are off by less than 1 %, bfloat16's rounding by up to 0.4 %. `"rounding"` has only these, and
    keeps u of gates and the inputs of norms as they are. `"few-bit"` also has codes of fewer bits, 6 by default,
    and codes u and norms in 8 bits.
    """
    if method == "coded":
        return [Coding(bits or CODES, 1, bits_u, bits_norms)]
    if method != "auto" or error == "exact":
        return []
    if error == "rounding":
        return [Coding(CODES, CODES, bits_u, bits_norms)] if bits is None or bits >= CODES else []
    of_both = bits_u or CODES, bits_norms or CODES
    return [Coding(one, 1, *of_both) for one in ((CODES, FEW_CODES) if bits is None else (bits,))]


def least(
    start: State, stock: Trace, steps: Sequence[Callable[[State], State]], measure: Callable[[State], Trace]
) -> tuple[State, Trace]:
    """Return the state that keeps least, and what it keeps: a step is taken if less is kept after it.

    Args:
        start: where to start.
        stock: what it keeps.
        steps: each gives another state from a state.
        measure: runs the model in a state.

    """
    for step in steps:
        state = step(start)
        if state == start:
            continue
        trace = measure(state)
        if trace.kept < stock.kept:
            start, stock = state, trace
    return start, stock


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
    given = [original_class(site.held) in substitutes for site in sites]

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
        return "it would keep more than stock: nothing that follows keeps its output"
    if was.alone:
        return "it would keep more than stock: it has few elements, and codes are padded to 8192"
    return "it would keep more than stock: neighbouring operations keep its tensor anyway"


@dataclass
class _Runs:
    """Measures replacements; equal ones are measured once."""

    measure: Measure
    done: dict[tuple[Any, ...], Trace] = field(default_factory=dict)

    def __call__(self, options: Sequence[Sequence[Replacement]]) -> list[Trace]:
        alike = {_key(replacements): replacements for replacements in options}
        new = [key for key in alike if key not in self.done]
        self.done.update(zip(new, self.measure([plan(alike[key]) for key in new]) if new else (), strict=True))
        return [self.done[_key(replacements)] for replacements in options]


def _key(replacements: Sequence[Replacement]) -> tuple[Any, ...]:
    return tuple((one.kind, one.in_place) for one in replacements)


def _nothing(usage: Usage, error: str) -> str:
    """Return why nothing is gained."""
    if usage.shared is None:
        return "example_inputs do not reach it"
    if not usage.kept:
        return "nothing to gain: other operations keep all that it keeps"
    allowed = "" if error == ERRORS[-1] else f' with error="{error}"'
    return f"nothing to gain: no replacement{allowed} keeps less"
