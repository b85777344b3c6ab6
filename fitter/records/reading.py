"""Fits read from their JSON; nothing in it is ever run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fitact.base import UsageError, check_keys, mapping, quote, read_record, readable, string
from fitact.base import read as read_as
from fitact.fitter.analysis import Activation, Formula, Gate, Learned, Number
from fitact.fitter.catalog import CATALOG, GATES, LEARNED
from fitact.fitter.files import FIT
from fitact.fitter.numerics import Weight

from .fit import KINDS, AnyFit, Option

T = TypeVar("T", bound=Formula)

# Methods of once, and what is in their place.
GONE = {
    **dict.fromkeys(("coded", "gate_coded", "learned_coded"), "block codes, of fitact.saving, took its place"),
    **dict.fromkeys(("exact", "gate_rebuild", "learned_rebuild"), "fit it again, as output or recompute"),
    "learned_exact": "learned_recompute saves as little in fitact.saving, and its gradients are exact",
}


def read(path: Path) -> AnyFit:
    """Read a fit from its file and check every field; a UsageError names the file and the field."""
    return FIT.read(path, from_json)


def from_json(source: str) -> AnyFit:
    """Read a fit from its JSON. Nothing in it is ever executed.

    Raises:
        UsageError: the text is not such a record; the message names the field.

    """
    record = FIT.record(source)
    method = record.get("method")
    if isinstance(method, str) and method in GONE:
        raise UsageError(f"method: {method} is not fitted any more: {GONE[method]}")
    kind = next((kind for kind in KINDS if method in kind.METHODS), None)
    if kind is None:
        methods = ", ".join(name for kind in KINDS for name in kind.METHODS)
        raise UsageError(f"method: expected one of {methods}, got {quote(method)}")
    return read_record(kind, record, _READERS)


def _activation(value: object, what: str) -> Activation:
    record = mapping(value, what)
    check_keys(record, ("expression", "name", *({"parameters"} & set(record))), f"{what}.")
    parameters = read_as(Mapping[str, float], record.get("parameters", {}), f"{what}.parameters", {})
    own = None if parameters else partial(Activation, None)
    return _formula(record, what, CATALOG, partial(Activation.of, parameters=parameters), own)


def _gate(value: object, what: str) -> Gate:
    record = mapping(value, what)
    check_keys(record, ("expression", "name"), f"{what}.")
    return _formula(record, what, GATES, Gate.of, partial(Gate, None))


def _learned(value: object, what: str) -> Learned:
    record = mapping(value, what)
    check_keys(record, ("expression", "learned", "name"), f"{what}.")
    numbers: tuple[Number, ...] = read_as(tuple[Number, ...], record["learned"], f"{what}.learned", {})
    given = {number.name: (number.start, number.channel) for number in numbers}
    named = partial(Learned.of, numbers=given)
    return _formula(record, what, LEARNED, named, partial(Learned, None, numbers=numbers))


readable(Number)


def _formula(
    record: dict[str, Any],
    what: str,
    known: Mapping[str, object],
    make: Callable[[str], T],
    own: Callable[[str], T] | None,
) -> T:
    """Return a user's own formula, or that of a catalog's name if the rest of the record agrees."""
    name = record["name"]
    if name is None and own is not None:
        return own(string(record["expression"], f"{what}.expression"))
    if not isinstance(name, str) or name not in known:
        raise UsageError(
            f"{what}.name: {quote(name)} is not in this catalog; the name of any other formula is null"
        )
    made = make(name)
    theirs = made.record()
    for part in ("expression", *record):
        if record[part] != theirs.get(part):
            raise UsageError(
                f"{what}.{part}: {quote(record[part])} is not that of {quote(name)} in this catalog, "
                f"{quote(theirs.get(part))}"
            )
    return made


_READERS: dict[Any, Callable[[object, str], Any]] = {
    Activation: _activation,
    Gate: _gate,
    Learned: _learned,
    Weight: lambda value, what: Weight(string(value, what)),
    Option: lambda value, what: value,  # the method's options check it
}
