"""Texts from strangers: each is read or refused in one line, in bounded time, and nothing of it is run.

While a case is read, nothing may be opened, imported, executed, started or connected to.
"""

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from fitact.cli import tables
from fitact.fitter.analysis import Activation
from fitact.fitter.catalog import CATALOG
from fitact.fitter.expr import FUNCTIONS
from fitact.fitter.syntax import MAX_DEPTH, MAX_LENGTH
from tests.fuzz import checks
from tests.fuzz.grammar import FITS, RAW, written
from tests.support.rows import listed

SECONDS = 30.0  # of processor time

# What Python reports to an audit hook as it reads, writes, imports, executes, starts or connects to something.
REPORTED = ("open", "import", "exec", "os.", "shutil.", "subprocess.", "socket.", "ctypes.", "pickle.", "tempfile")
LIBRARIES = ("sympy", "mpmath", "numpy", "scipy")  # they import parts of themselves when those are first used


WATCHES: list[list[str]] = []  # what was done while a case was read


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Note what is done, by the interpreter's own account."""
    if not WATCHES or not event.startswith(REPORTED):
        return
    if event == "import" and str(arguments[0]).split(".")[0] in LIBRARIES:
        return
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return  # the rest of such an import
        frame = frame.f_back
    WATCHES[-1].append(f"{event} {arguments!a:.200}")


WARM = "where(x > 1, min(gelu(x), 2**-x), sqrt(3*x)) + abs(x)**1.5*erf(x)/softplus(silu(x)) - log1p(x)*tanh(x)"


@pytest.fixture(scope="module", autouse=True)
def _watched_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An empty working folder, and all that is imported on first use."""
    with pytest.MonkeyPatch.context() as patch:
        for text in (WARM, *CATALOG):
            checks.check_text(text)
        checks.check_json(FITS[0])
        patch.chdir(tmp_path_factory.mktemp("empty"))
        sys.addaudithook(audit)
        yield


@contextmanager
def watched() -> Iterator[None]:
    """Hold what is done inside to so much time, no warning, and no touch of the machine."""

    def stop(*_: object) -> None:
        pytest.fail(f"no answer within {SECONDS} seconds")

    done: list[str] = []
    before, files = signal.signal(signal.SIGVTALRM, stop), os.listdir()
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    WATCHES.append(done)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        WATCHES.pop()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert done == []
    assert os.listdir() == files


def check(text: str) -> Activation | None:
    """Check a text as a formula and a weight; return the activation, if it is one."""
    with watched():
        return checks.check_text(text)


def balanced(parts: list[str], operator: str) -> str:
    """Join formulas by an operator, nested as little as possible."""
    while len(parts) > 1:
        parts = [f"({operator.join(parts[i : i + 2])})" for i in range(0, len(parts), 2)]
    return parts[0]


DEEP = MAX_DEPTH - 2
UNARY = [name for name, (arguments, _) in FUNCTIONS.items() if arguments == 1]
HOSTILE = {
    "tower": "**".join(["9"] * 50),
    "tower of x": "**".join(["x"] * DEEP),
    "powers of powers": "(" * 25 + "x" + " + 1)**1000" * 25,
    "squares": "(" * DEEP + "x" + ")**2" * DEEP,
    "hidden zero power": "(x - x)**-1 + x",
    "allowed length of minuses": "-" * (MAX_LENGTH - 1) + "x",
    "allowed length of calls": "x" + "()" * (MAX_LENGTH // 2 - 1),
    **{f"nested {name}": f"{name}(" * DEEP + "x" + ")" * DEEP for name in UNARY},
    **{f"nested inverse {name}": f"1/{name}(" * (DEEP // 2) + "x" + ")" * (DEEP // 2) for name in UNARY},
    **{f"nested {name} and x": f"x*{name}(" * (DEEP // 2) + "x" + ")" * (DEEP // 2) for name in UNARY},
    "nested min": "min(x, " * DEEP + "x*x" + ")" * DEEP,
    "nested where": "where(x > 0, x, " * DEEP + "x*x" + ")" * DEEP,
    "nested conditions": "where(" * 20 + "x" + " > x, x, -x)" * 20,
    "nested quotients": "x/(1 + " * 28 + "x" + ")" * 28,
    # wide
    "sum of 500": balanced(["x", "1"] * 250, "+"),
    "sum of powers": balanced([f"x**{i}" for i in range(200)], "+"),
    "sum of roots": balanced([f"sqrt({10**20 + i})" for i in range(70)], "+") + "*x",
    "powers of numbers": balanced(["1.1**70*0.9**70"] * 90, "*") + "*x",
    "product of wheres": balanced([f"where(x>{i},x,1)" for i in range(90)], "*"),
    "where that doubles": "where(x > 1, A, -A)".replace("A", "where(x > 2, exp(x)*tanh(x), 2*exp(x)*tanh(x))"),
    "squares that double": "(" * 9 + "x + 1" + ")" * 9 + "".join(f"*(x + {i})" for i in range(50)),
    "long hexadecimal": "0x" + "f" * (MAX_LENGTH - 2),
    "hidden imaginary of x": "sqrt(-1 - x**2)",
    "hidden imaginary erf": "erf(sqrt(-x**2))",
    "long integer": "9" * MAX_LENGTH,
    "long exponent": "1e" + "9" * (MAX_LENGTH - 2),
    "huge power": "x**" + "9" * 300,
    "root of a long number": "(" + "9" * 299 + ")**(1/7)*x",
    "large power of a sum": "(x + 1e290)**1000",
    "gamma-like": "exp(x*log(x) - x)*sqrt(2*pi*x)*(1 + 1/(12*x))",
    **{f"megabyte of {part!a}": part * (1_000_000 // len(part)) for part in ("x", "(", "-", " ", "\0", "x+", "−")},
}
LETTERS = [
    "ｘхⅹ×𝑥𝒙ᵪеｅ℮π𝛑²³½１٣߀∞−–＋∗·÷⁄ªºﬀ",
    "\0\x01\x08\x1b\x7f\x80\x85\xa0\xad\t\n\v\f\r\x1c\x1d\x1e\x1f",
    "\u061c\u200b\u200d\u200e\u200f\u2028\u2029\u202a\u202e\u2066\u2069\u2060\u3000\ufeff\ufffe\uffff",
    "\ud800\udbff\udc00\udfff\udc80\U000e0001\U0010ffff\u0301",
]
# Nothing in them is a formula, and some of them would do something if they were run.
PROGRAMS = [
    *listed(r"""
