"""The expression language: what it accepts and its values, what it refuses; rewriting leaves the values."""

import numpy as np
import pytest

from fitact.fitter.analysis import FLOAT32, Activation
from fitact.fitter.catalog import CATALOG
from fitact.fitter.expr import constant, evaluate, parse, stable, text_of, value, x
from fitact.fitter.syntax import MAX_DEPTH, MAX_LENGTH
from tests.support.literature import LITERATURE
from tests.support.reals import MP, real
from tests.support.refusals import refused, within
from tests.support.rows import listed

# beside the literature: every operator and function, and how texts are read
PLAIN = listed("""
x   +x   -x**2   2**3**2*x   1 - 2 - x   x/2/3   0.1*x   1e-3*x + .5   (1 + x**2)**-3   1/(1 + x**2)
x/(1 + abs(x))   sqrt(1 + x**2)   (1 + x**2)**0.3   2**-x   e**x   expm1(x)   log1p(x**2)   tanh(x)   sigmoid(x)
softplus(x)   relu(x)   abs(x - 2)   x*sign(x - 1)   x*sigmoid(x)   x*sigmoid(1.702*x)   x*tanh(softplus(x))
min(x, 1)   max(min(x, 2), -3)   max(x, x**2/4 - 1)   where(x < 1, x, 2*x - 1)   x**3 - x/7   pi*x + e   gelu(x)
where(x > 0, x, 1.6732632423543772*expm1(x))   silu(x)   exp(-x**2/2)   where(x**2 >= 2, exp(-x**2), x)   erf(x)
log(1 + x**2)
""")
# No identity of `rewrite` covers these, and the check in floating point says so: test_values.py.
REPORTED = ("soft_clipping", "colu", "soft_root_sign")
FORMULAS = {name: text for name, text in LITERATURE.items() if name not in REPORTED} | {t: t for t in PLAIN}
FAR = np.geomspace(2e-3, 1e4, 17)
POINTS = np.concatenate([np.linspace(-12, 12, 49), FAR, -FAR, np.random.default_rng(0).uniform(-100, 100, 32)])
# Three terms of order 1 leave 2/(3π|x|³) of its derivative far out, and no atom has their sum.
CANCELS = {"calu": 1e-15}


@pytest.mark.parametrize("name", FORMULAS)
def test_value_and_derivative(name):
    """Beside the text itself, as Python evaluates it with mpmath's numbers: up to the rounding of x."""
    activation, oracle = Activation.of(FORMULAS[name]), real(FORMULAS[name])
    for order, call in enumerate((activation.value, activation.derivative)):
        at = POINTS + 0.017 * order  # beside corners
        for point, actual in zip(at.tolist(), call(at).tolist(), strict=True):
            with MP.workdps(60):
                true, slope = (MP.diff(oracle, MP.mpf(point), k) for k in (order, order + 1))
                scale = abs(true) + abs(point * slope)
            if scale < 1e300:
                assert abs(actual - true) <= 1e-12 * scale + CANCELS.get(name, 1e-37), (order, point, actual)


@pytest.mark.parametrize("name", CATALOG)
def test_catalog_is_finite_everywhere(name):
    at, f = np.array([-1e38, -1e15, -745.0, -88.0, 0.0, 88.0, 710.0, 1e15, 1e38]), Activation.of(name)
    at = at[at < 700] if name == "exp" else at
    assert np.isfinite([*f.value(at), *f.derivative(at), *f.second_derivative(at[1:-1])]).all()


# The tie of each comparison; what is out of a formula's domain; the domain that a root leaves a power: x; values.
SINGLE = """
1: where(x > 1, 2, 3) + 0*x = 3   where(x >= 1, 2, 3) = 2   where(x < 1, 2, 3) = 3   where(x <= 1, 2, 3) = 2
1: where(1 < x, 2, 3) = 3   where(1 <= x, 2, 3) = 2   where(2 > 1, x, -x) = 1   where(1 >= 1, x, -x) = 1
1: where(1 > 1, x, -x) = -1   tanh(1e300)*x = 1   sqrt((x - 3)**6) = 8   sqrt((x - 3)**4) = 4
1: (4*(x - 3)**2)**1.5 = 64   ((x - 3)**-2)**0.5 = 0.5   sqrt(-(x - 3)**2) = nan
0: sign(x) = 0   log(x) = -inf   1/x = inf   sqrt(1/x) = inf
5: x**0 = 1   1 - 1 + 0*x = 0
-1: log(x) = nan   sqrt(x) = nan   x**0.5 = nan   (x**3)**(1/3) = nan
1000: exp(x) = inf   expm1(x) = inf   sinh(x) = inf   cosh(x) = inf
-1e300: exp(x) = 0   expm1(x) = -1   sinh(x) = -inf   cosh(x) = inf
8: sqrt(2/x) = 0.5   sqrt(-2/x) = nan
-8: sqrt(2/x) = nan   sqrt(-2/x) = 0.5
-3: sqrt(-3*x**5) = 27
-2: (-8*x**3)**(1/3) = 4   sqrt(x**2) = 2
"""
SINGLES = [
    (point, *case.rsplit(" = ", 1))
    for point, _, cases in (line.partition(": ") for line in SINGLE.strip().splitlines())
    for case in cases.split("   ")
]


