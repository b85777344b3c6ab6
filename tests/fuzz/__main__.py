"""`python -m tests.fuzz`: random cases for as long as one likes; what fails is printed, and kept in cases.json.

Each case comes from the seed and its number alone, so a failure can be had again.
"""

import argparse
import itertools
import json
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import checks, grammar

CASES = Path(__file__).with_name("cases.json")
SECONDS = 40  # of processor time: a case that takes longer hangs; bounds of the commands are half of it


class HangError(BaseException):
    """A case takes too long; no `except Exception` on the way may stop it."""


def stopped(*_: object) -> None:
    raise HangError(f"no answer within {SECONDS} seconds")


def failure(check: Callable[[Any], None], case: Any) -> str | None:
    """Return how a check fails on a case, None if it does not."""
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # of the arithmetic: NumPy's, not ours
            check(case)
    except (Exception, HangError, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {last.name}: {' '.join(str(error).split())[:300]}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return None


CHECKS: dict[str, tuple[Callable[[random.Random], Any], Callable[[Any], None], float]] = {
    "formula": (grammar.formula, checks.check_formula, 5),
    "gate": (grammar.gate, checks.check_gate, 1),
    "text": (grammar.text, checks.check_text, 4),
    "fit": (grammar.fit, checks.check_json, 3),
    "command": (grammar.command, checks.check_command, 2),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGVTALRM, stopped)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    held = json.loads(CASES.read_text("utf-8"))
    done: Counter[str] = Counter()
    failed: set[str] = set()
    end, longest = time.monotonic() + options.seconds, (0.0, "", "")
    for number in itertools.count():
        if time.monotonic() > end:
            break
        chance = random.Random(f"{options.seed}/{number}")
        name = chance.choices([*CHECKS], [weight for *_, weight in CHECKS.values()])[0]
        make, check, _ = CHECKS[name]
        case = make(chance)
        began = time.process_time()
        message = failure(check, case)
        longest = max(longest, (time.process_time() - began, name, str(case)[:150]))
        done[name] += 1
        if message and (kind := message.partition(":")[0]) not in failed:
            failed.add(kind)
            print(f"seed {options.seed}, case {number}, {name}: {message}\n  {str(case)!a:.2000}", flush=True)
            held.setdefault(name, []).append(case)
    if failed:
        CASES.write_text(json.dumps(held, indent=1) + "\n", "utf-8")
    print(f"{done.total()} cases from seed {options.seed}: {dict(done)}; {len(failed)} kinds of failure")
    print("longest, with its seconds of processor time: {:.1f} {} {!a}".format(*longest))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
