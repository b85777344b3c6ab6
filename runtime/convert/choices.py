"""Choosing a replacement for each activation: by a method, or by measuring what keeps least."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from typing import Any

from torch import nn

from fitact.errors import UsageError, quote
from fitact.runtime.ops.registry import registered
from fitact.runtime.rebuild.modules import original_class
from fitact.text import starred

from .detect import MODULES, ActivationSite, Found, recipe, shipped_class
from .measure import Plan, Trace, Usage
from .wrappers import Held, InPlace

METHODS = ("fewbit", "relumix", "inverted", "exact")
WIDTHS = (1, 2, 3, 4)
ERRORS = ("exact", "rounding", "few-bit")  # what auto may choose among; each allows all before it
# Piecewise linear: their derivatives are step functions, so Few-Bit and exact give PyTorch's own gradients.
PIECEWISE = frozenset(
    ("hardshrink", "hardsigmoid", "hardtanh", "leaky_relu", "relu", "relu6", "softshrink", "threshold")
)
ORIGINAL = "_fitact_original"  # the attribute of a replacement that holds the original, outside its modules
STEPS = 3  # bits of Few-Bit by default

Substitutes = Mapping[type[nn.Module], type[nn.Module]]
Measure = Callable[[Sequence[Plan]], list[Trace]]


def check_bits(method: str, bits: object) -> None:
    """Raise a UsageError if a method's fits cannot have this number of bits."""
    known = type(bits) is not bool and isinstance(bits, Integral) and bits in WIDTHS
    none = method in ("exact", "rebuild")
    if bits is not None and (none or not known):
        expected = f"none for {method}, which keeps no bits" if none else "1, 2, 3 or 4"
        raise UsageError(f"bits {quote(bits)}: expected {expected}")


@dataclass(frozen=True)
class Replacement:
    """What replaces the activation at a site.

    Attributes:
        kind: the class of the replacement; None to leave the activation alone.
        in_place: whether it must overwrite its input.
        reason: why it is left alone, or another note.
        missing: whether it is left alone because nothing is shipped.

    """

    kind: type[nn.Module] | None = None
    in_place: bool = False
    reason: str = ""
    missing: bool = False

    @property
    def label(self) -> str | None:
        """The name of the fit, None where nothing is replaced."""
        if self.kind is None:
            return None
        return registered(self.kind).name + ", in place" * self.in_place

    def make(self, held: Any) -> nn.Module:
        """Return a replacement for a module or a function."""
        assert self.kind is not None
        made = InPlace(self.kind()) if self.in_place else self.kind()
        return made if isinstance(held, nn.Module) else Held(made, held)


def put(sites: Sequence[ActivationSite], replacements: Sequence[Replacement]) -> None:
    """Replace what is chosen; a module at several sites gets a single replacement."""
    made: dict[Any, nn.Module] = {}
    for site, replacement in zip(sites, replacements, strict=True):
        if replacement.kind is None:
            continue
        if site.key not in made:
            made[site.key] = replacement.make(site.held)
            vars(made[site.key])[ORIGINAL] = site.held
            if isinstance(site.held, nn.Module):
                made[site.key].train(site.held.training)
        site.put(made[site.key])


@contextmanager
def putting(replacements: Sequence[Replacement], sites: Sequence[ActivationSite]) -> Iterator[None]:
    """Replace what is chosen until the context ends."""
    put(sites, replacements)
    try:
        yield
    finally:
        for site in sites:
            site.put(site.held)


def plan(replacements: Sequence[Replacement]) -> Plan:
    """Return replacements as a plan for a measurement."""
    return partial(putting, replacements)


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


# ----------------------------------------------------------------------------------- sites that no example reaches

ATTEMPTS = 8  # a layer that is left out every other time is run in one of them, except for 1 in 256


def attempt(sites: Sequence[ActivationSite], measure: Callable[[int], Trace]) -> tuple[int, Trace]:
    """Find random numbers with which the model runs each activation or one like it; return them and the trace.

    Otherwise layers that a model leaves out at random would be measured as keeping nothing.

    Args:
        sites: where the activations are.
        measure: runs the stock model with the random numbers of an attempt.

    """
    likes = [_like(site) for site in sites]
    reached = dict.fromkeys(range(ATTEMPTS), 0)
    found: dict[int, Trace] = {}
    for i in reached:
        found[i] = measure(i)
        usages = found[i].usages
        reached[i] = len({like for like, usage in zip(likes, usages, strict=True) if usage.shared is not None})
        if reached[i] == len({*likes}) or not found[i].random:
            break
    most = max(found, key=reached.__getitem__)  # the first of equals
    return most, found[most]


