"""A few hundred cases of the fuzzer, the same ones every time, and all that it has found; see `make fuzz`."""

import json
import random
from typing import Any

import pytest

from fitact.fitter.analysis import Activation
from fitact.fitter.methods import make
from tests.fuzz import checks, grammar
from tests.fuzz.__main__ import CASES, CHECKS
from tests.support.generated import load
from tests.support.refusals import within

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
