"""The functions of the language in Arb's ball arithmetic, and how each carries intervals to intervals.

A ball is a midpoint and a radius, of any precision; what is computed with balls is certain. Where a result may not
be a real number, it is NaN. An interval is a pair of exact balls, its ends, which may be infinite; (NaN, NaN) is
the empty one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flint import arb

Ball = Any  # flint's types are not subclassed by mypy
Interval = tuple[Ball, Ball]
Function = Callable[[Ball], Ball]
Enclosure = Callable[[Interval], Interval]

ZERO, ONE, INF, NAN = arb(0), arb(1), arb.pos_inf(), arb.nan()
HUGE = arb(10**120)  # exp of more than this is infinite
LARGEST = arb(10) ** (10**9)  # an end of an interval that is no larger is finite
FADED = arb(2) ** -(10**6)  # how far a function may be from a limit that it has all but met
EMPTY = NAN, NAN
REALS = -INF, INF


def far(function: Function, left: Ball, right: Ball, bound: Ball = HUGE) -> Function:
    """Return a function that has its limits beyond a bound: those at −∞ and ∞."""

    def guarded(u: Ball) -> Ball:
        if u > bound:
            return right
        return left if u < -bound else function(u)

    return guarded


def periodic(function: Function) -> Function:
    """Return a function that is NaN of numbers with more than 10,000 bits before the point."""
    bound = arb(1 << 10_000)
    return lambda u: function(u) if abs(u) < bound else NAN


exp = far(arb.exp, ZERO, INF)


def log(u: Ball) -> Ball:
    """Return log u, −∞ at 0."""
    return u.log() if u > 0 else -INF if u == 0 else NAN


def log1p(u: Ball) -> Ball:
    """Return log(1 + u), −∞ at −1."""
    return u.log1p() if u > -1 else -INF if u == -1 else NAN


def softplus(u: Ball) -> Ball:
    """Return log(1 + exp(u))."""
    return exp(u).log1p() if u < 0 else u + exp(-u).log1p()


def logcosh(u: Ball) -> Ball:
    """Return log(cosh u)."""
    a = abs(u)
    return (2 * (a / 2).sinh() ** 2).log1p() if a < 1 else a + exp(-2 * a).log1p() - arb.const_log2()


def hypot(u: Ball, v: int = 1) -> Ball:
    """Return √(u² + v²)."""
    return (u * u + v * v).sqrt()


def squareplus(u: Ball) -> Ball:
    """Return (u + √(u² + 4))/2."""
    return (u + hypot(u, 2)) / 2 if u > 0 else 2 / (hypot(u, 2) - u)


def relu(u: Ball) -> Ball:
    """Return max(u, 0)."""
    return (u + abs(u)) / 2 if u.is_finite() else ZERO if u < 0 else u


def chosen(u: Ball, a: Ball, b: Ball, *, least: bool) -> Ball:
    """Return a if u > 0, or u ≥ 0 if `least`, otherwise b; both, if that is not certain."""
    if u > 0 or (least and u >= 0):
        return a
    if u.is_nan() or u < 0 or (not least and u <= 0):
        return b
    return a.union(b) if a.is_finite() and b.is_finite() else NAN


# ------------------------------------------------------------------------------------------------------ intervals


def rising(function: Function, least: Ball = -INF, most: Ball = INF) -> Enclosure:
    """Return the enclosure of an increasing function between two bounds, which it does not reach."""

    def enclosure(u: Interval) -> Interval:
        low, high = function(u[0]).lower(), function(u[1]).upper()
        if not high > -INF:  # beyond the end of its domain
            return EMPTY
        low, high = max(least, low), min(high, most)  # of NaN, the bound
        if low == most:
            low = min((most - FADED).lower(), LARGEST)
        return low, (least + FADED).upper() if high == least else high

    return enclosure


def falling(function: Function) -> Enclosure:
    """Return the enclosure of a decreasing function that tends to 0."""
    return lambda u: (max(function(u[1]).lower(), ZERO), max(function(u[0]).upper(), FADED))


def sizes(u: Interval) -> Interval:
    """Return the enclosure of |u|."""
    low, high = u
    if low > 0:
        return u
    return (-high, -low) if high < 0 else (ZERO, max(-low, high)) if high >= 0 else EMPTY


def even(function: Function) -> Enclosure:
    """Return the enclosure of a function that increases with |u|."""
    grown = rising(function, function(ZERO))
    return lambda u: grown(sizes(u))


def peak(function: Function) -> Enclosure:
    """Return the enclosure of a function that falls from 1 to 0 with |u|."""
    fallen = falling(function)
    return lambda u: (fallen(sizes(u))[0], min(fallen(sizes(u))[1], ONE))


def through(function: Function, within: Interval = REALS) -> Enclosure:
    """Return the enclosure that the ball about an interval gives: of a function that waves, or has poles."""

    def enclosure(u: Interval) -> Interval:
        if not u[0] <= u[1]:
            return EMPTY
        ball = function(u[0].union(u[1])) if u[0].is_finite() and u[1].is_finite() else NAN
        return (max(ball.lower(), within[0]), min(ball.upper(), within[1])) if ball.is_finite() else within

    return enclosure


def add(a: Interval, b: Interval) -> Interval:
    """Return the enclosure of a sum."""
    low, high = (a[0] + b[0]).lower(), (a[1] + b[1]).upper()
    if low.is_nan() or high.is_nan():  # ∞ − ∞, unless one is empty
        if a[0].is_nan() or b[0].is_nan():
            return EMPTY
        return -INF if low.is_nan() else low, INF if high.is_nan() else high
    return low, high


def multiply(a: Interval, b: Interval) -> Interval:
    """Return the enclosure of a product; 0 times an infinite end is 0, as the numbers themselves are finite."""
    if a[0].is_nan() or b[0].is_nan():
        return EMPTY
    of, by = a[:1] if a[0] is a[1] else a, b[:1] if b[0] is b[1] else b  # a number has one end
    ends = [ZERO if u.is_zero() or v.is_zero() else u * v for u in of for v in by]
    return min([end.lower() for end in ends]), max([end.upper() for end in ends])


def reciprocal(u: Interval) -> Interval:
    """Return the enclosure of 1/u."""
    low, high = u
    if low <= 0 <= high:
        if low == 0 and high > 0:
            return (1 / high).lower(), INF
        return (-INF, (1 / low).upper()) if high == 0 and low < 0 else REALS
    return (1 / high).lower(), (1 / low).upper()


def selected(u: Interval, a: Interval, b: Interval, *, least: bool) -> Interval:
    """Return the enclosure of a conditional."""
    if u[0] > 0 or (least and u[0] >= 0):
        return a
    if u[0].is_nan() or u[1] < 0 or (not least and u[1] <= 0):
        return b
    if a[0].is_nan() or b[0].is_nan():
        return b if a[0].is_nan() else a
    return min(a[0], b[0]), max(a[1], b[1])
