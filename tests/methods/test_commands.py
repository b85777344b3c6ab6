"""The command `fit` with each method: what its options make; what `show` says of a method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fitact.fitter.methods.table import again
from fitact.fitter.records.reading import read
from tests.conftest import Command
from tests.support.refusals import written

# arguments; the fit's name; some of its fields
MAKES: list[tuple[str, str, dict[str, Any]]] = [
    ("inverted --fn 'softplus(x)' --name sp", "sp", {"bits": 0, "domain": None}),
    (
        "inverted --fn 'x**2 + x' --domain -2 2 --name square --tol 1e-3",
        "square",
        {"bits": 1, "domain": (-2.0, 2.0), "options": {"family": "rational", "tol": 1e-3}},
    ),
    ("inverted --fn relu6", "relu6_inverted2", {"bits": 2, "domain": None}),
    ("inverted --fn elu --param alpha=0.5 --name elu05", "elu05", {"bits": 1, "domain": None}),
    (
        "relumix --fn tanh --bits 2 --objective derivative --restarts 2 --seed 7 --name mine",
        "mine",
        {"even": False, "domain": (-10.0, 10.0), "options": {"objective": "derivative", "restarts": 2, "seed": 7}},
    ),
    (
        "inverted --fn silu --family published",
        "silu_inverted_published",
        {"bits": 1, "options": {"source": "arXiv 2407.15545"}},
    ),
    ("output --fn 'asinh(x)' --derivative '1/cosh(y)' --name own", "own", {"derivative": "1/cosh(y)"}),
]


@pytest.mark.parametrize(("arguments", "name", "fields"), MAKES, ids=[name for _, name, _ in MAKES])
def test_makes(arguments: str, name: str, fields: dict[str, Any], command: Command) -> None:
    status, out, err = command(f"fit --method {arguments}")
    path = f"generated/fits/{name}.json"
    assert (status, err, out.splitlines()[-1]) == (0, "", f"wrote {path}")
    assert written() == [path]
    fit = read(Path(path))
    assert {key: getattr(fit, key) for key in fields} == fields
    assert again(fit).to_json() == fit.to_json()


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("gelu", "yes: 1 bit or more beside the output, if its 2 smooth pieces can be fitted"),
        ("hardswish", "yes: 2 bits or more beside the output"),
        ("tanh", "yes: the output alone, 0 bits"),
        ("x + 2*sin(x)", "no: it has too many monotone pieces"),
    ],
)
def test_show_says_whether_inverted_applies(what: str, expected: str, command: Command) -> None:
    status, out, _ = command(f"show '{what}'")
    assert status == 0
    (row,) = (line for line in out.splitlines() if line.startswith("inverted"))
    assert expected in row
