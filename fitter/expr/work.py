"""A bound on the work that a formula may take, counted in operations: the same on every machine.

Code that answers a request opens a `budget`. Slow parts name themselves by `stage`, and announce by `spend`
how many operations they are about to make; one takes about a microsecond. Outside a budget nothing is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import ParamSpec, TypeVar

from fitact.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")

MILLION = 1_000_000


class WorkError(UsageError):
    """A formula takes more operations than its budget has."""


@dataclass
class _Record:
    """What a remembered result cost by itself, and the remembered results that it was made from."""

    key: Hashable
    cost: float = 0.0
    parts: dict[Hashable, _Record] = field(default_factory=dict)


@dataclass
class Budget:
    """What messages name, how many operations are allowed, how many were made, and for which results."""

    what: object
    limit: float
    spent: float = 0.0
    results: set[Hashable] = field(default_factory=set)

    def spend(self, operations: float) -> None:
        """Count operations; WorkError if too few are left."""
        self.spent += operations
        if self.spent > self.limit:
            name, advice = _stage.get()
            most = f"more than {self.limit / MILLION:g} million operations"
            raise WorkError(f"{self.what}: {name} takes too long, {most}: {advice}")

    def count(self, record: _Record) -> None:
        """Count a remembered result, and those that it was made of, each once."""
        if record.key not in self.results:
            self.results.add(record.key)
            for part in record.parts.values():
                self.count(part)
            self.spend(record.cost)


_budgets: ContextVar[tuple[Budget, ...]] = ContextVar("budgets", default=())
_making: ContextVar[_Record | None] = ContextVar("making", default=None)
_stage: ContextVar[tuple[str, str]] = ContextVar("stage", default=("evaluation", "write it with fewer functions"))


@contextmanager
def budget(what: object, limit: float) -> Iterator[Budget]:
    """Allow that many operations inside, and no more than the budgets around it have left.

    Args:
        what: what messages name first.
        limit: operations.

    Raises:
        WorkError: more are needed, or what is inside nests deeper than Python's stack allows.

    """
    own = Budget(what, limit)
    token = _budgets.set((*_budgets.get(), own))
    try:
        yield own
    except RecursionError:
        raise WorkError(f"{what}: it nests too deep: write it with fewer functions of functions") from None
    finally:
        _budgets.reset(token)


@contextmanager
def stage(name: str, advice: str) -> Iterator[None]:
    """Name the work inside, and say what to do if it takes too long; also a decorator."""
    token = _stage.set((name, advice))
    try:
        yield
    finally:
        _stage.reset(token)


def spend(operations: float) -> None:
    """Count operations; WorkError if a budget has too few left."""
    operations = round(operations)  # sums of whole numbers are the same in any order
    if (record := _making.get()) is not None:
        record.cost += operations
    for one in _budgets.get():
        one.spend(operations)


def remembered(most: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that keeps the results of a function, and what each of them cost.

    A budget counts a result once, whether it was kept or is made anew: so no answer depends on what came before.
    The function takes its arguments by position.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        kept: dict[tuple[object, ...], tuple[T, _Record]] = {}

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if args not in kept:
                record = _Record((function, args))
                token = _making.set(record)
                try:
                    result = function(*args, **kwargs)
                finally:
                    _making.reset(token)
                for one in _budgets.get():
                    one.results.add(record.key)
                if len(kept) >= most:
                    kept.pop(next(iter(kept)), None)
                kept[args] = result, record
            result, record = kept[args]
            for one in _budgets.get():
                one.count(record)
            if (outer := _making.get()) is not None:
                outer.parts[record.key] = record
            return result

        return call

    return decorate