def as_likes(
    sites: Sequence[ActivationSite], replacements: Sequence[Replacement], stock: Trace
) -> list[Replacement]:
    """Give each unreached site what most sites like it get; sites of one module get the same."""
    reached = [usage.shared is not None for usage in stock.usages]
    models: dict[Any, list[tuple[Replacement, ActivationSite]]] = {}
    for site, replacement, was in zip(sites, replacements, reached, strict=True):
        if was and not site.found.refusal and not site.found.converted:
            models.setdefault(_like(site), []).append((replacement, site))
    given: dict[Any, Replacement] = {}
    found = []
    for site, replacement, was in zip(sites, replacements, reached, strict=True):
        likes = models.get(_like(site))
        if likes and not was and not site.found.refusal and not site.found.converted:
            counts = Counter((like.kind, like.in_place) for like, _ in likes)
            (kind, in_place), _ = counts.most_common(1)[0]
            model = next(one.path for like, one in likes if (like.kind, like.in_place) == (kind, in_place))
            reason = f"example_inputs do not reach it: treated as {model}"
            replacement = given.setdefault(site.key, Replacement(kind, in_place, reason))
        found.append(replacement)
    return found


def _like(site: ActivationSite) -> tuple[str, str]:
    """Return a key that the same activation has in every layer."""
    return site.found.before, starred(site.path)


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
    policies, singles = _wishes(STEPS if bits is None else bits, error, substitutes)
    options = [one.replacements(sites) for one in (*policies, *singles)]
    runs = _Runs(measure, {((None, False),) * len(sites): stock})
    measured = runs(options)
    options = [lasting(replacements, trace) for replacements, trace in zip(options, measured, strict=True)]
    options[0] = [
        replacement
        if replacement.kind
        else replace(replacement, reason=replacement.reason or _nothing(usage, error))
        for replacement, usage in zip(options[0], stock.usages, strict=True)
    ]
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


def _wishes(width: int, error: str, substitutes: Substitutes) -> tuple[list[Policy], list[Policy]]:
    """Return the policies to choose among at each site, and further ones to compare the mixture with."""
    policy = partial(Policy, substitutes=substitutes, measured=True)
    alone = policy((), width)
    if error == "exact":
        return [
            alone,
            policy(("exact",), linear=True, same=True),
            policy(("fewbit",), width, linear=True, same=True),
        ], []
    most = [alone, policy(("exact",)), policy(("inverted",), most=width)]
    if error == "rounding":
        return [*most, policy(("fewbit",), width, linear=True)], []
    return [*most, policy(("fewbit", "relumix"), width)], [policy(("fewbit",), width)]


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
    """Leave sites alone where a replacement cannot be used or keeps more than stock.

    Args:
        sites: where the activations are.
        replacements: one for each of them.
        substitutes: as in Policy; they stay even where they keep more, because the user chose them.
        before: the trace of the stock model.
        measure: runs the model with each of several plans.

    Returns:
        The replacements, and what the model keeps with them.

    """
    given = [original_class(site.held) in substitutes for site in sites]
    while True:
        (after,) = measure([plan(replacements)])
        kept = [
            replacement
            if wanted or not replacement.kind or now.kept <= was.kept
            else Replacement(reason=_more(replacement.kind, was, now))
            for replacement, wanted, was, now in zip(
                lasting(replacements, after), given, before.usages, after.usages, strict=True
            )
        ]
        if kept == replacements:
            return kept, after
        replacements = kept


def _more(kind: type[nn.Module], was: Usage, now: Usage) -> str:
    """Return why a replacement keeps more than stock."""
    if registered(kind).keeps_output and not now.shared:
        return "it would keep more than stock: nothing that follows keeps its output"
    if was.kept:
        return "it would keep more than stock: it has few elements, and codes are padded to 8192"
    return "it would keep more than stock: neighbouring operations keep its tensor anyway"


@dataclass
class _Runs:
    """Measures replacements; equal ones are measured once."""

    measure: Measure
    done: dict[tuple[Any, ...], Trace] = field(default_factory=dict)

    def __call__(self, options: Sequence[Sequence[Replacement]]) -> list[Trace]:
        alike = {
            tuple((replacement.kind, replacement.in_place) for replacement in replacements): replacements
            for replacements in options
        }
        new = [key for key in alike if key not in self.done]
        self.done.update(zip(new, self.measure([plan(alike[key]) for key in new]) if new else (), strict=True))
        return [
            self.done[tuple((replacement.kind, replacement.in_place) for replacement in replacements)]
            for replacements in options
        ]


def _nothing(usage: Usage, error: str) -> str:
    """Return why nothing is gained."""
    if usage.shared is None:
        return "example_inputs do not reach it"
    if not usage.kept:
        return "nothing to gain: other operations keep all that it keeps"
    allowed = "" if error == ERRORS[-1] else f' with error="{error}"'
    return f"nothing to gain: no replacement{allowed} keeps less"
