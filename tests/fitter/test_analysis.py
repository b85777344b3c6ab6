"""The shape of formulas: expectations are derived by hand, or by mpmath from an independent formula."""

import math
import re
from dataclasses import dataclass, field

import numpy as np
import pytest
from scipy import optimize

from fitact.fitter.analysis import Activation, problem
from fitact.fitter.analysis.shape import REALS, Asymptote, Breakpoint, Piece, Root
from fitact.fitter.catalog import CATALOG
from tests.support.curves import ALPHA, CURVES, LAMBDA

INF = math.inf
UNIT = Asymptote("line", 1, 0, INF)


def flat(value: float) -> Asymptote:
    return Asymptote("line", 0, value, value)


def line(slope: float, intercept: float, side: int) -> Asymptote:
    return Asymptote("line", slope, intercept, side * slope * INF)


UNDEFINED, NONE = Asymptote("undefined"), Asymptote("none")
UP, DOWN = (Asymptote("infinite", limit=limit) for limit in (INF, -INF))


@dataclass
class Shape:
    """`turns` are where pieces meet, `directions` those of the pieces; `roots` are (at, order)."""

    left: Asymptote
    right: Asymptote
    directions: list[int]
    turns: list[float] = field(default_factory=list)
    roots: list[tuple[float, float]] = field(default_factory=list)
    range: tuple[float, float] = (0, 1)
    parity: str | None = None
    corners: list[float] = field(default_factory=list)
    jumps: list[float] = field(default_factory=list)


def dip(name: str) -> Shape:
    """An activation such as GELU, whose extrema are those of its closed form."""
    curve = CURVES[name]
    ends = (-4, 0), (0, 4)
    low, high = (
        sign * optimize.minimize_scalar(lambda x, s=sign: s * curve.derivative(np.float64(x)), bounds=end).fun
        for sign, end in zip((1, -1), ends, strict=True)
    )
    return Shape(flat(0), UNIT, [-1, 1], [curve.minimum], [(curve.minimum, 1)], (low, high))


CATALOG_SHAPES = {
    **{name: dip(name) for name in ("gelu", "gelu_tanh", "mish", "quick_gelu", "serf", "silu")},
    **dict.fromkeys(("celu", "elu"), Shape(flat(-1), UNIT, [1])),
    "exp": Shape(flat(0), UP, [1], range=(0, INF)),
    "hardshrink": Shape(line(1, 0, -1), UNIT, [1, 0, 1], [-0.5, 0.5], parity="even", jumps=[-0.5, 0.5]),
    "hardsigmoid": Shape(flat(0), flat(1), [0, 1, 0], [-3, 3], range=(0, 1 / 6), parity="even", corners=[-3, 3]),
    "hardswish": Shape(flat(0), UNIT, [0, -1, 1], [-3, -1.5], [(-1.5, 1)], (-0.5, 1.5), corners=[-3, 3]),
    "hardtanh": Shape(flat(-1), flat(1), [0, 1, 0], [-1, 1], parity="even", corners=[-1, 1]),
    "identity": Shape(line(1, 0, -1), UNIT, [1], range=(1, 1), parity="even"),
    "leaky_relu": Shape(line(0.01, 0, -1), UNIT, [1], range=(0.01, 1), corners=[0]),
    "logsigmoid": Shape(line(1, 0, -1), flat(0), [1]),
    "relu": Shape(flat(0), UNIT, [0, 1], [0], corners=[0]),
    "relu2": Shape(flat(0), UP, [0, 1], [0], range=(0, INF)),
    "relu6": Shape(flat(0), flat(6), [0, 1, 0], [0, 6], corners=[0, 6]),
    "selu": Shape(flat(-LAMBDA * ALPHA), line(LAMBDA, 0, 1), [1], range=(0, LAMBDA * ALPHA), corners=[0]),
    "sigmoid": Shape(flat(0), flat(1), [1], range=(0, 0.25), parity="even"),
    **dict.fromkeys(("softplus", "squareplus"), Shape(flat(0), UNIT, [1])),
    "softshrink": Shape(
        line(1, 0.5, -1), line(1, -0.5, 1), [1, 0, 1], [-0.5, 0.5], parity="even", corners=[-0.5, 0.5]
    ),
    **dict.fromkeys(("softsign", "tanh"), Shape(flat(-1), flat(1), [1], parity="even")),
    "tanhshrink": Shape(line(1, 1, -1), line(1, -1, 1), [1], roots=[(0, 2)], parity="even"),
    "threshold": Shape(flat(0), UNIT, [0, 1], [1], jumps=[1]),
}


def same(a: Asymptote, b: Asymptote) -> bool:
    numbers = pytest.approx([b.slope, b.intercept, b.limit], rel=1e-15, abs=0.0, nan_ok=True)
    return bool(a.kind == b.kind and [a.slope, a.intercept, a.limit] == numbers)


