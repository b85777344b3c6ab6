"""Formulas in `x` as SymPy trees: the atoms, and their values in NumPy float64.

Functions whose textbook formula overflows or cancels are *atoms*: SymPy classes of our own, whose values
and derivatives stay finite and accurate wherever they are representable. `evaluate` walks a tree; nothing
is compiled and nothing is executed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
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


class exp(sympy.Function):
    """exp(u); SymPy's own would turn exp(1e9*log(10)) into an integer of a billion digits."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> Any:
        return exp(self.args[0])


class log(sympy.Function):
    """The natural logarithm."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> Any:
        return 1 / self.args[0]


class sigmoid(sympy.Function):
    """σ(u) = 1 / (1 + exp(−u)), with σ′ = σ(u) σ(−u): no cancellation in either tail."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> Any:
        return sigmoid(self.args[0]) * sigmoid(-self.args[0])


class softplus(sympy.Function):
    """log(1 + exp(u)), whose derivative is σ(u)."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> Any:
        return sigmoid(self.args[0])


class tanh(sympy.Function):
    """tanh u, with 1 − tanh² u = 4 σ(2u) σ(−2u): no cancellation."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> Any:
        return 4 * sigmoid(2 * self.args[0]) * sigmoid(-2 * self.args[0])


class expm1(sympy.Function):
    """exp(u) − 1."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> Any:
        return exp(self.args[0])


class log1p(sympy.Function):
    """log(1 + u)."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> Any:
        return 1 / (1 + self.args[0])


class relu(sympy.Function):
    """max(u, 0), with PyTorch's derivative, 0 at 0."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> Any:
        return Where(self.args[0], sympy.Integer(1), sympy.Integer(0))


class absolute(sympy.Function):
    """|u|, with PyTorch's derivative, 0 at 0."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> Any:
        return sign(self.args[0])


class sign(sympy.Function):
    """−1, 0 or 1; its derivative is 0."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> Any:
        return sympy.Integer(0)


def _gelu(u: Any) -> Any:
    return u * (1 + sympy.erf(u / sympy.sqrt(2))) / 2


def _chosen(a: Any, b: Any, side: int) -> Any:
    """Return min (side 1) or max (side −1) of a and b: NaN if x is, like PyTorch's clamp."""
    if b.is_number:
        a, b = b, a
    return Where(side * (b - a), a, b)


# The functions of the language: name → (number of arguments, what builds the SymPy expression).
FUNCTIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    "exp": (1, exp),
    "expm1": (1, expm1),
    "log": (1, log),
    "log1p": (1, log1p),
    "sqrt": (1, sympy.sqrt),
    "erf": (1, sympy.erf),
    "tanh": (1, tanh),
    "sigmoid": (1, sigmoid),
    "softplus": (1, softplus),
    "relu": (1, relu),
    "abs": (1, absolute),
    "sign": (1, sign),
    "gelu": (1, _gelu),
    "silu": (1, lambda u: u * sigmoid(u)),
    "min": (2, lambda a, b: _chosen(a, b, 1)),
    "max": (2, lambda a, b: _chosen(a, b, -1)),
}
CONSTANTS = {"pi": sympy.pi, "e": sympy.E}

# Places where a formula may have a corner or a jump: the first argument of these changes sign there.
SWITCH_SAMPLES = 4001
SWITCHES = (Where, relu, absolute, sign)


def _where(u: Array, a: Array, b: Array) -> Array:
    return np.where(u > 0, a, b)


def _where_at_least(u: Array, a: Array, b: Array) -> Array:
    return np.where(u >= 0, a, b)


def _erf(u: Array) -> Array:
    from scipy import special  # costs more to import than the rest of this file

    return np.asarray(special.erf(u))


def _sigmoid(u: Array) -> Array:
    e = np.exp(-np.abs(u))
    return np.where(u >= 0, 1.0, e) / (1.0 + e)


