"""Enclosures contain the values, the search finds every root, and exact values are exact."""

import math
import random
from functools import partial
from itertools import islice, product

import flint
import numpy as np
import pytest

from fitact.fitter.analysis import REALS, roots
from fitact.fitter.expr import atoms, evaluate, exact, parse, value
from fitact.fitter.expr.atoms import ATOMS, x
from tests.fuzz.checks import answered
from tests.fuzz.grammar import tree
from tests.support.reals import MP, real


def enclose(expr, low, high) -> tuple[np.ndarray, np.ndarray]:
    ends = [exact.enclose(expr, a, b) for a, b in zip(low.tolist(), high.tolist(), strict=True)]
    bottom, top = np.array([[*map(float, pair)] for pair in ends]).T
    return np.nextafter(bottom, -np.inf), np.nextafter(top, np.inf)


def boxes(seed: int, size: int = 100) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    centre = rng.normal(size=size) * 10.0 ** rng.integers(-3, 4, size)
    width = np.abs(rng.normal(size=size)) * 10.0 ** rng.integers(-9, 2, size)
    return centre - width, centre + width


def check_enclosure(expr, low: np.ndarray, high: np.ndarray) -> None:
    bottom, top = enclose(expr, low, high)
    for share in (0.0, 0.1, 0.37, 0.5, 0.93, 1.0):
        at = np.clip(low + (high - low) * share, low, high)
        values = np.array([float(value(expr, point, 20)) for point in at.tolist()])
        seen = np.isfinite(values)
        assert ((bottom <= values) & (values <= top))[seen].all(), expr


@pytest.mark.parametrize("atom", ATOMS, ids=lambda atom: atom.__name__)
def test_values_are_those_of_the_definition_and_enclosed(atom) -> None:
    check_enclosure(atom(x), *boxes(1))
    check_enclosure(atom(1 - x**2), *boxes(1))
    rng = np.random.default_rng(2)
    at = np.concatenate([rng.normal(size=60) * 10.0 ** rng.integers(-8, 3, 60), [0.0, -40.0, 26.5, 700.0]])
    defined = real(f"{atom.__name__}(x)")
    bottom, top = enclose(atom(x), at, at)
    actual = evaluate(atom(x), at)
    with MP.workdps(700):
        for i, point in enumerate(at.tolist()):
            try:
                true = defined(MP.mpf(point))
            except ZeroDivisionError:
                continue
            if isinstance(true, MP.mpc) or not MP.isfinite(true):
                continue
            assert abs(MP.mpf(value(atom(x), point)._mpf_) - true) <= MP.mpf("1e-50") * abs(true)
            assert bottom[i] <= true <= top[i] and (top[i] - bottom[i]) <= 1e-14 * abs(true) + 1e-300
            if abs(true) < 1e300 and not (atom is atoms.tan and abs(point) > 100):
                # SciPy's erfc rounds u² before it takes exp(−u²)
                roundings = 44 + (point**2 if atom is atoms.erfc else 0)
                assert abs(actual[i] - true) <= 2.0**-52 * roundings * abs(true) + 1e-290


def test_random_formulas_are_enclosed() -> None:
    formulas = filter(None, (answered(partial(parse, tree(random.Random(i), 6))) for i in range(1000)))
    chosen = [*islice((formula for formula in formulas if x in formula.free_symbols), 60)]
    for i in range(60):
        check_enclosure(chosen[i], *boxes(i, 20))


HALF = math.sqrt(math.log(2)) / 1e5
# formula: the end of the domain or both ends, the roots
ROOTS: dict[str, tuple[float | tuple[float, float], list[float]]] = {
    "x**3 - x": (REALS, [-1, 0, 1]),
    "sin(x)": (10, [k * math.pi for k in range(-3, 4)]),
    "1 + sin(2*x)": (7, [(k - 0.25) * math.pi for k in range(-1, 3)]),
    "(x - 1)**2*(x + 2)**3": (1e4, [-2, 1]),
    "exp(x) - 1e30": (REALS, [30 * math.log(10)]),
    "x**2 - 1e-14": (1, [-1e-7, 1e-7]),
    "(x - 1)*(x - 1.0000001)": (10, [1, 1.0000001]),
    "(x - 3)**2 + 1e-12": (10, []),
    "x*exp(-x**2)": (REALS, [0]),
    "exp(-((x - 777.123)*1e5)**2) - 0.5": (REALS, [777.123 - HALF, 777.123 + HALF]),
    **dict.fromkeys(("where(x > 0.7, 1, -1)", "where(x > 0.7, x, x - 9)"), (10, [0.7])),
    "where(x > 0.7, 1, 2)": (10, []),
    "abs(x - 1) - 1": (10, [0, 2]),
    "1/(x - 0.3)": (10, [0.3]),
    "x - 1e20": (REALS, [1e20]),
    # in brackets of many magnitudes
    "x**2 - 2": ((0.0, 1.7e308), [math.sqrt(2)]),
    "log(x) - 1": ((1e-300, 1e300), [math.e]),
    "log(x) + 300": (REALS, [float(MP.exp(-300))]),
    "x**3 - 1e-290": (REALS, [float(MP.mpf(10) ** (MP.mpf(-290) / 3))]),
    "tanh(x) - 0.5": ((0.0, 1.7e308), [math.atanh(0.5)]),
    "x**0.1 - 5": ((0.0, 1.7e308), [5**10]),
    "x**0.001 - 0.01": ((0.0, 1.0), [0]),  # 1e-2000, which is 0 as a float64
}


