"""Sums of exponentials in formulas, and forms of them that do not overflow."""

from __future__ import annotations

import math

import sympy

from .atoms import Expr, Where, constant, cosh, exp, expm1, sinh, size, x

LARGE = 200  # parts of a formula; a larger one is not multiplied out
MAX_TERMS = 300  # nor one that would have more terms
HIGHEST = 1000  # powers of powers beyond this are not brought to one denominator: numbers would be as long
ONE = sympy.Integer(1)


def expanded(u: Expr) -> Expr | None:
    """Return a formula multiplied out, None if it would be too long."""
    if _terms(u) > MAX_TERMS:
        return None
    return sympy.expand(u)


def _terms(u: Expr) -> float:
    """Return how many terms a formula has at most when multiplied out, infinite if more than MAX_TERMS."""
    if u.is_Add or u.is_Mul:
        counts = [_terms(arg) for arg in u.args]
        total = math.fsum(counts) if u.is_Add else math.prod(counts)
    elif u.is_Pow and u.exp.is_Integer:
        n, k = _terms(u.base), abs(int(u.exp))
        total = 1.0 if n == 1 else math.inf if k > MAX_TERMS or n > MAX_TERMS else math.comb(int(n) + k - 1, k)
    else:
        total = max(map(_terms, u.args), default=1.0)
    return total if total <= MAX_TERMS else math.inf


def _degree(u: Expr) -> int:
    """Return the largest product of whole exponents, one inside of another."""
    inner = max(map(_degree, u.args), default=1)
    return inner * max(abs(int(u.exp)), 1) if u.is_Pow and u.exp.is_Integer else inner


def exponentials(u: Expr) -> dict[Expr, Expr] | None:
    """Return a formula that expands to a sum of numbers times exponentials as {exponent: number}, else None."""
    if size(u) > LARGE:
        return None
    plain = u.replace(expm1, lambda v: exp(v) - 1)
    plain = plain.replace(sinh, lambda v: (exp(v) - exp(-v)) / 2).replace(cosh, lambda v: (exp(v) + exp(-v)) / 2)
    names = {node: sympy.Dummy() for node in plain.atoms(exp) if node.free_symbols}
    exponents = {name: node.args[0] for node, name in names.items()}
    total = expanded(plain.xreplace(names))
    if total is None or not total.free_symbols <= set(exponents):
        return None
    found: dict[Expr, Expr] = {}
    for term in sympy.Add.make_args(total):
        number, rest = term.as_independent(*exponents, as_Add=False)
        powers = rest.as_powers_dict()
        if not set(powers) <= {*exponents, ONE}:
            return None
        exponent = tidy(sympy.Add(*(n * exponents[name] for name, n in powers.items() if name != 1)))
        found[exponent] = found.get(exponent, 0) + number
    return {exponent: number for exponent, number in found.items() if number != 0}


def positive_pair(u: Expr) -> list[tuple[Expr, Expr]] | None:
    """Return (exponent, number) of the terms of a sum of two exponentials, last the flatter, to be factored out.

    Return None if there are not two, or a number is not positive.
    """
    terms = exponentials(u) if u.is_Add else None
    if terms is None or len(terms) != 2 or not _all_positive(terms):
        return None
    return sorted(terms.items(), key=lambda item: -_steepness(item[0]))


def _steepness(exponent: Expr) -> float:
    """Return how steep an exponent is at x = 1, with 1 for every learned number."""
    slope = exponent.diff(x)
    return abs(constant(slope.xreplace(dict.fromkeys(slope.free_symbols, ONE))))


def _all_positive(terms: dict[Expr, Expr]) -> bool:
    return all(constant(number) > 0 for number in terms.values())


def tidy(exponent: Expr) -> Expr:
    """Return an exponent, multiplied out if it is linear in x; any other would lose digits."""
    total = expanded(exponent)
    return total if total is not None and not total.diff(x).free_symbols else exponent


def bounded_ratio(node: Expr) -> Expr | None:
    """Return a ratio of polynomials in one exponential E, for each sign of x the dominant power divided out.

    Return None unless all terms of the denominator are positive, so that it does not cancel, and there are three
    or more: two terms are a σ.
    """
    if not node.has(exp) or node.has(Where) or size(node) > LARGE or _degree(node) > HIGHEST:
        return None
    above, below = node.as_numer_denom()
    if not below.has(exp) or above.has(expm1, sinh):  # which would cancel if multiplied out
        return None
    lower = exponentials(below)
    if lower is None or len(lower) < 3 or not _all_positive(lower):
        return None
    growing = [f for f in sympy.Mul.make_args(above) if f.has(exp, cosh)]
    exps = [f for f in growing if exponentials(f) is not None]
    upper = exponentials(sympy.Mul(*exps))
    slopes = [w.coeff(x) for w in lower]
    if upper is None or any(w - w.coeff(x) * x != 0 for w in [*lower, *upper]):
        return None
    if any(slope.free_symbols for slope in slopes):  # the sign of a learned number is not known
        return None
    left, right = min(slopes, key=constant) * x, max(slopes, key=constant) * x

    def divided(w: Expr) -> Expr:
        upper_sum = sympy.Add(*(a * exp(sympy.expand(v - w)) for v, a in upper.items()))
        return upper_sum / sympy.Add(*(a * exp(sympy.expand(v - w)) for v, a in lower.items()))

    rest = sympy.Mul(*(f for f in sympy.Mul.make_args(above) if f not in exps))
    return rest * Where(x, divided(right), divided(left))
