"""Values computed once for all processes of a test run: the first process that needs one keeps it in a file."""

import hashlib
import json
import os
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any


def shared(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the results of a pure function, JSON of arguments with a repr, in this process and for the others."""

    @cache
    @wraps(function)
    def call(*arguments: Any) -> Any:
        key = hashlib.sha256(repr((function.__module__, function.__qualname__, arguments)).encode()).hexdigest()
        path = Path(os.environ["FITACT_TESTS_SHARED"], key)
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
        actual = function(*arguments)
        own = path.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps(actual), encoding="utf-8")
        os.replace(own, path)
        return actual

    return call
