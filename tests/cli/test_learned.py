"""Learned numbers on the command line: what is wrong with them is told in a line."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from fitact.__main__ import main
from fitact.cli import cli

FIT = ["fit", "--method", "rebuild", "--name", "own"]
OF = {
    "": "learned number '': a name is a Python identifier of at most 40 characters of ASCII; choose another name",
    "sin": "learned number 'sin': sin is a function of formulas; choose another name",
    "where": "learned number 'where': where is a function of formulas; choose another name",
    "class": "learned number 'class': the name is Python's own; choose another name",
    "__import__": "learned number '__import__': names that begin with an underscore belong to generated modules; "
    "choose another name",
    "exp": "learned number 'exp': exp is a function of formulas; choose another name",
    "gelu": "learned number 'gelu': gelu is a function of formulas; choose another name",
    "pi": "learned number 'pi': pi is a constant of formulas; choose another name",
    "x": "learned number 'x': x is an argument of formulas; choose another name",
    "lambda": "learned number 'lambda': the name is Python's own; choose another name",
    "None": "learned number 'None': the name is Python's own; choose another name",
    "match": "learned number 'match': the name is Python's own; choose another name",
    "print": "learned number 'print': the name is Python's own; choose another name",
    "forward": "learned number 'forward': generated modules use that name themselves; choose another name",
    "u0": "learned number 'u0': generated modules use that name themselves; choose another name",
    "_tl": "learned number '_tl': names that begin with an underscore belong to generated modules; "
    "choose another name",
    "a b": "learned number 'a b': a name is a Python identifier of at most 40 characters of ASCII; "
    "choose another name",
    "é": "learned number 'é': a name is a Python identifier of at most 40 characters of ASCII; choose another "
    "name",
}
WRONG = [
    *((["--fn", "x*tanh(x)", "--learn", f"{name}=1"], message) for name, message in OF.items()),
    (["--fn", "x*tanh(x)", "--learn", "zz=1"], "formula 'x*tanh(x)': the learned number zz is used nowhere"),
    (
        ["--fn", "a*x", "--learn", "a"],
        "--learn 'a': expected NAME=START or NAME:channel=START, with a number to start from",
    ),
    *(
        (
            ["--fn", "a*x", "--learn", text],
            f"--learn '{text}': expected NAME=START or NAME:channel=START, with a number to start from",
        )
        for text in ("a=", "a=one", "a:channel", "")
    ),
    (["--fn", "a*x", "--learn", "a=inf"], "learned number 'a': expected a start that float32 holds, got inf"),
    (
        ["--fn", "log(a)*x", "--learn", "a=0"],
        "formula 'log(a)*x': with its start a=0 the formula is inf at x = -10: expected finite numbers from "
        "x = -10 to 10; choose another start",
    ),
    (
        ["--fn", "x*sqrt(a)", "--learn", "a=0"],
        "formula 'x*sqrt(a)': with its start a=0 the derivative in a of the formula is nan at x = -10: expected "
        "finite numbers from x = -10 to 10; choose another start",
    ),
    (
        ["--fn", "a*x", "--learn", "a:rows=1"],
        "--learn 'a:rows=1': expected NAME=START or NAME:channel=START, with a number to start from",
    ),
    (["--fn", "a*x", "--learn", "a=nan"], "learned number 'a': expected a start that float32 holds, got nan"),
    (
        ["--fn", "x/a", "--learn", "a=0"],
        "formula 'x/a': with its start a=0 the formula is nan at x = -10: expected finite numbers from x = -10 to "
        "10; choose another start",
    ),
    (
        ["--fn", "x*exp(a*x**2)", "--learn", "a=1000"],
        "formula 'x*exp(a*x**2)': with its start a=1000 the formula is -inf at x = -10: expected finite numbers "
        "from x = -10 to 10; choose another start",
    ),
    (["--fn", "a", "--learn", "a=1"], "formula 'a' does not depend on x: write a formula in x"),
    (
        ["--fn", "silu(g)*u", "--learn", "g=1"],
        "--learn: expected an expression in x, got the gate 'silu(g)*u'",
    ),
    (
        ["--fn", "dyt", "--learn", "delta=1"],
        "dyt has no learned number 'delta': expected one of alpha, gamma, beta",
    ),
    (
        ["--fn", "a*x", "--learn", "a=1", "--learn", "a=2"],
        "--learn a: given twice",
    ),
]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(one[0]) for one in WRONG])
def test_one_line_says_what_is_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["fitact", *FIT, *arguments])
    assert main() == 2
    assert capsys.readouterr().err == f"fitact: {message}\n"
    assert not [*Path().rglob("*.json")]


def test_the_methods_of_learned_numbers() -> None:
    done = CliRunner().invoke(cli, ["fit", "--fn", "a*x", "--learn", "a=1", "--name", "own", "--bits", "3"])
    assert "that of formulas with learned numbers is rebuild" in str(done.exception)


def test_shown() -> None:
    done = CliRunner().invoke(cli, ["show", "dyt"])
    assert "alpha=0.5, gamma:channel=1, beta:channel=0" in done.output
    assert "by alpha     gamma*x*sech2(alpha*x)" in done.output
