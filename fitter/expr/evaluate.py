"""Formulas evaluated: a walk over a tree in any arithmetic, and float64 in NumPy."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, Literal

import numpy as np
import sympy

from . import wide
from .atoms import Expr, constant, terms, varies, x
from .wide import Array


@dataclass(frozen=True)
class Arithmetic:
    """A kind of number, and how a formula is evaluated in it."""

    constant: Callable[[Expr], Any]  # of a subformula without `x`
    add: Callable[[Any, Any], Any]
    multiply: Callable[[Any, Any], Any]
    power: Callable[[Any, Any, Expr], Any]  # of the base, the exponent, and the exponent as a SymPy expression
    column: Literal["numpy", "arb", "enclosure"]  # of the table of atoms, which has their functions

    def evaluate(self, expr: Expr, at: Any, done: dict[Expr, Any] | None = None) -> Any:
        """Return the value of a formula; `done` receives the value of every subformula."""
        values = [at]
        for node, kind, places in steps(expr):
            if kind is None:
                value = self.constant(node)
            elif kind is sympy.Add:
                value = reduce(self.add, [values[place] for place in places])
            elif kind is sympy.Mul:
                value = reduce(self.multiply, [values[place] for place in places])
            elif kind is sympy.Pow:
                value = self.power(values[places[0]], values[places[1]], node.args[1])
            else:
                value = getattr(kind, self.column)(*[values[place] for place in places])
            values.append(value)
        if done is not None:
            done.update(zip([x, *(node for node, _, _ in steps(expr))], values, strict=True))
        return values[-1]


@lru_cache(maxsize=1024)
def steps(expr: Expr) -> tuple[tuple[Expr, Any, tuple[int, ...]], ...]:
    """Return the subformulas in the order of evaluation: each, its function, and where its arguments' values are.

    The place of `x` is 0, those of the subformulas follow in this order. A constant has None for a function.
    """
    places = {x: 0}
    steps: list[tuple[Expr, Any, tuple[int, ...]]] = []

    def visit(node: Expr) -> int:
        if node not in places:
            arguments = () if not varies(node) else terms(node) if node.is_Add else node.args
            steps.append((node, node.func if varies(node) else None, tuple([visit(each) for each in arguments])))
            places[node] = len(steps)
        return places[node]

    visit(expr)
    return tuple(steps)


def evaluate(expr: Expr, at: Array) -> Array:
    """Return a formula in float64 at points of any shape; beyond its domain NaN or infinite, without a warning."""
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
    return wide.power(base, exponent)


FLOAT64 = Arithmetic(lambda node: np.float64(constant(node)), operator.add, operator.mul, _power, "numpy")
