"""Values of modules generated from formulas: by PyTorch's operators and, interpreted, by device code.

A formula that `check` reports may fail, and does fail where `check` says; any other fails nowhere.
"""

import re

import numpy as np
import pytest
import torch

from fitact.fitter.expr.exact import value as exact_value
from fitact.fitter.expr.parser import parse
from fitact.runtime.kernels import reference_math
from tests.conftest import INTERPRETED
from tests.support import values
from tests.support.device import apply
from tests.support.reals import MP, REAL
from tests.support.values import EACH, FORMULAS, Formula

# in half precision the device code computes the same before it is rounded
DTYPES = (torch.float32,) if INTERPRETED else (torch.bfloat16, torch.float16, torch.float32)
# NaN and infinity on purpose, in the interpreter's NumPy, which warns of them
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning") if INTERPRETED else []
of_pytorch = pytest.mark.skipif(INTERPRETED, reason="not of device code")


# What a report names: of what, what it is, at which x, and what is true.
REPORT = re.compile(r"(in float32 it is|its derivative is computed as) (\S+) at x = (\S+) in place of (\S+): ")


def may_fail(formula: Formula) -> bool:
    """Whether `check` reports the value; or anything at all, as it reports one thing, if that is all we know."""
    said = values.reported(formula.text) or ""
    return "in float32" in said or (formula.lost > 0 and said != "")


def exact(formula: Formula, at: values.Array) -> values.Array:
    """Return f with 260 digits at the points, rounded to float64, from the formula as it was typed."""
    return np.array([float(exact_value(parse(formula.text), point, 260)) for point in at.tolist()])


def defined(name: str, at: values.Array) -> values.Array:
    """Return a function's values from its definition with 700 digits, erfc's with 50, rounded to float64."""
    function = REAL[name.removesuffix("_half").removesuffix("_full")]
    with MP.workdps(50 if name in ("erfc", "ndtr", "ndtr_half") else 700):
        return np.array([float(function(MP.mpf(point))) for point in at.tolist()])


def value_of(formula: Formula, x: torch.Tensor) -> torch.Tensor:
    module = values.module(formula.text)
    actual: torch.Tensor = apply(module._value, x) if INTERPRETED else module._torch_value(x)
    return actual


@EACH
def test_value(formula: Formula) -> None:
    if may_fail(formula):
        pytest.skip("reported")
    every = values.points(torch.float32)
    known = values.bounds(formula, every.double().numpy())
    for x in map(values.points, DTYPES):
        at = torch.searchsorted(every, x.float())
        values.check(formula, value_of(formula, x), x, known=[each[at] for each in known])


@of_pytorch
@EACH
def test_value_in_float64(formula: Formula) -> None:
    """Where float32 is good enough, float64 is: compared with many digits."""
    if values.reported(formula.text):
        pytest.skip("reported")
    far = np.geomspace(1.7e-7, 1e30, 14)
    at = np.concatenate([np.linspace(-29.3, 30.1, 15), far, -far, [-265.0, -95.0, -60.0, 60.0, 95.0]])
    at = at.astype(np.float32).astype(np.float64)
    true, (_, allowed) = exact(formula, at), values.bounds(formula, at, torch.float64)
    actual = value_of(formula, torch.from_numpy(at)).numpy()
    representable = np.abs(true) < 1e300
    wrong = representable & ~(np.abs(actual - np.where(representable, true, 0.0)) <= allowed)
    assert not wrong.any(), (formula.text, at[wrong][0], actual[wrong][0], true[wrong][0])


@of_pytorch
@EACH
def test_to_the_end_of_the_range(formula: Formula) -> None:
    """To 1.3e38: nearer to the end of float32's range, parts of a formula may overflow where it does not."""
    if may_fail(formula):
        pytest.skip("reported")
    far = torch.from_numpy(np.geomspace(1e18, 1.3e38, 2_000).astype(np.float32))
    x = torch.cat([-far, far])
    values.check(formula, value_of(formula, x), x, limit=1.3e38)


