"""Formulas in `x` as SymPy trees: the atoms, one table of them.

Functions whose textbook formula overflows or cancels are *atoms*: SymPy classes of our own, whose values
and derivatives stay finite and accurate wherever they are representable. A row of the table has all that is known
of a function. `evaluate` walks a tree; nothing is compiled and nothing is executed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import sympy
from flint import arb

from . import balls, wide
from .balls import INF, LARGEST, NAN, ONE, ZERO, Enclosure, Function, Interval, even, far, peak, rising

Expr = Any  # SymPy ships no types; a formula is a `sympy.Expr`

x = sympy.Symbol("x")
SMALLEST_SINGLE, LARGEST_SINGLE = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # float32's range at full precision
MAX_ORDER = 1000  # of the roots of numbers that SymPy simplifies
MAX_RADICAND = 512  # of their numerators and denominators: SymPy joins these roots, and fails where that is large


class Where(sympy.Function):
    """`where(u > 0, a, b)`; where u is NaN it takes b, as PyTorch does."""

    nargs = 3
    holds = staticmethod(operator.gt)  # how u compares with 0
    numpy = staticmethod(lambda u, a, b: np.where(u > 0, a, b))
    arb = staticmethod(partial(balls.chosen, least=False))
    enclosure = staticmethod(partial(balls.selected, least=False))

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
    numpy = staticmethod(lambda u, a, b: np.where(u >= 0, a, b))
    arb = staticmethod(partial(balls.chosen, least=True))
    enclosure = staticmethod(partial(balls.selected, least=True))


def _leads_with_minus(u: Any) -> bool:
    """Whether to write u as −(−u): true for at most one of u and −u, even where SymPy would rewrite both."""
    if not u.could_extract_minus_sign():
        return False
    return bool(not (-u).could_extract_minus_sign() or u.as_coeff_Mul()[0].is_negative)


class _Atom(sympy.Function):
    """A function of one argument u: a row of the table, whose columns are class attributes."""

    nargs = 1
    derivative: Callable[[Any], Any]  # of u, as a formula
    numpy: Callable[[Any], Any]  # the function of arrays, in their dtype
    arb: Function  # of balls
    enclosure: Enclosure  # of intervals; by default the function increases
    parity: int  # 1 for an even and −1 for an odd function, which never keeps a leading minus in u
    origin: int | None  # the value at 0 if that is an integer
    triton: str  # its name in the device code of generated modules
    torch: str  # and in their PyTorch operators

    @classmethod
    def eval(cls, u: Any) -> Any:
        if u == 0 and cls.origin is not None:
            return sympy.Integer(cls.origin)
        if cls.parity and _leads_with_minus(u):
            return cls.parity * cls(-u)
        return None

    def fdiff(self, argindex: int = 1) -> Any:
        return self.derivative(self.args[0])

    def _eval_evalf(self, prec: int) -> Any:
        """Return a constant's value, from which SymPy takes its sign; mpmath's own function may overflow."""
        from .exact import value  # it imports this file

        number = value(self, 0) if not self.free_symbols else NAN
        return sympy.Float._new(number._mpf_, prec) if number.is_finite() else None

    def _eval_is_extended_real(self) -> bool | None:
        return None if self.free_symbols else True


def _exp(cls: Any, u: Any) -> Any:
    """Return a simpler exp(u); SymPy's own would turn exp(1e9*log(10)) into an integer of a billion digits."""
    if u == 0:
        return sympy.Integer(1)
    sign, rest = u.as_coeff_Mul()
    return rest.args[0] ** sign if rest.func is log and rest.is_number and abs(sign) == 1 else None


ATOMS: list[Any] = []


