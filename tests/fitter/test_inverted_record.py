"""The record of inverted fits, and the commands that make, show and draw them."""

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fitact.fitter.methods.table import again
from fitact.fitter.records.fit import InvertedFit
from fitact.fitter.records.reading import from_json, read
from tests.conftest import Command
from tests.support.refusals import GONE, changed, refused, written

FITS = Path(str(resources.files("fitact.generated") / "fits"))
SHIPPED = sorted(path.stem for path in FITS.glob("*inverted*.json"))
GOOD: dict[str, Any] = json.loads((FITS / "gelu_inverted1.json").read_text())
PRINTED: dict[str, Any] = json.loads((FITS / "silu_inverted_published.json").read_text())


# ------------------------------------------------------------------------------------------------ the file


def test_what_ships() -> None:
    assert SHIPPED == [
        "gelu_inverted1",
        "gelu_inverted2",
        "gelu_inverted_published",
        "gelu_tanh_inverted1",
        "hardswish_inverted2",
        "mish_inverted1",
        "quick_gelu_inverted1",
        "serf_inverted1",
        "silu_inverted1",
        "silu_inverted2",
        "silu_inverted_published",
    ]


APPROXIMANT = "approximants.float32.0"
WRONG = [
    ("bits", 5, "bits: expected 0, 1, 2, 3 or 4, got 5"),
    ("bits", True, "bits: expected"),
    ("bits", 0, "approximants.bfloat16: expected 1 to 1 approximants, got 2"),
    ("bits", "1", "bits: expected"),
    ("domain", [1.0], "domain: expected 2 numbers"),
    ("domain", [1.0, 1.0], "domain: expected increasing numbers"),
    ("domain", "all", "domain: expected a list of numbers"),
    ("borders", [], "borders: expected an object"),
    ("borders.float32", [], "borders.float32: expected 1 numbers, got 0"),
    ("borders.float32", [0.1], "borders.float32[0]: expected a number that float32 holds exactly"),
    ("borders.float32", [1e400], "not JSON: Infinity"),
    ("borders.float32", ["0"], "borders.float32[0]: expected a number, got '0'"),
    ("borders.float64", [0.0], "borders: expected bfloat16, float16, float32"),
    ("borders.float16", GONE, "borders: expected bfloat16, float16, float32"),
    ("approximants", {}, "approximants: expected bfloat16, float16, float32"),
    ("approximants.float32", [], "approximants.float32: expected 1 to 2 approximants, got 0"),
    (APPROXIMANT, 3, f"{APPROXIMANT.replace('.0', '[0]')}: expected an object"),
    (f"{APPROXIMANT}.kind", "spline", "expected"),
    (f"{APPROXIMANT}.kind", 3, "expected text"),
    (f"{APPROXIMANT}.kind", GONE, "expected text"),
    (f"{APPROXIMANT}.approximates", "sigmoid", "approximates: expected derivative"),
    (f"{APPROXIMANT}.extra", 1, "expected approximates, denominator, error"),
    (f"{APPROXIMANT}.low", 5.0, "low: expected at most high"),
    (f"{APPROXIMANT}.low", 0.1, "expected a number that float32 holds exactly"),
    (f"{APPROXIMANT}.high", None, "high: expected a number, got None"),
    (f"{APPROXIMANT}.high", 1e39, "expected a number that float32 holds exactly"),
    (f"{APPROXIMANT}.numerator", [], "numerator: expected 1 numbers, got 0"),
    (f"{APPROXIMANT}.numerator", [0.0] * 34, "numerator: expected 33 numbers, got 34"),
    (f"{APPROXIMANT}.numerator", [0.1], "numerator[0]: expected a number that float32 holds exactly"),
    (f"{APPROXIMANT}.denominator", [0.0], "denominator: expected no root"),
    (f"{APPROXIMANT}.denominator", [-0.25, 1.0], "denominator: expected no root"),
    (f"{APPROXIMANT}.radicals", [], "radicals: expected 1 to 3, got 0"),
    (f"{APPROXIMANT}.radicals", [{}] * 4, "radicals[0]: expected anchor, order, side, sign"),
    (f"{APPROXIMANT}.radicals", [1], "radicals[0]: expected an object, got 1"),
    (f"{APPROXIMANT}.radicals.0.order", 2.0, "order: expected an integer"),
    (f"{APPROXIMANT}.radicals.0.order", 0, "order: expected an integer"),
    (f"{APPROXIMANT}.radicals.0.side", 2, "side: expected an integer, one of -1, 0, 1, got 2"),
    (f"{APPROXIMANT}.radicals.0.sign", 0, "sign: expected an integer, one of -1, 1, got 0"),
    (f"{APPROXIMANT}.radicals.0.anchor", 0.1, "anchor[0]: expected a number that float32 holds exactly"),
    (f"{APPROXIMANT}.radicals.0.anchor", GONE, "radicals[0]: expected anchor, order, side, sign"),
    (f"{APPROXIMANT}.error", 1.0, "error.float32: expected that of the worst approximant, 1.0"),
    (f"{APPROXIMANT}.floor", 1.0, "floor.float32: expected that of the worst approximant, 1.0"),
    ("error.float32", -1.0, "error: expected no negative number"),
    ("error.float32", GONE, "error: expected bfloat16, float16, float32"),
    ("floor.float32", 0.0, "floor.float32: expected that of the worst approximant"),
    ("floor", GONE, "floor: missing"),
    ("levels", [1.0], "levels: not a field of a fit of the method inverted"),
    ("method", "exact", "not a field of a fit of the method exact"),
    ("activation.expression", "__import__('os')", "activation.expression"),
]


