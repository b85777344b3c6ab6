"""f′ from the output and a piece: against dense samples and all inputs of half precision."""

import json

import numpy as np
import pytest
import torch
from scipy import special

from fitact.base import FitWarning
from fitact.fitter.analysis import Activation
from fitact.fitter.methods import inverted, inverted_published
from fitact.fitter.numerics import DTYPES, minimax
from tests.codegen.test_standalone import shipped
from tests.support.curves import CURVES
from tests.support.generated import patterns
from tests.support.inverses import fitted, paper
from tests.support.refusals import refused

pytestmark = pytest.mark.full

FLOORS = {  # of any function of y and that many bits, x and y in the dtype
    ("gelu", 1): {"bfloat16": 0.010571, "float16": 0.004837},
    ("silu", 1): {"bfloat16": 0.011371, "float16": 0.00377},
    ("gelu", 2): {"bfloat16": 0.006597, "float16": 0.002496},
    ("silu", 2): {"bfloat16": 0.006242, "float16": 0.002065},
}


def cast(values, dtype):
    """float64 rounded to a dtype by PyTorch, by way of float32 as kernels do."""
    return torch.tensor(values).float().to(getattr(torch, dtype)).double().numpy()


def derivatives(fit, x, y, dtype="float32"):
    return fit.evaluate(y, fit.code(x, dtype), dtype).astype(np.float64)


def floor(keys, true):
    """By brute force: the least that any value is off what the x of one key have, relative to the size of each."""
    spread = {}
    for key, d in zip(keys, true, strict=True):
        spread.setdefault(key, []).append(d)
    ends = [(min(each), max(each)) for each in spread.values()]
    return max((b - a) / (max(1.0, abs(a)) + max(1.0, abs(b))) for a, b in ends)


