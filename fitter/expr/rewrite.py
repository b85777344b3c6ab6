"""Formulas rewritten so that floating point evaluates them well.

Textbook formulas overflow (`log(1 + exp(x))`), cancel (`1 + erf(x)` in the left tail) or divide infinity by
infinity (`exp(x)/(1 + exp(x))`). `stable` recognises such idioms, however they are spelt, and replaces them
by the atoms of `atoms`, which are accurate wherever their values are representable. Every rule is an identity
of real numbers for all x at which the formula is defined; the rest of a formula stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy

from .atoms import (
    Expr,
    Where,
    WhereAtLeast,
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
    size,
    softplus,
    softsign,
    squareplus,
    tanh,
    tsech2,
)
from .exponentials import LARGE, bounded_ratio, expanded, exponentials, positive_pair, tidy

HALF = sympy.Rational(1, 2)
GROWTH = 10  # a formula that grows beyond this multiple of its parts plus LARGE is left as it was given
LARGEST = 1000  # parts of a formula; a larger one is not rewritten, and the literature's f″ have 600
TERMS = 24  # of a sum; the terms of a longer one are not compared in pairs
PASSES = 8  # one rule's result is rarely another's idiom, and never for long

# h(u) + 1 and h(u) − 1 without cancellation.
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


def stable(expr: Expr) -> Expr:
    """Return a formula with the same values that floating point evaluates without overflow or cancellation."""
    done: dict[Expr, Expr] = {}

    def rewritten(node: Expr) -> Expr:
        if node not in done:
            args = [rewritten(arg) for arg in node.args]
            done[node] = _once(node if list(node.args) == args else node.func(*args))
        return done[node]

    given = expr
    if size(expr) > LARGEST:
        return expr
    for _ in range(PASSES):
        before, expr = expr, rewritten(expr)
        if expr == before:
            break
    return expr if size(expr) <= GROWTH * size(given) + LARGE else given


def _once(node: Expr) -> Expr:
    """Apply the rules at the root of a formula whose parts are stable already."""
    rule = _RULES.get(node.func)
    return node if rule is None or not node.free_symbols else rule(node)


def _sum(node: Expr) -> Expr:
    """Combine terms r·h(u) ± r, and a few other pairs, until none is left."""
    terms = list(sympy.Add.make_args(node))
    if len(terms) > TERMS:
        return node
    for i, term in enumerate(terms):
        for factor in sympy.Mul.make_args(term):
            rest = term / factor
            for j, other in enumerate(terms):
                combined = None if i == j else _pair(factor, rest, other) or _fractions(factor, rest, other)
                if combined is not None:
                    left = [t for k, t in enumerate(terms) if k not in (i, j)]
                    return stable(sympy.Add(*left, combined))
    return node


def _pair(h: Expr, rest: Expr, other: Expr) -> Expr | None:
    """Return rest·h + other in a stable form, None if no rule has one."""
    for sign in (1, -1):
        if other == sign * rest:
            table = PLUS_ONE if sign > 0 else MINUS_ONE
            if h.func in table:
                return rest * table[h.func](h.args[0])
            if sign < 0 and h.is_Pow and h.exp == 2 and h.base.func in SQUARE_MINUS_ONE:
                return rest * SQUARE_MINUS_ONE[h.base.func](h.base.args[0])
        if h.func is exp and other == sign * rest * exp(-h.args[0]):
            return 2 * rest * (cosh if sign > 0 else sinh)(h.args[0])
        if h.func is hypot1 and other == sign * rest * h.args[0]:
            return rest * squareplus(sign * 2 * h.args[0])
    if h.func is sigmoid and other == -rest / 2:
        return rest / 2 * tanh(h.args[0] / 2)
    if h.func is sigmoid:  # σ(u) − σ(v) = σ(u) σ(−v) (1 − exp(v − u))
        for factor in sympy.Mul.make_args(other):
            if factor.func is sigmoid and other == -rest * factor:
                u, v = h.args[0], factor.args[0]
                apart = expanded(v - u)
                if apart is None:
                    continue
                if apart.is_number and constant(apart) < 0:
                    return -rest * h * sigmoid(-v) * expm1(apart)
                if apart.is_number:  # the other way round, so that the exponent is below 0
                    return rest * factor * sigmoid(-u) * expm1(-apart)
    if h.func is softplus and other == -rest * h.args[0]:
        return rest * softplus(-h.args[0])
    return None


def _fractions(factor: Expr, rest: Expr, other: Expr) -> Expr | None:
    """Return rest/Dⁿ + b/Dⁿ⁺¹, which the quotient rule leaves, as one fraction if that cancels terms."""
    base, power = factor.as_base_exp()
    if not (base.is_Add and power.is_Integer and power < 0) or other.has(Where):
        return None
    above = other * base ** (1 - power)
    if above.has(base) or size(other) + size(rest) + size(base) > LARGE:
        return None
    left, right = expanded(rest * base), expanded(above)
    if left is None or right is None:
        return None
    total = _merged(left) + _merged(right)
    count = len(sympy.Add.make_args(left)) + len(sympy.Add.make_args(right))
    return total * base ** (power - 1) if len(sympy.Add.make_args(total)) < count else None


def _merged(u: Expr) -> Expr:
    """Return an expanded sum with the exponentials of each term merged."""
    return sympy.Add(*(_product(term) if term.is_Mul else term for term in sympy.Add.make_args(u)))


def _product(node: Expr) -> Expr:
    """Merge exponentials, and match factors of the numerator with factors of the denominator."""
    factors = list(sympy.Mul.make_args(node))
    exponents = [f.args[0] for f in factors if f.func is exp]
    if len(exponents) > 1:
        others = [f for f in factors if f.func is not exp]
        return stable(sympy.Mul(*others, exp(sympy.Add(*exponents))))
    spread = _distributed(factors) or _bounded(factors)
    if spread is not None:
        return stable(spread)
    bounded = bounded_ratio(node)
    if bounded is not None:
        return bounded
    for i, below in enumerate(factors):
        base, power = below.as_base_exp()
        if not base.free_symbols:  # nothing cancels a number for all x
            continue
        for j, above in enumerate(factors):
            combined = None if i == j else _quotient(base, power, above)
            if combined is not None:
                left = [f for k, f in enumerate(factors) if k not in (i, j)]
                return stable(sympy.Mul(*left, combined))
    return node


def _quotient(base: Expr, power: Expr, above: Expr) -> Expr | None:
    """Return base^power · above in a stable form, None if no rule has one."""
    if base.func is sigmoid and above.func is exp and power.is_Integer:
        u, w = base.args[0], above.args[0]
        for n in range(1, int(min(power, 8)) + 1):  # exp(w) σ(u)^n = exp(w + n u) σ(−u)^n
            rest = expanded(w + n * u)
            if rest is not None and rest.is_number:
                return exp(rest) * sigmoid(-u) ** n * base ** (power - n)
    if base.func is sigmoid and (above.is_Add or above.func in (expm1, sinh)):
        terms = exponentials(above)
        if terms is not None and len(terms) == 2:
            for w, v in (terms, reversed(terms)):
                a, b = terms[w], -terms[v]
                # p − q with p = a exp(w), q = b exp(v): (p − q) σ(log(p/q)) = p tanh(log(p/q)/2)
                if constant(a / b) > 0 and _is_zero(w - v + log(a / b) - base.args[0]):
                    return a * exp(w) * tanh(base.args[0] / 2) * base ** (power - 1)
    if base.func is sech2 and above == sinh(base.args[0]):
        return tanh(base.args[0]) / cosh(base.args[0]) * base ** (power - 1)
    if power.is_Integer and power < 0:
        again = base ** (power + 1)
        if base.func is cosh and above == sinh(base.args[0]):
            return tanh(base.args[0]) * again
        under, multiplicity = above.as_base_exp()
        whole = multiplicity.is_Integer and multiplicity > 0
        if base.func is hypot1 and whole and (ratio := under / base.args[0]).is_number:
            count = min(multiplicity, -power)  # at once: one by one, powers of a thousand nest too deep
            bounded = (ratio * isru(base.args[0])) ** count
            return under ** (multiplicity - count) * bounded * base ** (power + count)
        if base.is_Add and (found := _softsign(base, above)) is not None:
            return found * again
    return None


def _is_zero(u: Expr) -> bool:
    total = expanded(u)
    return total is not None and bool(total.is_number) and abs(constant(total)) < 1e-14


def _distributed(factors: list[Expr]) -> Expr | None:
    """Return exp(u)·(p + q + …) as a sum if all terms are exponentials and none cancels another.

    As a product, one factor may overflow where the other underflows.
    """
    for factor in factors:
        if factor.func is exp:
            for other in factors:
                terms = exponentials(other) if other.is_Add else None
                if terms is not None and len(terms) > 1 and len({constant(n) > 0 for n in terms.values()}) == 1:
                    summed = sympy.Add(*(n * exp(tidy(w + factor.args[0])) for w, n in terms.items()))
                    return sympy.Mul(summed, *(f for f in factors if f not in (factor, other)))
    return None


def _bounded(factors: list[Expr]) -> Expr | None:
    """Return t·sech²(k·t) as the atom `tsech2`, if t is an exponential, which may overflow."""
    for factor in factors:
        for other in factors:
            base, power = other.as_base_exp()
            if base.func is not sech2 or power != 1 or factor.func is not exp or not base.free_symbols:
                continue
            number = base.args[0] / factor
            if number.is_number:
                return tsech2(base.args[0]) / number * sympy.Mul(*(f for f in factors if f not in (factor, other)))
    return None


def _softsign(below: Expr, above: Expr) -> Expr | None:
    """Return above/below where below = c + k·|u| and above is a multiple of u."""
    c, rest = below.as_coeff_Add()
    k, u = rest.as_coeff_Mul()
    if u.func is not absolute or not c > 0 or not k > 0:
        return None
    ratio = above / u.args[0]
    return ratio / k * softsign(u.args[0] * k / c) if ratio.is_number else None


def _power(node: Expr) -> Expr:
    base, exponent = node.base, node.exp
    if not exponent.is_number:
        return node
    if base.func is exp:
        return exp(base.args[0] * exponent)
    if base.func is cosh and exponent == -2:
        return sech2(base.args[0])
    if base.is_Pow and base.exp == 2 and not exponent.is_Integer:
        return _once(absolute(base.base) ** (2 * exponent))
    if base.is_Mul and not exponent.is_Integer:
        number, rest = base.as_coeff_Mul()
        return raised(number, exponent) * _once(rest**exponent) if number > 0 and number != 1 else node
    if base.is_Add and (2 * exponent).is_Integer and not exponent.is_Integer:
        radical = _radical(base, exponent)
        if radical is not None:
            return radical
    if constant(exponent) < 0 and (pair := positive_pair(base)):
        (w, a), (v, b) = pair
        # a e^w + b e^v = b e^v / σ(−(w − v + log(a/b)))
        u = -(w - v + (log(a / b) if a != b else 0))
        return _once((b * exp(v)) ** exponent if v != 0 else raised(b, exponent)) * sigmoid(u) ** -exponent
    return node


def _radical(base: Expr, exponent: Expr) -> Expr | None:
    """Return (c + k·u²)^(n + 1/2) with c, k > 0 as a power of √(1 + u²)."""
    c, rest = base.as_coeff_Add()
    k, square = rest.as_coeff_Mul()
    if not (square.is_Pow and square.exp == 2 and c > 0 and k > 0):
        return None
    return c**exponent * hypot1(sympy.sqrt(k / c) * square.base) ** (2 * exponent)


def _choice(node: Expr) -> Expr:
    """Resolve, in both branches, the inner choices that the same condition has decided already."""
    u, *branches = node.args

    def decided(branch: Expr, i: int) -> Expr:
        same = [inner for inner in branch.atoms(node.func) if inner.func is node.func and inner.args[0] == u]
        return branch.xreplace({inner: inner.args[i] for inner in same})

    return node.func(u, decided(branches[0], 1), decided(branches[1], 2))


def _logarithm(node: Expr) -> Expr:
    u = node.args[0]
    if u.func is exp:
        return u.args[0]
    if u.func is sigmoid:
        return -softplus(-u.args[0])
    if u.func is cosh:
        return logcosh(u.args[0])
    factors = sympy.Mul.make_args(u)
    if len(factors) > 1 and all(_is_positive(factor) for factor in factors):
        return stable(sympy.Add(*(log(factor) for factor in factors)))
    if u.is_Pow and _is_positive(u.base):
        return stable(u.exp * log(u.base))
    if pair := positive_pair(u):
        (w, a), (v, b) = pair
        ratio = log(a / b) if a != b else sympy.S.Zero
        return v + (log(b) if b != 1 else 0) + softplus(w - v + ratio)
    number, _ = u.as_coeff_Add()
    if HALF <= number <= 2:
        return _once(log1p(stable(u - 1)))
    return node


def _is_positive(u: Expr) -> bool:
    """Whether a formula is positive by its form."""
    if u.is_number:
        return constant(u) > 0
    if u.is_Add or u.is_Mul:
        return all(map(_is_positive, u.args))
    if u.is_Pow:
        return _is_positive(u.base)
    return u.func in (exp, sigmoid, softplus, cosh, sech2, erfc, hypot1, squareplus)


def _exponential(node: Expr) -> Expr:
    number, rest = node.args[0].as_coeff_Mul()
    if rest.func is softplus and number.is_Integer:
        u = rest.args[0]
        return sigmoid(-u) ** -number if number < 0 else (1 + exp(u)) ** number
    return node


_RULES: dict[Any, Callable[[Expr], Expr]] = {
    sympy.Add: _sum,
    sympy.Mul: _product,
    sympy.Pow: _power,
    log: _logarithm,
    log1p: lambda node: softplus(node.args[0].args[0]) if node.args[0].func is exp else node,
    exp: _exponential,
    Where: _choice,
    WhereAtLeast: _choice,
}
