"""The forms that the paper fits by hand to GELU and SiLU, with its coefficients or better ones.

Novikov and Oseledets, *Inverted Activations*, arXiv 2407.15545.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fitact.errors import UsageError, quote

from .activation import Activation
from .expression import Array
from .precise import exactly

Bits = NDArray[np.intp]


# Section 5.1 of the paper. SiLU's two rows stand there in each other's place, and approximate sigmoid(x), not f′.
PUBLISHED: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "gelu": (
        (0.001217659791976, -0.296412101274584, 0.442363293155713, 0.831270529039268),
        (-1.383717971214795, 1.558420184350027, 0.04404574801811, 0.032146736769376, -2.119885089843949),
    ),
    "silu": (
        (0.217177007595768, -0.507684370508263, 0.079631397669175, 0.357494204859375),
        (-1.31085640213098, 0.848589647031652, -0.162990512595109, 0.002696163985044, -5.770613302664509),
    ),
}
REFITS = (1.0, 0.9, 1.1)  # of the published coefficients: where searches start


@dataclass(frozen=True)
class Parametric:
    """The paper's form for GELU or SiLU, in float64; v = y − f(T) with T the minimum.

    GELU's left piece is c0 + c1·u^c2·(1 − u)^c3 with u = v/|f(T)|, its right one is
    1 + (c0 + c1·√v + c2·v)·exp(c3·(c4 − v)³). SiLU's sigmoid(x) is c0 + c1·√v + c2·v + c3·v² on the left and of
    GELU's form on the right, and f′ = sigmoid(x)·(1 − y) + y.

    Attributes:
        activation: f.
        split, minimum: T and f(T).
        coefficients: c of the left and of the right piece.
        error: max |form − f′| on either, over all x.

    """

    activation: Activation
    split: float
    minimum: float
    coefficients: tuple[tuple[float, ...], tuple[float, ...]]
    error: tuple[float, float]

    def evaluate(self, y: Array, code: Bits) -> Array:
        """Return f′ of outputs y of the left (code 0) or the right piece (code 1), float64."""
        name = str(self.activation.name)
        left, right = (_form(name, s, np.array(self.coefficients[s]), y, self.minimum) for s in (0, 1))
        return np.where(code == 0, left, right)


def parametric(activation: Activation, *, refit: bool = True) -> Parametric:
    """Return the paper's form with its own coefficients, or with the best ones that are found from them.

    The search is robust least squares, then minimax by linear programmes on the linearised form; the best of
    three starts and of the published coefficients counts.

    Args:
        activation: gelu or silu.
        refit: whether to search.

    Returns:
        The form, with its errors.

    Raises:
        UsageError: another activation.

    """
    name = activation.name
    if name not in PUBLISHED:
        raise UsageError(f"activation: expected one of {', '.join(PUBLISHED)}, got {quote(name)}")
    (split,) = activation.monotone().zeros
    minimum = float(exactly(activation.formula, split.at, 30))
    coefficients, errors = [], []
    for s, side in enumerate((-1.0, 1.0)):
        distance = np.concatenate([[0.0], np.geomspace(1e-9, 40.0, 4000), np.linspace(0.0, 12.0, 4001)])
        x = np.unique(split.at + side * distance)
        y, slope = np.maximum(activation.value(x), minimum), activation.derivative(x)
        form = functools.partial(_form, str(name), s, y=y, minimum=minimum)
        best = np.array(PUBLISHED[str(name)][s])
        for start in REFITS if refit else ():
            best = min(best, _nearest(form, slope, best * start), key=lambda c: _off(form, slope, c))
        coefficients.append(tuple(best.tolist()))
        errors.append(_off(form, slope, best))
    return Parametric(activation, split.at, minimum, (coefficients[0], coefficients[1]), (errors[0], errors[1]))


def _form(name: str, s: int, c: Array, y: Array, minimum: float) -> Array:
    """Return the paper's form of a piece; what is infinite on the way is 1e9."""
    v = np.maximum(y - minimum, 0.0)
    with np.errstate(all="ignore"):
        if s == 1:
            value = 1 + (c[0] + c[1] * np.sqrt(v) + c[2] * v) * np.exp(np.minimum(c[3] * (c[4] - v) ** 3, 300.0))
        elif name == "gelu":
            u = np.minimum(v / abs(minimum), 1.0)
            value = c[0] + c[1] * u ** c[2] * (1 - u) ** c[3]
        else:
            value = c[0] + c[1] * np.sqrt(v) + c[2] * v + c[3] * v**2
        if name == "silu":
            value = value * (1 - y) + y
    return np.asarray(np.nan_to_num(value, nan=1e9, posinf=1e9, neginf=-1e9))


def _off(form: Callable[[Array], Array], slope: Array, c: Array) -> float:
    return float(np.max(np.abs(form(c) - slope)))


def _nearest(form: Callable[[Array], Array], slope: Array, start: Array) -> Array:
    """Return coefficients whose largest error is least nearby: Gauss–Newton steps, each a linear programme."""
    from scipy.optimize import least_squares, linprog

    found = least_squares(lambda c: np.clip(form(c) - slope, -10, 10), start, loss="soft_l1", f_scale=1e-3)
    c: Array = found.x
    radius = 0.1
    for _ in range(60):
        wrong = form(c) - slope
        now = float(np.max(np.abs(wrong)))
        step = 1e-6 * np.maximum(np.abs(c), 1e-2)
        jacobian = np.stack([(form(c + d) - form(c - d)) / (2 * d.sum()) for d in np.diag(step)], axis=1)
        worst = np.argsort(-np.abs(wrong), kind="stable")
        chosen = np.union1d(worst[:60], np.arange(0, len(wrong), 40))
        ones = -np.ones((len(chosen), 1))
        rows = np.vstack([np.hstack([sign * jacobian[chosen], ones]) for sign in (1, -1)])
        right = np.concatenate([-wrong[chosen], wrong[chosen]])
        bounds = [(-radius * size, radius * size) for size in np.maximum(np.abs(c), 1e-2)] + [(0, None)]
        result = linprog(np.eye(len(c) + 1)[-1], rows, right, bounds=bounds, method="highs")
        if result.x is None or radius < 1e-7:
            break
        moved = c + result.x[:-1]
        if _off(form, slope, moved) < now:
            c, radius = moved, min(2 * radius, 0.5)
        else:
            radius /= 4
    return c
