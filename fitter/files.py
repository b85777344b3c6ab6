"""The kinds of JSON files that are read here. What they hold is read by `records`; this imports no SymPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from fitact.base import FitactError, UsageError, read_text, record_of


class Kind(NamedTuple):
    """A kind of JSON file.

    Attributes:
        schema: what its field `schema` says.
        what: what such a file is called in messages.
        limit: the most bytes that are read.

    """

    schema: str
    what: str
    limit: int

    def record(self, source: str) -> dict[str, Any]:
        """Return the record that a text holds; UsageError if it is not one of this kind."""
        return record_of(source, self.schema, self.what)

    def check(self, path: Path) -> None:
        """Raise UsageError unless this file is there and holds a record of this kind, whatever is in it."""
        source = read_text(path, self.limit)
        try:
            self.record(source)
        except FitactError as error:
            raise UsageError(f"{path}: {error}") from None


FIT = Kind("fitact.fit/1", "a fitact fit", 1 << 20)
WEIGHTS = Kind("fitact.weights/1", "a file of fitact calibrate", 1 << 25)
