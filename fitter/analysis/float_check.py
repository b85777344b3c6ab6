"""Where floating point fails on a formula: the kernels' float32 arithmetic against many digits.

`stable` rewrites the idioms that it recognises. This file tries out the result from -1.3e38 to 1.3e38, and tells
the user at which x a formula fails, which part of it is to blame, and how to write it.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Collection
from functools import lru_cache
from typing import Any

import numpy as np
import sympy

from fitact.base import FitWarning, quote
from fitact.fitter.expr import (
    FLOAT64,
    Arithmetic,
    Array,
    Expr,
    constant,
    evaluate,
    text_of,
    value,
    x,
)

from .activation import Activation

# Roundings of float32 by which the value may be off: of f itself, and of f when x is rounded.
ROUNDINGS = 64
UNIT = 2.0**-24
LOST = 2.0**-9  # relative: as much as the rounding to bfloat16
NEAR = 0.1  # distance from a root within which a relative error says nothing
HALF = sympy.Rational(1, 2)
AMPLIFIED = 8.0  # the error of a function may become that of a formula, times this
TINY = 1e-37  # below it float32 loses digits whatever the formula
LARGEST = 1.3e38
DERIVATIVE_ERROR = 1e-7  # allowed in the derivative, relative to the larger of it and 1
_SIZES = np.union1d(np.geomspace(1.3e-30, 1.3e38, 69), np.geomspace(33.0, 1300.0, 17))
_MIDDLE = np.linspace(-30.0137, 29.9713, 60)
POINTS = np.concatenate([-_SIZES[::-1], _MIDDLE, [0.0], _SIZES]).astype(np.float32).astype(np.float64)


def _power(base: Any, exponent: Any, symbolic: Expr) -> Any:
    """Return a power as generated code computes it: by products and roots, else by logarithm and exponential."""
    if symbolic.is_Integer or abs(symbolic) == HALF:
        return FLOAT64.power(base, exponent, symbolic)
    return np.exp(exponent * np.log(base))


FLOAT32 = Arithmetic(lambda node: np.float32(constant(node)), operator.add, operator.mul, _power, "numpy")


@lru_cache(maxsize=512)
def problem(activation: Activation) -> str | None:
    """Return where floating point fails on a formula, in one line; None if it does not.

    The value is computed in float32, as kernels compute it, at some 230 points from -1.3e38 to 1.3e38. It is lost
    where it is off by more than 64 roundings (of f, and of x times f′) and by more than the rounding to bfloat16,
    unless a root of f is within 0.1: there it is off by roundings of the parts of f. The derivative is computed in
    float64, as in the fitter, and may be off by 1e-7 of the larger of itself and 1.

    Not everything is seen. Beyond the range a product may overflow though the value does not. Between the points a
    part may overflow where the value is beyond 1e20, or underflow to 0 where it is below 1e-18, and a `where` may
    take the other branch if the roundings of its condition's terms decide.
    """
    parts: dict[Expr, Any] = {}
    with np.errstate(all="ignore"):
        computed = FLOAT32.evaluate(activation.formula, POINTS.astype(np.float32), parts).astype(np.float64)
    derivatives = activation.derivative(POINTS)
    typed = activation.typed  # so that a mistake in rewriting it is found too
    slope = typed.diff(x)
    for i in np.argsort(np.abs(POINTS), kind="stable"):
        at = float(POINTS[i])
        true, derivative = value(typed, at, 20), value(slope, at, 20)
        if not (true.is_finite() and derivative.is_finite()) or abs(true) > LARGEST or abs(derivative) > LARGEST:
            continue
        allowed = max(ROUNDINGS * UNIT * float(abs(true) + abs(at * derivative)), LOST * float(abs(true))) + TINY
        lost = not abs(computed[i] - float(true)) <= allowed
        if lost:
            left, right = (value(typed, at + side * NEAR, 20) for side in (-1, 1))
            near_root = left * right < 0 or abs(true) < 0.1 * min(abs(left), abs(right))
            if not (np.isfinite(computed[i]) and near_root):
                where = f"in float32 it is {computed[i]:.4g} at x = {at:.4g} in place of {float(true):.4g}"
                return f"{where}: {_blame(parts, i, at)}"
        if not abs(derivatives[i] - float(derivative)) <= DERIVATIVE_ERROR * max(1.0, float(abs(derivative))):
            return (
                f"its derivative is computed as {derivatives[i]:.9g} at x = {at:.4g} "
                f"in place of {float(derivative):.9g}: "
                "write it with a part for each side, where(x > a, ..., ...)"
            )
    return None


def bears(formula: Expr, functions: Collection[Any], error: float) -> bool:
    """Return whether a formula is hardly further off than its functions are.

    Each of these atoms is made larger by a relative error, one place after another. The formula may then change by
    eight times that share of itself and of x times its derivative: x − tanh(x) changes by more near 0. A formula
    with learned parameters passes unchecked.
    """
    if formula.free_symbols != {x}:
        return True
    values, derivative = evaluate(formula, POINTS), evaluate(formula.diff(x), POINTS)
    with np.errstate(all="ignore"):
        allowed = AMPLIFIED * error * (np.abs(values) + np.abs(POINTS * derivative)) + TINY
        for node in formula.atoms(sympy.Function):
            if node.func in functions:
                changed = evaluate(formula.xreplace({node: (1 + sympy.Float(error)) * node}), POINTS)
                if np.any((np.abs(changed - values) > allowed) & np.isfinite(allowed)):
                    return False
    return True


def warn(activation: Activation) -> None:
    """Warn if floating point fails on a formula; PyTorch's own functions need no check."""
    if activation.torch is None and (failure := problem(activation)) is not None:
        warnings.warn(f"{activation}: {failure}", FitWarning, stacklevel=3)


def _blame(parts: dict[Expr, Array], i: int, at: float) -> str:
    """Return which part of a formula fails at a point, and what to write instead."""
    wrong = {node for node in parts if node.args and _error(parts, node, i, at) > 1e-3}
    first = next((node for node in parts if node in wrong and not wrong & set(node.args)), None)
    if first is None:
        return "roundings add up; write it with fewer operations"
    text = quote(text_of(first))
    if not np.isfinite(np.broadcast_to(parts[first], POINTS.shape)[i]):
        return (
            f"{text} overflows; write it with sigmoid, softplus, tanh or logcosh, or so that what is large is "
            "divided out, or where(abs(x) > a, ..., ...)"
        )
    if first.is_Add:
        return (
            f"{text} cancels; write the difference in closed form, with expm1, log1p, erfc, sigmoid, softplus or "
            "squareplus, or where(x < a, ..., ...)"
        )
    return (
        f"{text} loses its digits; write it with softplus or log1p, or where(x > a, ..., ...), a part for a side"
    )


def _error(parts: dict[Expr, Array], node: Expr, i: int, at: float) -> float:
    """Return the relative error of a part; infinite if that is not finite."""
    computed = float(np.broadcast_to(parts[node], POINTS.shape)[i])
    true = value(node, at, 20)
    if not true.is_finite():
        return 0.0
    error = abs(computed - float(true)) / max(float(abs(true)), TINY)
    return error if np.isfinite(error) else np.inf
