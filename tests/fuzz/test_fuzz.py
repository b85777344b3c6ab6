"""A few hundred cases of the fuzzer, the same ones every time, and all that it has found; see `make fuzz`."""

from __future__ import annotations

import json
import random
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fitact.cli import tables
from fitact.errors import UsageError
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.expr import work
from fitact.fitter.expr.multiprecision import MP
from fitact.fitter.expr.parser import parse
from tests.fuzz import checks, grammar, interruptions
from tests.fuzz.__main__ import CASES, CHECKS
from tests.fuzz.grammar import Tree, X
from tests.fuzz.reduce import reduced

KEPT = [(name, case) for name, cases in json.loads(CASES.read_text("utf-8")).items() for case in cases]


def chances(name: str, count: int) -> list[random.Random]:
    return [random.Random(f"{name}/{i}") for i in range(count)]


@pytest.mark.parametrize("part", range(4))
def test_texts(part: int) -> None:
    for chance in chances("text", 400)[part::4]:
        checks.check_text(grammar.text(chance))


@pytest.mark.parametrize("part", range(2))
def test_formulas_are_read(part: int) -> None:
    for chance in chances("formula", 80)[part::2]:
        checks.check_text(str(grammar.formula(chance)))


@pytest.mark.parametrize("i", range(3))
def test_formulas(i: int) -> None:
    checks.check_formula(str(grammar.PLAIN.tree(random.Random(i), 4)))


def test_gates() -> None:
    for chance in chances("gate", 4):
        checks.check_gate(str(grammar.gate(chance)))


def test_fits() -> None:
    for chance in chances("fit", 150):
        checks.check_json(grammar.fit(chance))


def test_commands(tmp_path: Path) -> None:
    for chance in chances("command", 8):
        checks.check_command(grammar.command(chance), tmp_path)
        for path in [*tmp_path.rglob("*.json")]:
            path.unlink()


@pytest.mark.parametrize(("name", "case"), KEPT, ids=[f"{name}: {str(case)[:60]!a}" for name, case in KEPT])
def test_what_was_found(name: str, case: Any, tmp_path: Path) -> None:
    if name == "command":
        checks.check_command(case, tmp_path)
    elif name in ("formula", "gate"):
        CHECKS[name][1](Tree(case))
    else:
        CHECKS[name][1](case)


# ------------------------------------------------------------------------------------------------ the bounds

# Each was read, and analysed for more than half a minute.
LONG = (
    "selu(where(tan(exp(max(1e-5, 1.0))) > sin(relu(x)), ((sigmoid(x) + (x - x)))**3, where(-(x / x) < sin(x), "
    "where(min(x, x) <= 100, square(x), (x * x)), asinh(sin(x)))))",
    "where(x < 1, (sech2(relu(leaky_relu(x))) + tan(log1p((pi * x)))), sigmoid(clamp((-(where(x >= "
    "where(x > -1.5, 0.044715, x), (x + x), x))**3), -2, 3)))",
)


@pytest.mark.parametrize("text", LONG, ids=[text[:30] for text in LONG])
def test_too_much_work_is_refused(
    text: str, command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tables.SHOWING == 3 * work.MILLION
    monkeypatch.setattr(tables, "SHOWING", 0.3 * work.MILLION)  # to see a tenth of it takes a tenth of the time
    status, out, err = command("show", text)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "takes too long, more than 0.3 million operations: write it with fewer" in err


def test_a_budget_names_the_stage() -> None:
    with work.budget("it", work.MILLION), work.stage("the search", "shorten it"):
        work.spend(work.MILLION)
        with pytest.raises(UsageError) as error:
            work.spend(1)
    assert str(error.value) == "it: the search takes too long, more than 1 million operations: shorten it"


def test_what_nests_too_deep_is_refused_in_one_line() -> None:
    """SymPy's functions call themselves, and the depth that they need cannot be told before."""

    def deeper(depth: int) -> int:
        return 1 + deeper(depth + 1)

    told = r"^it: it nests too deep: write it with fewer functions of functions$"
    with pytest.raises(work.WorkError, match=told), work.budget("it", work.MILLION):
        deeper(0)


def test_what_is_remembered_counts_once_a_budget() -> None:
    @work.remembered(10)
    def inner(n: int) -> int:
        work.spend(n)
        return n

    @work.remembered(10)
    def outer(n: int) -> int:
        work.spend(1)
        return inner(n) + inner(n)

    def spent(*functions: Callable[[int], int]) -> float:
        with work.budget("it", 1e9) as own:
            for function in functions:
                function(100)
        return own.spent

    assert spent(inner) == 100  # made
    assert spent(inner) == 100  # kept
    assert spent(inner, inner) == 100
    assert spent(outer) == 101  # made of what was kept
    assert spent(outer, inner, outer) == 101
    assert spent(inner, outer) == 101


@pytest.mark.parametrize("text", ["x*sigmoid(1.5*x)", "where(x**2 > 2, x**3, tanh(x))"])
def test_the_same_work_whatever_came_before(text: str) -> None:
    def spent() -> float:
        with work.budget("it", 1e9) as own:
            activation = Activation.of(text)
            activation.monotone()
            activation.derivative_range()
            activation.breakpoints()
        return own.spent

    first = spent()
    assert first > 10_000
    assert spent() == first


# ---------------------------------------------------------------------------------------- the fuzzer itself


def test_trees() -> None:
    for chance in chances("trees", 100):
        tree = grammar.formula(chance)
        assert str(tree).count("@") == 0
        for way, node in tree.nodes():
            assert tree.replaced(way, node) == tree


def test_failures_are_reduced() -> None:
    tree = grammar.PLAIN.tree(random.Random(5), 30)
    whole = Tree("(@ + @)", (tree, Tree("tanh(@)", (Tree("exp(@)", (tree,)),))))
    assert str(reduced(whole, lambda one: "exp(" in str(one))) == "exp(x)"
    assert reduced(X, lambda _: True) == X


def test_most_formulas_are_accepted() -> None:
    accepted = 0
    for chance in chances("accepted", 60):
        try:
            parse(str(grammar.PLAIN.tree(chance, 5)))
            accepted += 1
        except UsageError:
            pass
    assert accepted > 40


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
    assert MP.isfinite(MP.mpf(float(np.float64(fit.error["max"]))))


# -------------------------------------------------------------------------------- interruptions, and no room

MOST = [name for name in interruptions.COMMANDS if name != "plan"]  # which takes longest: `make fuzz COUNT=50`
WRITING = [name for name in MOST if name in interruptions.WRITING]


@pytest.mark.full
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
@pytest.mark.parametrize("command", MOST)
def test_ended_at_a_random_moment(command: str, sign: signal.Signals) -> None:
    for after in interruptions.moments(command, 2, 0):
        interruptions.check_interrupted(command, sign, after)


@pytest.mark.full
@pytest.mark.parametrize("command", WRITING)
def test_no_room(command: str) -> None:
    interruptions.check_no_room(command)


@pytest.mark.full
@pytest.mark.parametrize("command", WRITING)
def test_read_only(command: str) -> None:
    interruptions.check_read_only(command)


@pytest.mark.full
@pytest.mark.parametrize("command", WRITING)
def test_two_at_once(command: str) -> None:
    interruptions.check_together(command)
