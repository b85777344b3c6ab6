"""Checks of the values in a record's JSON; each function raises a UsageError that names the field."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from itertools import pairwise
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from fitact.base import UsageError, label, number, quote, whole

T = TypeVar("T")

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


def _reader(kind: type[T], expected: str) -> Callable[[object, str], T]:
    """Return a function that returns a value of a type of Python, called `expected` in messages."""

    def read(value: object, what: str) -> T:
        if not isinstance(value, kind):
            raise UsageError(f"{what}: expected {expected}, got {quote(value)}")
        return value

    return read


text = _reader(str, "text")
truth = _reader(bool, "true or false")
mapping: Callable[[object, str], dict[str, Any]] = _reader(dict, "an object")


def free_text(value: object, what: str) -> str:
    """Return a text that may stand anywhere: in a comment, a docstring, a picture."""
    if not isinstance(value, str) or not FREE_TEXT.fullmatch(value):
        raise UsageError(
            f"{what}: expected 1 to {MAX_TEXT} characters of printable ASCII, no quotes, # and backslashes, "
            f"got {quote(value)}"
        )
    return value


HINTS: dict[Any, dict[str, Any]] = {}  # the types of the fields of each record that can be read


def readable(kind: type[T]) -> type[T]:
    """Let `read` read a dataclass. Python evaluates its annotations here, so that reading runs nothing."""
    HINTS[kind] = get_type_hints(kind)
    return kind


def read(kind: Any, value: object, what: str, readers: Mapping[Any, Callable[[object, str], Any]]) -> Any:
    """Return a value of JSON as what an annotation asks for; a UsageError names the part that is something else.

    The annotation is a number, a text or a truth value; a tuple or a mapping of such; a `Literal`; a dataclass; or
    a union of dataclasses, which their fields `kind` tell apart. `readers` are those of other types.
    """
    origin, of = get_origin(kind), get_args(kind)
    if (reader := readers.get(kind) or _SCALARS.get(kind)) is not None:
        return reader(value, what)
    if origin is Literal:
        if value not in of:
            raise UsageError(f"{what}: expected {' or '.join(of)}, got {quote(value)}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            expected = "numbers" if of[0] is float else "objects"
            raise UsageError(f"{what}: expected a list of {expected}, got {quote(value)}")
        return tuple(read(of[0], item, f"{what}[{i}]", readers) for i, item in enumerate(value))
    if origin is Mapping:
        entries = mapping(value, what)
        return {key: read(of[1], item, f"{what}.{label(key)}", readers) for key, item in entries.items()}
    if type(None) in of:
        return None if value is None else read(of[0], value, what, readers)
    if of:
        tags = {tag: option for option in of for tag in get_args(HINTS[option]["kind"])}
        if (tag := text(mapping(value, what).get("kind"), f"{what}.kind")) not in tags:
            raise UsageError(f"{what}.kind: expected one of {', '.join(tags)}, got {quote(tag)}")
        kind = tags[tag]
    record, hints = mapping(value, what), HINTS[kind]
    check_keys(what, record, [part.name for part in fields(kind)])
    try:
        return kind(**{key: read(hints[key], item, key, readers) for key, item in record.items()})
    except UsageError as error:
        raise UsageError(f"{what}.{error}") from None


_SCALARS: dict[Any, Callable[[object, str], Any]] = {float: number, int: whole, str: text, bool: truth}
