"""Products of a formula in g and one in u: what is taken apart, and what is refused."""

import math

import numpy as np
import pytest

from fitact.errors import UsageError
from fitact.fitter.analysis.gate import Gate, is_gate
from fitact.fitter.expr.catalog import GATES


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def silu(x):
    return x * sigmoid(x)


def gelu(x):
    return x * math.erfc(-x / math.sqrt(2)) / 2


def clamped(g, u):
    g, u = min(g, 7), min(max(u, -7), 7)
    return g * sigmoid(1.702 * g) * (u + 1)


PRODUCTS = [
    ("swiglu", lambda g, u: silu(g) * u),
    ("geglu", lambda g, u: gelu(g) * u),
    ("reglu", lambda g, u: max(g, 0) * u),
    ("glu", lambda g, u: sigmoid(g) * u),
    ("swiglu_clamped", clamped),
    ("u*silu(g)", lambda g, u: silu(g) * u),
    ("-silu(g)*-u/-2", lambda g, u: -silu(g) * u / 2),
    ("-(silu(g)*(u/3))", lambda g, u: -silu(g) * u / 3),
    ("u/(1 + exp(-g))", lambda g, u: sigmoid(g) * u),
    ("u/(g*g + 1)/2", lambda g, u: u / (g * g + 1) / 2),
    ("2/(pi*(1 + u**2)*(1 + g**2))", lambda g, u: 2 / math.pi / (1 + u * u) / (1 + g * g)),
    ("4*tanh(g/4)*sigmoid(g)*25*tanh(u/25)", lambda g, u: 100 * math.tanh(g / 4) * sigmoid(g) * math.tanh(u / 25)),
    ("where(g > 0, g, 0.1*g)*(u - 1)", lambda g, u: (g if g > 0 else 0.1 * g) * (u - 1)),
    ("leaky_relu(g, 0.2)*u*g", lambda g, u: (g if g > 0 else 0.2 * g) * u * g),
    ("g*u", lambda g, u: g * u),
]


@pytest.mark.parametrize(("text", "product"), PRODUCTS, ids=[text for text, _ in PRODUCTS])
def test_the_factors_give_the_product(text, product):
    assert is_gate(text)
    gate = Gate.of(text)
    rng = np.random.default_rng(0)
    g, u = rng.normal(0, 5, (2, 100))
    expected = np.vectorize(product)(g, u)
    np.testing.assert_allclose(gate.a.value(g) * gate.b.value(u), expected, rtol=1e-12)
    assert Gate(gate.name, gate.expression) == gate


def test_a_single_call_is_the_activation_of_the_catalog():
    gate = Gate.of("leaky_relu(g, 0.2) * silu(u)")
    assert (gate.a.name, dict(gate.a.parameters), gate.a.torch) == (
        "leaky_relu",
        {"negative_slope": 0.2},
        "F.leaky_relu(x, 0.2)",
    )
    assert gate.b.name == "silu"
    assert Gate.of("2*silu(g)*u").a.name is None
    assert Gate.of("silu(2*g)*u").a.name is None
    assert Gate.of("-silu(g)*u").a.name is None


def test_constants_belong_to_a():
    gate = Gate.of("u*3*silu(g)/5")
    assert gate.b.expression == "x"
    assert gate.a.value(1.0) == pytest.approx(0.6 * silu(1.0), rel=1e-14)


REFUSED = [
    ("silu(g)", "with both g and u, got no factor of u"),
    ("3*tanh(u)", "with both g and u, got no factor of g"),
    ("silu(g + u)*u", "column 1: expected a product a(g)*b(u), got the factor 'silu(g + u)', which mixes g and u"),
    ("u*2*(g - u)", "column 6: expected a product a(g)*b(u), got the factor 'g - u', which mixes g and u"),
    ("silu(g) + u", "got the factor 'silu(g) + u', which mixes g and u"),
    ("(g*u)**2", "got the factor '(g * u) ** 2', which mixes g and u"),
    ("silu(g)*x", "column 9: unknown name 'x'; known are g, u,"),
    ("h*silu(g)*u", "column 1: unknown name 'h'; known are g, u,"),
    ("g(u)*u", "column 1: g is an argument, not a function"),
    ("0*g*u", "of its factor of g, called x: activation '0 * x' does not depend on x"),
    ("g*(u - u)", "of its factor of u, called x: activation 'x - x' does not depend on x"),
    ("u*g/0", "column 5: division by zero"),
    ("silu(g, 3)*u", "silu takes 1 argument, got 2"),
    ("exp(g)*u*1e200*1e200", "out of range"),
    ("g*[u]", "List is not part of the language"),
    ("(lambda g: g)*u", "Lambda is not part of the language"),
    ("g.real*u", "Attribute is not part of the language"),
    ("tanh(*g)*u", "tanh takes plain arguments only"),
    ("g*u; 1", "unexpected character"),
    ("g*u #", "unexpected character"),
    ("*".join(["g"] * 100 + ["u"]), "nested deeper than 60"),
    ("-" * 100 + "g*u", "nested deeper than 60"),
    ("g*" + "u" * 3000, "at most 2000"),
    ("swish", "unknown gate 'swish': expected one of geglu"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_refused(text, message):
    with pytest.raises(UsageError) as refused:
        Gate.of(text)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_meant_as_a_gate():
    assert all(map(is_gate, GATES))
    assert not any(map(is_gate, ("gelu", "silu", "x*sigmoid(x)", "sign(x)*square(x)")))
