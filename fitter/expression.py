"""Formulas in `x` as SymPy trees: the atoms, and their values in NumPy float64.

Functions whose textbook formula overflows or cancels are *atoms*: SymPy classes of our own, whose values
and derivatives stay finite and accurate wherever they are representable. `evaluate` walks a tree; nothing
is compiled and nothing is executed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import numpy as np
import sympy
from numpy.typing import NDArray

Expr = Any  # SymPy ships no types; a formula is a `sympy.Expr`
Array = NDArray[np.float64]

x = sympy.Symbol("x")


class Where(sympy.Function):
    """`where(u > 0, a, b)`: b also where u is NaN, as in PyTorch."""

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


class _Atom(sympy.Function):
    """A function of one argument u; `slope(u)` is its derivative.

    `parity` is +1 where it is even and -1 where it is odd: then u has no leading minus. `origin` is the value
    at 0, where it has a short name.
    """

    nargs = 1
    parity = 0
    origin: int | None = None
    slope: Callable[[Any], Any]

    @classmethod
    def eval(cls, u: Any) -> Any:
        if u == 0 and (cls.parity < 0 or cls.origin is not None):
            return sympy.Integer(cls.origin or 0)
        if cls.parity and u.could_extract_minus_sign():
            return cls.parity * cls(-u)
        return None

    def fdiff(self, argindex: int = 1) -> Any:
        return self.slope(self.args[0])


class exp(_Atom):
    """exp(u); SymPy's own would turn exp(1e9*log(10)) into an integer of a billion digits."""

    origin = 1

    @classmethod
    def eval(cls, u: Any) -> Any:
        if u == 0:
            return sympy.Integer(1)
        sign, rest = u.as_coeff_Mul()
        return rest.args[0] ** sign if rest.func is log and rest.is_number and abs(sign) == 1 else None

    @staticmethod
    def slope(u: Any) -> Any:
        return exp(u)


class expm1(_Atom):
    """exp(u) − 1."""

    origin = 0

    @staticmethod
    def slope(u: Any) -> Any:
        return exp(u)


class log(_Atom):
    """The natural logarithm."""

    @classmethod
    def eval(cls, u: Any) -> Any:
        return sympy.Integer(0) if u == 1 else None

    @staticmethod
    def slope(u: Any) -> Any:
        return 1 / u


class log1p(_Atom):
    """log(1 + u)."""

    origin = 0

    @staticmethod
    def slope(u: Any) -> Any:
        return 1 / (1 + u)


class sigmoid(_Atom):
    """σ(u) = 1 / (1 + exp(−u)), with σ′ = σ(u) σ(−u): no cancellation in either tail."""

    @staticmethod
    def slope(u: Any) -> Any:
        return sigmoid(u) * sigmoid(-u)


class softplus(_Atom):
    """log(1 + exp(u)), whose derivative is σ(u)."""

    @staticmethod
    def slope(u: Any) -> Any:
        return sigmoid(u)


class sinh(_Atom):
    """The hyperbolic sine."""

    parity = -1

    @staticmethod
    def slope(u: Any) -> Any:
        return cosh(u)


class cosh(_Atom):
    """The hyperbolic cosine."""

    parity = 1
    origin = 1

    @staticmethod
    def slope(u: Any) -> Any:
        return sinh(u)


class tanh(_Atom):
    """The hyperbolic tangent."""

    parity = -1

    @staticmethod
    def slope(u: Any) -> Any:
        return sech2(u)


class sech2(_Atom):
    """1 / cosh² u = 1 − tanh² u, without cancellation."""

    parity = 1
    origin = 1

    @staticmethod
    def slope(u: Any) -> Any:
        return -2 * tanh(u) * sech2(u)


class tsech2(_Atom):
    """U / cosh² u, also where u overflows."""

    parity = -1

    @staticmethod
    def slope(u: Any) -> Any:
        return sech2(u) - 2 * tanh(u) * tsech2(u)


class logcosh(_Atom):
    """log(cosh u), without overflow and without cancellation near 0."""

    parity = 1
    origin = 0

    @staticmethod
    def slope(u: Any) -> Any:
        return tanh(u)


class asinh(_Atom):
    """The inverse hyperbolic sine."""

    parity = -1

    @staticmethod
    def slope(u: Any) -> Any:
        return 1 / hypot1(u)


class sin(_Atom):
    """The sine."""

    parity = -1

    @staticmethod
    def slope(u: Any) -> Any:
        return cos(u)


class cos(_Atom):
    """The cosine."""

    parity = 1

    @staticmethod
    def slope(u: Any) -> Any:
        return -sin(u)


class tan(_Atom):
    """The tangent."""

    parity = -1

    @staticmethod
    def slope(u: Any) -> Any:
        return 1 + tan(u) ** 2


class atan(_Atom):
    """The inverse tangent."""

    parity = -1

    @staticmethod
    def slope(u: Any) -> Any:
        return hypot1(u) ** -2


