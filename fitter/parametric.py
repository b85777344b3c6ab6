"""The forms that the paper fits by hand to GELU and SiLU, with its coefficients or better ones.

Novikov and Oseledets, *Inverted Activations*, arXiv 2407.15545.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from fitact.errors import UsageError, quote

from .activation import Activation
from .expression import Array
from .fit import InvertedFit
from .forms import Form, Printed
from .inverted import borders, cells, judged, record
from .precise import exactly
from .storage import DTYPES

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
NAMES = {f"{name}_inverted_published": name for name in PUBLISHED}
SOURCE = "arXiv 2407.15545"
REFITS = (1.0, 0.9, 1.1)  # of the published coefficients: where searches start


SHAPES = {"gelu": (("power", "derivative"), ("exponential", "derivative"))}
SHAPES["silu"] = (("root", "sigmoid"), ("exponential", "sigmoid"))
DISTANCES = np.concatenate(
    [[0.0], np.geomspace(1e-9, 40.0, 4000), np.linspace(0.0, 12.0, 4001)]
)  # from the minimum


def fit(activation: Activation, name: str, *, refit: bool = True) -> InvertedFit:
    """Return the paper's form with its own coefficients, or with the best ones that are found from them.

    The search is robust least squares, then minimax by linear programmes on the linearised form; the best of
    three starts and of the published coefficients counts. One form serves all dtypes.

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
        raise UsageError(
            f"activation {quote(activation.expression)}: the parametric forms are those of {names}; "
            "use --family rational"
        )
    parts = cells(activation)
    minimum = float(exactly(activation.formula, parts[1].low, 30))
    splits = borders(activation, parts)
    found: dict[str, list[Form]] = {dtype: [] for dtype in DTYPES}
    for s, (kind, approximates) in enumerate(SHAPES[known]):
        c = _best(activation, known, s, parts[1].low, minimum) if refit else np.array(PUBLISHED[known][s])
        form = Printed(
            kind=kind,
            approximates=approximates,
            anchor=minimum,
            coefficients=tuple(c.tolist()),
            error=0.0,
            floor=0.0,
        )
        for dtype, forms in found.items():
            error, floor = judged(activation, parts[s], dtype, splits, s, form)
            forms.append(replace(form, error=error, floor=floor))
    return record(
        activation,
        name,
        1,
        None,
        dict.fromkeys(DTYPES, splits),
        {dtype: tuple(forms) for dtype, forms in found.items()},
        {"family": "parametric"} if refit else {"source": SOURCE},
    )


def published(name: str) -> InvertedFit:
    """Return the fit that has the paper's coefficients, by its name: one of `NAMES`."""
    return fit(Activation.of(NAMES[name]), name, refit=False)


def errors(activation: Activation, coefficients: Sequence[Array]) -> tuple[float, ...]:
    """Return max |form − f′| over all x on the left and on the right piece, in float64 and of exact outputs."""
    name, (left, right) = str(activation.name), cells(activation)
    minimum = float(exactly(activation.formula, left.high, 30))
    return tuple(
        _off(*_piece(activation, name, s, right.low, minimum), np.asarray(c)) for s, c in enumerate(coefficients)
    )


def _best(activation: Activation, name: str, s: int, split: float, minimum: float) -> Array:
    form, slope = _piece(activation, name, s, split, minimum)
    best = np.array(PUBLISHED[name][s])
    for start in REFITS:
        best = min(best, _nearest(form, slope, best * start), key=lambda c: _off(form, slope, c))
    return best


def _piece(
    activation: Activation, name: str, s: int, split: float, minimum: float
) -> tuple[Callable[[Array], Array], Array]:
    """Return the form of a piece as a function of the coefficients, and f′, on a sample of x."""
    x = np.unique(split + (-1.0, 1.0)[s] * DISTANCES)
    y, slope = np.maximum(activation.value(x), minimum), activation.derivative(x)
    return functools.partial(_form, name, s, y=y, minimum=minimum), slope


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
