"""The expression language: what it accepts and its values, what it refuses, and that it runs nothing."""

import ast
import builtins
import warnings
from collections.abc import Iterator

import mpmath
import numpy as np
import pytest
import sympy.parsing.sympy_parser
from scipy import special

from fitact.errors import UsageError
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.expr.atoms import constant, x
from fitact.fitter.expr.catalog import CATALOG
from fitact.fitter.expr.evaluate import evaluate
from fitact.fitter.expr.parser import MAX_DEPTH, MAX_LENGTH, parse
from fitact.fitter.numerics.weight import Weight
from tests.support.refusals import within

POINTS = np.array([-29.3, -11.7, -4.25, -1.3, -0.37, -1e-3, 1e-3, 0.41, 1.9, 5.3, 12.6, 28.9])


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """A text that takes for ever fails its test, and does not hold up the run."""
    with within(120):
        yield


def one_line(error: pytest.ExceptionInfo[UsageError]) -> str:
    message = str(error.value)
    assert message.isprintable()
    assert 10 < len(message) < 400
    return message


# ------------------------------------------------------------------------------------------------- values


def _sigmoid(t):
    return 1 / (1 + mpmath.exp(-t))


def _softplus(t):
    return mpmath.log1p(mpmath.exp(t))


def _gelu(t):
    return t * mpmath.ncdf(t)


# formula, the same in mpmath, absolute error allowed where the formula itself cancels
VALUES = [
    ("x", lambda t: t, 0),
    ("  +x ", lambda t: t, 0),
    ("-x**2", lambda t: -(t**2), 0),
    ("2**3**2*x", lambda t: 512 * t, 0),
    ("1 - 2 - x", lambda t: -1 - t, 0),
    ("x/2/3", lambda t: t / 6, 0),
    ("0.1*x", lambda t: t / 10, 0),
    ("1e-3*x + .5", lambda t: t / 1000 + mpmath.mpf(1) / 2, 0),
    ("pi*x + e", lambda t: mpmath.pi * t + mpmath.e, 1e-14),
    ("x**3 - x/7", lambda t: t**3 - t / 7, 1e-16),
    ("x**-3", lambda t: t**-3, 0),
    ("1/(1 + x**2)", lambda t: 1 / (1 + t**2), 0),
    ("x/(1 + abs(x))", lambda t: t / (1 + abs(t)), 0),
    ("sqrt(1 + x**2)", lambda t: mpmath.sqrt(1 + t**2), 0),
    ("(1 + x**2)**0.3", lambda t: (1 + t**2) ** mpmath.mpf("0.3"), 0),
    ("2**-x", lambda t: 2**-t, 0),
    ("e**x", mpmath.exp, 0),
    ("exp(-x**2/2)", lambda t: mpmath.exp(-(t**2) / 2), 1e-300),
    ("expm1(x)", mpmath.expm1, 0),
    ("log(1 + x**2)", lambda t: mpmath.log(1 + t**2), 1e-15),
    ("log1p(x**2)", lambda t: mpmath.log1p(t**2), 0),
    ("erf(x)", mpmath.erf, 1e-45),
    ("tanh(x)", mpmath.tanh, 0),
    ("sigmoid(x)", _sigmoid, 0),
    ("softplus(x)", _softplus, 0),
    ("relu(x)", lambda t: max(t, 0), 0),
    ("abs(x - 2)", lambda t: abs(t - 2), 0),
    ("x*sign(x - 1)", lambda t: t * mpmath.sign(t - 1), 0),
    ("silu(x)", lambda t: t * _sigmoid(t), 0),
    ("gelu(x)", _gelu, 1e-14),
    ("x*sigmoid(1.702*x)", lambda t: t * _sigmoid(mpmath.mpf("1.702") * t), 0),
    ("x*tanh(softplus(x))", lambda t: t * mpmath.tanh(_softplus(t)), 0),
    ("min(x, 1)", lambda t: min(t, 1), 0),
    ("max(min(x, 2), -3)", lambda t: max(min(t, 2), -3), 0),
    ("max(x, x**2/4 - 1)", lambda t: max(t, t**2 / 4 - 1), 0),
    ("where(x < 1, x, 2*x - 1)", lambda t: t if t < 1 else 2 * t - 1, 0),
    ("where(x**2 >= 2, exp(-x**2), x)", lambda t: mpmath.exp(-(t**2)) if t**2 >= 2 else t, 1e-300),
    (
        "where(x > 0, x, 1.6732632423543772*expm1(x))",
        lambda t: t if t > 0 else 1.6732632423543772 * mpmath.expm1(t),
        0,
    ),
]


