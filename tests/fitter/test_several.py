"""Formulas in several arguments: products of a formula in g and one in u, and formulas with learned parameters."""

import dataclasses

import numpy as np
import pytest

from fitact.fitter.analysis import Activation, Gate, Learned, problem
from fitact.fitter.catalog import GATES, LEARNED, is_gate
from tests.support.reals import MP, REAL
from tests.support.refusals import refused
from tests.support.rows import listed

# the gates of the catalog written out; and products that are their own oracle, as Python evaluates them
WRITTEN = listed("""
swiglu: silu(g)*u   geglu: gelu(g)*u   quick_geglu: g*sigmoid(1.702*g)*u   reglu: max(g, 0)*u   glu: sigmoid(g)*u
geglu_tanh: g/2*(1 + tanh(sqrt(2/pi)*(g + 0.044715*g**3)))*u
swiglu_clamped: min(g, 7)*sigmoid(1.702*min(g, 7))*(min(max(u, -7), 7) + 1)
""")
NAMED = dict(row.split(": ") for row in WRITTEN)
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


def test_what_is_no_gate():
    assert not any(map(is_gate, ("gelu", "silu", "x*sigmoid(x)", "sign(x)*square(x)")))


AT = np.array([-1e4, -30.0, -3.3, -0.4, -1e-3, 1e-3, 0.3, 2.2, 30.0, 1e4])
SIGMOID, SOFTPLUS, TANH, ERF, EXPM1 = (REAL[name] for name in ("sigmoid", "softplus", "tanh", "erf", "expm1"))
FORMULAS = {
    "dyt": lambda x, a, g, b: g * TANH(a * x) + b,
    "derf": lambda x, a, s, g, b: g * ERF(a * x + s) + b,
    "prelu": lambda x, w: x if x > 0 else w * x,
    "swish_beta": lambda x, b: x * SIGMOID(b * x),
    "xielu": lambda x, p, n: (
        SOFTPLUS(p) * x**2 + x / 2 if x > 0 else (SOFTPLUS(n) + 0.5) * (EXPM1(min(x, MP.mpf("-1e-6"))) - x) + x / 2
    ),
}


@pytest.mark.parametrize("name", LEARNED)
def test_values_and_derivatives(name: str) -> None:
    formula = Learned.of(name, {})
    assert dataclasses.replace(formula, name=None).formula == formula.formula
    start = formula.start()
    assert start is not None
    np.testing.assert_allclose(start.value(AT), formula.at_start(formula.formula, AT), rtol=1e-12, atol=1e-15)
    with MP.workdps(60):
        starts = [MP.mpf(repr(number.start)) for number in formula.numbers]
        formulas = [formula.formula, formula.derivative_formula, *formula.gradient_formulas]
        for k, ours in enumerate(formulas):
            order = tuple(int(i == k - 1) for i in range(len(starts) + 1))
            for x, value in zip(AT, formula.at_start(ours, AT), strict=True):
                at = (MP.mpf(float(x)), *starts)
                true = MP.diff(FORMULAS[name], at, order) if k else FORMULAS[name](*at)
                assert value == pytest.approx(float(true), rel=1e-12, abs=1e-30)


def test_a_quotient_of_exponentials_is_made_stable() -> None:
    formula = Learned.of("x/(1 + exp(-b*x))", {"b": (1.0, False)})
    swish = Learned.of("swish_beta", {})
    assert formula.formula == swish.formula.xreplace(dict(zip(swish.symbols, formula.symbols, strict=True)))
    for gradient_formula in (formula.derivative_formula, *formula.gradient_formulas):
        assert np.isfinite(formula.at_start(gradient_formula, np.array([-1e4, 1e4]))).all()


def test_a_number_that_is_named_as_an_exponent() -> None:
    start = Learned.of("x*2.e3 + e3*x**2", {"e3": (0.5, False)}).start()
    assert start is not None and start.value(np.array([2.0])) == [4002.0]


@pytest.mark.parametrize("text", ["(a*x + sqrt(a*x*x + 4*b))/2", "sinh(a*x)/cosh(b*x)"])
def test_what_is_stable_at_the_starts_alone(text: str) -> None:
    start = Learned.of(text, {"a": (1.0, False), "b": (1.0, False)}).start()
    assert start is not None and problem(start) is not None
    assert problem(Activation.of(start.expression)) is None


def test_a_formula_that_is_a_constant_at_the_starts() -> None:
    numbers = {"a": (1.0, False), "b": (1.0, False)}
    assert Learned.of("exp(x + a)/(exp(b*x) + exp(x + a))", numbers).start() is None