_NUMPY: dict[Any, Callable[..., Array]] = {
    Where: _where,
    WhereAtLeast: _where_at_least,
    sigmoid: _sigmoid,
    softplus: lambda u: np.logaddexp(u, 0.0),
    tanh: np.tanh,
    expm1: np.expm1,
    log1p: np.log1p,
    relu: lambda u: np.where(u < 0, 0.0, u),
    absolute: np.abs,
    sign: np.sign,
    exp: np.exp,
    log: np.log,
    sympy.exp: np.exp,  # from derivatives that SymPy knows, such as those of erf and 2**x
    sympy.log: np.log,
    sympy.erf: _erf,
}


def evaluate(expr: Expr, at: Array) -> Array:
    """Evaluate a formula in float64.

    Args:
        expr: a SymPy expression made by `parse`, or a derivative of one.
        at: the points, any shape.

    Returns:
        The values, shape of `at`. Outside a formula's domain they are NaN or infinite, without a warning.

    """
    done: dict[Any, Any] = {x: at}

    def value(node: Any) -> Any:
        if node in done:
            return done[node]
        if node.is_Rational:
            result: Any = _ratio(node.p, node.q)
        elif node.is_Float or node in (sympy.pi, sympy.E):
            result = float(node)
        elif node.is_Add:
            result = _reduce(operator.add, node)
        elif node.is_Mul:
            result = _reduce(operator.mul, node)
        elif node.is_Pow:
            result = _power(value(node.base), node.exp, value)
        elif node.func in _NUMPY:
            result = _NUMPY[node.func](*map(value, node.args))
        else:
            result = np.nan  # complex infinity, NaN and the like: what SymPy makes of 1/0
        done[node] = result
        return result

    def _reduce(op: Callable[[Any, Any], Any], node: Any) -> Any:
        terms = [value(arg) for arg in node.args]
        result = terms[0]
        for term in terms[1:]:
            result = op(result, term)
        return result

    with np.errstate(all="ignore"):
        return np.broadcast_to(np.asarray(value(expr), dtype=np.float64), np.shape(at)).copy()


def _ratio(p: int, q: int) -> float:
    """Return p / q, correctly rounded."""
    try:
        return p / q
    except OverflowError:
        return np.inf if p > 0 else -np.inf


def _power(base: Any, exponent: Any, value: Callable[[Any], Any]) -> Any:
    if exponent == sympy.Rational(1, 2):
        return np.sqrt(base)
    if exponent == sympy.Rational(-1, 2):
        return 1.0 / np.sqrt(base)
    if exponent == -1:
        return np.divide(1.0, base)
    return np.power(np.asarray(base, dtype=np.float64), value(exponent))


def constant(expr: Expr) -> float:
    """Return the float64 value of an expression without `x`."""
    return float(evaluate(expr, np.zeros(())))


def switch_points(expr: Expr, low: float, high: float) -> Array:
    """Return the points inside (low, high) where a formula may have a corner or a jump, increasing.

    They are the zeros of the arguments of `where`, `relu`, `abs` and `sign`: exact where the argument is
    linear in x, otherwise bracketed on a grid of 4000 cells and solved to float64.
    """
    arguments = [node.args[0] for node in sympy.preorder_traversal(expr) if isinstance(node, SWITCHES)]
    found = {point for u in arguments for point in _zeros(u, low, high)}
    return np.array(sorted(point for point in found if low < point < high), dtype=np.float64)


def _zeros(u: Expr, low: float, high: float) -> list[float]:
    slope = u.diff(x)
    if not slope.free_symbols:
        if slope == 0:
            return []
        return [float(evaluate(-u.subs(x, 0) / slope, np.zeros(())))]

    from scipy.optimize import brentq

    def at(point: float) -> float:
        return float(evaluate(u, np.asarray(point)))

    grid = np.linspace(low, high, SWITCH_SAMPLES)
    values = evaluate(u, grid)
    zero = values == 0
    # a run of zeros begins and ends where some inner function switches: those points are found by themselves
    alone = zero & ~np.roll(zero, 1) & ~np.roll(zero, -1)
    exact = [float(point) for point in grid[alone]]
    cross = np.flatnonzero(values[:-1] * values[1:] < 0)
    return exact + [float(brentq(at, grid[i], grid[i + 1], xtol=1e-15, rtol=1e-15)) for i in cross]
