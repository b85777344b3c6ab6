"""Reading JSON records by the annotations of dataclasses: a UsageError names the field, and nothing is run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

from .errors import FitactError, UsageError, quote
from .files import read_text

T = TypeVar("T")
Readers = Mapping[Any, Callable[[object, str], Any]]
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


def check_keys(record: Iterable[str], expected: Iterable[str], what: str = "") -> None:
    """Raise UsageError unless an object has these fields and no others."""
    names = [*expected]
    for name in sorted({*names} ^ {*record}):
        problem = "missing" if name in names else f"not a field, expected {', '.join(sorted(names))}"
        raise UsageError(f"{what}{label(name)}: {problem}")


def string(value: object, what: str) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise UsageError(f"{what}: expected text, got {quote(value)}")
    return value


def mapping(value: object, what: str) -> dict[str, Any]:
    """Return an object of JSON."""
    if not isinstance(value, dict):
        raise UsageError(f"{what}: expected an object, got {quote(value)}")
    return value


def _truth(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{what}: expected true or false, got {quote(value)}")
    return value


SCALARS: Readers = {float: number, int: whole, str: string, bool: _truth}
HINTS: dict[Any, dict[str, Any]] = {}  # the types of the fields of each record that can be read


def readable(kind: type[T]) -> type[T]:
    """Let `read` read a dataclass. Python evaluates its annotations here, so that reading runs nothing."""
    hints, record = get_type_hints(kind), cast("Any", kind)
    HINTS[kind] = {part.name: hints[part.name] for part in fields(record)}
    return kind


def read_record(kind: type[T], record: Mapping[str, Any], readers: Readers) -> T:
    """Return a dataclass whose fields an object has; `readers` are those of types of the fields."""
    check_keys(record, HINTS[kind])
    return kind(**{name: read(hint, record[name], name, readers) for name, hint in HINTS[kind].items()})


def read(kind: Any, value: object, what: str, readers: Readers) -> Any:
    """Return a value of JSON as what an annotation asks for; a UsageError names the part that is something else.

    The annotation is a number, a text or a truth value; a tuple or a mapping of such; a `Literal`; a dataclass; or
    a union of dataclasses, which their fields `kind` tell apart. `readers` are those of other types.
    """
    origin, of = get_origin(kind), get_args(kind)
    if (reader := readers.get(kind) or SCALARS.get(kind)) is not None:
        return reader(value, what)
    if origin is Literal:
        if value not in of:
            raise UsageError(f"{what}: expected {' or '.join(of)}, got {quote(value)}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise UsageError(f"{what}: expected a list, got {quote(value)}")
        return tuple(read(of[0], item, f"{what}[{i}]", readers) for i, item in enumerate(value))
    if origin is Mapping:
        entries = mapping(value, what)
        return {key: read(of[1], item, f"{what}.{label(key)}", readers) for key, item in entries.items()}
    if type(None) in of:
        return None if value is None else read(of[0], value, what, readers)
    if of:
        tags = {tag: option for option in of for tag in get_args(HINTS[option]["kind"])}
        if (tag := string(mapping(value, what).get("kind"), f"{what}.kind")) not in tags:
            raise UsageError(f"{what}.kind: expected {' or '.join(tags)}, got {quote(tag)}")
        kind = tags[tag]
    try:
        return read_record(kind, mapping(value, what), readers)
    except UsageError as error:
        raise UsageError(f"{what}.{error}") from None


class Kind(NamedTuple):
    """A kind of JSON file."""

    schema: str  # what its field `schema` says: a name, / and a version
    what: str  # what such a file is called in messages
    limit: int  # the most bytes that are read

    def record(self, source: str) -> dict[str, Any]:
        """Return the record that a text holds, without its schema.

        Raises:
            UsageError: it is not a JSON object of this kind, or has a field twice, or an infinite number.

        """
        try:
            record = json.loads(source, parse_constant=_no_constant, object_pairs_hook=_no_twins)
        except (ValueError, RecursionError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"not JSON: {str(error).splitlines()[0]}") from None
        if not isinstance(record, dict):
            raise UsageError(f"expected a JSON object, got {quote(record)}")
        name, _, newest = self.schema.rpartition("/")
        if (stated := record.pop("schema", None)) != self.schema:
            version = (
                re.fullmatch(rf"{re.escape(name)}/([1-9]\d{{0,5}})", stated) if isinstance(stated, str) else None
            )
            older = version is not None and int(version[1]) < int(newest)
            other = "upgrade fitact to read it" if version else f"this is not {self.what}"
            advice = "make it again" if older else other
            raise UsageError(f"schema: expected {self.schema}, got {quote(stated)}: {advice}")
        return record

    def read(self, path: Path, parse: Callable[[str], T]) -> T:
        """Return what a file of this kind holds, which `parse` reads; a UsageError names the file."""
        source = read_text(path, self.limit)
        try:
            return parse(source)
        except FitactError as error:
            raise UsageError(f"{path}: {error}") from None

    def check(self, path: Path) -> None:
        """Raise UsageError unless this file is there and holds a record of this kind, whatever is in it."""
        self.read(path, self.record)


def _no_constant(name: str) -> NoReturn:
    raise UsageError(f"not JSON: {name} is not a JSON number")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for key, value in pairs:
        if key in record:
            raise UsageError(f"{label(key)}: appears twice in the same object")
        record[key] = value
    return record
