"""What all tests of the command line need."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _not_ignored() -> Iterator[None]:
    """Let commands hear Ctrl-C even where a shell has started the tests in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