def _atom(
    name: str,
    derivative: Callable[[Expr], Expr],
    numpy: Callable[[Any], Any],
    arb: Function,
    within: Interval = balls.REALS,
    *,
    encloses: Callable[[Function], Enclosure] | None = None,
    triton: str = "_tiles",
    torch: str = "_torch",
    parity: int = 0,
    evaluated: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """Return a new atom.

    The columns are as in `_Atom`. A function that increases does so `within` these bounds; of any other `encloses`
    makes the enclosure. `triton` and `torch` are the modules in which generated code finds it. `evaluated` is what
    SymPy calls `eval`.
    """
    enclosure = encloses(arb) if encloses else rising(arb, *within)
    columns = {"derivative": derivative, "numpy": numpy, "arb": arb, "enclosure": enclosure}
    own: dict[str, Any] = {key: staticmethod(function) for key, function in columns.items()}
    own |= {"triton": f"{triton}.{name}", "torch": f"{torch}.{name}", "parity": parity, "__module__": __name__}
    own |= {"origin": arb(ZERO).unique_fmpz()} | ({"eval": classmethod(evaluated)} if evaluated else {})
    ATOMS.append(sympy.FunctionClass(name, (_Atom,), own))
    return ATOMS[-1]


_TWO, _MATH = arb(2), "_rt.reference_math"  # where functions are that PyTorch lacks
_ABOVE, _INSIDE, _UNIT = (ZERO, INF), (-ONE, ONE), (ZERO, ONE)
exp: Any = _atom("exp", lambda u: exp(u), wide.exp, balls.exp, _ABOVE, triton="_tl", evaluated=_exp)
expm1: Any = _atom("expm1", lambda u: exp(u), wide.expm1, far(arb.expm1, -ONE, INF), (-ONE, INF))
log: Any = _atom(
    "log",
    lambda u: 1 / u,
    wide.log,
    balls.log,
    triton="_tl",
    evaluated=lambda _, u: sympy.S.Zero if u == 1 else None,
)
log1p: Any = _atom("log1p", lambda u: 1 / (1 + u), wide.log1p, balls.log1p)
# 1/(1 + exp(−u)); no tail of σ′ cancels
sigmoid: Any = _atom(
    "sigmoid", lambda u: sigmoid(u) * sigmoid(-u), wide.sigmoid, lambda u: 1 / (1 + balls.exp(-u)), _UNIT
)
# log(1 + exp(u))
softplus: Any = _atom("softplus", lambda u: sigmoid(u), wide.softplus, balls.softplus, _ABOVE, torch="_F")
sinh: Any = _atom("sinh", lambda u: cosh(u), wide.sinh, far(arb.sinh, -INF, INF), parity=-1)
cosh: Any = _atom("cosh", lambda u: sinh(u), wide.cosh, far(arb.cosh, INF, INF), encloses=even, parity=1)
tanh: Any = _atom("tanh", lambda u: sech2(u), wide.tanh, far(arb.tanh, -ONE, ONE), _INSIDE, parity=-1)
# 1/cosh² u = 1 − tanh² u
sech2: Any = _atom(
    "sech2",
    lambda u: -2 * tanh(u) * sech2(u),
    wide.sech2,
    far(lambda u: u.sech() ** 2, ZERO, ZERO),
    encloses=peak,
    torch=_MATH,
    parity=1,
)
# u/cosh² u
tsech2: Any = _atom(
    "tsech2",
    lambda u: sech2(u) - 2 * tanh(u) * tsech2(u),
    wide.tsech2,
    far(lambda u: u * u.sech() ** 2, ZERO, ZERO),
    encloses=lambda _: lambda u: balls.multiply(u, sech2.enclosure(u)),
    torch=_MATH,
    parity=-1,
)
# log(cosh u)
logcosh: Any = _atom(
    "logcosh", lambda u: tanh(u), wide.logcosh, balls.logcosh, encloses=even, torch=_MATH, parity=1
)
asinh: Any = _atom("asinh", lambda u: 1 / hypot1(u), wide.asinh, far(arb.asinh, -INF, INF, LARGEST), parity=-1)
_SIN, _COS, _WAVE = balls.periodic(arb.sin), balls.periodic(arb.cos), partial(balls.through, within=_INSIDE)
sin: Any = _atom("sin", lambda u: cos(u), wide.sin, _SIN, encloses=_WAVE, triton="_tl", parity=-1)
cos: Any = _atom("cos", lambda u: -sin(u), wide.cos, _COS, encloses=_WAVE, triton="_tl", parity=1)
tan: Any = _atom(
    "tan", lambda u: 1 + tan(u) ** 2, wide.tan, balls.periodic(arb.tan), encloses=balls.through, parity=-1
)
atan: Any = _atom("atan", lambda u: hypot1(u) ** -2, wide.atan, arb.atan, parity=-1)
_BELL = sympy.sqrt(sympy.pi) / 2  # the integral of exp(−u²) from 0
erf: Any = _atom(
    "erf",
    lambda u: exp(-(u**2)) / _BELL,
    wide.special("erf"),
    far(arb.erf, -ONE, ONE),
    _INSIDE,
    triton="_tl",
    parity=-1,
)
# 1 − erf(u)
erfc: Any = _atom(
    "erfc",
    lambda u: -exp(-(u**2)) / _BELL,
    wide.special("erfc"),
    far(arb.erfc, _TWO, ZERO),
    encloses=balls.falling,
)
# √(1 + u²)
hypot1: Any = _atom("hypot1", lambda u: isru(u), wide.hypot1, balls.hypot, encloses=even, torch=_MATH, parity=1)
# u/√(1 + u²)
isru: Any = _atom(
    "isru",
    lambda u: hypot1(u) ** -3,
    wide.isru,
    far(lambda u: u / balls.hypot(u), -ONE, ONE, LARGEST),
    _INSIDE,
    torch=_MATH,
    parity=-1,
)
# (u + √(u² + 4))/2
squareplus: Any = _atom(
    "squareplus",
    lambda u: squareplus(u) / hypot1(u / 2) / 2,
    wide.squareplus,
    balls.squareplus,
    _ABOVE,
    torch=_MATH,
)
# u/(1 + |u|)
softsign: Any = _atom(
    "softsign",
    lambda u: (1 + absolute(u)) ** -2,
    lambda u: u / (1 + np.abs(u)),
    far(lambda u: u / (1 + abs(u)), -ONE, ONE, LARGEST),
    _INSIDE,
    torch="_F",
    parity=-1,
)
# with PyTorch's derivatives, 0 at 0
relu: Any = _atom(
    "relu",
    lambda u: Where(u, sympy.S.One, sympy.S.Zero),
    lambda u: np.where(u < 0, np.zeros((), u.dtype), u),
    balls.relu,
    torch="_F",
)
absolute: Any = _atom(
    "abs", lambda u: sign(u), np.abs, abs, encloses=lambda _: balls.sizes, triton="_tl", parity=1
)
sign: Any = _atom("sign", lambda u: sympy.S.Zero, np.sign, lambda u: NAN if u.is_nan() else u.sgn(), parity=-1)


def _chosen(a: Any, b: Any, side: int) -> Any:
    """Return min (side 1) or max (side −1) of a and b: NaN if x is, like PyTorch's clamp."""
    if b.is_number:
        a, b = b, a
    return Where(side * (b - a), a, b)


# The functions of the language: name → (number of arguments, builder of the SymPy expression). Every activation
# of the catalog is a function too.
FUNCTIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    **{atom.__name__: (1, atom) for atom in ATOMS},
    "sqrt": (1, lambda u: raised(u, sympy.S.Half)),
    "square": (1, lambda u: u**2),
    "min": (2, lambda a, b: _chosen(a, b, 1)),
    "max": (2, lambda a, b: _chosen(a, b, -1)),
    "clamp": (3, lambda u, low, high: _chosen(_chosen(u, low, -1), high, 1)),
}
CONSTANTS = {"pi": sympy.pi, "e": exp(sympy.Integer(1))}


