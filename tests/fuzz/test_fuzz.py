"""A few hundred cases of the fuzzer, the same ones every time, and all that it has found; see `make fuzz`."""

from __future__ import annotations

import json
import random
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fitact.base import UsageError
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.expr.parser import parse
from tests.fuzz import checks, grammar, interruptions
from tests.fuzz.__main__ import CASES, CHECKS
from tests.fuzz.grammar import Tree, X
from tests.fuzz.reduce import reduced
from tests.support.refusals import within

FOUND = [
    pytest.param(name, case, id=f"{name}: {str(case)[:60]!a}", marks=[pytest.mark.full] * (i > 2))
    for name, cases in json.loads(CASES.read_text("utf-8")).items()
    for i, case in enumerate(cases)
]


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


@pytest.mark.parametrize(("name", "case"), FOUND)
def test_what_was_found(name: str, case: Any, tmp_path: Path) -> None:
    if name == "command":
        checks.check_command(case, tmp_path)
    elif name in ("formula", "gate"):
        CHECKS[name][1](Tree(case))
    else:
        CHECKS[name][1](case)


# ------------------------------------------------------------------------------------------------- the bound

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


# ---------------------------------------------------------------------------------------- the fuzzer itself


def test_trees_and_their_reduction() -> None:
    for chance in chances("trees", 100):
        tree = grammar.formula(chance)
        assert str(tree).count("@") == 0
        for way, node in tree.nodes():
            assert tree.replaced(way, node) == tree
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


# -------------------------------------------------------------------------------- interruptions, and no room

MOST = [name for name in interruptions.COMMANDS if name != "plan"]  # which takes longest: `make fuzz COUNT=50`
WRITING = [name for name in MOST if name in interruptions.WRITING]


@pytest.mark.full
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
@pytest.mark.parametrize("command", MOST)
def test_ended_at_a_random_moment(command: str, sign: signal.Signals) -> None:
    for after in interruptions.moments(command, 2, 0):
        interruptions.check_interrupted(command, sign, after)


CHECKED = (interruptions.check_no_room, interruptions.check_read_only, interruptions.check_together)


@pytest.mark.full
@pytest.mark.parametrize("command", WRITING)
@pytest.mark.parametrize("check", CHECKED, ids=lambda check: check.__name__)
def test_no_room_read_only_and_two_at_once(check: Callable[[str], None], command: str) -> None:
    check(command)