@pytest.mark.parametrize(("name", "bits"), FLOORS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_comes_near_the_floor(name, bits, dtype):
    value, derivative = CURVES[name].value, CURVES[name].derivative
    fit = shipped(f"{name}_inverted{bits}")
    x = np.unique(patterns(getattr(torch, dtype)).double().numpy())
    x = x[np.isfinite(x)]
    x = x[np.isfinite(cast(value(x), dtype))]
    y, true = cast(value(x), dtype), derivative(x)
    off = np.abs(derivatives(fit, x, y, dtype) - true).max()
    published = FLOORS[name, bits][dtype]
    assert fit.bits == bits and len(fit.approximants[dtype]) == 2**bits
    assert off <= (1.25, 1.15)[bits - 1] * published
    assert off == pytest.approx(fit.error[dtype], rel=1e-3)
    assert fit.floor[dtype] <= 1.002 * published  # the cells may be better than those of that figure
    keys = list(zip(y, fit.code(x, dtype), strict=True))
    assert float(f"{floor(keys, true):.4g}") == fit.floor[dtype]


def test_hardswish_is_exact_on_its_cells():
    fit = fitted("hardswish")
    assert fit.bits == 2
    degrees = [(len(each.numerator), each.denominator) for each in fit.approximants["float32"]]
    assert degrees == [(length, (1.0,)) for length in (1, 2, 2, 1)]
    x = cast(np.concatenate([np.linspace(-8, 8, 4001), [-3, -1.5, 3, np.nextafter(np.float32(3), 0)]]), "float32")
    y = cast(CURVES["hardswish"].value(x), "float32")
    off = np.abs(derivatives(fit, x, y) - CURVES["hardswish"].derivative(x))
    assert off[np.abs(x + 1.5) > 0.05].max() <= 2e-6
    assert off.max() <= 1.1e-4  # at the minimum: twice the floor
    assert off[(x >= 3) | (x <= -3)].max() == 0


REFUSED = [
    ("x + 2*sin(x)", None, None, "its monotone pieces over the reals are too many or too narrow"),
    ("log(x)", None, None, "not defined all over the domain"),
    ("sqrt(x)", None, (0, 4), "infinite at x = 0"),
    ("x**3 - x", None, None, "fit it on a smaller domain"),
    ("1e38*x", None, None, "derivative is 1e+38 at x = "),
    ("silu(x)/1000", None, None, "its slopes are 0.0011 at most, and the error is not far below"),
    ("gelu", 0, None, "use --bits 1"),
    ("gelu", 1, (1, 1), "domain: expected increasing numbers"),
    ("sin(x)", None, (-40, 40), "take 5 bits to tell apart"),
]


@pytest.mark.parametrize(("text", "bits", "domain", "message"), REFUSED)
def test_refused(text, bits, domain, message):
    assert message in refused(inverted.fit, Activation.of(text), "fitted", bits, domain=domain)


def test_a_part_that_overflows_is_refused():
    with pytest.warns(FitWarning, match="overflows"):
        message = refused(inverted.fit, Activation.of("x**2*exp(-abs(x))"), "fitted")
    assert "a part of it overflows in float32 at x = -1.84467e+19" in message


def test_a_part_that_overflows_where_x_nearly_does_matters_to_no_fit():
    fit = inverted.fit(Activation.of("2*silu(x)"), "fitted")
    assert max(fit.error.values()) < 0.03


def test_evaluation():
    fit = shipped("gelu_inverted1")
    x = np.array([[-np.inf, -1e30, -5.0], [np.inf, 1e30, np.nan]])
    assert fit.code(x).tolist() == [[0, 0, 0], [1, 1, 0]]
    for dtype in DTYPES:
        derivative = fit.evaluate(np.array([-0.0, 0.0, 3e38, np.inf, -np.inf]), np.array([0, 0, 1, 1, 1]), dtype)
        error = fit.error[dtype]
        assert derivative.dtype == np.float32
        assert derivative[:4] == pytest.approx([0, 0, 1, 1], abs=error)
        assert derivative[4] == pytest.approx(0, abs=3 * error)  # no output of f: taken as the minimum
    assert np.isnan(fit.evaluate(np.array([np.nan]), np.array([1])))[0]


def test_a_formula_that_fails_in_float32_is_warned_of():
    with pytest.warns(FitWarning, match="overflows"):
        inverted.fit(Activation.of("x*log(1 + x**2)/8 + x"), "fitted", domain=(-3, 3), tol=0.01)


# of either approximant, of exact outputs in float64; of outputs in bfloat16, float16 and float32
PAPER = [
    ("gelu", (0.00122, 0.0187), (0.0325, 0.0204, 0.0187)),
    ("silu", (0.000831, 0.00291), (0.0163, 0.0064, 0.0029)),
]


@pytest.mark.parametrize(("name", "published", "of_dtypes"), PAPER)
def test_the_papers_approximants(name, published, of_dtypes):
    value, derivative, middle = CURVES[name].value, CURVES[name].derivative, CURVES[name].minimum
    fit = inverted_published.published(f"{name}_inverted_published")
    x = np.linspace(-20, 20, 400_001)
    parts = json.loads(fit.to_json())["approximants"]["float32"]
    wrong = [np.abs(paper(part, value(x), part["anchor"]) - derivative(x)) for part in parts]
    off = [wrong[0][x < middle].max(), wrong[1][x > middle].max()]
    assert [float(f"{error:.3g}") for error in off] == list(published)
    assert fit.bits == 1 and fit.borders["float32"] == (np.float32(middle),)
    of_rounded = [approximant.error for approximant in fit.approximants["float32"]]
    assert of_rounded == pytest.approx(off, abs=1e-4)
    assert [fit.error[dtype] for dtype in DTYPES] == pytest.approx(of_dtypes, abs=6e-5)


BITS = {"celu": 1, "elu": 1, "hardsigmoid": 2, "leaky_relu": 1, "logsigmoid": 0, "relu6": 2, "selu": 1}


@pytest.mark.parametrize(("text", "bits"), [*BITS.items(), ("sigmoid", 0), ("x + sin(x)**2", 0)])
def test_what_is_monotone_costs_a_bit_only_for_its_corners(text, bits):
    fit = fitted(text, domain=(-1, 2) if text.startswith("x") else None)
    assert fit.bits == bits
    assert fit.error["float32"] <= 1e-4


@pytest.mark.parametrize(("n", "published"), [(2, 7.3587e-3), (3, 7.9938e-4), (4, 8.6522e-5)])
def test_quotients_come_as_near_as_published(n: int, published: float) -> None:
    """Nearer to exp(-t) than on all of t ≥ 0, where the least are Carpenter, Ruttan and Varga's (1984)."""
    t = np.linspace(0, 20, 1000)
    decay, one = np.exp(-t), np.ones_like(t)
    reached, (p, q) = minimax(t, decay, decay, one, one, (n, n), 1.0)
    found = np.polynomial.polynomial.polyval(t, p) / np.polynomial.polynomial.polyval(t, q)
    assert np.max(np.abs(found - decay)) == pytest.approx(reached, rel=0.02)
    assert reached < published


@pytest.mark.parametrize(("end", "degree"), [(12, 13), (40, 15)])
def test_polynomials_come_as_near_as_their_series_tells(end: float, degree: int) -> None:
    """The distance of exp(-t) is between the next term of its Chebyshev series and the sum of all the next."""
    t = np.linspace(0, end, 1000)
    decay, one = np.exp(-t), np.ones_like(t)
    reached, _ = minimax(t, decay, decay, one, one, (degree, 0), 1.0)
    terms = 2 * special.ive(np.arange(degree + 1, 100), end / 2)
    assert terms[0] < reached < terms.sum()


def test_the_stated_error_counts_the_ends_of_a_domain():
    x = np.array([-10.0, 10.0])
    fit = inverted.fit(Activation.of("exp(x)"), "a", domain=(-10.0, 10.0))
    for dtype in ("bfloat16", "float16"):
        off = np.abs(derivatives(fit, x, cast(np.exp(x), dtype), dtype) - np.exp(x))
        assert np.all(off <= fit.error[dtype] * 1.001 * np.maximum(1.0, np.exp(x))), (dtype, off)


def test_the_stated_error_counts_all_values_up_to_1e37():
    fit = inverted.fit(Activation.of("exp(x)/2"), "a")
    x = np.linspace(80.0, 85.88, 1001).astype(np.float32).astype(np.float64)
    true = np.exp(x) / 2
    assert np.max(np.abs(derivatives(fit, x, true) / true - 1)) <= fit.error["float32"] * 1.001


def test_the_floor_of_steep_slopes():
    fit = inverted.fit(Activation.of("exp(x) + 1000"), "a")
    # f' from 0 to 2 where y rounds to 1000: the relative errors of 2/3 are both 2/3
    assert fit.floor["bfloat16"] == pytest.approx(2 / 3, rel=1e-2)


@pytest.mark.parametrize(
    ("text", "domain"), [("sinh(x)", (-5.0, 5.0)), ("where(x > 0, x**3 + x, x)", (-3.0, 3.0))]
)
def test_quotients_that_exist_are_found(text, domain):
    # sqrt(1 + y**2) up to 74 by Zolotarev's quotient of degrees 8 and 8, in float32: 0.0072, 0.0043 and 0.0039
    fit = inverted.fit(Activation.of(text), "a", domain=domain)
    assert max(fit.error.values()) <= 0.01
