"""Reading JSON records: each function raises a UsageError that names the field."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from .errors import UsageError, quote

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,79}")
MAX_INTEGER = 2**63 - 1


def number(value: object, what: str) -> float:
    """Return a finite number as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{what}: expected a number, got {quote(value)}")
    try:
        result = float(value)
    except OverflowError:
        raise UsageError(f"{what}: expected a number in the range of float64, got {quote(value)}") from None
    if not math.isfinite(result):
        raise UsageError(f"{what}: expected a finite number, got {quote(value)}")
    return result


def whole(value: object, what: str) -> int:
    """Return an integer of any moderate size."""
    if type(value) is not int or abs(value) > MAX_INTEGER:
        raise UsageError(f"{what}: expected an integer below 2**63 in size, got {quote(value)}")
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
    if (stated := record.get("schema")) != schema:
        name = re.escape(schema.rpartition("/")[0])
        version = re.fullmatch(rf"{name}/([1-9]\d{{0,5}})", stated) if isinstance(stated, str) else None
        older = version is not None and int(version[1]) < int(schema.rpartition("/")[2])
        advice = "make it again" if older else "upgrade fitact to read it" if version else f"this is not {what}"
        raise UsageError(f"schema: expected {schema}, got {quote(stated)}: {advice}")
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