@pytest.mark.parametrize(
    ("path", "value", "message"), WRONG, ids=[f"{path}={value!r:.30}" for path, value, _ in WRONG]
)
def test_what_is_wrong_is_named(path: str, value: object, message: str) -> None:
    assert message in refused(from_json, changed(GOOD, path, value))


PRINTED_WRONG = [
    (f"{APPROXIMANT}.kind", "cubic", "kind: expected one of"),
    (f"{APPROXIMANT}.kind", "quotient", "expected approximates, denominator"),
    (f"{APPROXIMANT}.kind", "exponential", "coefficients: expected 5 numbers, got 4"),
    (f"{APPROXIMANT}.approximates", "value", "approximates: expected derivative or sigmoid"),
    (
        f"{APPROXIMANT}.approximates",
        "derivative",
        "approximants.float32: expected quotients, or approximants of one anchor",
    ),
    (f"{APPROXIMANT}.anchor", 0.5, "anchor: expected a number below 0"),
    (f"{APPROXIMANT}.anchor", -0.5, "approximants.float32: expected quotients, or approximants of one anchor"),
    (f"{APPROXIMANT}.coefficients", [1.0], "coefficients: expected 4 numbers"),
    (f"{APPROXIMANT}.coefficients.0", "exec", "coefficients[0]: expected a number"),
]


@pytest.mark.parametrize(("path", "value", "message"), PRINTED_WRONG)
def test_what_is_wrong_with_the_papers_approximants_is_named(path: str, value: object, message: str) -> None:
    assert message in refused(from_json, changed(PRINTED, path, value))


# ------------------------------------------------------------------------------------------------ the commands


MAKES = [
    ("--fn 'softplus(x)' --name sp", "sp", 0, None),
    ("--fn 'x**2 + x' --domain -2 2 --name square --tol 1e-3", "square", 1, (-2.0, 2.0)),
    ("--fn relu6", "relu6_inverted2", 2, None),
    ("--fn elu --param alpha=0.5 --name elu05", "elu05", 1, None),
]


@pytest.mark.parametrize(("arguments", "name", "bits", "domain"), MAKES)
def test_makes(arguments: str, name: str, bits: int, domain: object, command: Command) -> None:
    status, _, err = command(f"fit --method inverted {arguments}")
    assert (status, err) == (0, "")
    assert written() == [f"generated/fits/{name}.json"]
    fit = read(Path(f"generated/fits/{name}.json"))
    assert isinstance(fit, InvertedFit)
    assert (fit.bits, fit.domain) == (bits, domain)
    assert again(fit).to_json() == fit.to_json()


REFUSED = [
    ("fit --fn gelu --method inverted --bits 0", "use --bits 1"),
    ("fit --fn gelu --method inverted --bits 5", "bits: expected 0 to 4, got 5"),
    ("fit --fn gelu --method inverted --weight normal", "--method inverted has no --weight"),
    ("fit --fn gelu --method inverted --seed 3", "--method inverted has no --seed"),
    ("fit --fn gelu --method inverted --objective derivative", "--method inverted has no --objective"),
    ("fit --fn gelu --method inverted --tol 0 --name a", "tol: expected 1e-6 to 0.01, got 0.0"),
    ("fit --fn gelu --method inverted --tol 1e-3", "--name is required for --tol"),
    ("fit --fn gelu --method inverted --domain -5 5", "--name is required for --domain"),
    ("fit --fn gelu --method inverted --domain -10 10", "--name is required for --domain"),
    ("fit --fn gelu --method inverted --family parametric", "--name is required for --family"),
    ("fit --fn gelu --method inverted --family parametric --bits 1 --name a", "--family parametric has one bit"),
    ("fit --fn mish --method inverted --family parametric --name a", "those of gelu and silu"),
    ("fit --fn gelu --bits 3 --family rational", "--method fewbit has no --family"),
    ("fit --fn gelu --bits 3 --tol 1e-3", "--method fewbit has no --tol"),
    ("fit --fn 'x + 2*sin(x)' --method inverted --name a", "too many monotone pieces over the reals"),
    ("fit --fn 'log(x)' --method inverted --name a", "not defined all over the domain"),
    ("fit --fn 'x*sigmoid(x)' --method inverted", "--name is required for an expression"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED, ids=[line for line, _ in REFUSED])
def test_refuses(line: str, message: str, refuses: Callable[[str], str]) -> None:
    assert message in refuses(line)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("gelu", "yes: 1 bit or more beside the output, if its 2 smooth pieces can be fitted"),
        ("hardswish", "yes: 2 bits or more beside the output"),
        ("tanh", "yes: the output alone, 0 bits"),
        ("x + 2*sin(x)", "no: it has too many monotone pieces"),
    ],
)
def test_show_says_whether_it_applies(what: str, expected: str, command: Command) -> None:
    status, out, _ = command(f"show '{what}'")
    assert status == 0
    (row,) = (line for line in out.splitlines() if line.startswith("inverted"))
    assert expected in row


def test_codes_and_values_of_a_fit() -> None:
    fit = read(FITS / "gelu_inverted2.json")
    assert isinstance(fit, InvertedFit)
    x = np.array([-np.inf, -0.8, -0.7517, np.nan, 5.0, np.inf])
    assert [int(code) for code in fit.code(x, "bfloat16")][0::3] == [0, 0]
    assert fit.code(x)[-1] == 3