@pytest.mark.parametrize(("text", "oracle", "atol"), VALUES, ids=[text for text, *_ in VALUES])
def test_value_and_derivative(text, oracle, atol):
    formula = parse(text)
    with mpmath.workdps(50):
        points = [mpmath.mpf(float(point)) for point in POINTS]
        values = [float(oracle(point)) for point in points]
        derivatives = [float(mpmath.diff(oracle, point)) for point in points]
    np.testing.assert_allclose(evaluate(formula, POINTS), values, rtol=1e-12, atol=atol)
    np.testing.assert_allclose(evaluate(formula.diff(x), POINTS), derivatives, rtol=1e-12, atol=10 * atol)


@pytest.mark.parametrize("name", CATALOG)
def test_catalog_is_finite_everywhere(name):
    at = np.array([-1e38, -1e15, -745.0, -88.0, 0.0, 88.0, 710.0, 1e15, 1e38])
    activation = Activation.of(name)
    at = at[at < 700] if name == "exp" else at
    for values in (activation.value(at), activation.derivative(at), activation.second_derivative(at[1:-1])):
        assert np.isfinite(values).all()


@pytest.mark.parametrize(
    ("text", "point", "value"),
    [
        # the tie of each comparison
        ("where(x > 1, 2, 3) + 0*x", 1.0, 3),
        ("where(x >= 1, 2, 3)", 1.0, 2),
        ("where(x < 1, 2, 3)", 1.0, 3),
        ("where(x <= 1, 2, 3)", 1.0, 2),
        ("where(1 < x, 2, 3)", 1.0, 3),
        ("where(1 <= x, 2, 3)", 1.0, 2),
        ("where(2 > 1, x, -x)", 1.0, 1),
        ("where(1 >= 1, x, -x)", 1.0, 1),
        ("where(1 > 1, x, -x)", 1.0, -1),
        ("sign(x)", 0.0, 0),
        ("x**0", 5.0, 1),
        ("1 - 1 + 0*x", 2.0, 0),
        ("tanh(1e300)*x", 1.0, 1),
        # out of the formula's domain
        ("log(x)", -1.0, np.nan),
        ("log(x)", 0.0, -np.inf),
        ("sqrt(x)", -1.0, np.nan),
        ("1/x", 0.0, np.inf),
        ("exp(x)", 1000.0, np.inf),
        ("x**0.5", -1.0, np.nan),
        # the root of a power has the domain that the power leaves it
        ("sqrt(2/x)", 8.0, 0.5),
        ("sqrt(2/x)", -8.0, np.nan),
        ("sqrt(-2/x)", -8.0, 0.5),
        ("sqrt(-2/x)", 8.0, np.nan),
        ("sqrt(-3*x**5)", -3.0, 27.0),
        ("(x**3)**(1/3)", -1.0, np.nan),
        ("(-8*x**3)**(1/3)", -2.0, 4.0),
        ("sqrt(x**2)", -2.0, 2.0),
        ("sqrt((x - 3)**6)", 1.0, 8.0),
        ("sqrt((x - 3)**4)", 1.0, 4.0),
        ("(4*(x - 3)**2)**1.5", 1.0, 64.0),
        ("((x - 3)**-2)**0.5", 1.0, 0.5),
        ("sqrt(-(x - 3)**2)", 1.0, np.nan),
        ("sqrt(1/x)", 0.0, np.inf),
    ],
)
def test_single_value(text, point, value):
    assert evaluate(parse(text), np.array(point)) == pytest.approx(value, nan_ok=True)


