"""The functions of runtime/kernels/tiles/math.py, one by one, over the whole range of float32, interpreted."""

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special

from fitact.runtime.kernels.tiles import jit, math, tl
from tests.support import values
from tests.support.device import SIZE, apply
from tests.support.generated import EACH_HALF, patterns
from tests.support.rows import listed

# NaN and infinity on purpose, in NumPy, which warns of them
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@jit
def _apply_power(x, y, n, exponent: tl.constexpr, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(y + at, math.power(tl.load(x + at, mask=at < n, other=0.0), exponent), mask=at < n)


# Units in the last place: the worst that was seen, and a little more; absolute errors below 1.2e-38 do not count.
# The largest are relative errors of 3e-6, 4e-6 and 6e-5.
ULPS = """
asinh 4   atan 3   cosh 5   erfc 12   exp_full 3   exp_half 1.5   expm1 5   expm1_half 40   exponential 3
hypot1 1.5   isru 2.5   log1p 4   logcosh 7.5   ndtr 12   ndtr_half 1000   sech2 5   sech2_half 10   sigmoid 4
sigmoid_half 5   sinh 6   softplus 4.5   softplus_half 4.5   softsign 2   squareplus 3   tan 4   tanh 5.5
tanh_half 50   tanh_softplus 6   tanh_softplus_half 7   tsech2 5.5
"""
# And these many more where the exponent is rounded: of |u| − log 2, of u², of u.
SLACK = {
    **dict.fromkeys(("sinh", "cosh"), np.abs),
    "erfc": lambda u: np.where(u > 0, u * u, 0.0),
    "ndtr": lambda u: np.where(u < 0, 2 * u * u, 0.0),  # of u/√2 too
    **dict.fromkeys(("sigmoid_half", "tanh_softplus_half"), lambda u: np.where(u < 0, -2 * u, 0.0)),
    **dict.fromkeys(("exp_half", "expm1_half"), lambda u: 2 * np.abs(u)),
    "sech2_half": lambda u: 4 * np.abs(u),
}


@pytest.mark.parametrize(("name", "most"), [row.split() for row in listed(ULPS)])
def test_device_functions(name: str, most: str) -> None:
    at = values.function_points(name)
    actual = apply(getattr(math, name), torch.from_numpy(at.astype(np.float32))).double().numpy()
    error, i = values.worst(actual, values.FLOAT64[name](at), slack=SLACK.get(name, np.zeros_like)(at))
    assert error <= float(most), (at[i], actual[i], error)
    assert apply(getattr(math, name), torch.tensor([torch.nan])).isnan().all()


@EACH_HALF
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gelu_fewbit3", lambda x: x * special.ndtr(x)),
        ("silu_fewbit3", lambda x: x * special.expit(x)),
        ("mish_fewbit3", lambda x: x * values.FLOAT64["tanh_softplus"](x)),
        ("softplus_output", lambda x: np.logaddexp(x, 0)),
        ("exp_output", np.exp),
        ("tanh_output", np.tanh),
        ("elu_output", lambda x: np.where(x > 0, x, np.expm1(x))),
        ("gelu_tanh_fewbit3", lambda x: x * special.expit(np.sqrt(8 / np.pi) * (x + 0.044715 * x**3))),
    ],
)
def test_short_values_are_lost_in_the_rounding(name: str, value: Any, dtype: torch.dtype) -> None:
    """At every number of half precision, before the result is rounded: off by a fraction of that rounding."""
    x, info = patterns(dtype), torch.finfo(dtype)
    x = x[x.isfinite() & ((x == 0) | (x.abs() >= info.smallest_normal))].float()
    short = importlib.import_module(f"fitact.generated.{name}")._value_half
    true = value(x.double().numpy())
    known = np.abs(true) <= info.max
    x, true = x[known], true[known]
    off = np.abs(apply(short, x).double().numpy() - true)
    roundings = np.maximum(np.abs(true) * info.eps / 4, info.smallest_normal * info.eps / 2)  # at least
    flushed = 1.2e-38 * np.maximum(1.0, np.abs(x.double().numpy()))  # a factor that is subnormal is 0
    assert (np.maximum(off - flushed, 0.0) / roundings).max() <= {torch.bfloat16: 0.06, torch.float16: 0.25}[dtype]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 16])
def test_power(n: int) -> None:
    at = values.function_points("power")
    x = torch.from_numpy(at.astype(np.float32))
    y = torch.zeros_like(x)
    _apply_power[(1,)](x, y, x.numel(), n, SIZE)
    error, i = values.worst(y.double().numpy(), at**n)
    assert error <= n - 1, (at[i], error)


@pytest.mark.parametrize("name", ["relu", "sign"])
def test_functions_that_do_not_round(name: str) -> None:
    x = torch.from_numpy(values.function_points(name).astype(np.float32))
    x = torch.cat([x, torch.tensor([torch.nan, torch.inf, -torch.inf])])
    actual = apply(getattr(math, name), x)
    torch.testing.assert_close(actual, getattr(torch, name)(x), rtol=0, atol=0, equal_nan=True)
