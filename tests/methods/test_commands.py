"""The command `fit` with each method: what its options make, and what is refused; what `show` says of a method."""

from __future__ import annotations

from collections.abc import Callable
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


REFUSED = [
    ("inverted --fn gelu --bits 0", "use --bits 1"),
    ("inverted --fn gelu --bits 5", "is not in the range 0<=x<=4"),
    ("inverted --fn gelu --weight normal", "--method inverted has no --weight"),
    ("inverted --fn gelu --seed 3", "--method inverted has no --seed"),
    ("inverted --fn gelu --objective derivative", "--method inverted has no --objective"),
    ("inverted --fn gelu --tol 0 --name a", "tol: expected 1e-6 to 0.01, got 0.0"),
    ("inverted --fn gelu --tol 1e-3", "--name is required for --tol"),
    ("inverted --fn gelu --domain -5 5", "--name is required for --domain"),
    ("inverted --fn gelu --domain -10 10", "--name is required for --domain"),
    ("inverted --fn gelu --family parametric", "--name is required for --family"),
    ("inverted --fn gelu --family parametric --bits 1 --name a", "--family parametric has one bit"),
    ("inverted --fn mish --family parametric --name a", "those of gelu and silu"),
    ("inverted --fn 'x + 2*sin(x)' --name a", "too many monotone pieces over the reals"),
    ("inverted --fn 'log(x)' --name a", "not defined all over the domain"),
    ("inverted --fn 'x*sigmoid(x)'", "--name is required for an expression"),
    ("fewbit --fn gelu --bits 3 --family rational", "--method fewbit has no --family"),
    ("fewbit --fn gelu --bits 3 --tol 1e-3", "--method fewbit has no --tol"),
    ("fewbit --fn tanh --bits 2 --objective primitive", "--method fewbit has no --objective"),
    ("fewbit --fn tanh --bits 2 --restarts 3", "--method fewbit has no --restarts"),
    ("relumix --fn tanh --bits 2 --domain -5 5 --name a", "--method relumix has no --domain"),
    ("relumix --fn tanh --bits 2 --weight normal --name a", "--method relumix has no --weight"),
    ("relumix --fn tanh --bits 2 --domain -5 5 --weight normal --name a", "has no --domain or --weight"),
    ("relumix --fn tanh", "--bits is required for --method relumix"),
    ("relumix --fn tanh --bits 2 --objective derivative", "--name is required for"),
    ("output --fn tanh --objective primitive", "--method output has no --objective"),
    ("output --fn tanh --bits 3", "--method output has no --bits: it takes --derivative"),
    ("output --fn tanh --domain -5 5", "--method output has no --domain"),
    ("output --fn tanh --weight normal", "--method output has no --weight"),
    ("output --fn 'asinh(x)' --derivative '1/cosh(y)'", "--name is required for --derivative"),
    ("output --fn tanh --fn gelu", "no closed form"),
    ("output --fn tanh --derivative 'y*(1 - y)' --name a", "not that function of the output"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[arguments for arguments, _ in REFUSED])
def test_refuses(arguments: str, message: str, refuses: Callable[[str], str]) -> None:
    assert message in refuses(f"fit --method {arguments}")


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
