"""A few hundred cases of the fuzzer, the same ones every time, and all that it has found; see `make fuzz`."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from fitact.fitter.analysis import Activation
from fitact.fitter.methods import make
from tests.fuzz import checks, grammar
from tests.fuzz.__main__ import CASES, CHECKS
from tests.support.generated import load
from tests.support.refusals import refused, within

FOUND = [
    pytest.param(name, case, id=f"{name}: {str(case)[:60]!a}", marks=[pytest.mark.full] * (i > 2))
    for name, cases in json.loads(CASES.read_text("utf-8")).items()
    for i, case in enumerate(cases)
]


PARTS = [
    *(("text", i) for i in range(0, 400, 100)),
    ("gate", 0),
    ("fit", 0),
    ("command", 0),
    ("read", 0),
    ("read", 40),
]
COUNTS = {"text": 100, "gate": 4, "fit": 150, "command": 8, "read": 40}


@pytest.mark.parametrize(("name", "first"), PARTS)
def test_cases(name: str, first: int) -> None:
    """Of formulas, whose full check takes long, most are only read."""
    make, check = (grammar.formula, checks.check_text) if name == "read" else CHECKS[name][:2]
    for i in range(first, first + COUNTS[name]):
        check(make(random.Random(f"{'formula' if name == 'read' else name}/{i}")))


@pytest.mark.parametrize("i", range(3))
def test_formulas(i: int) -> None:
    checks.check_formula(grammar.tree(random.Random(i), 4))


@pytest.mark.parametrize(("name", "case"), FOUND)
def test_what_was_found(name: str, case: Any) -> None:
    with within(120):
        CHECKS[name][1](case)


LONG = (
    "selu(where(tan(exp(max(1e-5, 1.0))) > sin(relu(x)), ((sigmoid(x) + (x - x)))**3, where(-(x / x) < sin(x), "
    "where(min(x, x) <= 100, square(x), (x * x)), asinh(sin(x)))))",
    "where(x < 1, (sech2(relu(leaky_relu(x))) + tan(log1p((pi * x)))), sigmoid(clamp((-(where(x >= "
    "where(x > -1.5, 0.044715, x), (x + x), x))**3), -2, 3)))",
)


@pytest.mark.full
@pytest.mark.parametrize("text", LONG, ids=[text[:30] for text in LONG])
def test_what_takes_long_is_bounded(text: str, command: Callable[..., tuple[int, str, str]]) -> None:
    """Conditions that switch without end, of what oscillates."""
    with within(240):
        status, out, err = command("show", text)
    assert (status, err) == (0, "") and "breakpoints" in out


TOO_LARGE = [
    ("*".join(f"tanh({k}*x)*exp(-x**2/{k})" for k in range(1, 12)), "its derivatives, written out, would have"),
    ("".join(f"where(x > {k}, " for k in range(30)) + "x" + ", -x)" * 30, "its functions are nested deeper"),
]


@pytest.mark.parametrize(("text", "message"), TOO_LARGE)
def test_what_is_too_large_is_refused_where_it_is_read(text: str, message: str) -> None:
    assert message in refused(Activation.of, text)


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_module_is_seen() -> None:
    fit, other = (make("fewbit", Activation.of(f"x*sigmoid({a}*x)"), "a", bits=2) for a in ("1.5", "1.501"))
    checks.check_values(fit, load(fit), reported=False, count=100)
    with pytest.raises(AssertionError):
        checks.check_values(fit, load(other), reported=False, count=100)
