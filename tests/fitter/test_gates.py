"""Products of a formula in g and one in u: what is taken apart, and what is refused."""

import numpy as np
import pytest

from fitact.fitter.analysis import Gate
from fitact.fitter.catalog import GATES, is_gate
from tests.support.reals import MP, REAL
from tests.support.refusals import refused

# the gates of the catalog written out; and products that are their own oracle, as Python evaluates them
NAMED = {
    "swiglu": "silu(g)*u",
    "geglu": "gelu(g)*u",
    "geglu_tanh": "g/2*(1 + tanh(sqrt(2/pi)*(g + 0.044715*g**3)))*u",
    "quick_geglu": "g*sigmoid(1.702*g)*u",
    "reglu": "max(g, 0)*u",
    "glu": "sigmoid(g)*u",
    "swiglu_clamped": "min(g, 7)*sigmoid(1.702*min(g, 7))*(min(max(u, -7), 7) + 1)",
}
PRODUCTS = [
    *("u*silu(g)", "-silu(g)*-u/-2", "-(silu(g)*(u/3))", "u/(1 + exp(-g))", "u/(g*g + 1)/2", "g*u"),
    *("2/(pi*(1 + u**2)*(1 + g**2))", "4*tanh(g/4)*sigmoid(g)*25*tanh(u/25)", "leaky_relu(g, 0.2)*u*g"),
    "where(g > 0, g, 0.1*g)*(u - 1)",
]


@pytest.mark.parametrize("text", [*GATES, *PRODUCTS])
def test_the_factors_give_the_product(text):
    assert is_gate(text)
    gate, product = Gate.of(text), NAMED[text] if text in GATES else text
    g, u = np.random.default_rng(0).normal(0, 5, (2, 100))
    expected = [float(eval(product, REAL | {"g": MP.mpf(a), "u": MP.mpf(b)})) for a, b in zip(g, u, strict=True)]
    np.testing.assert_allclose(gate.a.value(g) * gate.b.value(u), expected, rtol=1e-12)
    assert Gate(gate.name, gate.expression) == gate


def test_a_single_call_is_the_activation_of_the_catalog_and_constants_belong_to_a():
    gate = Gate.of("leaky_relu(g, 0.2) * silu(u)")
    assert (gate.a.name, gate.a.torch, gate.b.name) == ("leaky_relu", "F.leaky_relu(x, 0.2)", "silu")
    for text in ("2*silu(g)*u", "silu(2*g)*u", "-silu(g)*u", "u*3*silu(g)/5"):
        assert (Gate.of(text).a.name, Gate.of(text).b.expression) == (None, "x")


REFUSED = [
    ("silu(g)", "with both g and u, got no factor of u"),
    ("3*tanh(u)", "with both g and u, got no factor of g"),
    ("silu(g + u)*u", "column 1: expected a product a(g)*b(u), got the factor 'silu(g + u)', which mixes g and u"),
    ("u*2*(g - u)", "column 6: expected a product a(g)*b(u), got the factor 'g - u', which mixes g and u"),
    ("silu(g) + u", "got the factor 'silu(g) + u', which mixes g and u"),
    ("(g*u)**2", "got the factor '(g * u) ** 2', which mixes g and u"),
    ("silu(g)*x", "column 9: unknown name 'x'; known are g, u,"),
    ("g(u)*u", "column 1: g is an argument, not a function"),
    ("0*g*u", "of its factor of g, called x: activation '0 * x' does not depend on x"),
    ("g*(u - u)", "of its factor of u, called x: activation 'x - x' does not depend on x"),
    ("u*g/0", "column 5: division by zero"),
    ("*".join(["g"] * 100 + ["u"]), "nested deeper than 60"),
    ("swish", "unknown gate 'swish': expected one of geglu"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_refused(text, message):
    assert message in refused(Gate.of, text)


@pytest.mark.parametrize("text", ["gelu", "silu", "x*sigmoid(x)", "sign(x)*square(x)"])
def test_what_is_no_gate(text):
    assert not is_gate(text)
