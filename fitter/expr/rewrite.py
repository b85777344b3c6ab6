"""Formulas rewritten so that floating point evaluates them well: a table of identities.

Textbook formulas overflow (`log(1 + exp(x))`), cancel (`1 + erf(x)` in the left tail) or divide infinity by
infinity (`exp(x)/(1 + exp(x))`). `stable` replaces the usual ones by the atoms of `atoms`, which are accurate
wherever their values are representable. Each row is an identity of real numbers for all x at which the formula is
defined. What no row covers stays as it is: `float_check` then names the part that fails, and the functions to use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy

from .atoms import (
    Expr,
    absolute,
    asinh,
    constant,
    cos,
    cosh,
    erf,
    erfc,
    exp,
    expm1,
    hypot1,
    isru,
    log,
    log1p,
    logcosh,
    raised,
    sech2,
    sigmoid,
    sin,
    sinh,
    softplus,
    softsign,
    squareplus,
    tanh,
    tsech2,
    x,
)

HALF = sympy.Rational(1, 2)
TERMS = 24  # of a sum; the terms of a longer one are not compared in pairs
PASSES = 8  # one row's result is rarely another's idiom, and never for long

# h(u) + 1, h(u) − 1 and h(u)² − 1
PLUS_ONE: dict[Any, Callable[[Expr], Expr]] = {
    tanh: lambda u: 2 * sigmoid(2 * u),
    erf: lambda u: erfc(-u),
    expm1: exp,
    isru: lambda u: squareplus(2 * u) / hypot1(u),
}
MINUS_ONE: dict[Any, Callable[[Expr], Expr]] = {
    tanh: lambda u: -2 * sigmoid(-2 * u),
    erf: lambda u: -erfc(u),
    erfc: lambda u: -erf(u),
    sigmoid: lambda u: -sigmoid(-u),
    exp: expm1,
    cos: lambda u: -2 * sin(u / 2) ** 2,
    cosh: lambda u: 2 * sinh(u / 2) ** 2,
    sech2: lambda u: -(tanh(u) ** 2),
    hypot1: lambda u: u * tanh(asinh(u) / 2),
    isru: lambda u: -squareplus(-2 * u) / hypot1(u),
}
SQUARE_MINUS_ONE: dict[Any, Callable[[Expr], Expr]] = {
    tanh: lambda u: -sech2(u),
    sin: lambda u: -(cos(u) ** 2),
    cos: lambda u: -(sin(u) ** 2),
}
# h(g(u))
COMPOSED: dict[tuple[Any, Any], Callable[[Expr], Expr]] = {
    (log, exp): lambda u: u,
    (log, sigmoid): lambda u: -softplus(-u),
    (log, cosh): logcosh,
    (log1p, exp): softplus,
}


def stable(expr: Expr) -> Expr:
    """Return a formula with the same values that floating point evaluates with less overflow and cancellation."""
    done: dict[Expr, Expr] = {}

    def rewritten(node: Expr) -> Expr:
        if node not in done:
            args = [rewritten(arg) for arg in node.args]
            done[node] = _once(node if list(node.args) == args else node.func(*args))
        return done[node]

    for _ in range(PASSES):
        before, expr = expr, rewritten(expr)
        if expr == before:
            break
    return expr


def _once(node: Expr) -> Expr:
    """Apply a row at the root of a formula whose parts are stable already."""
    if not node.free_symbols:
        return node
    if node.is_Add:
        return _sum(node)
    if node.is_Mul:
        return _product(node)
    if node.is_Pow:
        return _power(node) if node.exp.is_number else node
    inner = node.args[0] if node.args else node
    if (node.func, inner.func) in COMPOSED:
        return COMPOSED[node.func, inner.func](inner.args[0])
    if node.func is log:
        return _logarithm(node)
    number, rest = inner.as_coeff_Mul()
    if node.func is exp and rest.func is softplus and number.is_Integer:
        u = rest.args[0]
        return sigmoid(-u) ** -number if number < 0 else (1 + exp(u)) ** number
    return node


def _sum(node: Expr) -> Expr:
    """Combine terms r·h(u) ± r, and a few other pairs, until none is left."""
    terms = list(node.args)
    if len(terms) > TERMS:
        return node
    for i, term in enumerate(terms):
        for factor in sympy.Mul.make_args(term):
            for j, other in enumerate(terms):
                combined = None if i == j else _pair(factor, term / factor, other)
                if combined is not None:
                    return stable(sympy.Add(*(t for k, t in enumerate(terms) if k not in (i, j)), combined))
    return node


def _pair(h: Expr, rest: Expr, other: Expr) -> Expr | None:
    """Return rest·h + other in a stable form, None if no row has one."""
    u = h.args[0] if h.args else h
    for sign, table in ((1, PLUS_ONE), (-1, MINUS_ONE)):
        if other == sign * rest and h.func in table:
            return rest * table[h.func](u)
        if h.func is exp and other == sign * rest * exp(-u):
            return 2 * rest * (cosh if sign > 0 else sinh)(u)
        if h.func is hypot1 and other == sign * rest * u:
            return rest * squareplus(sign * 2 * u)
    if other == -rest and h.is_Pow and h.exp == 2 and h.base.func in SQUARE_MINUS_ONE:
        return rest * SQUARE_MINUS_ONE[h.base.func](h.base.args[0])
    if h.func is sigmoid and other == -rest / 2:
        return rest / 2 * tanh(u / 2)
    return rest * softplus(-u) if h.func is softplus and other == -rest * u else None


def _product(node: Expr) -> Expr:
    """Merge exponentials, and match each factor with each other one."""
    factors = list(node.args)
    exponents = [f.args[0] for f in factors if f.func is exp]
    if len(exponents) > 1:
        return stable(sympy.Mul(*(f for f in factors if f.func is not exp), exp(sympy.Add(*exponents))))
    for below in factors:
        base, power = below.as_base_exp()
        for above in factors if base.free_symbols else ():
            combined = None if above is below else _quotient(base, power, above)
            if combined is not None:
                return stable(sympy.Mul(*(f for f in factors if f not in (above, below)), combined))
    return node


def _quotient(base: Expr, power: Expr, above: Expr) -> Expr | None:
    """Return base^power · above in a stable form, None if no row has one."""
    u, v = (part.args[0] if part.args else part for part in (base, above))
    if base.func is sigmoid and above.func is exp and power.is_Integer:
        for n in range(1, int(min(power, 8)) + 1):  # exp(v) σ(u)^n = exp(v + n u) σ(−u)^n
            if (v + n * u).is_number:
                return exp(v + n * u) * sigmoid(-u) ** n * base ** (power - n)
    if base.func is sigmoid and above.func is expm1 and v + u == 0:
        return tanh(v / 2) * base ** (power - 1)
    if base.func is sech2 and above == sinh(u):
        return tanh(u) / cosh(u) * base ** (power - 1)
    if base.func is sech2 and power == 1 and above.func is exp and (number := u / above).is_number:
        return tsech2(u) / number  # exp may overflow
    if power.is_Integer and power < 0:
        if base.func is cosh and above == sinh(u):
            return tanh(u) * base ** (power + 1)
        under, count = above.as_base_exp()
        if base.func is hypot1 and count.is_Integer and count > 0 and (ratio := under / u).is_number:
            count = min(count, -power)  # at once: one by one, powers of a thousand nest too deep
            return above / under**count * (ratio * isru(u)) ** count * base ** (power + count)
        c, rest = base.as_coeff_Add()
        k, size = rest.as_coeff_Mul()
        if size.func is absolute and c > 0 and k > 0 and (ratio := above / size.args[0]).is_number:
            return ratio / k * softsign(size.args[0] * k / c) * base ** (power + 1)
    return None


def _power(node: Expr) -> Expr:
    base, exponent = node.base, node.exp
    if base.func is exp:
        return exp(base.args[0] * exponent)
    if base.func is cosh and exponent == -2:
        return sech2(base.args[0])
    if base.is_Pow and base.exp == 2 and not exponent.is_Integer:
        return _once(absolute(base.base) ** (2 * exponent))
    if base.is_Mul and not exponent.is_Integer:
        number, rest = base.as_coeff_Mul()
        return raised(number, exponent) * _once(rest**exponent) if number > 0 and number != 1 else node
    c, rest = base.as_coeff_Add()
    k, square = rest.as_coeff_Mul()
    halves = (2 * exponent).is_Integer and not exponent.is_Integer
    if halves and c > 0 and k > 0 and square.is_Pow and square.exp == 2:
        return c**exponent * hypot1(sympy.sqrt(k / c) * square.base) ** (2 * exponent)
    if constant(exponent) < 0 and (pair := _exponentials(base)):
        (w, a), (v, b) = pair
        # a e^w + b e^v = b e^v / σ(−(w − v + log(a/b)))
        u = -(w - v + (log(a / b) if a != b else 0))
        return _once((b * exp(v)) ** exponent if v != 0 else raised(b, exponent)) * sigmoid(u) ** -exponent
    return node


def _logarithm(node: Expr) -> Expr:
    u = node.args[0]
    if pair := _exponentials(u):
        (w, a), (v, b) = pair
        return v + (log(b) if b != 1 else 0) + softplus(w - v + (log(a / b) if a != b else 0))
    return _once(log1p(stable(u - 1))) if HALF <= u.as_coeff_Add()[0] <= 2 else node


def _exponentials(u: Expr) -> list[tuple[Expr, Expr]] | None:
    """Return (exponent, number) of the terms of a·exp(w) + b·exp(v) with a, b > 0, last the flatter; else None."""
    terms = []
    for term in u.args if u.is_Add and len(u.args) == 2 else ():
        number, rest = term.as_independent(*term.free_symbols, as_Add=False)
        if constant(number) > 0 and (rest == 1 or rest.func is exp):
            terms.append((rest.args[0] if rest != 1 else sympy.Integer(0), number))
    return sorted(terms, key=lambda item: -_steepness(item[0])) if len(terms) == 2 else None


def _steepness(exponent: Expr) -> float:
    """Return how steep an exponent is at x = 1, with 1 for every learned parameter."""
    slope = exponent.diff(x)
    return abs(constant(slope.xreplace(dict.fromkeys(slope.free_symbols, sympy.Integer(1)))))