# A constant, and what mpmath makes of it at 700 digits.
CONSTANTS = [
    ("cosh(40) - sinh(40)", lambda: mpmath.exp(-40)),
    ("(1 + exp(-40)) - 1", lambda: mpmath.exp(-40)),
    ("1/(erfc(6) + erf(6) - 1 + exp(-200))", lambda: mpmath.exp(200)),
    ("2.269184**1e-30", lambda: mpmath.mpf("2.269184") ** mpmath.mpf("1e-30")),
    ("0.17**0.442363293155713", lambda: mpmath.mpf("0.17") ** mpmath.mpf("0.442363293155713")),
    ("log(2)/log(3)**2.5", lambda: mpmath.log(2) / mpmath.log(3) ** 2.5),
    ("silu(e)", lambda: mpmath.e / (1 + mpmath.exp(-mpmath.e))),
    ("logcosh(-1.0277)**100", lambda: mpmath.log(mpmath.cosh(mpmath.mpf("1.0277"))) ** 100),
    ("sin(pi)", lambda: 0),
    ("erfc(1e300)", lambda: 0),
    ("relu(-3)", lambda: 0),
    # what is lost in a part shows nowhere else
    ("sin(1e200)", lambda: mpmath.sin(mpmath.mpf(10) ** 200)),
    ("exp(sin(1e250*pi + 1))", lambda: mpmath.exp(mpmath.sin(mpmath.mpf(10) ** 250 * mpmath.pi + 1))),
    ("2**cos(exp(600))", lambda: 2 ** mpmath.cos(mpmath.exp(600))),
    ("sqrt(exp(200) + 1) - exp(100)", lambda: mpmath.sqrt(mpmath.exp(200) + 1) - mpmath.exp(100)),
    ("exp(1e80*log(1 + exp(-185)))", lambda: mpmath.exp(mpmath.mpf(10) ** 80 * mpmath.log1p(mpmath.exp(-185)))),
]


@pytest.mark.parametrize(("text", "oracle"), CONSTANTS, ids=[text for text, _ in CONSTANTS])
def test_a_constant_is_rounded_once(text, oracle):
    with mpmath.workdps(700):
        value = float(oracle())
    assert constant(parse(text)) == value
    assert constant(parse(f"({text})*(x + 1)").diff(x).subs(x, 3)) == value


@pytest.mark.parametrize("text", ["celu(1.5 + x, 1/3)", "celu(x - 2.5, 0.3)", "celu(celu(1.5 + x, 1/3), 0.7)"])
def test_arguments_of_activations_are_not_multiplied_out(text):
    """Where 1.5 + x cancels, the value of celu keeps its digits."""
    f = Activation.of(text)
    at = np.array([-1.5 - 3e-9, -1.5 - 7e-6, -1.51, 2.5 - 1e-9, 2.49])

    def celu(u, alpha):
        return u if u > 0 else alpha * mpmath.expm1(u / alpha)

    def oracle(t):
        if "2.5" in text:
            return celu(t - 2.5, mpmath.mpf("0.3"))
        inner = celu(t + 1.5, mpmath.mpf(float(1 / 3)))
        return celu(inner, mpmath.mpf("0.7")) if "0.7" in text else inner

    with mpmath.workdps(40):
        values = [float(oracle(mpmath.mpf(float(t)))) for t in at]
    assert f.value(at) == pytest.approx(values, rel=4 * 2.0**-52, abs=0.0)


# ----------------------------------------------------------------------------------------------- refusals

