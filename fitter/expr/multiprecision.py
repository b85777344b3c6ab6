"""Values of formulas to any number of digits: mpmath at rising precision, until two answers agree."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mpmath
import sympy

from . import atoms
from .atoms import Expr
from .evaluate import Arithmetic, Parts

Number = Any  # an mpmath `mpf`; mpmath ships no types

MP = mpmath.MPContext()  # its own precision: nobody else's changes
FIRST_EXTRA = 45  # extra digits of the first attempt
MAX_DIGITS = 2500
NOTHING = MP.mpf("1e-400")  # a value that cancels to less than this counts as 0
HUGE = MP.mpf(10) ** 120  # exp of more than this is infinite
LEAST_EXPONENT = -(10**10)  # of 2: a smaller value counts as 0, long before exp saturates in a part of a formula
DELICATE = (atoms.sin, atoms.cos, atoms.tan, atoms.log)  # they have zeros where their argument is rounded
LEAST_ORDER = 0.03  # of a root: a smaller order means that the limit is not 0
MAX_BITS = 10_000  # sin and its like of more than 2**MAX_BITS are NaN

_zero, _one, _inf, _nan = MP.zero, MP.one, MP.inf, MP.nan


def evaluate_multiprecision(expr: Expr, at: float | Number, digits: int = 50) -> Number:
    """Return the value of a formula at a point, correct to about `digits` significant digits.

    Args:
        expr: a formula in `x`, which may be naive, such as `1 + erf(x)` at −12.
        at: the point, a float or an mpmath number.
        digits: significant digits, below 2000.

    Returns:
        An mpmath number: NaN where the value is not real, infinite or NaN where a denominator is zero, and 0 where
        the value cancels to less than 1e-400 or is below 2**-1e10. exp of more than 1e120 is infinite. It raises
        no exception.

    """
    point = at if isinstance(at, MP.mpf) else MP.mpf(at)  # mpf would round an mpf to the context's precision
    last, precision = _nan, digits + FIRST_EXTRA
    while True:
        with MP.workdps(precision):
            value, sure = _attempt(expr, point)
            if value and MP.isfinite(value) and MP.mag(value) < LEAST_EXPONENT:
                return _zero
            if sure:
                return value
            if MP.isfinite(value) and MP.isfinite(last):
                if value != 0 and abs(value - last) <= MP.mpf(10) ** -digits * abs(value):
                    return value
                if precision > 400 and abs(value) < NOTHING:
                    return _zero
            elif precision > 150 and (value == last or (MP.isnan(value) and MP.isnan(last))):
                return value
            if precision >= MAX_DIGITS:
                return value
        last, precision = value, min(2 * precision, MAX_DIGITS)


def order(expr: Expr, at: Number, side: int) -> float:
    """Return the order of the zero of a formula at a point, seen from one side.

    Args:
        expr: the formula.
        at: the zero, known to 25 digits or more.
        side: −1 for the order from below, +1 from above.

    Returns:
        a, rounded to 6 decimals, where the formula behaves like hᵃ at a distance h of 1e-16: 0 where it has
        another limit than 0, negative at a pole, `inf` where it is flatter than any power, NaN where it is
        undefined.

    """
    with MP.workdps(80):
        h = MP.mpf(10) ** -16 * max(abs(at), _one)
        far, near = (evaluate_multiprecision(expr, at + side * d, 30) for d in (h, h / 2))
        if MP.isnan(far) or MP.isnan(near):
            return float("nan")
        if near == 0:
            return float("inf")
        if not MP.isfinite(near) or far == 0:
            return float("-inf")
        return round(float(MP.log(abs(far / near), 2)), 6) + 0.0


def _attempt(expr: Expr, at: Number) -> tuple[Number, bool]:
    """Return the value at the working precision, and whether at most FIRST_EXTRA digits of it were lost."""
    lost = 0  # bits
    known = True  # whether all constants are known to the working precision

    def add(a: Number, b: Number) -> Number:
        nonlocal lost
        total = a + b
        lost += _cancelled(a, b, total)
        return total

    def constant(node: Expr) -> Number:
        nonlocal known
        value, sure = _constant_to(node, MP.prec)
        known = known and sure
        return value

    done: dict[Expr, Number] = {}
    value = Arithmetic(constant, add, lambda a, b: a * b, _power, FUNCTIONS, _cost).evaluate(expr, at, done)
    return value, known and lost < 64 and not any(_loses(node, result) for node, result in done.items())


def _cancelled(a: Number, b: Number, total: Number) -> int:
    """Return how many bits were lost in adding two numbers to their total."""
    if not (a and b) or (after := _size(total)) is None:
        return 0
    return int(max(MP.mag(a), MP.mag(b)) - after) if total else MAX_BITS


def _loses(node: Expr, result: Number) -> bool:
    """Whether a subformula's value may lose digits: too large for the functions above it, or near their zeros."""
    size = _size(result)
    if size is None or size > 50:
        return True
    return (size < -20 or not result) and node.func in DELICATE


def _size(value: Number) -> int | None:
    """Return the exponent of 2 above a number, as MP.mag does but faster; 0 for 0, None if it is not finite."""
    _, mantissa, exponent, bits = value._mpf_
    return exponent + bits if mantissa or not exponent else None


