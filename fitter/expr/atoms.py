"""Formulas in `x` as SymPy trees: the atoms.

Functions whose textbook formula overflows or cancels are *atoms*: SymPy classes of our own, whose values
and derivatives stay finite and accurate wherever they are representable. `evaluate` walks a tree; nothing
is compiled and nothing is executed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import sympy

from .work import remembered, spend, stage

Expr = Any  # SymPy ships no types; a formula is a `sympy.Expr`

x = sympy.Symbol("x")
SMALLEST_SINGLE, LARGEST_SINGLE = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # float32's range at full precision
DIFFERENTIATION = 20  # operations for each part of a derivative
MAX_ORDER = 1000  # of the roots of numbers that SymPy simplifies
MAX_RADICAND = 512  # of their numerators and denominators: SymPy joins these roots, and fails where that is large


class Where(sympy.Function):
    """`where(u > 0, a, b)`; where u is NaN it takes b, as PyTorch does."""

    nargs = 3
    holds = staticmethod(operator.gt)  # how u compares with 0

    @classmethod
    def eval(cls, u: Any, a: Any, b: Any) -> Any:
        if a == b:
            return a
        if u.is_number:
            return a if cls.holds(constant(u), 0.0) else b
        return None

    def _eval_derivative(self, symbol: Any) -> Any:
        u, a, b = self.args
        return self.func(u, a.diff(symbol), b.diff(symbol))


class WhereAtLeast(Where):
    """`where(u >= 0, a, b)`."""

    holds = staticmethod(operator.ge)


def _leads_with_minus(u: Any) -> bool:
    """Whether to write u as −(−u): true for at most one of u and −u, even where SymPy would rewrite both."""
    if not u.could_extract_minus_sign():
        return False
    return bool(not (-u).could_extract_minus_sign() or u.as_coeff_Mul()[0].is_negative)


class _Atom(sympy.Function):
    """A function of one argument u; `derivative(u)` is its derivative.

    `parity` is 1 for an even and −1 for an odd function, which never keeps a leading minus in u. `origin` is the
    value at 0 if that is an integer; an odd function needs none.
    """

    nargs = 1
    parity = 0
    origin: int | None = None
    derivative: Callable[[Any], Any]

    @classmethod
    def eval(cls, u: Any) -> Any:
        if u == 0 and (cls.parity < 0 or cls.origin is not None):
            return sympy.Integer(cls.origin or 0)
        if cls.parity and _leads_with_minus(u):
            return cls.parity * cls(-u)
        return None

    def fdiff(self, argindex: int = 1) -> Any:
        return self.derivative(self.args[0])

    def _eval_evalf(self, prec: int) -> Any:
        """Return a constant's value, from which SymPy takes its sign; mpmath's own function may overflow."""
        from .multiprecision import MP, evaluate_multiprecision  # it imports this file

        value = evaluate_multiprecision(self, 0) if not self.free_symbols else MP.nan
        return sympy.Float._new(value._mpf_, prec) if MP.isfinite(value) else None

    def _eval_is_extended_real(self) -> bool | None:
        return None if self.free_symbols else True


class exp(_Atom):
    """exp(u); SymPy's own would turn exp(1e9*log(10)) into an integer of a billion digits."""

    origin = 1
    derivative = staticmethod(lambda u: exp(u))

    @classmethod
    def eval(cls, u: Any) -> Any:
        if u == 0:
            return sympy.Integer(1)
        sign, rest = u.as_coeff_Mul()
        return rest.args[0] ** sign if rest.func is log and rest.is_number and abs(sign) == 1 else None


class log(_Atom):
    """The natural logarithm."""

    derivative = staticmethod(lambda u: 1 / u)

    @classmethod
    def eval(cls, u: Any) -> Any:
        return sympy.Integer(0) if u == 1 else None


def _atom(name: str, derivative: Callable[[Expr], Expr], *, parity: int = 0, origin: int | None = None) -> Any:
    """Return a new atom; the arguments are as in `_Atom`."""
    own = {"derivative": staticmethod(derivative), "parity": parity, "origin": origin, "__module__": __name__}
    return sympy.FunctionClass(name, (_Atom,), own)


