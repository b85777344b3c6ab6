"""What stands in the place of each activation: by a method, or by measuring what keeps least."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from fitact.errors import UsageError, quote

from .convert_measure import Plan, Trace, Usage
from .inplace import InPlace
from .sites import Found, Slot, recipe, registered, shipped_class

METHODS = ("fewbit", "relumix", "inverted", "exact")
WIDTHS = (1, 2, 3, 4)
ORIGINAL = "_fitact_original"  # under which a replacement holds what it replaced: not among its modules
STEPS = 3  # bits of Few-Bit by default

Replacements = Mapping[type[nn.Module], type[nn.Module]]
Measure = Callable[[Sequence[Plan]], list[Trace]]


def check_bits(method: str, bits: int | None) -> None:
    """Raise a UsageError if bits are none that a method's fits have."""
    if bits is not None and (method == "exact" or bits not in WIDTHS):
        expected = "none for exact, which keeps no bits" if method == "exact" else "1, 2, 3 or 4"
        raise UsageError(f"bits {quote(bits)}: expected {expected}")


@dataclass(frozen=True)
class Choice:
    """What a slot gets.

    Attributes:
        kind: the class of the replacement; None to leave what is there.
        in_place: whether it has to overwrite its input.
        reason: why it is left alone, or what one should know.
        missing: whether that is because nothing is shipped.

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

    def make(self) -> nn.Module:
        """Return a replacement."""
        assert self.kind is not None
        return InPlace(self.kind()) if self.in_place else self.kind()


def put(places: Sequence[Slot], choices: Sequence[Choice]) -> None:
    """Replace what is chosen; what one module was at several places, one replacement is."""
    made: dict[Any, nn.Module] = {}
    for slot, choice in zip(places, choices, strict=True):
        if choice.kind is None:
            continue
        if slot.key not in made:
            made[slot.key] = choice.make()
            vars(made[slot.key])[ORIGINAL] = slot.held
            if isinstance(slot.held, nn.Module):
                made[slot.key].train(slot.held.training)
        slot.put(made[slot.key])


@contextmanager
def putting(choices: Sequence[Choice], places: Sequence[Slot]) -> Iterator[None]:
    """Replace what is chosen until the context ends."""
    put(places, choices)
    try:
        yield
    finally:
        for slot in places:
            slot.put(slot.held)


def plan(choices: Sequence[Choice]) -> Plan:
    """Return choices as what a measurement takes."""
    return partial(putting, choices)


@dataclass(frozen=True)
class Wish:
    """What is asked for.

    Attributes:
        methods: of METHODS, of whose fits the widest is taken, the first of equals; none to leave alone.
        bits: the most that are kept per element, None for each method's default.
        replacements: generated classes by the classes they replace, before any method.
        most: bits above which a default is left out.
        measured: whether it is measured what is gained.

    """

    methods: tuple[str, ...]
    bits: int | None = None
    replacements: Replacements = field(default_factory=dict)
    most: int | None = None
    measured: bool = False

    def choices(self, places: Sequence[Slot]) -> list[Choice]:
        """Return what each slot gets."""
        return [self._choice(slot) for slot in places]

    def _choice(self, slot: Slot) -> Choice:
        found = slot.found
        if found.converted:
            return Choice(reason=f"already {found.before}")
        if found.refusal:
            return Choice(reason=found.refusal)
        given = self.replacements.get(type(slot.held))
        if given is not None:
            return self._in_place(Choice(given, bool(getattr(slot.held, "inplace", False))), found)
        if not self.methods and slot.activation:
            return Choice()
        method = self.methods[0] if self.methods else "fewbit"
        kinds = [] if slot.activation is None else self._kinds(slot.activation)
        if not kinds:
            return Choice(reason=missing(found, method, self.bits), missing=True)
        kind = max(kinds, key=lambda kind: registered(kind).bits)
        width = registered(kind).bits
        narrow = self.bits is not None and 0 < width < self.bits and not self.measured
        note = f"{width} bit{'s' if width > 1 else ''}: none of {self.bits} is shipped" if narrow else ""
        return self._in_place(Choice(kind, found.in_place, note), found)

    def _kinds(self, activation: str) -> list[type[nn.Module]]:
        kinds = [shipped_class(activation, method, self.bits) for method in self.methods]
        return [kind for kind in kinds if kind and (self.most is None or registered(kind).bits <= self.most)]

    def _in_place(self, choice: Choice, found: Found) -> Choice:
        """Refuse a replacement in place where it is of no use."""
        if not choice.in_place or choice.kind is None:
            return choice
        if registered(choice.kind).keeps_output:
            return Choice(reason="in place: a method that keeps the output needs another tensor for it")
        if not found.keeps_input and not self.measured:
            return Choice(
                reason='in place: it keeps its output alone, as most layers do; method="auto" measures that'
            )
        return choice


def missing(found: Found, method: str, bits: int | None) -> str:
    """Return why nothing is shipped for an activation, and how to make it."""
    command = recipe(found, method, bits)
    if found.activation is None and not found.formula:
        return "it is not known here: fit its formula with fitact fit, and give replace={its class: yours}"
    if found.activation and not found.parameters:
        return f"{method}: nothing is shipped for {found.activation}; if there is a fit, {command} makes it"
    return f"not shipped: {command}; then fitact codegen, and give replace={{its class: yours}}"


# ------------------------------------------------------------------------------------------------------------ auto


def best(
    places: Sequence[Slot], bits: int | None, replacements: Replacements, measure: Measure
) -> tuple[list[Choice], Trace, Trace]:
    """Return, for each slot, what keeps least, and what the model keeps stock and so.

    Each candidate is measured at all slots at once, and each slot takes the one that keeps least there: leaving it
    alone, exact, inverted, Few-Bit, the first of equals. What activations keep depends a little on each other, so
    the whole is measured too, and where a single method keeps less, that method is taken.

    Args:
        places: the slots.
        bits: the most that are kept per element; 3 by default.
        replacements: as in Wish; these are not chosen among.
        measure: runs the model with each of some plans.

    """
    width = STEPS if bits is None else bits
    wish = partial(Wish, replacements=replacements, measured=True)
    wishes = [
        wish((), width),
        wish(("exact",)),
        wish(("inverted",), most=width),
        wish(("fewbit", "relumix"), width),
        wish(("fewbit",), width),
    ]
    options = [one.choices(places) for one in wishes]
    runs = _Runs(measure)
    stock, *measured = runs([[Choice()] * len(places), *options])
    options = [lasting(choices, trace) for choices, trace in zip(options, measured, strict=True)]
    options[0] = [
        choice if choice.kind else replace(choice, reason=choice.reason or _nothing(usage))
        for choice, usage in zip(options[0], stock.usages, strict=True)
    ]
    measured = runs(options)
    mixed = []
    for i in range(len(places)):
        kept = [trace.usages[i].kept for trace in measured[:-1]]  # equal for all slots of one module
        mixed.append(options[kept.index(min(kept))][i])
    (whole,) = runs([mixed])
    single = min(range(len(options)), key=lambda k: measured[k].kept)
    if measured[single].kept < whole.kept:
        return options[single], stock, measured[single]
    return mixed, stock, whole


def lasting(choices: Sequence[Choice], trace: Trace) -> list[Choice]:
    """Leave alone where backward would need an output that is overwritten meanwhile.

    Args:
        choices: for each slot.
        trace: of the model with them.

    """
    return [
        Choice(reason="what follows overwrites its output, so a method that keeps the output cannot be used")
        if choice.kind and registered(choice.kind).keeps_output and usage.overwritten
        else choice
        for choice, usage in zip(choices, trace.usages, strict=True)
    ]


@dataclass
class _Runs:
    """Measures choices, what is replaced alike once."""

    measure: Measure
    done: dict[tuple[Any, ...], Trace] = field(default_factory=dict)

    def __call__(self, options: Sequence[Sequence[Choice]]) -> list[Trace]:
        alike = {tuple((choice.kind, choice.in_place) for choice in choices): choices for choices in options}
        new = [key for key in alike if key not in self.done]
        self.done.update(zip(new, self.measure([plan(alike[key]) for key in new]) if new else (), strict=True))
        return [self.done[tuple((choice.kind, choice.in_place) for choice in choices)] for choices in options]


def _nothing(usage: Usage) -> str:
    """Return why nothing is gained."""
    if usage.shared is None:
        return "example_inputs do not reach it"
    if not usage.kept:
        return "nothing to gain: it keeps nothing that others do not keep too"
    return "nothing to gain: no replacement keeps less"