KNOWN = "unknown name"
CHARACTER = "unexpected character"
NESTED = f"nested deeper than {MAX_DEPTH}"
REFUSALS = [
    # nothing to read
    ("", "empty"),
    ("   ", "empty"),
    ("()", "Tuple is not part"),
    # names and calls
    ("y", KNOWN),
    ("X", KNOWN),
    ("eval", KNOWN),
    ("x*__builtins__", KNOWN),
    ("print(x)", KNOWN),
    ("x(x)", "x is an argument, not a function"),
    ("e(x)", KNOWN),
    ("exp", "exp is a function: write exp(...)"),
    ("x*where", "where is a function"),
    ("x.real", "Attribute is not part"),
    ("x.__class__", "Attribute is not part"),
    ("x.is_zero()", "only the functions of the language"),
    ("exp(x)(x)", "only the functions of the language"),
    ("(lambda: x)()", "only the functions of the language"),
    ("exp()", "exp takes 1 argument, got 0"),
    ("exp(x, x)", "exp takes 1 argument, got 2"),
    ("max(x)", "max takes 2 arguments, got 1"),
    ("exp(u=x)", "plain arguments"),
    ("exp(x, evaluate=0)", "plain arguments"),
    ("exp(*x)", "plain arguments"),
    ("exp(**x)", "plain arguments"),
    # the rest of Python
    ("__import__('os')", CHARACTER),
    ("'x'", CHARACTER),
    ('"x"', CHARACTER),
    ("f'{x}'", CHARACTER),
    ("x # y", CHARACTER),
    ("x\n", CHARACTER),
    ("\tx", CHARACTER),
    ("x\r\n+1", CHARACTER),
    ("x\0", CHARACTER),
    ("x\\\n+1", CHARACTER),
    ("x;x", CHARACTER),
    ("`x`", CHARACTER),
    ("$x", CHARACTER),
    ("x^2", "written **, not ^"),
    ("lambda: x", "Lambda is not part"),
    ("x := 1", "not a formula"),
    ("(x := 1)", "NamedExpr is not part"),
    ("x = 1", "not a formula"),
    ("x if x else x", "IfExp is not part"),
    ("[x]", "List is not part"),
    ("[x for x in x]", "ListComp is not part"),
    ("{x: x}", "Dict is not part"),
    ("x[0]", "Subscript is not part"),
    ("x, x", "Tuple is not part"),
    ("x and x", "BoolOp is not part"),
    ("not x", "UnaryOp is not part"),
    ("~x", "UnaryOp is not part"),
    ("await x", "Await is not part"),
    ("...", "Constant is not part"),
    ("*x", "not a formula"),
    ("import os", "not a formula"),
    ("x x", "not a formula"),
    ("2x", "not a formula"),
    ("x +", "not a formula"),
    ("(x", "not a formula"),
    ("x)", "not a formula"),
    ("x!", "not a formula"),
    ("x // 2", "FloorDiv"),
    ("x % 2", "Mod"),
    ("x @ x", "MatMult"),
    ("x << 1", "LShift"),
    ("x | x", "BitOr"),
    ("x & x", "BitAnd"),
    ("x + 1j", "expected a number"),
    ("x + True", "expected a number"),
    ("None", "expected a number"),
    # comparisons
    ("x > 0", "belongs in where"),
    ("x*(x > 0)", "belongs in where"),
    ("x in x", "belongs in where"),
    ("where(x > 0, x < 1, x)", "belongs in where"),
    ("where(x == 0, 1, x)", "<, <=, > or >="),
    ("where(x is x, 1, x)", "<, <=, > or >="),
    ("where(0 < x < 1, 1, x)", "one comparison"),
    ("where(x, 1, 2)", "takes a comparison"),
    ("where(x > 0, 1)", "takes a comparison"),
    # letters that look like others
    ("\N{CYRILLIC SMALL LETTER HA}", CHARACTER),
    ("\N{FULLWIDTH LATIN SMALL LETTER X}", CHARACTER),
    ("\N{MATHEMATICAL ITALIC SMALL X}", CHARACTER),
    ("\N{CYRILLIC SMALL LETTER IE}xp(x)", CHARACTER),
    ("x*\N{FULLWIDTH DIGIT TWO}", CHARACTER),
    ("x\N{SUPERSCRIPT TWO}", CHARACTER),
    ("x \N{MINUS SIGN} 1", CHARACTER),
    ("x\N{NO-BREAK SPACE}", CHARACTER),
    ("x\N{RIGHT-TO-LEFT OVERRIDE}", CHARACTER),
    ("x\ud800", CHARACTER),
    # too long, too deep
    ("x+" * 500_000 + "x", "characters are too many"),
    ("(" * 10_000 + "x" + ")" * 10_000, "characters are too many"),
    ("x" * (MAX_LENGTH + 1), "characters are too many"),
    ("(" * 900 + "x" + ")" * 900, NESTED),
    ("[" * 1999, NESTED),
    ("exp(" * 300 + "x" + ")" * 300, NESTED),
    ("-" * 1900 + "x", NESTED),
    ("x**" * 600 + "x", NESTED),
    ("+".join(["x"] * 900), NESTED),
    # towers and overflow
    ("10**10**10", "power of numbers is out of range"),
    ("x*2**2**2**2**2**2", "power of numbers is out of range"),
    ("(2**1000)**1000", "power of numbers is out of range"),
    ("2**-(10**9)", "power of numbers is out of range"),
    ("(x/10)**400", "power of numbers is out of range"),
    ("(x/3)**1000", "power of numbers is out of range"),
    ("1.000001**(10**9)", "power of numbers is out of range"),
    ("x**10**10", "exponent 1e+10 is out of range"),
    ("x**-1001", "exponent -1001 is out of range"),
    ("exp(exp(exp(100)))", "not a real number below"),
    ("exp(710)*x", "not a real number below"),
    ("exp(1e10*log(10))*x", "log(10)"),
    ("exp(1000*log(10))*x", "log(10)"),
    ("9" * 1900, "number is out of range"),
    ("1" + "0" * 301, "number is out of range"),
    ("1e301", "number is out of range"),
    ("1e999*x", "number is out of range"),
    ("1e200*1e200*x", "1e200"),
    # constants that float64 cannot hold
    ("x + 1e-301", "a coefficient is out of range: 1e-300 to 1e+300"),
    ("exp(-800)*x", "'exp(-800)' is too small: at least 1e-300"),
    ("logcosh(-1.0277)**1000 + x", "logcosh(10277/10000)**1000' is too small"),
    ("tan(pi/2)*x", "'tan(pi/2)' is not a real number"),
    ("x/sin(pi)", "division by zero"),
    ("x/relu(-1)", "division by zero"),
    # no real number
    ("1/0", "division by zero"),
    ("x/0.0", "division by zero"),
    ("1/(x - x)", "division by zero"),
    ("0**-1", "out of range"),
    ("log(-1)", "not a real number"),
    ("log(0)*x", "not a real number"),
    ("log1p(-1)", "not a real number"),
    ("sqrt(-1)*sqrt(-1)*x", "not a real number"),
    ("(-8)**(1/3)*x", "out of range"),
    ("(-2)**x", "positive base"),
    ("0**x", "positive base"),
]