class erf(_Atom):
    """The error function."""

    parity = -1

    @staticmethod
    def slope(u: Any) -> Any:
        return 2 / sympy.sqrt(sympy.pi) * exp(-(u**2))


class erfc(_Atom):
    """1 − erf(u), without cancellation."""

    origin = 1

    @staticmethod
    def slope(u: Any) -> Any:
        return -2 / sympy.sqrt(sympy.pi) * exp(-(u**2))


class hypot1(_Atom):
    """√(1 + u²), without overflow."""

    parity = 1
    origin = 1

    @staticmethod
    def slope(u: Any) -> Any:
        return isru(u)


class isru(_Atom):
    """u / √(1 + u²), without overflow."""

    parity = -1

    @staticmethod
    def slope(u: Any) -> Any:
        return hypot1(u) ** -3


class squareplus(_Atom):
    """(u + √(u² + 4)) / 2, without overflow and without cancellation in the left tail."""

    @staticmethod
    def slope(u: Any) -> Any:
        return squareplus(u) / hypot1(u / 2) / 2


class softsign(_Atom):
    """u / (1 + |u|)."""

    parity = -1

    @staticmethod
    def slope(u: Any) -> Any:
        return (1 + absolute(u)) ** -2


class relu(_Atom):
    """max(u, 0), with PyTorch's derivative, 0 at 0."""

    origin = 0

    @staticmethod
    def slope(u: Any) -> Any:
        return Where(u, sympy.Integer(1), sympy.Integer(0))


class absolute(_Atom):
    """|u|, with PyTorch's derivative, 0 at 0."""

    parity = 1
    origin = 0

    @staticmethod
    def slope(u: Any) -> Any:
        return sign(u)


class sign(_Atom):
    """−1, 0 or 1; its derivative is 0."""

    parity = -1

    @staticmethod
    def slope(u: Any) -> Any:
        return sympy.Integer(0)


def _chosen(a: Any, b: Any, side: int) -> Any:
    """Return min (side 1) or max (side −1) of a and b: NaN if x is, like PyTorch's clamp."""
    if b.is_number:
        a, b = b, a
    return Where(side * (b - a), a, b)


# The functions of the language: name → (number of arguments, what builds the SymPy expression). Beside these,
# every activation of the catalog is one.
FUNCTIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    "exp": (1, exp),
    "expm1": (1, expm1),
    "log": (1, log),
    "log1p": (1, log1p),
    "sqrt": (1, sympy.sqrt),
    "square": (1, lambda u: u**2),
    "sin": (1, sin),
    "cos": (1, cos),
    "tan": (1, tan),
    "atan": (1, atan),
    "sinh": (1, sinh),
    "cosh": (1, cosh),
    "sech2": (1, sech2),
    "tsech2": (1, tsech2),
    "logcosh": (1, logcosh),
    "tanh": (1, tanh),
    "asinh": (1, asinh),
    "erf": (1, erf),
    "erfc": (1, erfc),
    "sigmoid": (1, sigmoid),
    "softplus": (1, softplus),
    "hypot1": (1, hypot1),
    "isru": (1, isru),
    "squareplus": (1, squareplus),
    "softsign": (1, softsign),
    "relu": (1, relu),
    "abs": (1, absolute),
    "sign": (1, sign),
    "min": (2, lambda a, b: _chosen(a, b, 1)),
    "max": (2, lambda a, b: _chosen(a, b, -1)),
    "clamp": (3, lambda u, low, high: _chosen(_chosen(u, low, -1), high, 1)),
}
# A formula may have a corner or a jump where the first argument of these changes sign.
SWITCHES = (Where, relu, absolute, sign)
CONSTANTS = {"pi": sympy.pi, "e": exp(sympy.Integer(1))}


def _sigmoid(u: Array) -> Array:
    e = np.exp(-np.abs(u))
    return np.where(u >= 0, 1.0, e) / (1.0 + e)


def _softplus(u: Array) -> Array:
    return np.maximum(u, 0.0) + np.log1p(np.exp(-np.abs(u)))


def _sech2(u: Array) -> Array:
    e = np.exp(-2 * np.abs(u))
    return np.asarray(4 * e / (1 + e) ** 2)


def _tsech2(u: Array) -> Array:
    bounded = np.clip(u, -400.0, 400.0)  # beyond, it is below 1e-340
    return np.asarray(bounded * _sech2(bounded))


def _logcosh(u: Array) -> Array:
    a = np.abs(u)
    tail = a + np.log1p(np.exp(-2 * a)) - np.log(np.asarray(2.0, a.dtype))
    return np.asarray(np.where(a < 1, np.log1p(2 * np.sinh(np.minimum(a, 1.0) / 2) ** 2), tail))


def _special(name: str) -> Callable[[Array], Array]:
    def function(u: Array) -> Array:
        from scipy import special  # costs more to import than the rest of this file

        return np.asarray(getattr(special, name)(u))

    return function


def _isru(u: Array) -> Array:
    return np.where(np.isinf(u), np.sign(u), u / np.hypot(u, np.ones((), u.dtype)))