@pytest.mark.parametrize(("point", "text", "expected"), SINGLES)
def test_single_value(point, text, expected):
    assert evaluate(parse(text), np.array(float(point))) == pytest.approx(float(expected), nan_ok=True)


CONSTANTS = [
    *("cosh(40) - sinh(40)", "(1 + exp(-40)) - 1", "1/(erfc(6) + erf(6) - 1 + exp(-200))", "2.269184**1e-30"),
    *("0.17**0.442363293155713", "log(2)/log(3)**2.5", "silu(e)", "logcosh(-1.0277)**100", "relu(-3)"),
    # what is lost in a part shows nowhere else
    *("sin(1e200)", "exp(sin(1e250*pi + 1))", "2**cos(exp(600))", "sqrt(exp(200) + 1) - exp(100)"),
    *("exp(1e80*log(1 + exp(-185)))", "erfc(1e300)", "sin(pi)"),
]


@pytest.mark.parametrize("text", CONSTANTS)
def test_a_constant_is_rounded_once(text):
    with MP.workdps(700):
        value = 0.0 if text in ("sin(pi)", "erfc(1e300)") else float(real(text)(MP.mpf(0)))
    assert constant(parse(text)) == value
    assert constant(parse(f"({text})*(x + 1)").diff(x).subs(x, 3)) == value


@pytest.mark.parametrize("text", ["elu(1.5 + x, 1/3)", "elu(x - 2.5, 0.3)", "elu(elu(1.5 + x, 1/3), 0.7)"])
def test_arguments_of_activations_are_not_multiplied_out(text):
    """Where 1.5 + x cancels, the value keeps its digits."""
    at = np.array([-1.5 - 3e-9, -1.5 - 7e-6, -1.51, 2.5 - 1e-9, 2.49])
    values = [float(real(text)(MP.mpf(float(point)))) for point in at]
    assert Activation.of(text).value(at) == pytest.approx(values, rel=4 * 2.0**-52, abs=0.0)


@pytest.mark.parametrize(
    "text", ["tanh(1e4*(x - 3))", "-2*(x - 3)**2/3 - (x - 3)/7", "where(2*(x - 3) > 0, 5*(x - 3), 0)"]
)
def test_factors_are_not_multiplied_out(text):
    """Nor are they by text that is read again; in float32 the value keeps its digits where the sum cancels."""
    assert parse(text_of(parse(text))) == parse(text)
    at = (3 + np.array([-6e-5, -2.4e-7, 4.8e-7, 1e-3])).astype(np.float32)
    values = [float(real(text)(MP.mpf(float(point)))) for point in at]
    assert FLOAT32.evaluate(parse(text), at, {}) == pytest.approx(values, rel=2e-6, abs=0.0)