expm1: Any = _atom("expm1", lambda u: exp(u), origin=0)  # exp(u) − 1
log1p: Any = _atom("log1p", lambda u: 1 / (1 + u), origin=0)  # log(1 + u)
sigmoid: Any = _atom("sigmoid", lambda u: sigmoid(u) * sigmoid(-u))  # 1/(1 + exp(−u)); no tail of σ′ cancels
softplus: Any = _atom("softplus", lambda u: sigmoid(u))  # log(1 + exp(u))
sinh: Any = _atom("sinh", lambda u: cosh(u), parity=-1)
cosh: Any = _atom("cosh", lambda u: sinh(u), parity=1, origin=1)
tanh: Any = _atom("tanh", lambda u: sech2(u), parity=-1)
sech2: Any = _atom("sech2", lambda u: -2 * tanh(u) * sech2(u), parity=1, origin=1)  # 1/cosh² u = 1 − tanh² u
tsech2: Any = _atom("tsech2", lambda u: sech2(u) - 2 * tanh(u) * tsech2(u), parity=-1)  # u/cosh² u
logcosh: Any = _atom("logcosh", lambda u: tanh(u), parity=1, origin=0)  # log(cosh u)
asinh: Any = _atom("asinh", lambda u: 1 / hypot1(u), parity=-1)
sin: Any = _atom("sin", lambda u: cos(u), parity=-1)
cos: Any = _atom("cos", lambda u: -sin(u), parity=1)
tan: Any = _atom("tan", lambda u: 1 + tan(u) ** 2, parity=-1)
atan: Any = _atom("atan", lambda u: hypot1(u) ** -2, parity=-1)
erf: Any = _atom("erf", lambda u: 2 / sympy.sqrt(sympy.pi) * exp(-(u**2)), parity=-1)
erfc: Any = _atom("erfc", lambda u: -2 / sympy.sqrt(sympy.pi) * exp(-(u**2)), origin=1)  # 1 − erf(u)
hypot1: Any = _atom("hypot1", lambda u: isru(u), parity=1, origin=1)  # √(1 + u²)
isru: Any = _atom("isru", lambda u: hypot1(u) ** -3, parity=-1)  # u/√(1 + u²)
squareplus: Any = _atom("squareplus", lambda u: squareplus(u) / hypot1(u / 2) / 2)  # (u + √(u² + 4))/2
softsign: Any = _atom("softsign", lambda u: (1 + absolute(u)) ** -2, parity=-1)  # u/(1 + |u|)
# with PyTorch's derivatives, 0 at 0
relu: Any = _atom("relu", lambda u: Where(u, sympy.Integer(1), sympy.Integer(0)), origin=0)
absolute: Any = _atom("absolute", lambda u: sign(u), parity=1, origin=0)
sign: Any = _atom("sign", lambda u: sympy.Integer(0), parity=-1)
ATOMS: tuple[Any, ...] = tuple(_Atom.__subclasses__())


def _chosen(a: Any, b: Any, side: int) -> Any:
    """Return min (side 1) or max (side −1) of a and b: NaN if x is, like PyTorch's clamp."""
    if b.is_number:
        a, b = b, a
    return Where(side * (b - a), a, b)


# The functions of the language: name → (number of arguments, builder of the SymPy expression). Every activation
# of the catalog is a function too.
FUNCTIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    **{"abs" if atom is absolute else atom.__name__: (1, atom) for atom in ATOMS},
    "sqrt": (1, lambda u: raised(u, sympy.S.Half)),
    "square": (1, lambda u: u**2),
    "min": (2, lambda a, b: _chosen(a, b, 1)),
    "max": (2, lambda a, b: _chosen(a, b, -1)),
    "clamp": (3, lambda u, low, high: _chosen(_chosen(u, low, -1), high, 1)),
}
# A formula may have a corner or a jump where the first argument of these changes sign.
SWITCHES = (Where, relu, absolute, sign)
CONSTANTS = {"pi": sympy.pi, "e": exp(sympy.Integer(1))}


@remembered(10_000)
def constant(expr: Expr) -> float:
    """Return the value of an expression without `x`, rounded once to float64.

    The value is infinite beyond the range of float64 and at a pole, and NaN where it is not real.
    """
    if expr.is_Rational:
        return _ratio(expr.p, expr.q)
    from .multiprecision import evaluate_multiprecision  # it imports this file

    return float(evaluate_multiprecision(expr, 0, 20))


def beyond_singles(expr: Expr) -> str | None:
    """Return a constant of a formula in `x` that float32 cannot hold, as text; None if it holds them all.

    In a product, float32 must hold the product of the constants, and float64 each of them.
    """
    for node in sympy.preorder_traversal(expr):
        numbers = [arg for arg in node.args if not arg.free_symbols]
        if len(numbers) == len(node.args):
            continue
        if node.is_Mul:
            numbers = [n for n in numbers if not 0 < abs(constant(n)) < math.inf] + [sympy.Mul(*numbers)]
        for number in numbers:
            size = constant(number)
            if SMALLEST_SINGLE <= abs(size) <= LARGEST_SINGLE:
                continue
            if size and math.isfinite(size):
                return f"{size:g}"
            from .multiprecision import MP, evaluate_multiprecision  # it imports this file

            if precise := evaluate_multiprecision(number, 0, 20):  # 0 only in float64
                return str(MP.nstr(precise, 6))
    return None