def _squareplus(u: Array) -> Array:
    s = np.hypot(u, np.asarray(2.0, u.dtype))
    return np.where(u > 0, u / 2 + s / 2, 2 / (s - u))


NUMPY: dict[Any, Callable[..., Any]] = {
    Where: lambda u, a, b: np.where(u > 0, a, b),
    WhereAtLeast: lambda u, a, b: np.where(u >= 0, a, b),
    exp: np.exp,
    expm1: np.expm1,
    log: np.log,
    log1p: np.log1p,
    sigmoid: _sigmoid,
    softplus: _softplus,
    sinh: np.sinh,
    cosh: np.cosh,
    tanh: np.tanh,
    sech2: _sech2,
    tsech2: _tsech2,
    logcosh: _logcosh,
    asinh: np.arcsinh,
    sin: np.sin,
    cos: np.cos,
    tan: np.tan,
    atan: np.arctan,
    erf: _special("erf"),
    erfc: _special("erfc"),
    hypot1: lambda u: np.hypot(u, np.ones((), u.dtype)),
    isru: _isru,
    squareplus: _squareplus,
    softsign: lambda u: u / (1 + np.abs(u)),
    relu: lambda u: np.where(u < 0, np.zeros((), u.dtype), u),
    absolute: np.abs,
    sign: np.sign,
}


@dataclass(frozen=True)
class Arithmetic:
    """Numbers of some kind, in which a formula can be evaluated.

    Attributes:
        constant: a subformula without `x` → its value.
        add, multiply: of two values.
        power: value of the base, value of the exponent, and the exponent as a SymPy expression → value.
        functions: atom → its value from those of its arguments.

    """

    constant: Callable[[Expr], Any]
    add: Callable[[Any, Any], Any]
    multiply: Callable[[Any, Any], Any]
    power: Callable[[Any, Any, Expr], Any]
    functions: Mapping[Any, Callable[..., Any]]

    def evaluate(self, expr: Expr, at: Any, done: dict[Expr, Any] | None = None) -> Any:
        """Return the value of a formula; `done` receives that of every subformula."""
        done = {} if done is None else done
        done[x] = at

        def value(node: Expr) -> Any:
            if node not in done:
                if not node.free_symbols:
                    done[node] = self.constant(node)
                elif node.is_Add:
                    done[node] = reduce(self.add, map(value, node.args))
                elif node.is_Mul:
                    done[node] = reduce(self.multiply, map(value, node.args))
                elif node.is_Pow:
                    done[node] = self.power(value(node.base), value(node.exp), node.exp)
                else:
                    done[node] = self.functions[node.func](*map(value, node.args))
            return done[node]

        return value(expr)


def evaluate(expr: Expr, at: Array) -> Array:
    """Evaluate a formula in float64.

    Args:
        expr: a SymPy expression made by `parse`, or a derivative of one.
        at: the points, any shape.

    Returns:
        The values, shape of `at`. Outside a formula's domain they are NaN or infinite, without a warning.

    """
    with np.errstate(all="ignore"):
        values = FLOAT64.evaluate(expr, np.asarray(at, dtype=np.float64))
        return np.broadcast_to(np.asarray(values, dtype=np.float64), np.shape(at)).copy()


@lru_cache(maxsize=10_000)
def constant(expr: Expr) -> float:
    """Return the float64 value of an expression without `x`; NaN for what SymPy makes of 1/0."""
    if expr.is_Rational:
        return _ratio(expr.p, expr.q)
    if expr.is_Float or expr == sympy.pi:
        return float(expr)
    args = [np.float64(constant(arg)) for arg in expr.args]
    with np.errstate(all="ignore"):
        if expr.is_Add:
            return float(reduce(operator.add, args))
        if expr.is_Mul:
            return float(reduce(operator.mul, args))
        if expr.is_Pow:
            return float(_power(args[0], args[1], expr.exp))
        return float(NUMPY[expr.func](*args)) if expr.func in NUMPY else math.nan


def size(expr: Expr) -> int:
    """Return how many parts a formula written out has."""
    return sizes(expr)[0]


def sizes(expr: Expr) -> tuple[int, int, int]:
    """Return how many parts a formula written out has, and about how many its first two derivatives would have."""
    done: dict[Expr, tuple[int, int, int]] = {}

    def parts(node: Expr) -> tuple[int, int, int]:
        if node not in done:
            done[node] = _parts(node, [parts(arg) for arg in node.args])
        return done[node]

    return parts(expr)


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


def _power(base: Any, exponent: Any, symbolic: Expr) -> Any:
    if symbolic == sympy.Rational(1, 2):
        return np.sqrt(base)
    if symbolic == sympy.Rational(-1, 2):
        return 1 / np.sqrt(base)
    if symbolic == -1:
        return 1 / base
    if symbolic.is_Integer and 0 < symbolic <= 4:  # as exact as products are, and faster
        return reduce(operator.mul, [base] * int(symbolic))
    return np.power(base, exponent)


FLOAT64 = Arithmetic(lambda node: np.float64(constant(node)), operator.add, operator.mul, _power, NUMPY)