@pytest.mark.parametrize(("text", "reason"), REFUSALS, ids=[ascii(text[:40]) for text, _ in REFUSALS])
def test_refusal(text, reason):
    with pytest.raises(UsageError) as error:
        parse(text, what="activation")
    message = one_line(error)
    assert reason in message
    assert message.startswith("activation")


def test_what_was_read_is_read_again_by_its_own_variable() -> None:
    """A formula that was read is remembered; one that was refused is refused again, in the new words."""
    assert parse("y*2", variable="y") == parse("x*2")
    assert parse("y*2", variable="y") == parse("x*2")
    with pytest.raises(UsageError, match=r"unknown name 'y'"):
        parse("y*2")
    for what in ("weight", "derivative"):
        with pytest.raises(UsageError, match=f"{what} 'z'"):
            parse("z", what=what)


@pytest.mark.parametrize("text", [None, 3, b"x", ["x"]])
def test_only_text_is_read(text):
    with pytest.raises(UsageError, match="expected text"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "column"), [("x + y", 5), ("  y", 3), ("x*(1 + 2**9999)", 8), ("x + 'a'", 5), ("  x +* 2", 6)]
)
def test_refusal_names_the_column(text, column):
    with pytest.raises(UsageError, match=f"column {column}:"):
        parse(text)


# -------------------------------------------------------------------------------------------- hard formulas

AT = np.array([[0.0, 1.0, -2.5], [1e300, -np.inf, np.nan]])


def survives(text: str) -> None:
    try:
        formula = parse(text)
    except UsageError as error:
        assert str(error).isprintable()
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tree in (formula, formula.diff(x)):
            for at in (AT, AT[0, 0]):
                values = evaluate(tree, at)
                assert values.dtype == np.float64
                assert values.shape == np.shape(at)


