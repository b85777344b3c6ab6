"""What tests of refusals share: records with one change, errors of one line, and a limit of time."""

import copy
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fitact.base import UsageError

GONE = type("Gone", (), {"__repr__": lambda self: "gone"})()


def changed(record: dict[str, Any], path: str, value: object) -> str:
    """Return a record's JSON with one entry, by its dotted path, replaced, added or removed."""
    record = copy.deepcopy(record)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    target: Any = record
    for part in parents:
        target = target[part]
    if value is GONE:
        del target[last]
    else:
        target[last] = value
    return json.dumps(record)


def refused(call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """Return the message of the UsageError that a call must raise: one line, of moderate length."""
    with pytest.raises(UsageError) as error:
        call(*arguments, **options)
    message = str(error.value)
    assert message.isprintable(), "one line"
    assert 10 < len(message) < 500
    return message


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail a test that takes longer, and do not hold up the run."""

    def stop(*_: object) -> None:
        pytest.fail(f"no answer within {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
