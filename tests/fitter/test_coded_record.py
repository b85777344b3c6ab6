"""The record of coded inputs, and the commands that make, show and draw them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fitact.fitter.records.coded import CodedFit
from fitact.fitter.records.fit import SCHEMA
from fitact.fitter.records.reading import from_json, read
from tests.codegen.test_hostile_fits import HOSTILE, texts
from tests.codegen.test_hostile_fits import changed as with_text
from tests.conftest import Command
from tests.support.refusals import GONE, changed, refused, written

GOOD: dict[str, Any] = {
    "schema": SCHEMA,
    "name": "tanh_coded3",
    "method": "coded",
    "activation": {"name": "tanh", "expression": "tanh(x)"},
    "bits": 3,
    "domain": [-8.0, 8.0],
    "weight": "student(4, -1, 2)",
    "borders": [-1.5, -0.75, -0.25, 0.0, 0.25, 0.75, 1.5],
    "values": [-0.9375, -0.75, -0.5, -0.125, 0.125, 0.5, 0.75, 0.9375],
    "derivatives": [0.125, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.125],
    "reach": 0.0625,
    "error": {
        "objective": 0.01,
        **{
            f"{what}_{deviation}": 0.125
            for what in ("derivative", "value")
            for deviation in ("0.5", "1", "2", "4")
        },
    },
    "options": {"cells": 400},
}


def test_round_trip() -> None:
    text = json.dumps(GOOD, indent=2, sort_keys=True) + "\n"
    fit = from_json(text)
    assert isinstance(fit, CodedFit)
    assert fit.to_json() == text
    assert (fit.bits, fit.domain, fit.reach, fit.options) == (3, (-8.0, 8.0), 0.0625, {"cells": 400})
    assert (fit.borders, fit.values) == (tuple(GOOD["borders"]), tuple(GOOD["values"]))
    assert fit.derivatives == tuple(GOOD["derivatives"])


WRONG = [
    *((key, GONE, key) for key in GOOD),
    ("levels", [], "levels: not a field"),
    ("even", False, "even: not a field"),
    ("bits", 2, "bits: expected 3, 4, 5, 6, 7 or 8, got 2"),
    ("bits", 9, "bits: expected"),
    ("bits", 4, "borders: expected 15 numbers, got 7"),
    ("bits", True, "bits: expected"),
    ("bits", 3.0, "bits: expected"),
    ("domain", [-65505.0, 8.0], "at most 65504 in size"),
    ("domain", [8.0, -8.0], "domain: expected increasing numbers"),
    ("domain", None, "domain: expected a list"),
    ("weight", "student(0)", "degrees of freedom above 0"),
    ("weight", "student(3, 1)", "expected student, student(freedom)"),
    ("weight", "-1", "weight '-1' is -1"),
    ("weight", 3, "weight: expected text"),
    ("borders", [0.0] * 7, "borders: expected increasing numbers"),
    ("borders.0", 0.1, "borders[0]: expected a number that float32 holds exactly"),
    ("borders.6", 1e39, "borders[6]: expected a number that float32 holds"),
    ("values", [0.0] * 7, "values: expected 8 numbers, got 7"),
    ("values.1", 0.3, "values[1]: expected a number that float32 holds exactly"),
    ("values.1", "0", "values[1]: expected a number, got '0'"),
    ("values.1", float("nan"), "not JSON: NaN"),
    ("derivatives", [0.0] * 9, "derivatives: expected 8 numbers, got 9"),
    ("derivatives.7", 0.3, "derivatives[7]: expected a number that float32"),
    ("derivatives.7", True, "derivatives[7]: expected a number"),
    ("reach", -1.0, "reach: expected no negative number"),
    ("reach", "all", "reach: expected a number"),
    ("reach", None, "reach: expected a number"),
    ("error.value_1", GONE, "error: expected derivative_0.5"),
    ("error.value_3", 0.1, "error: expected derivative_0.5"),
    ("error.value_1", -0.1, "error: expected no negative number"),
    ("error.objective", 1e400, "not JSON: Infinity"),
    ("options.seed", 0, "options.seed: unknown option; those of coded are cells"),
    ("options.cells", 1.5, "options.cells: expected an integer"),
]


@pytest.mark.parametrize(("path", "value", "reason"), WRONG, ids=lambda part: str(part)[:40])
def test_wrong(path: str, value: object, reason: str) -> None:
    assert reason in refused(from_json, changed(GOOD, path, value))


def test_no_text_of_a_stranger_is_read() -> None:
    """Texts that mean something are compared with what they may mean."""
    paths = list(texts(GOOD))
    assert ("weight",) in paths
    for path in paths:
        for text in HOSTILE:
            assert str(refused(from_json, json.dumps(with_text(GOOD, path, text)))).isprintable()


# ------------------------------------------------------------------------------------------ the command line


def test_fit_show_plot(command: Command) -> None:
    status, out, err = command("fit --fn tanh --fn identity --method coded --bits 3")
    assert (status, err) == (0, "")
    assert written() == ["generated/fits/identity_coded3.json", "generated/fits/tanh_coded3.json"]
    fit = read(Path("generated/fits/tanh_coded3.json"))
    assert isinstance(fit, CodedFit)
    assert (fit.weight.text, fit.domain, fit.options) == ("student(3)", (-64.0, 64.0), {"cells": 4000})
    heads = [
        "bits",
        "objective",
        "f/f'",
        "at",
        "0.5",
        "f/f'",
        "at",
        "1",
        "f/f'",
        "at",
        "2",
        "f/f'",
        "at",
        "4",
        "reach",
    ]
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == heads
    errors = [f"{fit.error[f'value_{s}']:.3g}/{fit.error[f'derivative_{s}']:.3g}" for s in ("0.5", "1", "2", "4")]
    row = ["tanh_coded3", "3", f"{fit.error['objective']:.7g}", *errors, f"{fit.reach:.4g}"]
    assert lines[1] == row
    status, out, _ = command("show generated/fits/tanh_coded3.json")
    assert [line.split() for line in out.splitlines()] == [heads, row]
    assert command("plot -o both.png")[0] == 0
    first = Path("both.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    assert command("plot -o both.png")[0] == 0
    assert Path("both.png").read_bytes() == first


def test_options_of_the_command(command: Command) -> None:
    line = 'fit --fn "x*sigmoid(1.5*x)" --method coded --bits 3 --name a'
    status, _, err = command(f'{line} --domain -8 9 --weight "student(3, -1.3, 1.2)"')
    assert (status, err) == (0, "")
    fit = read(Path("generated/fits/a.json"))
    assert isinstance(fit, CodedFit)
    assert (fit.domain, fit.weight.text, fit.name) == ((-8.0, 9.0), "student(3, -1.3, 1.2)", "a")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("", "--bits is required for --method coded: 3 to 8"),
        ("--bits 2", "bits: expected 3, 4, 5, 6, 7 or 8, got 2"),
        ("--bits 9", "got 9"),
        ("--bits 3 --seed 1", "--method coded has no --seed: it takes --bits, --domain, --weight"),
        ("--bits 3 --tol 1e-3", "has no --tol"),
        ("--bits 3 --restarts 1", "has no --restarts"),
        ("--bits 3 --family rational", "has no --family"),
        ("--bits 3 --objective primitive", "has no --objective"),
        ("--bits 3 --domain -8 8", "--name is required for --domain"),
        ("--bits 3 --weight uniform", "--name is required for --weight"),
        ("--bits 3 --weight student", "--name is required for --weight"),
        ("--bits 3 --domain -65505 100 --name a", "of at most 65504 in size"),
        ('--bits 3 --weight "student(3, 1)" --name a', "expected student, student(freedom) or"),
    ],
)
def test_refuses(refuses: Callable[[str], str], options: str, reason: str) -> None:
    assert reason in refuses(f"fit --fn silu --method coded {options}")


def test_the_default_domain_and_weight_need_no_name(command: Command) -> None:
    status, _, err = command('fit --fn tanh --method coded --bits 3 --domain -64 64 --weight "student(3)"')
    assert (status, err) == (0, "")
    assert written() == ["generated/fits/tanh_coded3.json"]


@pytest.mark.parametrize(
    ("thing", "line"),
    [
        ("silu", "coded          yes: 3 to 8 bits, for the value too"),
        ("identity", "coded          yes: 3 to 8 bits"),
        ("log(x)", "coded          no: activation 'log(x)' is nan at x = -64"),
        ("sign(x)", "coded          no: the root mean square of its derivative"),
    ],
)
def test_show_says_whether_it_can_be_coded(command: Command, thing: str, line: str) -> None:
    status, out, _ = command(f'show "{thing}"')
    assert status == 0
    assert line in out


def test_codes() -> None:
    fit = from_json(json.dumps(GOOD))
    assert isinstance(fit, CodedFit)
    x = np.random.default_rng(0).normal(0, 2, (5, 6))
    expected = [sum(border < value for border in fit.borders) for value in x.ravel()]
    assert fit.code(x).ravel().tolist() == expected
    assert fit.code(np.array([np.nan, 0.0, np.nextafter(0.0, 1)])).tolist() == [0, 3, 4]