@pytest.mark.parametrize("text", ROOTS)
def test_roots(text: str) -> None:
    end, expected = ROOTS[text]
    low, high = end if isinstance(end, tuple) else (-end, end)
    actual = roots(parse(text), low, high)
    assert actual.reach == math.inf and actual.at == pytest.approx(expected, rel=1e-15, abs=0)


@pytest.mark.parametrize("level", [1e-30, 1e-4, 0.3, 0.5, 0.999, 1 - 1e-9])
@pytest.mark.parametrize("scale", [1e-6, 1, 1000])
def test_roots_beside_flat_tails(level: float, scale: float) -> None:
    """Newton's steps are short there and lead slowly to the root, which is as far away as the domain's end."""
    actual, share = roots(parse(f"sigmoid({scale!r}*x) - {level!r}"), -REALS, REALS), MP.mpf(repr(level))
    expected = float(MP.log(share / (1 - share)) / MP.mpf(repr(scale)))
    assert actual.reach == math.inf and actual.at.tolist() == pytest.approx([expected], rel=1e-14, abs=1e-300)


def test_signs_beside_zeros_and_flats() -> None:
    for text, end, at, signs in (
        ("x*(x - 1)**2", 5, [0, 1], ((-5, 0, -1), (0, 5, 1))),
        ("where(x > 1, x - 1, where(x < -1, x + 1, 0))", 5, [], ((-5, -1, -1), (-1, 1, 0), (1, 5, 1))),
        ("sin(x)**2 + cos(x)**2 - 1", 5, [], ((-5, 5, 0),)),
        ("exp(-x**2)", REALS, [], ((-REALS, REALS, 1),)),
        ("log(x)", 5, [1], ((0, 1, -1), (1, 5, 1))),
    ):
        actual = roots(parse(text), -end, end)
        assert (actual.at.tolist(), actual.signs) == (at, signs)


def test_too_many_roots() -> None:
    actual = roots(parse("sin(x)"), -REALS, REALS, 20)
    assert actual.reach < math.inf and actual.at.size >= 20
    inside = int(actual.reach / math.pi)
    assert actual.at == pytest.approx([k * math.pi for k in range(-inside, inside + 1)], rel=1e-15)


CANCELLING = [("1 + erf(x/sqrt(2))", -12.0), ("log(1 + exp(x))", -50.0), ("log(1 + exp(x))", -264.75)]
CANCELLING += [("(exp(x) - exp(-x))/(exp(x) + exp(-x))", 1e4), ("1 - cos(x)", 1e-30), ("sin(x**20)", 100.0)]


@pytest.mark.parametrize(("text", "at"), CANCELLING)
def test_exact_values(text: str, at: float) -> None:
    with MP.workdps(400):
        assert abs(MP.mpf(value(parse(text), at)._mpf_) / real(text)(MP.mpf(at)) - 1) < MP.mpf("1e-49")


def test_exact_values_never_fail() -> None:
    texts = "exp(exp(exp(x))) sin(exp(exp(x))) 1/x log(x) x**0.5 tan(x**300) x/abs(x) atan(1/x)"
    for text, at in product(texts.split(), (-1e300, -1.0, 0.0, 1e-300, 20.0, 1e300)):
        value(parse(text), at)
    assert value(parse("1/x"), 0.0) == flint.arb.pos_inf() and value(parse("sqrt(x)"), -1.0).is_nan()
    assert value(parse("exp(x)"), -1e200) == 0
