"""A few hundred cases of the fuzzer, the same ones every time, and all that it has found; see `make fuzz`."""

import json
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from fitact.base import UsageError
from fitact.fitter.analysis.activation import Activation
from tests.fuzz import checks, grammar
from tests.fuzz.__main__ import CASES, CHECKS
from tests.support.refusals import within

FOUND = [
    pytest.param(name, case, id=f"{name}: {str(case)[:60]!a}", marks=[pytest.mark.full] * (i > 2))
    for name, cases in json.loads(CASES.read_text("utf-8")).items()
    for i, case in enumerate(cases)
]


@pytest.mark.parametrize(
    ("name", "first"), [*(("text", i) for i in range(0, 400, 100)), ("gate", 0), ("fit", 0), ("command", 0)]
)
def test_cases(name: str, first: int) -> None:
    make, check, _ = CHECKS[name]
    for i in range(first, first + {"text": 100, "gate": 4, "fit": 150, "command": 8}[name]):
        check(make(random.Random(f"{name}/{i}")))


@pytest.mark.parametrize("first", [0, 40])
def test_formulas_are_read(first: int) -> None:
    for i in range(first, first + 40):
        checks.check_text(grammar.formula(random.Random(f"formula/{i}")))


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


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "*".join(f"tanh({k}*x)*exp(-x**2/{k})" for k in range(1, 12)),
            "its derivatives, written out, would have",
        ),
        ("".join(f"where(x > {k}, " for k in range(30)) + "x" + ", -x)" * 30, "its functions are nested deeper"),
    ],
)
def test_what_is_too_large_is_refused_where_it_is_read(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Activation.of(text)


def test_a_wrong_module_is_seen() -> None:
    from fitact.fitter.methods.table import make
    from tests.support.generated import load

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = make("fewbit", Activation.of("x*sigmoid(1.5*x)"), "a", bits=2)
        other = make("fewbit", Activation.of("x*sigmoid(1.501*x)"), "a", bits=2)
    checks.check_values(fit, load(fit), reported=False, count=100)
    with pytest.raises(AssertionError):
        checks.check_values(fit, load(other), reported=False, count=100)
