"""The best borders: on a grid by Few-Bit's dynamic programme, and off it by Newton's method.

Novikov et al., *Few-Bit Backward*, arXiv 2202.00441, eq. 7 and 8. The programme is the plain O(n² K) one: faster
ones need a monotone function, and the derivatives of GELU, SiLU and Mish are not.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fitact.base import UsageError
from fitact.fitter.expr import Array

from .moments import Moments, about, spread

NEWTON_STEPS = 100
NOISE = 1e-15  # of the integral of the square: what an interval adds by rounding, and would choose borders by
HALVINGS = 10  # of a step of Newton's method


def dp_borders(moments: Moments, levels: int, ends: tuple[float, float] | None = None) -> Array:
    """Return the inner borders, (levels − 1,), of the best step functions whose borders are grid points.

    `best[k, i]` is the least error of k + 1 levels on the first i cells: the recursion
    best[k, i] = min over j < i of best[k − 1, j] + spread(j, i), all j and many k at once. `ends` gives the first
    and the last level of the function, and the first and the last interval then cost the error about these. If the
    grid has too few cells, raise UsageError.
    """
    sums = moments.sums
    n, noise = len(moments.grid) - 1, NOISE * sums[2, -1]
    if n < levels:
        raise UsageError(f"cells: {n} are too few for {levels} levels")
    best = np.full((levels, n + 1), np.inf)
    last, rows = np.zeros((levels, n + 1), dtype=np.intp), np.arange(levels - 1)
    for i in range(1, n + 1):
        cost = spread(sums[:, i, None] - sums[:, :i])
        cost[cost < noise] = 0.0
        best[0, i] = cost[0] if ends is None else about(sums[:, i], ends[0])
        candidates = best[:-1, :i] + cost
        last[1:, i] = candidates.argmin(axis=1)
        best[1:, i] = candidates[rows, last[1:, i]]
    if ends is not None:
        last[-1, n] = np.argmin(best[-2, :n] + about(sums[:, n, None] - sums[:, :n], ends[1]))
    cells = np.empty(levels - 1, dtype=np.intp)
    i = n
    for k in range(levels - 1, 0, -1):
        i = last[k, i]
        cells[k - 1] = i
    borders: Array = moments.grid[cells]
    return borders


def newton(gradient: Callable[[Array], Array], at: Array, free: NDArray[np.bool_], stops: Array) -> Array:
    """Return the borders nearby at which the gradient of the free ones vanishes, by Newton's method.

    The Jacobian is taken by central differences. Each step is halved until the gradient is smaller and no border
    has passed another one or a stop; the search ends where that does not help.
    """
    wrong = gradient(at)[free]
    for _ in range(NEWTON_STEPS if free.any() else 0):
        shifts = np.eye(len(at))[free] * min(1e-5, np.min(np.diff(at), initial=1.0) / 100)
        columns = [(gradient(at + shift) - gradient(at - shift))[free] / (2 * shift.sum()) for shift in shifts]
        step = np.zeros_like(at)
        try:
            step[free] = np.linalg.solve(np.stack(columns, axis=1), -wrong)
        except np.linalg.LinAlgError:
            break
        for _ in range(HALVINGS):
            moved = at + step
            sides = (at[:, None] - stops) * (moved[:, None] - stops)
            if np.all(np.diff(moved) > 0) and np.all(sides >= 0):
                left = gradient(moved)[free]
                if np.linalg.norm(left) < np.linalg.norm(wrong):
                    break
            step /= 2
        else:
            break
        at, wrong = moved, left
    return at