def check_pieces(actual, low, high, directions, turns, roots, near: float) -> None:
    assert math.isinf(actual.reach)
    assert [piece.direction for piece in actual.pieces] == directions
    assert (actual.pieces[0].low, actual.pieces[-1].high) == (low, high)
    edges = [piece.low for piece in actual.pieces[1:]]
    assert edges == [piece.high for piece in actual.pieces[:-1]]
    assert edges == pytest.approx(turns, rel=1e-12, abs=1e-15)
    if roots is not None:
        assert [z.at for z in actual.roots] == pytest.approx([at for at, _ in roots], rel=near, abs=near / 10)
        assert [(z.order_below, z.order_above) for z in actual.roots] == [(n, n) for _, n in roots]


@pytest.mark.parametrize("name", sorted(CATALOG.keys() - {"snake"}))  # its derivative has a root in every period
def test_catalog(name: str) -> None:
    f, expected = Activation.of(name), CATALOG_SHAPES[name]
    marks = [(at, "jump") for at in expected.jumps] + [(at, "corner") for at in expected.corners]
    assert f.breakpoints() == tuple(Breakpoint(*mark) for mark in sorted(marks))
    assert f.derivative_parity(10.0) == expected.parity
    assert same(f.asymptotes[0], expected.left) and same(f.asymptotes[1], expected.right)
    check_pieces(f.monotone(), -REALS, REALS, expected.directions, expected.turns, expected.roots, 1e-12)
    assert f.derivative_range() == pytest.approx(expected.range, rel=1e-12, abs=1e-15)


ASYMPTOTES = {
    **dict.fromkeys(("sqrt(x)", "log(x)"), (UNDEFINED, UP)),
    **dict.fromkeys(("log(1 + x**2)", "x**2"), (UP, UP)),
    **dict.fromkeys(("x**3", "x + sin(x)"), (DOWN, UP)),
    "exp(x)": (flat(0), UP),
    **dict.fromkeys(("sin(x)", "x*cos(x)"), (NONE, NONE)),
    **dict.fromkeys(("sin(x)/x", "1/sqrt(1 + x**2)"), (flat(0), flat(0))),
    "atan(x)": (flat(-math.pi / 2), flat(math.pi / 2)),
    "squareplus(x)": (flat(0), UNIT),
    **dict.fromkeys(("sqrt(1 + x**2)", "abs(x)"), (line(-1, 0, -1), UNIT)),
    "(3*x**2 + x)/(x + 2)": (line(3, -5, -1), line(3, -5, 1)),
    "0.1*x + 0.7*atan(x)": (line(0.1, -0.35 * math.pi, -1), line(0.1, 0.35 * math.pi, 1)),
}


@pytest.mark.parametrize("text", ASYMPTOTES)
def test_asymptotes(text: str) -> None:
    assert all(map(same, Activation.of(text).asymptotes, ASYMPTOTES[text]))


TWO_SINES = [s * (2 * math.pi / 3) + 2 * math.pi * k for k in range(-5, 6) for s in (-1, 1)]
EDGE = (math.asin(0.9999) / 3, (math.pi - math.asin(0.9999)) / 3)
WINDOWS = sorted(edge + 2 * math.pi * k / 3 for k in range(-50, 50) for edge in EDGE)


@pytest.mark.parametrize(
    ("text", "domain", "directions", "turns", "roots"),
    [
        ("x**3 - x", None, [1, -1, 1], [-(3**-0.5), 3**-0.5], [(-(3**-0.5), 1), (3**-0.5, 1)]),
        ("x + sin(x)**2", (-20, 20), [1], [], [((k - 0.25) * math.pi, 2) for k in range(-6, 7)]),
        ("x + 2*sin(x)", (-30, 30), None, [at for at in sorted(TWO_SINES) if abs(at) < 30], None),
        ("where(x > 0, x + 1, x)", None, [1], [], []),
        ("where(x > 0, x - 1, x)", None, [1, 1], [0], []),
        ("where(x > 0.5, 3, -2)", None, [0, 0], [0.5], []),
        ("abs(x)", None, [-1, 1], [0], []),
        ("where(x > 1, x - 1, where(x < -1, x + 1, 0))", None, [1, 0, 1], [-1, 1], []),
        ("x**5", None, [1], [], [(0, 4)]),
        ("x**1000", None, [-1, 1], [0], [(0, 999)]),
        ("exp(-1/x**2)", None, [-1, 1], [0], [(0, math.inf)]),
        ("x*abs(x)", None, [1], [], [(0, 1)]),
        ("x*sqrt(abs(x))", None, [1], [], [(0, 0.5)]),
        ("sqrt(abs(x))", None, [-1, 1], [0], []),
        ("relu(x)**1.5", None, [0, 1], [0], []),
        ("1/(x - 0.3)", None, [-1, -1], [0.3], []),
        ("tan(x)", (-5, 5), [1] * 5, [(k + 0.5) * math.pi for k in range(-2, 2)], []),
        ("where(sin(3*x) > 0.9999, x, -x)", (-5, 5), None, [at for at in WINDOWS if abs(at) < 5], []),
    ],
)
def test_pieces(text, domain, directions, turns, roots) -> None:
    f = Activation.of(text)
    low, high = domain or (-REALS, REALS)
    actual = f.monotone(low, high)
    if directions is None:  # they alternate
        directions = [actual.pieces[0].direction * (-1) ** k for k in range(len(turns) + 1)]
    check_pieces(actual, low, high, directions, turns, roots, 1e-14)


