"""The approximants that the paper made by hand for GELU and SiLU, with its coefficients or better ones.

Novikov and Oseledets, *Inverted Activations*, arXiv 2407.15545.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fitact.base import UsageError
from fitact.fitter.analysis import Activation
from fitact.fitter.expr import Array, geometric, in_long_double, power, value
from fitact.fitter.numerics import DTYPES
from fitact.fitter.records import Approximant, Approximates, InvertedFit, Kind, PublishedApproximant

from .inverted import cell_borders, cells, record, samples_of, stated

# Section 5.1 of the paper. There SiLU's two rows are swapped, and they approximate sigmoid(x), not f′.
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
NAMES = {f"{name}_inverted_published": name for name in PUBLISHED}
SOURCE = "arXiv 2407.15545"
REFITS = (1.0, 0.9, 1.1)  # times the published coefficients: where searches start
SHAPES: dict[str, tuple[tuple[Kind, Approximates], ...]] = {
    "gelu": (("power", "derivative"), ("exponential", "derivative")),
    "silu": (("root", "sigmoid"), ("exponential", "sigmoid")),
}
STEPS = 200  # of the search
DISTANCES = np.concatenate([[0.0], geometric(1e-9, 40.0, 4000), np.linspace(0.0, 12.0, 4001)])  # from the minimum


def fit(activation: Activation, name: str, *, refit: bool = True) -> InvertedFit:
    """Return the paper's approximant with its own coefficients, or with the best ones that are found from them.

    The search is robust least squares, then minimax by linear programmes on the linearised approximant; the best
    of three starts and of the published coefficients counts. One approximant serves all dtypes.

    Args:
        activation: gelu or silu.
        name: of the fit.
        refit: whether to search.

    Returns:
        The fit, with its errors by dtype.

    Raises:
        UsageError: another activation.

    """
    known = activation.name if activation.name in PUBLISHED and not activation.parameters else None
    if known is None:
        names = " and ".join(PUBLISHED)
        raise UsageError(f"{activation}: the parametric approximants are those of {names}; use --family rational")
    parts = cells(activation)
    minimum = float(value(activation.formula, parts[1].low, 30))
    borders = cell_borders(activation, parts)
    found: dict[str, list[Approximant]] = {dtype: [] for dtype in DTYPES}
    for s, (kind, approximates) in enumerate(SHAPES[known]):
        c = _best(activation, known, s, parts[1].low, minimum) if refit else np.array(PUBLISHED[known][s])
        approximant = PublishedApproximant(
            kind=kind, approximates=approximates, anchor=minimum, coefficients=tuple(c.tolist())
        )
        for dtype, approximants in found.items():
            error, floor = stated(approximant, samples_of(activation, parts[s], dtype, borders, s))
            approximants.append(replace(approximant, error=error, floor=floor))
    return record(
        {dtype: tuple(approximants) for dtype, approximants in found.items()},
        activation=activation,
        name=name,
        bits=1,
        domain=None,
        borders=dict.fromkeys(DTYPES, borders),
        options={"family": "parametric"} if refit else {"source": SOURCE},
    )


def published(name: str) -> InvertedFit:
    """Return the fit that has the paper's coefficients, by its name: one of `NAMES`."""
    return fit(Activation.of(NAMES[name]), name, refit=False)


def _best(activation: Activation, name: str, s: int, border: float, minimum: float) -> Array:
    """Return the best coefficients of piece s that are found."""
    x = np.unique(border + (-1.0, 1.0)[s] * DISTANCES)
    y, derivative = np.maximum(activation.value(x), minimum), activation.derivative(x)
    approximant = functools.partial(_approximant, name, s, y=y, minimum=minimum)
    best = np.array(PUBLISHED[name][s])
    for start in REFITS:
        near = _nearest(approximant, derivative, best * start)
        best = min(best, near, key=lambda c: _off(approximant, derivative, c))
    return best


def _approximant(name: str, s: int, c: Array, y: Array, minimum: float) -> Array:
    """Return the paper's approximant of a piece; a value that is not finite becomes ±1e9."""
    v = np.maximum(y - minimum, 0.0)
    with np.errstate(all="ignore"):
        if s == 1:
            value = 1 + (c[0] + c[1] * np.sqrt(v) + c[2] * v) * in_long_double(np.exp)(
                np.minimum(c[3] * (c[4] - v) * (c[4] - v) ** 2, 300.0)
            )
        elif name == "gelu":
            u = np.minimum(v / abs(minimum), 1.0)
            value = c[0] + c[1] * power(u, c[2]) * power(1 - u, c[3])
        else:
            value = c[0] + c[1] * np.sqrt(v) + c[2] * v + c[3] * v**2
        if name == "silu":
            value = value * (1 - y) + y
    return np.asarray(np.nan_to_num(value, nan=1e9, posinf=1e9, neginf=-1e9))


def _off(approximant: Callable[[Array], Array], derivative: Array, c: Array) -> float:
    return float(np.max(np.abs(approximant(c) - derivative)))


def _nearest(approximant: Callable[[Array], Array], derivative: Array, start: Array) -> Array:
    """Return coefficients whose largest error is least nearby: Gauss–Newton steps, each a linear programme."""
    from scipy.optimize import linprog

    c = start
    radius = 0.1
    for _ in range(STEPS):
        wrong = approximant(c) - derivative
        now = float(np.max(np.abs(wrong)))
        step = 1e-6 * np.maximum(np.abs(c), 1e-2)
        jacobian = np.stack(
            [(approximant(c + d) - approximant(c - d)) / (2 * d.sum()) for d in np.diag(step)], axis=1
        )
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
        if _off(approximant, derivative, moved) < now:
            c, radius = moved, min(2 * radius, 0.5)
        else:
            radius /= 4
    return c