def raised(base: Expr, exponent: Expr) -> Expr:
    """Return base ** exponent, the exponent a number.

    SymPy takes the root of a number apart by its prime factors, may raise these to the order of the root, and
    fails where they are large. For the root of a power it computes real and imaginary parts, which takes minutes
    for nested formulas. Here all numbers are real, so a power has a root only where its base is positive, unless
    its exponent is even: then its root is a power of the absolute value.
    """
    number, rest = base.as_coeff_Mul()
    inner = rest.exp if rest.is_Pow else sympy.Integer(0)
    if inner != 0 and inner.is_even and not exponent.is_integer:
        if number < 0:
            return exp(exponent * log(base))  # a root of what is nowhere positive
        power = inner * exponent
        root = raised(rest.base if power.is_even else absolute(rest.base), power)
        return root if number == 1 else raised(number, exponent) * root
    if inner.is_Rational and not inner.is_even and not exponent.is_integer:
        if abs(number) != 1:
            return raised(abs(number), exponent) * raised(sympy.sign(number) * rest, exponent)
        if number == 1 and not (inner.is_integer and (inner * exponent).is_integer):
            return raised(rest.base, inner * exponent)
    if not exponent.is_Rational or exponent.is_integer or abs(number) == 1:
        return base**exponent
    if exponent.q <= MAX_ORDER and max(abs(number.p), number.q) <= MAX_RADICAND:
        return base**exponent
    return _root(abs(number), exponent) * (sympy.sign(number) * rest) ** exponent


def _root(number: Expr, exponent: Expr) -> Expr:
    """Return a positive number to a fraction: a fraction if it is one."""
    (upper, above), (lower, below) = (sympy.integer_nthroot(int(n), int(exponent.q)) for n in (number.p, number.q))
    return sympy.Rational(upper, lower) ** exponent.p if above and below else exp(exponent * log(number))


@lru_cache(maxsize=10_000)
def varies(node: Expr) -> bool:
    """Return whether a formula is not a constant; SymPy itself would look at every occurrence of every part."""
    return bool(node.is_Symbol) or any(map(varies, node.args))


def terms(total: Expr) -> tuple[Expr, ...]:
    """Return the terms of a sum in the order in which they are added, by the fitter and in generated code.

    Those that are printed without a leading minus come first; in both groups, constants are last.
    """
    return tuple(sorted(total.args, key=lambda term: (term.could_extract_minus_sign(), not varies(term))))


def size(expr: Expr) -> int:
    """Return how many parts a formula has when written out."""
    return sizes(expr)[0]


def sizes(expr: Expr) -> tuple[int, int, int]:
    """Return how many parts a formula has when written out, and about how many its first two derivatives have."""
    done: dict[Expr, tuple[int, int, int]] = {}

    def parts(node: Expr) -> tuple[int, int, int]:
        if node not in done:
            done[node] = _parts(node, [parts(arg) for arg in node.args])
        return done[node]

    return parts(expr)


def differentiated(expr: Expr) -> Expr:
    """Return the derivative of a formula with respect to `x`, as SymPy gives it."""
    with stage("differentiation", "write it with fewer products and fewer functions of functions"):
        spend(DIFFERENTIATION * sizes(expr)[1])
    return expr.diff(x)


def _parts(node: Expr, args: list[tuple[int, int, int]]) -> tuple[int, int, int]:
    """Return `sizes` from those of the arguments: the rules of differentiation, counted."""
    own = [sum(arg[k] for arg in args) for k in range(3)]
    if not args:
        return 1, int(node == x), 0
    if node.is_Add or isinstance(node, Where):
        return own[0] + 1, own[1] + 1, own[2] + 1
    if node.is_Mul:
        moving = [arg for arg in args if arg[1]]
        first = sum(arg[1] + own[0] - arg[0] for arg in moving)
        second = sum(arg[2] + own[0] - arg[0] for arg in moving)
        pairs = sum(own[0] - a[0] - b[0] + a[1] + b[1] for a in moving for b in moving if a is not b)
        return own[0] + 1, first + 1, second + pairs + 1
    if not own[1]:
        return own[0] + 1, 0, 0
    # h(u): h′ u′, and h″ u′² + h′ u″, with u about twice in h′ and four times in h″
    return own[0] + 1, 2 * own[0] + own[1] + 3, 6 * own[0] + 3 * own[1] + own[2] + 6


def _ratio(p: int, q: int) -> float:
    """Return p / q, correctly rounded."""
    try:
        return p / q
    except OverflowError:
        return math.inf if p > 0 else -math.inf