# Each is refused, or accepted and then handled without trouble.
HARD = [
    # subformulas that are written once and used twice, so that nesting them doubles the work
    *(f * 40 + "x" + ")" * 40 for f in ("gelu(", "silu(", "max(x, ", "min(1, ", "x*tanh(", "exp(", "relu(")),
    *(f * 12 + "x" + ")" * 12 for f in ("gelu(", "silu(", "max(x*x, ", "erf(")),
    "min(x**2, " * 15 + "exp(x)" + ")" * 15,
    "where(x > 0, " * 20 + "x" + ", -x)" * 20,
    # what SymPy multiplies out by itself
    "((10*x)**1000)**1000",
    "(((10*x)**1000)**1000)**1000",
    "((x/10)**1000)**1000",
    "(sqrt(8*x)**1000)**1000",
    "exp(1e10*log(10) + x)",
    "exp(1e10*log(10)*x/x)",
    "exp(690)*x*exp(690)",
    "max((relu(4.6**7)**-0.5)**4, where(cos(exp(x)) > relu(x), (x - x)*(x/x), x) + logcosh(0.5*-2.053)**1000)",
    # coefficients that leave the range of float64
    "x*1e200*1e200",
    "x/1e-200/1e-200",
    "(x*1e200)**2",
    "1e300*(1e300*x + 1e300)",
]


@pytest.mark.parametrize("text", HARD, ids=[text[:30] for text in HARD])
def test_hard_formula(text):
    survives(text)
    try:
        activation = Activation.of(text)
    except UsageError:
        return
    activation.switch_points(-5.0, 5.0)
    activation.derivative_parity(5.0)


# ---------------------------------------------------------------------------------------- nothing is run


@pytest.mark.parametrize(
    "text", [*CATALOG, "where(x > 1, x**2.5/3, min(x, gelu(-x)))", "exec(x)", "1 +", "10**10**10"]
)
def test_parsing_runs_no_code(text, monkeypatch):
    text = Activation.of(text).expression if text in CATALOG else text
    real = builtins.compile

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("code was about to be run")

    def compile_to_tree(source, filename, mode, flags=0, **more):
        return real(source, filename, mode, flags, **more) if flags & ast.PyCF_ONLY_AST else refuse()

    for name in CATALOG:
        Activation.of(name)  # so that what SymPy imports on first use is there
    monkeypatch.setattr(builtins, "eval", refuse)
    monkeypatch.setattr(builtins, "exec", refuse)
    monkeypatch.setattr(builtins, "compile", compile_to_tree)
    monkeypatch.setattr(sympy, "sympify", refuse)
    monkeypatch.setattr(sympy.parsing.sympy_parser, "parse_expr", refuse)
    monkeypatch.setattr(sympy.parsing.sympy_parser, "eval_expr", refuse)
    with pytest.raises(AssertionError):
        builtins.compile("x", "", "eval")  # the trap works
    try:
        formula = parse(text)
        formula.diff(x)
    except UsageError:
        pass
    finally:
        monkeypatch.undo()  # pytest itself compiles


# -------------------------------------------------------------------------------------------- activations


@pytest.mark.parametrize("name", CATALOG)
def test_activation_of_a_name(name):
    activation = Activation.of(name)
    entry = CATALOG[name]
    assert (activation.name, activation.expression) == (name, entry.expression.format(**entry.parameters))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("geluu", "expected one of celu"),
        ("pi", "unknown activation"),
        ("lambda", "unknown activation"),
        ("1 + 1", "does not depend on x"),
        ("x - x", "does not depend on x"),
        ("0*x", "does not depend on x"),
        ("where(1 > 0, 1, x)", "does not depend on x"),
        ("x*erfc(1e300)", "does not depend on x"),
        # what float32 cannot hold, wherever a module would have it
        ("x*sigmoid(clamp(x, -5, 1e39))", "constant 1e+39"),
        ("where(x < -1e39, 0, x)", "constant -1e+39"),
        ("where(x > 0, x, 1e39)", "constant 1e+39"),
        ("1e39*x", "constant 1e+39"),
        ("1e20*x*1e20", "constant 1e+40"),
        ("x*exp(60)*pi*exp(60)", "constant 4.09721e+52"),
        ("tanh(x) + 1e39", "constant 1e+39"),
        ("x**2 + 1e-40", "constant 1e-40"),
        ("(1e13*x)**3", "constant 1e+39"),
        ("max((x/cos(2))**-1000, cos(x))", "constant 1.76440e-381"),  # 0 in float64
        ("(pi*x)**1000", "constant 1.41212e+497"),
        ("(e*x)**1000/exp(680)/exp(315)", "constant 1.97007e+434"),  # e**1000 of a product that is e**5
        ("", "empty"),
        ("y + 1", "unknown name"),
    ],
)
def test_activation_refuses(text, reason):
    with pytest.raises(UsageError, match="activation") as error:
        Activation.of(text)
    assert reason in one_line(error)


