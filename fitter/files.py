"""The kinds of JSON files that are read here. What they hold is read by `records`; this imports no SymPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fitact.base import FitactError, UsageError, read_text, record_of

T = TypeVar("T")


class Kind(NamedTuple):
    """A kind of JSON file."""

    schema: str  # what its field `schema` says
    what: str  # what such a file is called in messages
    limit: int  # the most bytes that are read

    def record(self, source: str) -> dict[str, Any]:
        """Return the record that a text holds; UsageError if it is not one of this kind."""
        return record_of(source, self.schema, self.what)

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


FIT = Kind("fitact.fit/1", "a fitact fit", 1 << 20)
WEIGHTS = Kind("fitact.weights/1", "a file of fitact calibrate", 1 << 25)
