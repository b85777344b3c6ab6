"""Fits read from their JSON; nothing in it is ever run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from fitact.errors import FitactError, UsageError, quote
from fitact.files import read_text
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.analysis.gate import Gate
from fitact.fitter.analysis.learned import MOST, Learned, Number
from fitact.fitter.expr.catalog import CATALOG, GATES, LEARNED

from .fit import SCHEMA, activation_record
from .gate import GateFit
from .kinds import KINDS, AnyFit
from .learned import LearnedFit
from .validate import check_keys, label, mapping, number, objects, record_of, text

MAX_BYTES = 1 << 20
# Methods of once, and what is in their place.
GONE = {
    **dict.fromkeys(("coded", "gate_coded", "learned_coded"), "block codes, of fitact.saving, took its place"),
    "learned_exact": "learned_rebuild keeps as little in fitact.saving, and its gradients are exact",
}


def read(path: Path) -> AnyFit:
    """Read a fit from its file and check every field; a UsageError names the file and the field."""
    source = read_text(path, MAX_BYTES)
    try:
        return from_json(source)
    except FitactError as error:
        raise UsageError(f"{path}: {error}") from None


def from_json(source: str) -> AnyFit:
    """Read a fit from its JSON. Nothing in it is ever executed.

    Raises:
        UsageError: the text is not such a record; the message names the field.

    """
    record = record_of(source, SCHEMA, "a fitact fit")
    method = record.get("method")
    if isinstance(method, str) and method in GONE:
        raise UsageError(f"method: {method} is not fitted any more: {GONE[method]}")
    kind = next((kind for kind in KINDS if method in kind.METHODS), None)
    if kind is None:
        methods = ", ".join(name for kind in KINDS for name in kind.METHODS)
        raise UsageError(f"method: expected one of {methods}, got {quote(method)}")
    return _fit(kind, {key: value for key, value in record.items() if key != "schema"})


def _fit(kind: type[AnyFit], record: dict[str, Any]) -> AnyFit:
    """Return a fit of a kind from its fields."""
    expected = {part.name for part in fields(kind)}
    method = record.get("method", kind.METHODS[0])
    if method not in kind.METHODS:
        raise UsageError(f"method: expected one of {', '.join(kind.METHODS)}, got {quote(method)}")
    for name in sorted(expected ^ set(record)):
        if name in expected:
            raise UsageError(f"{name}: missing")
        raise UsageError(f"{label(name)}: not a field of a fit of the method {method}")
    own: dict[str, Any] = {
        "activation": _READ.get(kind, _activation)(record["activation"]),
        "error": mapping(record["error"], "error", (int, float)),
        **{name: read(record[name], name) for name, read in kind.READ.items()},
    }
    return kind(name=record["name"], method=record["method"], **own)


def _gate(value: object) -> Gate:
    record = mapping(value, "activation", (str, type(None)))
    check_keys("activation", record, ("expression", "name"))
    name, expression = record["name"], text(record["expression"], "activation.expression")
    if name is None:
        return Gate(None, expression)
    if name not in GATES:
        raise UsageError(
            f"activation.name: {quote(name)} is not a gate of this catalog; the name of any other product is null"
        )
    if expression != GATES[name]:
        raise UsageError(
            f"activation.expression: {quote(expression)} is not that of {quote(name)} in this catalog, "
            f"{quote(GATES[name])}"
        )
    return Gate.of(name)


def _activation(value: object) -> Activation:
    record = mapping(value, "activation", (str, type(None), dict))
    if set(record) - {"parameters"} != {"name", "expression"}:
        raise UsageError(f"activation: expected name and expression, got {quote(sorted(record))}")
    name, expression = record["name"], text(record["expression"], "activation.expression")
    parameters = mapping(record.get("parameters", {}), "activation.parameters", (int, float))
    if name is None and not parameters:
        return Activation(None, expression)
    if not isinstance(name, str) or name not in CATALOG:
        raise UsageError(
            f"activation.name: {quote(name)} is not in this catalog; the name of any other formula is null"
        )
    activation = Activation.of(name, parameters)
    if activation_record(activation) != record:
        raise UsageError(
            f"activation.expression: {quote(expression)} is not that of {quote(name)} in this catalog, "
            f"{quote(activation.expression)}"
        )
    return activation


def _learned(value: object) -> Learned:
    record = mapping(value, "activation", (str, type(None), list))
    check_keys("activation", record, ("expression", "learned", "name"))
    name, expression = record["name"], text(record["expression"], "activation.expression")
    numbers = []
    for i, one in enumerate(objects(record["learned"], "activation.learned", MOST)):
        what = f"activation.learned[{i}]"
        check_keys(what, one, ("channel", "name", "start"))
        numbers.append(Number(one["name"], number(one["start"], f"{what}.start"), one["channel"]))
    if name is not None and (not isinstance(name, str) or name not in LEARNED):
        raise UsageError(
            f"activation.name: {quote(name)} is not a formula with learned numbers of this catalog; the name of "
            "any other is null"
        )
    formula = Learned(name, expression, tuple(numbers))
    if name is not None and (expression, [*formula.names]) != (LEARNED[name][0], [*LEARNED[name][1]]):
        raise UsageError(
            f"activation.expression: {quote(expression)} with {', '.join(formula.names)} is not that of "
            f"{quote(name)} in this catalog, {quote(LEARNED[name][0])} with {', '.join(LEARNED[name][1])}"
        )
    return formula


_READ: dict[type, Callable[[object], Activation | Gate | Learned]] = {
    GateFit: _gate,
    LearnedFit: _learned,
}
