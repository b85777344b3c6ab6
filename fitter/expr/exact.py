"""Values of formulas to any number of digits, and enclosures of their values, by Arb (python-flint)."""

from __future__ import annotations

import operator
from functools import lru_cache, reduce
from typing import Any

import sympy
from flint import arb, ctx, fmpq

from . import balls
from .atoms import Expr
from .balls import INF, NAN, ONE, ZERO, Ball, Interval
from .evaluate import Arithmetic

Number = Any  # an exact ball: a number of any precision, ±∞ or NaN

MOST = 8000  # bits of the last attempt
EXTRA = 40  # bits of the first attempt beyond those that are wanted
NOTHING = arb("1e-400")  # a sum that cancels to less than this counts as 0
LEAST = arb(2) ** -(10**10)  # a smaller value counts as 0
ENCLOSING = 100  # bits of the ends of intervals
LEAST_ORDER = 0.03  # of a root: a smaller order means that the limit is not 0


def value(expr: Expr, at: float | Number, digits: int = 50) -> Number:
    """Return the value of a formula at a point, correct to `digits` significant digits, below 2000.

    The formula may be naive, such as `1 + erf(x)` at −12. The value is NaN where it is not real, infinite or NaN
    where a denominator is zero, and 0 where it cancels to less than 1e-400 or is below 2**-1e10. exp of more than
    1e120 is infinite.
    """
    point, wanted = arb(at), int(3.33 * digits) + 4
    bits, lost = wanted + EXTRA, False
    while True:
        with ctx.workprec(bits):
            ball = BALLS.evaluate(expr, point)
        if not ball.is_finite():
            if ball.is_exact() or lost or bits > MOST:  # twice undefined, or infinite
                return ball if ball.is_exact() else NAN
            lost = bits > 500
        elif ball.rel_accuracy_bits() >= wanted or bits > MOST:
            return ZERO if abs(ball) < LEAST else ball.mid()
        elif ball.is_zero() or abs(ball) < NOTHING:
            return ZERO
        bits *= 2


def sign_of(number: Number) -> int:
    """Return the sign of a number, 0 for NaN."""
    return int(number > 0) - int(number < 0)


def shifted(at: Number, side: int, distance: str) -> Number:
    """Return a point below (side −1) or above (1) another, at a distance relative to it beyond 1."""
    with ctx.workprec(300):
        return (at + side * arb(distance) * max(abs(at), ONE)).mid()


def order(expr: Expr, at: Number, side: int) -> float:
    """Return the order of a formula's zero, known to 25 digits or more, from below (side −1) or above (1).

    It is a, rounded to 6 decimals, where the formula behaves like hᵃ at a distance h of 1e-16: 0 where it has
    another limit than 0, negative at a pole, `inf` where it is flatter than any power, NaN where it is undefined.
    """
    far, near = (value(expr, shifted(at, side, distance), 30) for distance in ("1e-16", "5e-17"))
    if far.is_nan() or near.is_nan():
        return float("nan")
    if near == 0:
        return float("inf")
    if not near.is_finite() or far == 0:
        return float("-inf")
    with ctx.workprec(100):
        return round(float(abs(far / near).log() / arb.const_log2()), 6) + 0.0


def enclose(expr: Expr, low: float, high: float) -> Interval:
    """Return an interval that has all finite values of a formula from `low` to `high`, empty if there are none."""
    with ctx.workprec(ENCLOSING):
        interval: Interval = INTERVALS.evaluate(expr, (arb(low), arb(high)))
    return interval


def roughly(expr: Expr, at: float) -> Ball:
    """Return a value of a formula to the precision of enclosures, with its rounding."""
    with ctx.workprec(ENCLOSING):
        return BALLS.evaluate(expr, arb(at))


def _add(a: Ball, b: Ball) -> Ball:
    total = a + b
    return total if abs(total) > NOTHING or not (total.contains(ZERO) and abs(total) < NOTHING) else ZERO


@lru_cache(maxsize=10_000)
def _constant(node: Expr, bits: int) -> Ball:
    """Return a constant to the working precision, which is that many bits."""
    if node.is_Rational:
        return arb(fmpq(int(node.p), int(node.q)))
    if node.is_Float:
        negative, mantissa, exponent, _ = node._mpf_
        return arb(-int(mantissa) if negative else int(mantissa)) * arb(2) ** int(exponent)
    if node is sympy.pi:
        return arb.pi()
    if node in (sympy.oo, -sympy.oo):
        return INF if node is sympy.oo else -INF
    values = [_constant(arg, bits) for arg in node.args]
    if node.is_Add or node.is_Mul:
        return reduce(_add if node.is_Add else operator.mul, values)
    if node.is_Pow:
        return _power(values[0], values[1], node.exp)
    return node.func.arb(*values) if hasattr(node.func, "arb") else NAN


def _power(base: Ball, exponent: Ball, symbolic: Expr) -> Ball:
    if base == 0:
        return ONE if exponent == 0 else ZERO if exponent > 0 else INF if exponent < 0 else NAN
    if symbolic.is_Integer and abs(symbolic.p) < 10_000:
        return base ** int(symbolic.p)
    if not base > 0:
        return NAN
    return base.sqrt() if symbolic == sympy.S.Half else balls.exp(exponent * base.log())


def _interval(node: Expr) -> Interval:
    ball = _constant(node, ctx.prec)
    low = ball.lower()
    return (low, low) if ball.is_exact() else (low, ball.upper())


def _raised(base: Interval, exponent: Interval, symbolic: Expr) -> Interval:
    if not symbolic.is_number:
        logarithm = balls.rising(balls.log)(base)
        return balls.rising(balls.exp, ZERO)(balls.multiply(exponent, logarithm))
    if exponent[1] < 0:
        return balls.reciprocal(_raised(base, (-exponent[1], -exponent[0]), -symbolic))
    low, high = base
    if symbolic.is_Integer and symbolic.p % 2:
        return (low ** int(symbolic.p)).lower(), (high ** int(symbolic.p)).upper()
    if symbolic.is_Integer:
        low, high = balls.sizes(base)
    elif high < 0 or low.is_nan():
        return balls.EMPTY
    else:
        low = max(low, ZERO)
    ends = [_power(end, power, symbolic) for end in (low, high) for power in exponent]
    return max(min(end.lower() for end in ends), ZERO), max(end.upper() for end in ends)


BALLS = Arithmetic(lambda node: _constant(node, ctx.prec), _add, operator.mul, _power, "arb")
INTERVALS = Arithmetic(_interval, balls.add, balls.multiply, _raised, "enclosure")
