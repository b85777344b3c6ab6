"""Formulas evaluated in NumPy, with the same last bit on every CPU."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import numpy as np
import sympy
from numpy.typing import NDArray

from . import atoms
from .atoms import Expr, constant, x
from .work import spend

Array = NDArray[np.float64]


def wide(function: Callable[..., Any], limit: float = np.inf) -> Callable[..., Array]:
    """Return a NumPy function that computes in long double and rounds once to the dtype of its arguments.

    In float32 and float64 NumPy and the C library choose their kernels by CPU, and these differ in the last bit.
    Arguments beyond a limit are computed as the limit: the rounded result must be the same there.
    """

    def rounded(*arguments: Array) -> Array:
        dtype = np.result_type(*arguments)
        if limit < np.inf:
            arguments = tuple(np.minimum(np.maximum(u, -limit), limit) for u in arguments)
        return np.asarray(function(*(np.asarray(u, dtype=np.longdouble) for u in arguments)), dtype=dtype)

    return rounded


# exp of more is infinite or 0 in float64; a long double that overflows takes seven times as long
BEYOND = 1000.0
_exp, _sinh = wide(np.exp, BEYOND), wide(np.sinh, BEYOND)
_log, _log1p, _hypot = map(wide, (np.log, np.log1p, np.hypot))
power = wide(np.power)


def geometric(low: float, high: float, count: int) -> Array:
    """Return numbers from low to high in geometric progression, (count,)."""
    return np.geomspace(np.longdouble(low), np.longdouble(high), count).astype(np.float64)


def _sigmoid(u: Array) -> Array:
    e = _exp(-np.abs(u))
    return np.where(u >= 0, 1.0, e) / (1.0 + e)


def _softplus(u: Array) -> Array:
    return np.maximum(u, 0.0) + _log1p(_exp(-np.abs(u)))


def _sech2(u: Array) -> Array:
    e = _exp(-2 * np.abs(u))
    return np.asarray(4 * e / (1 + e) ** 2)


def _tsech2(u: Array) -> Array:
    bounded = np.clip(u, -400.0, 400.0)  # beyond, it is below 1e-340
    return np.asarray(bounded * _sech2(bounded))


def _logcosh(u: Array) -> Array:
    a = np.abs(u)
    tail = a + _log1p(_exp(-2 * a)) - _log(np.asarray(2.0, a.dtype))
    return np.asarray(np.where(a < 1, _log1p(2 * _sinh(np.minimum(a, 1.0) / 2) ** 2), tail))


def _special(name: str) -> Callable[[Array], Array]:
    def function(u: Array) -> Array:
        from scipy import special  # costs more to import than the rest of this file

        return np.asarray(getattr(special, name)(u))

    return function


def _isru(u: Array) -> Array:
    return np.where(np.isinf(u), np.sign(u), u / _hypot(u, np.ones((), u.dtype)))


def _squareplus(u: Array) -> Array:
    s = _hypot(u, np.asarray(2.0, u.dtype))
    return np.where(u > 0, u / 2 + s / 2, 2 / (s - u))


NUMPY: dict[Any, Callable[..., Any]] = {
    atoms.Where: lambda u, a, b: np.where(u > 0, a, b),
    atoms.WhereAtLeast: lambda u, a, b: np.where(u >= 0, a, b),
    atoms.exp: _exp,
    atoms.expm1: wide(np.expm1, BEYOND),
    atoms.log: _log,
    atoms.log1p: _log1p,
    atoms.sigmoid: _sigmoid,
    atoms.softplus: _softplus,
    atoms.sinh: _sinh,
    atoms.cosh: wide(np.cosh, BEYOND),
    atoms.tanh: wide(np.tanh),
    atoms.sech2: _sech2,
    atoms.tsech2: _tsech2,
    atoms.logcosh: _logcosh,
    atoms.asinh: wide(np.arcsinh),
    atoms.sin: wide(np.sin),
    atoms.cos: wide(np.cos),
    atoms.tan: wide(np.tan),
    atoms.atan: wide(np.arctan),
    atoms.erf: _special("erf"),
    atoms.erfc: _special("erfc"),
    atoms.hypot1: lambda u: _hypot(u, np.ones((), u.dtype)),
    atoms.isru: _isru,
    atoms.squareplus: _squareplus,
    atoms.softsign: lambda u: u / (1 + np.abs(u)),
    atoms.relu: lambda u: np.where(u < 0, np.zeros((), u.dtype), u),
    atoms.absolute: np.abs,
    atoms.sign: np.sign,
}


class Parts(NamedTuple):
    """How many parts a formula has, how many of them are functions, and how many of these error functions."""

    all: int
    functions: int
    slow: int


@dataclass(frozen=True)
class Arithmetic:
    """A kind of number, and how a formula is evaluated in it.

    Attributes:
        constant: a subformula without `x` → its value.
        add, multiply: two values → their sum, their product.
        power: value of the base, value of the exponent, and the exponent as a SymPy expression → value.
        functions: atom → the function that computes its value from the values of its arguments.
        cost: the parts of a formula, and a value of x → the operations that the evaluation takes, see `work`.

    """

    constant: Callable[[Expr], Any]
    add: Callable[[Any, Any], Any]
    multiply: Callable[[Any, Any], Any]
    power: Callable[[Any, Any, Expr], Any]
    functions: Mapping[Any, Callable[..., Any]]
    cost: Callable[[Parts, Any], float]

    def evaluate(self, expr: Expr, at: Any, done: dict[Expr, Any] | None = None) -> Any:
        """Return the value of a formula; `done` receives the value of every subformula."""
        done = {} if done is None else done
        done[x] = at
        spend(self.cost(_parts(expr), at))
        for node, kind, arguments in _steps(expr):
            values = [done[one] for one in arguments]
            if kind is None:
                done[node] = self.constant(node)
            elif kind is sympy.Add:
                done[node] = reduce(self.add, values)
            elif kind is sympy.Mul:
                done[node] = reduce(self.multiply, values)
            elif kind is sympy.Pow:
                base, exponent = values
                done[node] = self.power(base, exponent, arguments[1])
            else:
                done[node] = self.functions[kind](*values)
        return done[expr]


@lru_cache(maxsize=1024)
def _steps(expr: Expr) -> tuple[tuple[Expr, Any, tuple[Expr, ...]], ...]:
    """Return the subformulas in the order of evaluation: each, its function and arguments; None for a constant."""
    found: dict[Expr, tuple[Expr, Any, tuple[Expr, ...]]] = {}

    def visit(node: Expr) -> None:
        if node == x or node in found:
            return
        varies = atoms.varies(node)
        arguments = () if not varies else atoms.terms(node) if node.is_Add else node.args
        for one in arguments:
            visit(one)
        found[node] = (node, node.func if varies else None, arguments)

    visit(expr)
    return tuple(found.values())


@lru_cache(maxsize=1024)
def _parts(expr: Expr) -> Parts:
    steps = _steps(expr)
    functions = [kind for _, kind, _ in steps if kind in NUMPY or kind is sympy.Pow]
    return Parts(len(steps), len(functions), sum(kind in (atoms.erf, atoms.erfc) for kind in functions))


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


def _power(base: Any, exponent: Any, symbolic: Expr) -> Any:
    if symbolic == sympy.Rational(1, 2):
        return np.sqrt(base)
    if symbolic == sympy.Rational(-1, 2):
        return 1 / np.sqrt(base)
    if symbolic == -1:
        return 1 / base
    if symbolic.is_Integer and 0 < symbolic <= 4:  # as exact as products are, and faster
        return reduce(operator.mul, [base] * int(symbolic))
    return power(base, exponent)


def cost(parts: Parts, at: Array) -> float:
    """Return the operations that NumPy takes: the more, the more numbers there are."""
    return parts.all * 8 + parts.functions * np.size(at) * 0.1


FLOAT64 = Arithmetic(lambda node: np.float64(constant(node)), operator.add, operator.mul, _power, NUMPY, cost)