def _cost(parts: Parts, _: Number) -> float:
    """Return the operations that an evaluation takes: functions by their digits, error functions by more."""
    digits = int(MP.dps)
    each = digits * (1 + digits / 500)
    return 5 * parts.all + each / 4 * parts.functions + each * parts.slow


@lru_cache(maxsize=10_000)
def _constant_to(node: Expr, bits: int) -> tuple[Number, bool]:
    """Return a constant to the working precision, which is that many bits, and whether few digits were lost."""
    if node.is_Rational:
        return MP.mpf(node.p) / node.q, True
    if node.is_Float:
        return MP.mpf(node._mpf_), True
    if node is sympy.pi or node is sympy.E:
        return +(MP.pi if node is sympy.pi else MP.e), True
    if node in (sympy.oo, -sympy.oo):
        return (_inf if node is sympy.oo else -_inf), True
    parts = [_constant_to(arg, bits) for arg in node.args]
    values = [value for value, _ in parts]
    sure = all(each for _, each in parts)
    if node.is_Add:
        lost = 0
        total = _zero
        for value in values:
            before, total = total, total + value
            lost += _cancelled(before, value, total)
        return total, sure and lost < 64
    if node.is_Mul:
        return MP.fprod(values), sure
    if node.is_Pow:
        value = _power(values[0], values[1], node.exp)
    else:
        value = FUNCTIONS[node.func](*values) if node.func in FUNCTIONS else _nan
    return value, sure and not any(map(_loses, (*node.args, node), (*values, value)))


def _power(base: Number, exponent: Number, symbolic: Expr) -> Number:
    if base == 0:
        return _one if exponent == 0 else _zero if exponent > 0 else _inf if exponent < 0 else _nan
    if symbolic.is_Integer and abs(symbolic.p) < 10_000:
        return base**symbolic.p
    if not base > 0:
        return _nan
    return MP.sqrt(base) if exponent == 0.5 else _exp(exponent * MP.log(base))


def _exp(u: Number) -> Number:
    if abs(u) > HUGE:
        return _inf if u > 0 else _zero
    return MP.exp(u)


def _periodic(function: Callable[[Number], Number]) -> Callable[[Number], Number]:
    def guarded(u: Number) -> Number:
        return function(u) if MP.isfinite(u) and (not u or MP.mag(u) < MAX_BITS) else _nan

    return guarded


def _saturating(function: Callable[[Number], Number], right: Number, left: Number) -> Callable[[Number], Number]:
    def guarded(u: Number) -> Number:
        return function(u) if not abs(u) > HUGE else right if u > 0 else left

    return guarded


def _log(u: Number) -> Number:
    return MP.log(u) if u > 0 else -_inf if u == 0 else _nan


def _log1p(u: Number) -> Number:
    return MP.log1p(u) if u > -1 else -_inf if u == -1 else _nan


def _logcosh(u: Number) -> Number:
    a = abs(u)
    return MP.log1p(2 * MP.sinh(a / 2) ** 2) if a < 1 else a + MP.log1p(_exp(-2 * a)) - MP.ln2


def _hypot(u: Number, one: int = 1) -> Number:
    return MP.sqrt(u * u + one * one)


def _tan(u: Number) -> Number:
    cosine = MP.cos(u)
    return MP.sin(u) / cosine if cosine else _inf


FUNCTIONS: dict[Any, Callable[..., Number]] = {
    atoms.Where: lambda u, a, b: a if u > 0 else b,
    atoms.WhereAtLeast: lambda u, a, b: a if u >= 0 else b,
    atoms.exp: _exp,
    atoms.expm1: _saturating(MP.expm1, _inf, -_one),
    atoms.log: _log,
    atoms.log1p: _log1p,
    atoms.sigmoid: lambda u: 1 / (1 + _exp(-u)),
    atoms.softplus: lambda u: MP.log1p(_exp(u)) if u < 0 else u + MP.log1p(_exp(-u)),
    atoms.sinh: _saturating(MP.sinh, _inf, -_inf),
    atoms.cosh: _saturating(MP.cosh, _inf, _inf),
    atoms.tanh: _saturating(MP.tanh, _one, -_one),
    atoms.sech2: _saturating(lambda u: 1 / MP.cosh(u) ** 2, _zero, _zero),
    atoms.tsech2: _saturating(lambda u: u / MP.cosh(u) ** 2, _zero, _zero),
    atoms.logcosh: _logcosh,
    atoms.asinh: lambda u: MP.asinh(u) if MP.isfinite(u) else u,
    atoms.sin: _periodic(MP.sin),
    atoms.cos: _periodic(MP.cos),
    atoms.tan: _periodic(_tan),
    atoms.atan: MP.atan,
    atoms.erf: _saturating(MP.erf, _one, -_one),
    atoms.erfc: _saturating(MP.erfc, _zero, MP.mpf(2)),
    atoms.hypot1: _hypot,
    atoms.isru: lambda u: u / _hypot(u) if MP.isfinite(u) else MP.sign(u),
    atoms.squareplus: lambda u: (u + _hypot(u, 2)) / 2 if u > 0 else 2 / (_hypot(u, 2) - u),
    atoms.softsign: lambda u: u / (1 + abs(u)) if MP.isfinite(u) else MP.sign(u),
    atoms.relu: lambda u: _zero if u < 0 else u,
    atoms.absolute: abs,
    atoms.sign: MP.sign,
}