@EACH
def test_nan_and_infinity(formula: Formula) -> None:
    """NaN stays NaN unless the formula itself makes a number of it; finite limits are reached."""
    special = torch.tensor([torch.nan, torch.inf, -torch.inf])
    true = formula.activation.value(special.double().numpy())
    for dtype in DTYPES:
        actual = value_of(formula, special.to(dtype)).double().numpy()
        assert np.isnan(actual[0]) == np.isnan(true[0])
        finite = np.isfinite(true[1:])
        eps = 1e-6 if INTERPRETED else float(torch.finfo(dtype).eps)
        np.testing.assert_allclose(actual[1:][finite], true[1:][finite], rtol=eps, atol=1e-7 * INTERPRETED)


@EACH
def test_what_is_reported_is_so(formula: Formula) -> None:
    """At the x that it names, by half of what is allowed: PyTorch's functions round otherwise than NumPy's."""
    report = values.reported(formula.text) or ""
    if not report or (INTERPRETED and "in float32" not in report):
        pytest.skip("nothing is reported of it, so there is nothing to confirm")
    what, _, at, said = REPORT.match(report).groups()
    x = (float(at) * np.linspace(1 - 5e-4, 1 + 5e-4, 41)).astype(np.float32)  # `at` has four digits
    wide = x.astype(np.float64)
    if "float32" in what:
        actual = value_of(formula, torch.from_numpy(x)).double().numpy()
        true = exact(formula, wide)
        _, limits = values.bounds(Formula(formula.name, formula.text, values.PROMISED, values.LOST), wide)
    else:
        actual = formula.activation.derivative(wide)
        function = formula.activation.derivative_formula
        true = np.array([float(exact_value(function, point, 20)) for point in wide.tolist()])
        limits = 1e-7 * np.maximum(1.0, np.abs(true))
    assert np.min(np.abs(true - float(said))) <= 2e-3 * np.max(np.abs(true))
    assert np.any(~(np.abs(actual - true) <= limits / 2))


@of_pytorch
@pytest.mark.full
def test_some_are_reported() -> None:
    assert 5 <= sum(values.reported(formula.text) is not None for formula in FORMULAS) <= len(FORMULAS) / 3


# Units in the last place, the worst that was seen and a little more; absolute errors below 1.2e-38 do not count.
ULPS = {"hypot1": 1.0, "isru": 2.0, "squareplus": 2.5, "sech2": 5.0, "tsech2": 5.0, "logcosh": 4.0}


@of_pytorch
@pytest.mark.parametrize("name", values.FLOAT64)
def test_the_reference_of_functions(name: str) -> None:
    """float64 is within 1e-13 of the definition with 700 digits."""
    at = values.function_points(name)[::401]
    if name in ("exp_full", "exp_half", "expm1", "expm1_half", "sinh", "cosh"):
        at = at[np.abs(at) < 700]
    with np.errstate(all="ignore"):
        actual = values.FLOAT64[name](at)
    true = defined(name, at)
    assert np.all(np.abs(actual - true) <= 1e-13 * np.abs(true) + 1e-100)


@of_pytorch
@pytest.mark.parametrize("name", ULPS)
def test_composed(name: str) -> None:
    near, far = values.function_points(name), np.geomspace(1e-300, 1e300, 61)
    wide = np.concatenate([values.function_points(name, np.float64)[::401], far, -far])
    with np.errstate(all="ignore"):
        reference = values.FLOAT64[name](near)
    for kind, at, true in ((np.float32, near, reference), (np.float64, wide, defined(name, wide))):
        result = getattr(reference_math, name)(torch.from_numpy(at.astype(kind))).double().numpy()
        error, i = values.worst(result, true, kind)
        assert error <= ULPS[name], (at[i], result[i], error)