CHARACTER = "unexpected character"
# the reason → texts, three spaces apart
REFUSALS: dict[str, str] = {
    "is not part of the language": (
        "()   x, x   x.real   x.__class__   lambda: x   (x := 1)   [x]   [x for x in x]   {x: x}"
        "   x[0]   x and x   not x   ~x   await x   ...   x // 2   x % 2   x @ x   x << 1   x | x   x & x"
    ),
    "unknown name": "y   X   eval   x*__builtins__   print(x)   e(x)",
    "x is an argument, not a function": "x(x)",
    "exp is a function: write exp(...)": "exp",
    "where is a function": "x*where",
    "only the functions of the language": "x.is_zero()   exp(x)(x)   (lambda: x)()",
    "exp takes 1 argument, got 0": "exp()",
    "exp takes 1 argument, got 2": "exp(x, x)",
    "max takes 2 arguments, got 1": "max(x)",
    "plain arguments": "exp(u=x)   exp(x, evaluate=0)   exp(*x)   exp(**x)",
    CHARACTER: "__import__('os')   'x'   f'{x}'   x # y   x;x   `x`   $x",
    "written **, not ^": "x^2",
    "not a formula": "x := 1   x = 1   *x   import os   x x   2x   x +   (x   x)   x!",
    "expected a number": "x + 1j   x + True   None",
    "belongs in where": "x > 0   x*(x > 0)   x in x   where(x > 0, x < 1, x)",
    "<, <=, > or >=": "where(x == 0, 1, x)   where(x is x, 1, x)",
    "one comparison": "where(0 < x < 1, 1, x)",
    "takes a comparison": "where(x, 1, 2)   where(x > 0, 1)",
    "a comparison belongs in where": "x if x > 0 else 0   x*(x > 0)",
    "power of numbers is out of range": (
        "10**10**10   x*2**2**2**2**2**2   (2**1000)**1000   2**-(10**9)   (x/10)**400   (x/3)**1000"
        "   1.000001**(10**9)"
    ),
    "exponent 1e+10 is out of range": "x**10**10",
    "exponent -1001 is out of range": "x**-1001",
    "not a real number below": "exp(exp(exp(100)))   exp(710)*x",
    "log(10)": "exp(1e10*log(10))*x   exp(1000*log(10))*x",
    "number is out of range": "1e301   1e999*x",
    "a coefficient is out of range: 1e-300 to 1e+300": "x + 1e-301",
    "'exp(-800)' is too small: at least 1e-300": "exp(-800)*x",
    "logcosh(10277/10000)**1000' is too small": "logcosh(-1.0277)**1000 + x",
    "'tan(pi/2)' is not a real number": "tan(pi/2)*x",
    "division by zero": "x/sin(pi)   x/relu(-1)   1/0   x/0.0   1/(x - x)",
    "out of range": "0**-1   (-8)**(1/3)*x",
    "positive base": "(-2)**x   0**x",
    "column 5: unknown": "x + y",
    "column 8:": "x*(1 + 2**9999)",
    "column 5:": "x + 'a'",
}
ODD: dict[str, list[str]] = {
    "empty": ["", "   "],
    CHARACTER: [
        *('"x"', "x\n", "\tx", "x\r\n+1", "x\0", "x\\\n+1", "\N{FULLWIDTH LATIN SMALL LETTER X}", "x\ud800")
    ],
    "characters are too many": ["x+" * 500_000 + "x", "(" * 10_000 + "x" + ")" * 10_000, "x" * (MAX_LENGTH + 1)],
    f"nested deeper than {MAX_DEPTH}": [
        *("(" * 900 + "x" + ")" * 900, "[" * 1999, "exp(" * 300 + "x" + ")" * 300, "-" * 1900 + "x"),
        *("x**" * 600 + "x", "+".join(["x"] * 900)),
    ],
    "number is out of range": ["9" * 1900, "1" + "0" * 301],
    "its derivatives, written out, would have": ["*".join(f"tanh({k}*x)*exp(-x**2/{k})" for k in range(1, 12))],
    "functions are nested deeper": ["".join(f"where(x > {k}, " for k in range(30)) + "x" + ", -x)" * 30],
}


def test_what_was_read_is_read_again_by_its_own_variable() -> None:
    for _ in range(2):
        assert parse("y*2", variable="y") == parse("x*2")
    for text, message in (("y*2", "unknown name 'y'"), (None, "expected text, got None")):
        assert message in refused(parse, text)


# What float32 cannot hold, wherever a module would have it, and other reasons: texts, three spaces apart.
ACTIVATIONS = {
    "expected one of celu": "geluu",
    "unknown activation": "pi   lambda",
    "does not depend on x": "1 + 1   x - x   0*x   where(1 > 0, 1, x)   x*erfc(1e300)",
    "constant 1e+39": "x*sigmoid(clamp(x, -5, 1e39))   where(x > 0, x, 1e39)   tanh(x) + 1e39   (1e13*x)**3",
    "constant 4.09721e+52": "x*exp(60)*pi*exp(60)",
    "constant 1e-40": "x**2 + 1e-40",
    "constant 1.76440e-381": "max((x/cos(2))**-1000, cos(x))",  # 0 in float64
    "constant 1.41212e+497": "(pi*x)**1000",
}
TEXTS = [(parse, text, reason) for reason, texts in ODD.items() for text in texts]
TEXTS += [
    (read, text, reason)
    for read, table in ((parse, REFUSALS), (Activation.of, ACTIVATIONS))
    for reason, texts in table.items()
    for text in texts.split("   ")
]


