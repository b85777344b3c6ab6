"""A few hundred cases of the fuzzer, the same ones every time, and all that it has found; see `make fuzz`.

Texts from strangers: each is read or refused in one line, in bounded time, and nothing of it is run. While such a
text is read, nothing may be opened, executed, started or connected to.
"""

import json
import os
import random
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fitact.fitter.analysis import Activation
from fitact.fitter.catalog import CATALOG
from fitact.fitter.methods import make
from fitact.fitter.syntax import MAX_DEPTH, MAX_LENGTH
from tests.fuzz import checks, grammar
from tests.fuzz.__main__ import CASES, CHECKS
from tests.support.commands import record
from tests.support.generated import load
from tests.support.refusals import within
from tests.support.rows import listed

FOUND = [
    pytest.param(name, case, id=f"{name}: {str(case)[:60]!a}", marks=[pytest.mark.full] * (i > 2))
    for name, cases in json.loads(CASES.read_text("utf-8")).items()
    for i, case in enumerate(cases)
]
CHECKED = {name: (name, *check[:2]) for name, check in CHECKS.items()}
CHECKED["read"] = ("formula", grammar.formula, checks.check_text)
COUNTS = {"text": 400, "gate": 4, "fit": 150, "command": 8, "read": 80}


@pytest.mark.parametrize("name", COUNTS)
def test_cases(name: str) -> None:
    """Of formulas, whose full check takes long, most are only read."""
    seed, make, check = CHECKED[name]
    for i in range(COUNTS[name]):
        check(make(random.Random(f"{seed}/{i}")))


@pytest.mark.parametrize("i", range(3))
def test_formulas(i: int) -> None:
    checks.check_formula(grammar.tree(random.Random(i), 4))


@pytest.mark.parametrize(("name", "case"), FOUND)
def test_what_was_found(name: str, case: Any) -> None:
    with within(120):
        CHECKS[name][1](case)


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_module_is_seen() -> None:
    fit, other = (make("fewbit", Activation.of(f"x*sigmoid({a}*x)"), "a", bits=2) for a in ("1.5", "1.501"))
    checks.check_values(fit, load(fit), reported=False, count=100)
    with pytest.raises(AssertionError):
        checks.check_values(fit, load(other), reported=False, count=100)


WATCHES: list[list[str]] = []  # what was done while a case was read
# What Python reports to an audit hook as it reads, writes, executes, starts or connects to something.
REPORTED = ("open", "exec", "os.", "shutil.", "subprocess.", "socket.", "ctypes.", "pickle.", "tempfile")
WARM = "where(x > 1, min(gelu(x), 2**-x), sqrt(3*x)) + abs(x)**1.5*erf(x)/softplus(silu(x)) - log1p(x)*tanh(x)"


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Note what is done, but for a library that imports a part of itself."""
    if WATCHES and event.startswith(REPORTED):
        frames = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)]
        if not any(name.startswith("<frozen importlib") for name in frames):
            WATCHES[-1].append(f"{event} {arguments!a:.200}")


@pytest.fixture(scope="module", autouse=True)
def _audited() -> None:
    """Import all that is imported on first use, then watch."""
    for text in (WARM, *CATALOG):
        checks.check_text(text)
    checks.check_json(record("warm"))
    sys.addaudithook(audit)


@contextmanager
def watched() -> Iterator[None]:
    """Hold what is done inside to so much time, and to no touch of the machine."""
    done: list[str] = []
    WATCHES.append(done)
    try:
        with within(60):
            yield
    finally:
        WATCHES.pop()
    assert done == []


DEEP = MAX_DEPTH - 2
HOSTILE = {
    "tower": "**".join(["9"] * 50),
    "tower of x": "**".join(["x"] * DEEP),
    "powers of powers": "(" * 25 + "x" + " + 1)**1000" * 25,
    "allowed length of minuses": "-" * (MAX_LENGTH - 1) + "x",
    **{f"nested {name}": f"{name}(" * DEEP + "x" + ")" * DEEP for name in grammar.UNARY},
    **{f"nested inverse {name}": f"1/{name}(" * (DEEP // 2) + "x" + ")" * (DEEP // 2) for name in grammar.UNARY},
    **{f"nested {name} and x": f"x*{name}(" * (DEEP // 2) + "x" + ")" * (DEEP // 2) for name in grammar.UNARY},
    "nested where": "where(x > 0, x, " * DEEP + "x*x" + ")" * DEEP,
    "nested quotients": "x/(1 + " * 28 + "x" + ")" * 28,
    "where that doubles": "where(x > 1, A, -A)".replace("A", "where(x > 2, exp(x)*tanh(x), 2*exp(x)*tanh(x))"),
    "hidden imaginary of x": "sqrt(-1 - x**2)",
    "long integer": "9" * MAX_LENGTH,
    "root of a long number": "(" + "9" * 299 + ")**(1/7)*x",
    **{f"megabyte of {part!a}": part * (1_000_000 // len(part)) for part in ("x", "(", "-", " ", "\0", "x+", "−")},
}
# Nothing in them is a formula, and some of them would do something if they were run.
PROGRAMS = [
    *listed(r"""
__import__('os').system('touch x')  canary()  exp(canary)  where(x > 0, canary(), canary())  exp(x=canary())
[canary() for x in x]  lambda: canary()  (lambda x=canary(): x)()  (y := canary())  x if canary() else x
0 < x < canary()  x; canary()  import canary  exec('canary()')  open('x', 'w')  breakpoint()  await canary()
x.__class__.__mro__  ().__class__.__base__.__subclasses__()  f'{canary()}'  x # canary()  @canary  `canary`
"""),
    *("x\ncanary()", "x\rcanary()", "x\x0ccanary()", "\\x63anary()", "# -*- coding: unicode_escape -*-\ncanary()"),
]


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text(text):
    """By itself, as a weight, and as the activation of a fit."""
    with watched():
        checks.check_text(text)
        checks.check_json(record("hostile", activation={"name": None, "expression": text}))


@pytest.mark.parametrize("text", PROGRAMS)
def test_programs_are_refused_and_not_run(text):
    around = (text, f"({text})", f" {text} ", f"x + {text}", f"exp({text})", f"where(x > 0, {text}, {text})")
    with watched():
        assert not any(map(checks.check_text, around))


@pytest.mark.parametrize("act", [lambda: os.system("true"), lambda: eval("1 + 1")])
def test_the_watch_sees(act):
    with pytest.raises(AssertionError), watched():
        act()
