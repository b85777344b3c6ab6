"""`python -m tests.fuzz`: random cases for as long as one likes; what fails is printed, and kept in cases.json.

Each case comes from the seed and its number alone, so a failure can be had again.
"""

import argparse
import itertools
import json
import random
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.refusals import within

from . import checks, grammar

CASES = Path(__file__).with_name("cases.json")
SECONDS = 60  # a case that takes longer hangs; bounds of the commands are a third of it


def failure(check: Callable[[Any], None], case: Any) -> str | None:
    """Return how a check fails on a case, None if it does not."""
    try:
        with warnings.catch_warnings(), within(SECONDS):
            warnings.simplefilter("error", RuntimeWarning)  # of the arithmetic: NumPy's, not ours
            check(case)
    except (Exception, pytest.fail.Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {last.name}: {' '.join(str(error).split())[:300]}"
    return None


CHECKS: dict[str, tuple[Callable[[random.Random], Any], Callable[[Any], None], float]] = {
    "formula": (grammar.formula, checks.check_formula, 5),
    "gate": (grammar.gate, checks.check_gate, 1),
    "text": (grammar.text, checks.check_text, 4),
    "command": (grammar.command, checks.check_command, 2),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kept = json.loads(CASES.read_text("utf-8"))
    done: Counter[str] = Counter()
    failed: set[str] = set()
    end = time.monotonic() + options.seconds
    for number in itertools.count():
        if time.monotonic() > end:
            break
        chance = random.Random(f"{options.seed}/{number}")
        name = chance.choices([*CHECKS], [weight for *_, weight in CHECKS.values()])[0]
        make, check, _ = CHECKS[name]
        case = make(chance)
        told = failure(check, case)
        done[name] += 1
        if told and (kind := told.partition(":")[0]) not in failed:
            failed.add(kind)
            print(f"seed {options.seed}, case {number}, {name}: {told}\n  {str(case)!a:.2000}", flush=True)
            kept.setdefault(name, []).append(case)
    if failed:
        CASES.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    print(f"{done.total()} cases from seed {options.seed}: {dict(done)}; {len(failed)} kinds of failure")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
