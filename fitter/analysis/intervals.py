"""Interval evaluation of formulas: enclosures of their values.

Boxes are intervals of x, many at once. Every operation rounds outward, so a formula's enclosure on a box contains
all its values there. If it is positive, the formula has no root in the box, however narrow its features are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import sympy

from fitact.fitter.expr import atoms
from fitact.fitter.expr.atoms import Expr
from fitact.fitter.expr.evaluate import NUMPY, Arithmetic, Array, Parts
from fitact.fitter.expr.multiprecision import MP, evaluate_multiprecision
from fitact.fitter.expr.work import remembered

Pair = tuple[Any, Any]  # low and high, arrays or numbers

ATOM_SLACK = 16 * 2.0**-52  # relative, of NumPy's and SciPy's functions
ERFC_END = 26.0  # beyond this SciPy's erfc is below 1e-290, and soon 0
TINY = 1e-290
POWER_SLACK = 256 * 2.0**-52  # relative, also for an exponent that was rounded
TSECH2_PEAK = 0.7717023192091042  # where 2u tanh u = 1
LARGEST = float(np.finfo(np.float64).max)


def _down(value: Any, slack: Any = None) -> Any:
    if slack is None:
        return np.nextafter(value, -math.inf)
    lower = np.nextafter(value - np.abs(value) * slack, -math.inf)
    return np.where(value == math.inf, LARGEST, lower)


def _up(value: Any, slack: Any = None) -> Any:
    return np.nextafter(value, math.inf) if slack is None else -_down(-value, slack)


@remembered(10_000)
def _constant(node: Expr) -> Pair:
    value = np.float64(atoms.constant(node))
    if node.is_Rational and sympy.Rational(float(value)) == node:
        return value, value
    exact = evaluate_multiprecision(node, 0, 30)
    value = np.float64(exact)
    return (value, value) if MP.mpf(float(value)) == exact else (_down(value), _up(value))


def _add(a: Pair, b: Pair) -> Pair:
    empty = np.isnan(a[0]) | np.isnan(b[0])

    def total(u: Any, v: Any) -> tuple[Any, Any]:
        s = u + v
        part = s - u
        return s, (u - (s - part)) + (v - part) == 0  # exact

    (low, low_exact), (high, high_exact) = total(a[0], b[0]), total(a[1], b[1])
    low = np.where(low_exact, low, _down(np.where(np.isnan(low), -math.inf, low)))
    high = np.where(high_exact, high, _up(np.where(np.isnan(high), math.inf, high)))
    return np.where(empty, math.nan, low), np.where(empty, math.nan, high)


def _multiply(a: Pair, b: Pair) -> Pair:
    empty = np.isnan(a[0]) | np.isnan(b[0])
    products, rounded = [], []
    for u, u_zero, u_one in _ends(a):
        for v, v_zero, v_one in _ends(b):
            zero = u_zero | v_zero  # times an infinite bound, too: the numbers themselves are finite
            products.append(np.where(zero, 0.0, u * v))
            rounded.append(~(zero | u_one | v_one))
    low, high = reduce(np.minimum, products), reduce(np.maximum, products)
    below, above = (
        reduce(np.logical_or, [r & (one == end) for one, r in zip(products, rounded, strict=True)])
        for end in (low, high)
    )
    low, high = np.where(below, _down(low), low), np.where(above, _up(high), high)
    return np.where(empty, math.nan, low), np.where(empty, math.nan, high)


def _ends(u: Pair) -> list[tuple[Any, Any, Any]]:
    """Return each end of a pair, where it is 0, and where ±1; of a number, whose ends are the same, only one."""
    return [(end, end == 0, np.abs(end) == 1) for end in (u[:1] if u[0] is u[1] else u)]


def _sizes(u: Pair) -> Pair:
    """Return the least and the largest |u|."""
    low, high = u
    inside = (low <= 0) & (high >= 0)
    return np.where(inside, 0.0, np.minimum(np.abs(low), np.abs(high))), np.maximum(np.abs(low), np.abs(high))


def _power(base: Pair, exponent: Pair, symbolic: Expr) -> Pair:
    if not symbolic.is_number:
        return FUNCTIONS[atoms.exp](_multiply(exponent, FUNCTIONS[atoms.log](base)))
    p = float(exponent[0] + exponent[1]) / 2
    if p < 0 and not math.isinf(p):
        return _reciprocal(_power(base, (-exponent[1], -exponent[0]), -symbolic))

    slack = ATOM_SLACK if symbolic.is_Integer or p == 0.5 else POWER_SLACK

    def raised(u: Any) -> Pair:
        value = np.power(u, p)
        exact = (u == 0) | (u == 1) | (p == 1)
        return np.where(exact, value, _down(value, slack)), np.where(exact, value, _up(value, slack))

    low, high = base
    if symbolic.is_Integer and symbolic.p % 2:
        return raised(low)[0], raised(high)[1]
    if symbolic.is_Integer:
        least, largest = _sizes(base)
    else:
        least, largest = np.where(high < 0, math.nan, np.maximum(low, 0.0)), np.where(high < 0, math.nan, high)
    return np.maximum(raised(least)[0], 0.0), raised(largest)[1]


def _reciprocal(u: Pair) -> Pair:
    low, high = u
    pole = (low < 0) & (high > 0) | (low == 0) & (high == 0)
    lower = np.where(high == 0, -math.inf, _down(1 / high))
    upper = np.where(low == 0, math.inf, _up(1 / low))
    lower = np.where(low >= 0, np.maximum(lower, 0.0), lower)
    upper = np.where(high <= 0, np.minimum(upper, 0.0), upper)
    return np.where(pole, -math.inf, lower), np.where(pole, math.inf, upper)


def _increasing(atom: Any, least: float = -math.inf, largest: float = math.inf) -> Callable[[Pair], Pair]:
    def enclosure(u: Pair) -> Pair:
        ends = [np.asarray(NUMPY[atom](np.clip(end, -LARGEST, LARGEST))) for end in u]
        known = [(end == 0) & (value == 0) for end, value in zip(u, ends, strict=True)]
        low = np.where(known[0], 0.0, _down(ends[0], ATOM_SLACK))
        high = np.where(known[1], 0.0, _up(ends[1], ATOM_SLACK))
        return np.maximum(low, least), np.minimum(high, largest)

    return enclosure


def _clipped(atom: Any, end: float) -> Callable[[Pair], Pair]:
    """Return the enclosure of a logarithm, defined from `end` on."""
    rising = _increasing(atom)

    def enclosure(u: Pair) -> Pair:
        empty = u[1] <= end
        low, high = rising((np.maximum(u[0], end), np.maximum(u[1], end)))
        low = np.where(u[0] <= end, -math.inf, low)
        return np.where(empty, math.nan, low), np.where(empty, math.nan, high)

    return enclosure


def _even(rising: Callable[[Pair], Pair]) -> Callable[[Pair], Pair]:
    return lambda u: rising(_sizes(u))


def _erfc(u: Pair) -> Pair:
    """Return the enclosure of erfc. SciPy rounds u² before it takes exp(−u²), and underflows too early."""

    def value(end: Any) -> tuple[Any, Any]:
        return np.asarray(NUMPY[atoms.erfc](end)), ATOM_SLACK + np.square(np.clip(end, 0.0, ERFC_END)) * 2.0**-53

    low, high = u
    top = np.where(low > ERFC_END, TINY, np.minimum(_up(*value(low)), 2.0))
    bottom = np.where(high > ERFC_END, 0.0, np.maximum(_down(*value(high)), 0.0))
    return np.where(np.isnan(high), math.nan, bottom), np.where(np.isnan(low), math.nan, top)


def _wave(atom: Any, peak: float) -> Callable[[Pair], Pair]:
    """Return the enclosure of a function of period 2π that is 1 at `peak` and −1 half a period later."""

    def enclosure(u: Pair) -> Pair:
        low, high = (np.clip(end, -1e300, 1e300) for end in u)
        values = [np.asarray(NUMPY[atom](end)) for end in (low, high)]
        near = 1e-9 + 1e-15 * np.maximum(np.abs(low), np.abs(high))

        def reached(at: float) -> Any:
            first, last = (low - near - at) / math.tau, (high + near - at) / math.tau
            return (np.floor(last) >= np.ceil(first)) | (near > 1)

        ends = np.minimum(*values), np.maximum(*values)
        zero = (u[0] == 0) & (u[1] == 0)
        bottom = np.where(reached(peak - math.pi), -1.0, np.maximum(_down(ends[0], ATOM_SLACK), -1.0))
        top = np.where(reached(peak), 1.0, np.minimum(_up(ends[1], ATOM_SLACK), 1.0))
        empty = np.isnan(u[0])
        bottom, top = np.where(zero, ends[0], bottom), np.where(zero, ends[1], top)
        return np.where(empty, math.nan, bottom), np.where(empty, math.nan, top)

    return enclosure


def _tan(u: Pair) -> Pair:
    half = math.pi / 2
    low, high = (np.clip(end, -1e300, 1e300) for end in u)
    near = 1e-9 + 1e-15 * np.maximum(np.abs(low), np.abs(high))
    pole = np.floor((high + near - half) / math.pi) >= np.ceil((low - near - half) / math.pi)
    bottom, top = _increasing(atoms.tan)((low, high))
    pole |= near > 1
    return np.where(pole, -math.inf, bottom), np.where(pole, math.inf, top)


def _tsech2(u: Pair) -> Pair:
    """Return the enclosure of u / cosh² u, which rises between −TSECH2_PEAK and TSECH2_PEAK only."""
    lows, highs = zip(*(_increasing(atoms.tsech2)((end, end)) for end in u), strict=True)
    largest = _up(NUMPY[atoms.tsech2](np.float64(TSECH2_PEAK)), ATOM_SLACK)
    top = np.where((u[0] <= TSECH2_PEAK) & (u[1] >= TSECH2_PEAK), largest, np.maximum(*highs))
    bottom = np.where((u[0] <= -TSECH2_PEAK) & (u[1] >= -TSECH2_PEAK), -largest, np.minimum(*lows))
    return bottom, top


def _where(u: Pair, a: Pair, b: Pair, *, least: bool) -> Pair:
    low, high = u
    yes = low >= 0 if least else low > 0
    no = (high < 0 if least else high <= 0) | np.isnan(low)
    bottom = np.where(yes, a[0], np.where(no, b[0], np.fmin(a[0], b[0])))
    return bottom, np.where(yes, a[1], np.where(no, b[1], np.fmax(a[1], b[1])))


_HALF_PI = math.nextafter(math.pi / 2, 2)
FUNCTIONS: dict[Any, Callable[..., Pair]] = {
    atoms.Where: lambda u, a, b: _where(u, a, b, least=False),
    atoms.WhereAtLeast: lambda u, a, b: _where(u, a, b, least=True),
    atoms.exp: _increasing(atoms.exp, 0.0),
    atoms.expm1: _increasing(atoms.expm1, -1.0),
    atoms.log: _clipped(atoms.log, 0.0),
    atoms.log1p: _clipped(atoms.log1p, -1.0),
    atoms.sigmoid: _increasing(atoms.sigmoid, 0.0, 1.0),
    atoms.softplus: _increasing(atoms.softplus, 0.0),
    atoms.sinh: _increasing(atoms.sinh),
    atoms.cosh: _even(_increasing(atoms.cosh, 1.0)),
    atoms.tanh: _increasing(atoms.tanh, -1.0, 1.0),
    atoms.sech2: lambda u: _increasing(atoms.sech2, 0.0, 1.0)(_sizes(u)[::-1]),  # falling
    atoms.tsech2: _tsech2,
    atoms.logcosh: _even(_increasing(atoms.logcosh, 0.0)),
    atoms.asinh: _increasing(atoms.asinh),
    atoms.sin: _wave(atoms.sin, math.pi / 2),
    atoms.cos: _wave(atoms.cos, 0.0),
    atoms.tan: _tan,
    atoms.atan: _increasing(atoms.atan, -_HALF_PI, _HALF_PI),
    atoms.erf: _increasing(atoms.erf, -1.0, 1.0),
    atoms.erfc: _erfc,
    atoms.hypot1: _even(_increasing(atoms.hypot1, 1.0)),
    atoms.isru: _increasing(atoms.isru, -1.0, 1.0),
    atoms.squareplus: _increasing(atoms.squareplus, 0.0),
    atoms.softsign: _increasing(atoms.softsign, -1.0, 1.0),
    atoms.relu: lambda u: (np.maximum(u[0], 0.0), np.maximum(u[1], 0.0)),
    atoms.absolute: _sizes,
    atoms.sign: lambda u: (np.sign(u[0]), np.sign(u[1])),
}


def _cost(parts: Parts, at: Pair) -> float:
    return parts.all * (120 + 0.2 * np.size(at[0]))


INTERVALS = Arithmetic(_constant, _add, _multiply, _power, FUNCTIONS, _cost)


def enclose(expr: Expr, low: Array, high: Array) -> tuple[Array, Array]:
    """Enclose the values of a formula on boxes.

    Args:
        expr: the formula.
        low: lower ends of the boxes, shape (N,).
        high: their upper ends, shape (N,).

    Returns:
        Arrays (N,): every finite value on box i lies in [first[i], second[i]]; both are NaN if the formula is
        defined nowhere on the box. They allow for rounding by one unit in the last place for sums and products,
        by 16 for functions, and by u²/2 more for erfc of u > 0.

    """
    low, high = np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)
    with np.errstate(all="ignore"):
        bottom, top = INTERVALS.evaluate(expr, (low, high))
    return np.broadcast_to(bottom, low.shape).copy(), np.broadcast_to(top, low.shape).copy()