@pytest.mark.parametrize(("read", "text", "reason"), TEXTS, ids=[ascii(text[:40]) for _, text, _ in TEXTS])
def test_refusal(read, text, reason):
    with within(120):
        message = refused(read, text)
    assert reason in message and ("activation" in message or read is parse)


SOME = [-41.3, -7.7, -2.3, -0.61, -1e-3, 0.0137, 0.37, 1.9, 5.3, 12.1, 33.7]
WRITTEN = listed("""
log(1 + exp(x)) -> softplus(x)   1/(1 + exp(-x)) -> sigmoid(x)   exp(x)/(1 + exp(x)) -> sigmoid(x)
exp(x)/(1 + exp(x))**2 -> sigmoid(-x)*sigmoid(x)   x*(1 + erf(x/sqrt(2)))/2 -> x*erfc(-x/sqrt(2))/2
0.5*x*(1 + tanh(x)) -> x*sigmoid(2*x)   0.5*x + 0.5*x*tanh(x) -> x*sigmoid(2*x)
(exp(x) - exp(-x))/(exp(x) + exp(-x)) -> tanh(x)   (exp(2*x) - 1)/(exp(2*x) + 1) -> tanh(x)
2/(1 + exp(-2*x)) - 1 -> tanh(x)   1 - tanh(x)**2 -> sech2(x)   log(cosh(x)) -> logcosh(x)
(x + sqrt(x**2 + 4))/2 -> squareplus(x)   x/sqrt(1 + x**2) -> isru(x)   x/(1 + abs(x)) -> softsign(x)
1 - exp(-exp(x)) -> -expm1(-exp(x))   sigmoid(x) - 1 -> -sigmoid(-x)   x - log(1 + exp(x)) -> -softplus(-x)
(1 + exp(-(x - 30)**3))**-1 -> sigmoid((x - 30)**3)   exp(-(x - 50)**2)**2 -> exp(-2*(x - 50)**2)
1/(exp(2*x) + exp(x))**3 -> exp(-3*x)*sigmoid(-x)**3
""")
IDIOMS = dict(row.split(" -> ") for row in WRITTEN)
OTHERS = listed("""
sigmoid(10*x + 50) - sigmoid(10*x - 50)   sigmoid(10*x - 50) - sigmoid(10*x + 50)   x*log(2 - exp(-exp(x)))
sqrt(1 + x**2) - 1 + x   sqrt(1 + x**2) - x   x*(1 + x/sqrt(1 + x**2))/2   x/(x/2 + exp(-x/3))
exp((x - 1)/x**2)**2   (1 + exp(-1.5*x))**(-1/3)   cos(x) - 1   cosh(x) - 1   exp(x)*(e - 1)
""")


@pytest.mark.parametrize(("text", "better"), IDIOMS.items(), ids=IDIOMS)
def test_idiom(text: str, better: str) -> None:
    assert stable(parse(text)) == parse(better)


@pytest.mark.parametrize("text", [*IDIOMS, *OTHERS])
def test_the_values_stay_and_float32_is_no_worse(text: str) -> None:
    typed = parse(text)
    for formula, rewritten in ((typed, stable(typed)), (typed.diff(x), stable(stable(typed).diff(x)))):
        for point in SOME:
            expected, actual = value(formula, point, 40), value(rewritten, point, 40)
            if expected.is_finite():
                assert abs(actual - expected) <= 1e-15 * abs(expected) + 1e-300, point
    # in float32, worse by 32 roundings at most, and better where the formula as typed is not finite
    at = np.array([*SOME, -100.0, 100.0], dtype=np.float32)
    with np.errstate(all="ignore"):
        before = np.broadcast_to(FLOAT32.evaluate(typed, at), at.shape)
        after = np.broadcast_to(FLOAT32.evaluate(stable(typed), at), at.shape)
    for point, old, new in zip(at.tolist(), before.tolist(), after.tolist(), strict=True):
        true = float(value(typed, point, 20))
        if abs(true) < 3e38:
            worse = abs(new - true) - abs(old - true)
            assert np.isfinite(new) and (not np.isfinite(old) or worse <= 32 * 2.0**-24 * abs(true) + 1e-37), point
