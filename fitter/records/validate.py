"""Checks of the values in a record's JSON; each function raises a UsageError that names the field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np

from fitact.errors import UsageError, quote

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,79}")
MAX_INTEGER = 2**63 - 1
MAX_TEXT = 200  # characters of a free text
FREE_TEXT = re.compile(rf"[ !$-&(-\[\]-_a-~]{{1,{MAX_TEXT}}}")  # printable ASCII without quotes, # and backslashes


def check_numbers(what: str, values: tuple[float, ...], count: int, *, single: bool = False) -> None:
    """Raise UsageError unless there are `count` finite numbers, and float32 holds each exactly if `single`."""
    if len(values) != count:
        raise UsageError(f"{what}: expected {count} numbers, got {len(values)}")
    for i, value in enumerate(values):
        if not math.isfinite(value):
            raise UsageError(f"{what}[{i}]: expected a finite number, got {value!r}")
        if single and not (abs(value) < 3.4e38 and float(np.float32(value)) == value):
            raise UsageError(f"{what}[{i}]: expected a number that float32 holds exactly, got {value!r}")


def check_increasing(what: str, values: tuple[float, ...]) -> None:
    """Raise UsageError unless the numbers increase."""
    if any(a >= b for a, b in pairwise(values)):
        raise UsageError(f"{what}: expected increasing numbers, got {quote(list(values))}")


def check_bits(bits: object, allowed: range) -> None:
    """Raise UsageError unless a code may have that many bits."""
    *fewer, most = allowed
    if type(bits) is not int or bits not in allowed:
        raise UsageError(f"bits: expected {', '.join(map(str, fewer))} or {most}, got {quote(bits)}")


def check_domain(domain: tuple[float, ...], reach: float) -> None:
    """Raise UsageError unless these are two increasing numbers of at most `reach` in size."""
    check_numbers("domain", domain, 2)
    check_increasing("domain", domain)
    if max(map(abs, domain)) > reach:
        raise UsageError(f"domain: expected numbers of at most {reach:g} in size, got {quote(list(domain))}")


def check_keys(what: str, record: Mapping[str, Any], expected: Iterable[str]) -> None:
    """Raise UsageError unless an object has these fields and no others."""
    if set(record) != set(expected):
        raise UsageError(f"{what}: expected {', '.join(sorted(expected))}, got {quote(sorted(record))}")


def numbers(values: object, what: str) -> tuple[float, ...]:
    """Return a list of numbers."""
    if not isinstance(values, list):
        raise UsageError(f"{what}: expected a list of numbers, got {quote(values)}")
    return tuple(number(value, f"{what}[{i}]") for i, value in enumerate(values))


def number(value: object, what: str) -> float:
    """Return a number as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{what}: expected a number, got {quote(value)}")
    try:
        return float(value)
    except OverflowError:
        raise UsageError(f"{what}: expected a number in the range of float64, got {quote(value)}") from None


def integer(value: object, what: str, allowed: Iterable[int]) -> int:
    """Return an integer that is one of those allowed."""
    if type(value) is not int or value not in allowed:
        raise UsageError(f"{what}: expected an integer, one of {', '.join(map(str, allowed))}, got {quote(value)}")
    return value


def objects(value: object, what: str, most: int) -> list[dict[str, Any]]:
    """Return a list of 1 to `most` objects."""
    if not isinstance(value, list) or not 1 <= len(value) <= most:
        raise UsageError(f"{what}: expected a list of 1 to {most} objects, got {quote(value)}")
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise UsageError(f"{what}[{i}]: expected an object, got {quote(item)}")
    return value


def text(value: object, what: str) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise UsageError(f"{what}: expected text, got {quote(value)}")
    return value


def free_text(value: object, what: str) -> str:
    """Return a text that may stand anywhere: in a comment, a docstring, a picture."""
    if not isinstance(value, str) or not FREE_TEXT.fullmatch(value):
        raise UsageError(
            f"{what}: expected 1 to {MAX_TEXT} characters of printable ASCII, no quotes, # and backslashes, "
            f"got {quote(value)}"
        )
    return value


def choice(value: object, what: str, allowed: Iterable[str]) -> str:
    """Return a text that is one of those allowed."""
    if not isinstance(value, str) or value not in allowed:
        raise UsageError(f"{what}: expected {' or '.join(allowed)}, got {quote(value)}")
    return value


def whole(value: object, what: str) -> int:
    """Return an integer of any moderate size."""
    if type(value) is not int or abs(value) > MAX_INTEGER:
        raise UsageError(f"{what}: expected an integer below 2**63 in size, got {quote(value)}")
    return value


def mapping(value: object, what: str, kinds: tuple[type, ...]) -> dict[str, Any]:
    """Return an object whose values are of these types, numbers finite."""
    if not isinstance(value, dict):
        raise UsageError(f"{what}: expected an object, got {quote(value)}")
    for key, item in value.items():
        if isinstance(item, bool) or not isinstance(item, kinds):
            raise UsageError(f"{what}.{label(key)}: unexpected value {quote(item)}")
        if isinstance(item, int | float) and not math.isfinite(number(item, f"{what}.{label(key)}")):
            raise UsageError(f"{what}.{label(key)}: expected a finite number, got {quote(item)}")
    return value


options = partial(mapping, kinds=(int, float, str))


def as_it_is(value: Any, what: str) -> Any:
    """Return a value that the record itself checks."""
    return value


def label(key: str) -> str:
    """Return a key for a message: as it is if it is a plain name, quoted otherwise."""
    return key if NAME.fullmatch(key) else quote(key)


def record_of(source: str, schema: str, what: str) -> dict[str, Any]:
    """Return the record that a JSON text holds.

    Args:
        source: the text.
        schema: what its field `schema` has to be: a name, / and a version.
        what: what such a file is called in messages.

    Raises:
        UsageError: it is not a JSON object of this schema, or has a field twice, or an infinite number.

    """
    try:
        record = json.loads(source, parse_constant=_no_constant, object_pairs_hook=_no_twins)
    except (ValueError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(record, dict):
        raise UsageError(f"expected a JSON object, got {quote(record)}")
    if (found := record.get("schema")) != schema:
        name = re.escape(schema.rpartition("/")[0])
        newer = isinstance(found, str) and re.fullmatch(rf"{name}/[1-9]\d{{0,5}}", found)
        advice = "upgrade fitact to read it" if newer else f"this is not {what}"
        raise UsageError(f"schema: expected {schema}, got {quote(found)}: {advice}")
    return record


def _no_constant(name: str) -> NoReturn:
    raise UsageError(f"not JSON: {name} is not a JSON number")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for key, value in pairs:
        if key in record:
            raise UsageError(f"{label(key)}: appears twice in the same object")
        record[key] = value
    return record