def test_pieces_begin_where_a_formula_is_defined_and_orders_may_differ() -> None:
    assert Activation.of("log(x)").monotone().pieces == (Piece(0, REALS, 1),)
    assert Activation.of("where(x > 0, x**3, -x**4)").monotone().roots == (Root(0, 3, 2),)


# the ends of the domain if they are not those of the reals, the range
RANGES: dict[str, tuple[float, ...]] = {
    "x + sin(x)**2": (-20, 20, 0, 2),
    "x*x": (-1, 3, -2, 6),
    "x**2": (-INF, INF),
    "2*x + 1": (2, 2),
    **dict.fromkeys(("sqrt(x)", "log(x)", "relu(x)**1.5"), (0, INF)),
    "sqrt(abs(x))": (-INF, INF),
    "1/(x - 0.3)": (-INF, 0),
    "sqrt(abs(x - 1))": (-INF, INF),
    "log(x - 1)": (0, INF),
    "exp(exp(x))": (0, INF),
    "exp(-x**2)": (-math.sqrt(2 / math.e), math.sqrt(2 / math.e)),
    "abs(x)": (-1, 1),
    "where(x > 0, 3, -2)": (0, 0),
    "x + 2*sin(x)": (-1, 3),
    "log(exp(x) + exp(-x) + 1)": (-1, 1),  # which overflow
    "log(1 + exp(x) + exp(2*x))": (0, 2),
}


@pytest.mark.parametrize("text", RANGES)
def test_ranges(text: str) -> None:
    *domain, low, high = RANGES[text]
    actual = Activation.of(text).derivative_range(*domain or (-REALS, REALS))
    assert actual == pytest.approx((low, high), rel=1e-14, abs=1e-30)


# f: its jumps; its corners
BREAKS: dict[str, tuple[list[float], list[float]]] = {
    "where(x > 0, x + 1, x)": ([0], []),
    "where(x > 0, x, where(x > -1, 2*x, -2))": ([], [-1, 0]),
    **dict.fromkeys(("relu(x)**2", "x*abs(x)", "x/(1 + abs(x))", "max(x, sin(x))"), ([], [])),
    "abs(x - 0.1)": ([], [0.1]),
    "abs(abs(x) - 1)": ([], [-1, 0, 1]),
    "relu(1 - abs(x - 3))": ([], [2, 3, 4]),
    **dict.fromkeys(("sqrt(abs(x))", "where(x > 0, sqrt(x), 0)"), ([], [0])),
    "where(x*x > 2, 1, 0)": ([-math.sqrt(2), math.sqrt(2)], []),
    "where((x - 5)*(x - 5.0001) < 0, 1, 0)": ([5, 5.0001], []),
    "sign(x)*exp(-20)": ([0], []),
    "where(sin(3*x) > 0.9999, x, -x)": ([at for at in WINDOWS if abs(at) < 100], []),
}


@pytest.mark.parametrize("text", BREAKS)
def test_breakpoints(text: str) -> None:
    actual = Activation.of(text).breakpoints(-100, 100)
    for kind, at in zip(("jump", "corner"), BREAKS[text], strict=True):
        assert [point.at for point in actual if point.kind == kind] == pytest.approx(at, rel=1e-15, abs=0.0)


def test_switch_points_include_harmless_ones() -> None:
    assert Activation.of("relu(x)**2 + abs(x - 0.1)").switch_points(-5, 5).tolist() == [0, 0.1]
    assert Activation.of("relu(x - 7)").switch_points(-5, 5).size == 0
    assert Activation.of("where(abs(x) > 1, x, 0)").switch_points(-5, 5).tolist() == [-1, 0, 1]


def test_parity() -> None:
    texts = {"sin(x)": "even", "x**2": "odd", "exp(-x**2)": "odd", "log(x)": "odd", "3*x": "even"}
    texts |= dict.fromkeys(
        ("x + x**2", "x*where(x > 9.9, 2, 1)", "sqrt(x)", "clamp(x, -1, 1.001)", "clamp(x, -20, 9.9999)")
    )
    assert {text: Activation.of(text).derivative_parity(10.0) for text in texts} == texts


def test_a_report_has_the_digits_that_differ() -> None:
    report = problem(Activation.of("tan(x/10)"))
    numbers = re.search(r"derivative is computed as (\S+) at x = \S+ in place of (\S+): ", report or "")
    assert numbers and float(numbers[1]) != float(numbers[2]) == pytest.approx(0.137065441)