# ------------------------------------------------------------------------------------------------ weights


def _student(t, freedom):
    """The density of Student's t."""
    beta = mpmath.beta(mpmath.mpf(1) / 2, mpmath.mpf(freedom) / 2)
    return (1 + mpmath.mpf(t) ** 2 / freedom) ** (-(mpmath.mpf(freedom) + 1) / 2) / (mpmath.sqrt(freedom) * beta)


@pytest.mark.parametrize(
    ("text", "oracle"),
    [
        ("uniform", lambda t: 1),
        ("normal", mpmath.npdf),
        ("normal(0, 2)", lambda t: mpmath.npdf(t, 0, 2)),
        ("normal( -1.5 ,5e-1)", lambda t: mpmath.npdf(t, -1.5, 0.5)),
        ("normal(+.5, 3.)", lambda t: mpmath.npdf(t, 0.5, 3)),
        ("student", lambda t: _student(t, 3)),
        ("student(3)", lambda t: _student(t, 3)),
        ("student( 1.5 )", lambda t: _student(t, 1.5)),
        ("student(4.5 ,-1.2, 3e-3)", lambda t: _student((t + 1.2) / 0.003, 4.5) / 0.003),
        ("student(1000,0,2)", lambda t: _student(t / 2, 1000) / 2),
        ("exp(-abs(x))", lambda t: mpmath.exp(-abs(t))),
        ("1 + relu(x)", lambda t: 1 + max(t, 0)),
    ],
)
def test_weight(text, oracle):
    expected = [float(oracle(mpmath.mpf(float(point)))) for point in POINTS]
    np.testing.assert_allclose(Weight(text)(POINTS), expected, rtol=1e-11, atol=1e-300)


@pytest.mark.parametrize("freedom", [0.5, 3, 40])
@pytest.mark.parametrize(("mean", "scale"), [(0, 1), (-1.3, 0.01), (5, 1e-6), (63, 30)])
def test_mass_of_students_density(freedom, mean, scale):
    """Both its narrow middle and its heavy tails."""
    low, high = ((end - mean) / scale for end in (-64, 64))
    expected = special.stdtr(freedom, high) - special.stdtr(freedom, low)
    assert Weight(f"student({freedom}, {mean}, {scale})").mass(-64.0, 64.0) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("gauss", KNOWN),
        ("Normal", KNOWN),
        ("uniform(0, 1)", KNOWN),
        ("normal(0)", "normal(mean, deviation)"),
        ("normal(0, 1, 2)", "normal(mean, deviation)"),
        ("normal(x, 1)", "normal(mean, deviation)"),
        ("normal()", "normal(mean, deviation)"),
        ("normal + 1", "normal(mean, deviation)"),
        ("normal(0, 1)\n", "normal(mean, deviation)"),
        ("normal(0, 0)", "deviation above 0"),
        ("student()", "student(freedom, mean, scale)"),
        ("student(3, 0)", "student(freedom, mean, scale)"),
        ("student(3, 0, 1, 2)", "student(freedom, mean, scale)"),
        ("student(x)", "student(freedom, mean, scale)"),
        ("student + 1", "student(freedom, mean, scale)"),
        ("students", "student(freedom, mean, scale)"),
        ("student(0)", "degrees of freedom above 0"),
        ("student(-1)", "degrees of freedom above 0"),
        ("student(1001)", "up to 1000"),
        ("student(1e999)", "up to 1000"),
        ("student(3, 0, 0)", "a scale above 0"),
        ("student(3, 1e999, 1)", "a finite mean"),
        ("normal(0, -1)", "deviation above 0"),
        ("normal(1e999, 1)", "finite mean"),
        ("normal(0, 1e999)", "deviation"),
        ("normal(0, 1e308)", "out of range"),
        ("normal(" + "1" * 100_000, "too many"),
        ("normal(" + "1" * 1_000_000 + ", 1)", "too many"),
        ("x > 0", "belongs in where"),
        ("__import__('os')", CHARACTER),
        ("10**10**10", "out of range"),
    ],
    ids=lambda text: text[:30],
)
def test_weight_refuses(text, reason):
    with pytest.raises(UsageError, match=r"\Aweight") as error:
        Weight(text)
    assert reason in one_line(error)
