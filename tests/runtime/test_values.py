"""Values of modules generated from formulas: by PyTorch's operators and, interpreted, by device code.

A formula that `check` reports may fail, and does fail where `check` says; any other fails nowhere.
"""

import numpy as np
import pytest
import torch

from fitact.runtime.kernels import reference_math
from tests.conftest import INTERPRETED
from tests.support import values
from tests.support.device import apply
from tests.support.values import EACH, FORMULAS, Formula

# in half precision the device code computes the same before it is rounded
DTYPES = (torch.float32,) if INTERPRETED else (torch.bfloat16, torch.float16, torch.float32)
# NaN and infinity on purpose, in the interpreter's NumPy, which warns of them
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning") if INTERPRETED else []
of_pytorch = pytest.mark.skipif(INTERPRETED, reason="not of device code")


def value_of(formula: Formula, x: torch.Tensor) -> torch.Tensor:
    module = values.module(formula.text)
    actual: torch.Tensor = apply(module._value, x) if INTERPRETED else module._torch_value(x)
    return actual


@EACH
def test_value(formula: Formula) -> None:
    if values.may_fail(formula):
        pytest.skip("reported")
    for dtype in DTYPES:
        x = values.points(dtype)
        values.check(formula, value_of(formula, x), x)


@of_pytorch
@EACH
def test_value_in_float64(formula: Formula) -> None:
    """Where float32 is good enough, float64 is: compared with many digits."""
    if values.reported(formula.text):
        pytest.skip("reported")
    at = values.few_points()
    true, allowed = values.exact(formula, at), values.allowed(formula, at, torch.float64)
    actual = value_of(formula, torch.from_numpy(at)).numpy()
    representable = np.abs(true) < 1e300
    wrong = representable & ~(np.abs(actual - np.where(representable, true, 0.0)) <= allowed)
    assert not wrong.any(), (formula.text, at[wrong][0], actual[wrong][0], true[wrong][0])


@of_pytorch
@EACH
def test_to_the_end_of_the_range(formula: Formula) -> None:
    """To 1.3e38: nearer to the end of float32's range, parts of a formula may overflow where it does not."""
    if values.may_fail(formula):
        pytest.skip("reported")
    far = torch.from_numpy(np.geomspace(1e18, 1.3e38, 2_000).astype(np.float32))
    x = torch.cat([-far, far])
    values.check(formula, value_of(formula, x), x, limit=1.3e38)


@EACH
def test_nan_and_infinity(formula: Formula) -> None:
    """NaN stays NaN unless the formula itself makes a number of it; finite limits are reached."""
    special = torch.tensor([torch.nan, torch.inf, -torch.inf])
    true = values.truth(formula, special.double().numpy())
    for dtype in DTYPES:
        actual = value_of(formula, special.to(dtype)).double().numpy()
        assert np.isnan(actual[0]) == np.isnan(true[0])
        finite = np.isfinite(true[1:])
        eps = 1e-6 if INTERPRETED else float(torch.finfo(dtype).eps)
        np.testing.assert_allclose(actual[1:][finite], true[1:][finite], rtol=eps, atol=1e-7 * INTERPRETED)


@EACH
def test_what_is_reported_is_so(formula: Formula) -> None:
    """At the x that it names, by half of what is allowed: PyTorch's functions round otherwise than NumPy's."""
    if not values.reported(formula.text) or (INTERPRETED and not values.value_is_reported(formula.text)):
        pytest.skip("nothing is reported of it, so there is nothing to confirm")
    if values.value_is_reported(formula.text):
        _, at, said = values.named(formula.text, values.VALUE)
        x = values.neighbours(at).double().numpy()
        actual = value_of(formula, torch.from_numpy(x).float()).double().numpy()
        true = values.exact(formula, x)
        limits = values.allowed(Formula(formula.name, formula.text, values.PROMISED, values.LOST), x)
    else:
        _, at, said = values.named(formula.text, values.DERIVATIVE)
        x = values.neighbours(at).double().numpy()
        actual = formula.activation.derivative(x)
        function = formula.activation.derivative_formula
        true = np.array([float(values.exact_value(function, point, 20)) for point in x.tolist()])
        limits = 1e-7 * np.maximum(1.0, np.abs(true))
    assert np.min(np.abs(true - said)) <= 2e-3 * np.max(np.abs(true))
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
    true = values.defined(name, at)
    assert np.all(np.abs(actual - true) <= 1e-13 * np.abs(true) + 1e-100)


@of_pytorch
@pytest.mark.parametrize("name", ULPS)
def test_composed(name: str) -> None:
    near, far = values.function_points(name), np.geomspace(1e-300, 1e300, 61)
    wide = np.concatenate([values.function_points(name, np.float64)[::401], far, -far])
    with np.errstate(all="ignore"):
        reference = values.FLOAT64[name](near)
    for kind, at, true in ((np.float32, near, reference), (np.float64, wide, values.defined(name, wide))):
        result = getattr(reference_math, name)(torch.from_numpy(at.astype(kind))).double().numpy()
        error, i = values.worst(result, true, kind)
        assert error <= ULPS[name], (at[i], result[i], error)