__import__('os').system('touch x')  __import__(chr(111) + chr(115)).mkdir(chr(120))  canary()  canary(x)*x
canary.x  canary[x]  canary + x  exp(canary)  where(canary > 0, x, 1)  where(x > 0, canary(), canary())
exp(x=canary())  exp(*canary())  exp(x, evaluate=False)  [canary() for x in x]  {canary()}  {x: canary()}
lambda: canary()  (lambda x=canary(): x)()  (y := canary())  x if canary() else x  canary() or x  not canary()
0 < x < canary()  x in canary  (yield canary())  await canary()  *canary  x, canary()  x; canary()  x = canary()
import canary  del x  assert canary()  raise canary  exec('canary()')  open('x', 'w')  breakpoint()
x.__class__.__mro__  ().__class__.__base__.__subclasses__()  exp.__globals__  exp(x).diff(x)  sympify(x)
f'{canary()}'  '{0.__class__}'.format(x)  {x.__class__}  {alpha}*x  %(x)s  x % (canary(),)  x @ canary  `canary`
$(touch x)  x && touch x  ../x  x # canary()  x // canary  @canary  ...
"""),
    *("x\ncanary()", "x\rcanary()", "x\x0ccanary()", "\\x63anary()", "# -*- coding: unicode_escape -*-\ncanary()"),
]


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text(text):
    """By itself, and as the weight and as the activation of a fit."""
    check(text)
    if len(text) <= MAX_LENGTH:
        for field in ({"weight": text}, {"activation": {"name": None, "expression": text}}):
            with watched():
                checks.check_json(replaced(**field))


@pytest.mark.parametrize(
    "text", ["exp(x**4)", "x**-400", "exp(exp(exp(x)))", "exp(" * 8 + "x" + ")" * 8, "2**" * 9 + "x"]
)
def test_a_formula_that_overflows_is_shown(text):
    activation = Activation.of(text)
    with watched():
        activation.steps(-10.0, 10.0)
        tables.activation(activation)


@pytest.mark.parametrize("letters", LETTERS, ids=ascii)
def test_letters_beyond_ascii(letters):
    for letter in letters:
        around = f"{letter} x{letter} {letter}x e{letter}p(x) exp({letter}) ge{letter}lu".split(" ")
        for formula in (*around, f"x + {letter}*x"):
            assert check(formula) is None


@pytest.mark.parametrize("text", PROGRAMS)
def test_programs_are_refused_and_not_run(text):
    around = (text, f"({text})", f" {text} ", f"x + {text}", f"exp({text})", f"where(x > 0, {text}, {text})")
    for formula in around:
        assert check(formula) is None


@pytest.mark.parametrize(
    ("act", "seen"),
    [
        (lambda: os.system("true"), r"os\.system"),
        (lambda: eval("1 + 1"), r"exec \(<code object"),
        (lambda: np.float64(1) / np.float64(0), "divide by zero"),
    ],
)
def test_the_watch_sees(act, seen):
    with pytest.raises((Exception, pytest.fail.Exception), match=seen), watched():
        act()


RECORD = next(record for record in map(json.loads, FITS) if record["name"] == "gelu_fewbit1")
NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "-0", "0.1", "1E400", "5e-324", "1e39"]
NUMBERS += ["9" * 400, "9" * 4300, "9" * 4301, "-" + "9" * 100_000, "0." + "3" * 100_000, "1e" + "9" * 5000]


def replaced(**fields: object) -> str:
    return written({**RECORD, **fields})


# What each field of a record is replaced by; made when it is tested, as much of it is large.
VALUES: dict[str, Callable[[], object]] = {
    "megabyte of numbers": lambda: [0.5] * 200_000,
    "megabyte of text": lambda: "x" * 1_000_000,
    "megabyte of fields": lambda: {str(i): i for i in range(80_000)},
    "long integer": lambda: RAW + "9" * 4300,
    "too long an integer": lambda: RAW + "9" * 4301,
    "long fraction": lambda: RAW + "0." + "3" * 900_000,
    **{number: partial(str.__add__, RAW, number) for number in NUMBERS[:3]},
}


@pytest.mark.parametrize("name", RECORD)
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_hostile_field(value, name):
    with watched():
        checks.check_json(replaced(**{name: value()}))
