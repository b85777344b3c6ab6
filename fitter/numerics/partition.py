"""The best borders on a grid: Few-Bit's dynamic programme.

Novikov et al., *Few-Bit Backward*, arXiv 2202.00441, eq. 7 and 8. The programme is the plain O(n² K) one: faster
ones need a monotone function, and the derivatives of GELU, SiLU and Mish are not. It skips intervals that
cannot be part of the optimum, because each of them alone costs more than some choice of all borders.
"""

from __future__ import annotations

import numpy as np

from fitact.errors import UsageError
from fitact.fitter.expr.wide import Array

from .moments import Moments, about, spread

ROUNDING = 1e-13  # of ∫w·g²: how far the differences of running integrals may be off
BLOCK = 1 << 16  # sums in a buffer: half a megabyte, which a core's own cache holds


def dp_borders(moments: Moments, levels: int, ends: tuple[float, float] | None = None) -> Array:
    """Return the inner borders, (levels − 1,), of the best step functions whose borders are grid points.

    `best[k, i]` is the least error of k + 1 levels on the first i cells: the recursion
    best[k, i] = min over j < i of best[k − 1, j] + spread(j, i), all j and many k at once. `ends` gives the first
    and the last level of the function, and the first and the last interval then cost the error about these.

    Raises:
        UsageError: the grid has too few cells.

    """
    sums = moments.sums
    n = len(moments.grid) - 1
    if n < levels:
        raise UsageError(f"cells: {n} are too few for {levels} levels")
    most = np.inf if ends is not None else _total(moments, _even_shares(moments, levels))
    most = most * (1 + 1e-9) + ROUNDING * sums[2, n]
    best = np.full((levels, n + 1), np.inf)
    last = np.zeros((levels, n + 1), dtype=np.intp)
    block = np.empty(BLOCK + n)  # one buffer: allocating it anew would take longer than the sums
    start = 0
    for i in range(1, n + 1):
        cost = spread(sums[:, i, None] - sums[:, start:i])
        if start == 0:
            best[0, i] = cost[0] if ends is None else about(sums[:, i], ends[0])
        # an interval costs no less than a part of it, so what is too wide for i is too wide for all that follow
        wide = int(np.argmax(cost <= most))
        start, cost = start + wide, cost[wide:]
        step = max(BLOCK // len(cost), 1)
        for k in range(0, levels - 1, step):
            before = best[k : min(k + step, levels - 1), start:i]
            candidates = np.add(before, cost, out=block[: before.size].reshape(before.shape))
            chosen = candidates.argmin(axis=1)
            last[k + 1 : k + 1 + len(before), i] = start + chosen
            best[k + 1 : k + 1 + len(before), i] = candidates[np.arange(len(before)), chosen]
    if ends is not None:
        last[-1, n] = np.argmin(best[-2, :n] + about(sums[:, n, None] - sums[:, :n], ends[1]))
    found = np.empty(levels - 1, dtype=np.intp)
    i = n
    for k in range(levels - 1, 0, -1):
        i = last[k, i]
        found[k - 1] = i
    borders: Array = moments.grid[found]
    return borders


def _even_shares(moments: Moments, levels: int) -> Array:
    """Return grid points, (levels − 1,), that share out the cube roots of the cells' errors evenly.

    Where cells are narrow, the error of n cells made one grows by n³: so these borders are near the best.
    """
    n = len(moments.grid) - 1
    shares = np.cumsum(np.cbrt(spread(np.diff(moments.sums, axis=-1))))
    chosen = 1 + np.searchsorted(shares, shares[-1] * np.arange(1, levels) / levels)
    # each at least one cell after the one before, and before the one after
    steps = np.arange(1, levels)
    chosen = np.maximum.accumulate(np.maximum(chosen, 1) - steps) + steps
    chosen = np.minimum(chosen, n - levels + steps)
    return np.asarray(moments.grid[chosen])


def _total(moments: Moments, borders: Array) -> float:
    at = np.concatenate([[0], np.searchsorted(moments.grid, borders), [len(moments.grid) - 1]])
    return float(spread(np.diff(moments.sums[:, at], axis=-1)).sum())