@lru_cache(maxsize=10_000)
def constant(expr: Expr) -> float:
    """Return the value of an expression without `x`, rounded once to float64.

    The value is infinite beyond the range of float64 and at a pole, and NaN where it is not real.
    """
    if expr.is_Rational:
        try:
            return float(expr.p / expr.q)
        except OverflowError:
            return math.inf if expr.p > 0 else -math.inf
    from .exact import value  # it imports this file

    return float(value(expr, 0, 20))


def beyond_singles(expr: Expr) -> str | None:
    """Return a constant of a formula in `x` that float32 cannot hold, as text; None if it holds them all.

    In a product, float32 must hold the product of the constants, and float64 each of them.
    """
    from .exact import value  # it imports this file

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
            if (precise := value(number, 0, 20)) != 0:  # 0 only in float64
                return str(precise.str(6, radius=False))
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
    size = abs(number)
    (upper, above), (lower, below) = (sympy.integer_nthroot(int(n), int(exponent.q)) for n in (size.p, size.q))
    root = sympy.Rational(upper, lower) ** exponent.p if above and below else exp(exponent * log(size))
    return root * (sympy.sign(number) * rest) ** exponent


@lru_cache(maxsize=10_000)
def varies(node: Expr) -> bool:
    """Return whether a formula is not a constant; SymPy itself would look at every occurrence of every part."""
    return bool(node.is_Symbol) or any(map(varies, node.args))


def terms(total: Expr) -> tuple[Expr, ...]:
    """Return the terms of a sum in the order in which they are added, by the fitter and in generated code.

    Those that are printed without a leading minus come first; in both groups, constants are last.
    """
    return tuple(sorted(total.args, key=lambda term: (term.could_extract_minus_sign(), not varies(term))))


@lru_cache(maxsize=10_000)
def sizes(expr: Expr) -> tuple[int, int, int]:
    """Return how many parts a formula has when written out, and about how many its first two derivatives have.

    These are the rules of differentiation, counted.
    """
    args = [sizes(arg) for arg in expr.args]
    own = [sum(arg[k] for arg in args) for k in range(3)]
    if not args:
        return 1, int(expr == x), 0
    if expr.is_Add or isinstance(expr, Where):
        return own[0] + 1, own[1] + 1, own[2] + 1
    if expr.is_Mul:
        moving = [arg for arg in args if arg[1]]
        first = sum(arg[1] + own[0] - arg[0] for arg in moving)
        second = sum(arg[2] + own[0] - arg[0] for arg in moving)
        pairs = sum(own[0] - a[0] - b[0] + a[1] + b[1] for a in moving for b in moving if a is not b)
        return own[0] + 1, first + 1, second + pairs + 1
    if not own[1]:
        return own[0] + 1, 0, 0
    # h(u): h′ u′, and h″ u′² + h′ u″, with u about twice in h′ and four times in h″
    return own[0] + 1, 2 * own[0] + own[1] + 3, 6 * own[0] + 3 * own[1] + own[2] + 6


def depth(expr: Expr) -> int:
    """Return how deep a formula is nested."""
    return 1 + max(map(depth, expr.args), default=0)
