"""Quotients of polynomials with the least maximum error.

The method is differential correction (Cheney and Loeb, *On rational Chebyshev approximation*, 1961). Each step is
a linear programme.
"""

from __future__ import annotations

import math

import numpy as np

from fitact.fitter.expr import Array, in_long_double

EXCHANGES = 30
CORRECTIONS = 100  # at most: they end where the next comes no nearer
CLOSE = 1.01  # times the least distance: a fit comes as near as this
DEPENDENT = 1e-14  # relative: what is left of a column that depends on others
POSITIVE = 0.04  # least value of a q of size 1: float32 then loses no digits
HIGHS = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
Coefficients = tuple[tuple[float, ...], tuple[float, ...]]  # of numerator and denominator, constant first


def _product(rows: Array, vector: Array) -> Array:
    """Return rows · vector, (n,), summed in a fixed order; BLAS and LAPACK choose theirs by CPU."""
    return np.asarray((rows * vector).sum(axis=1))


def _orthonormal(rows: Array) -> tuple[Array, Array]:
    """Return an orthonormal basis of the columns, (n, columns), and the upper triangle R with rows = basis · R.

    This is Gram and Schmidt's process, applied twice to each column. A column that depends on earlier ones has
    zeros in the basis.
    """
    columns, upper = np.array(rows.T, order="C"), np.eye(rows.shape[1])
    basis = np.zeros_like(columns)
    for j, rest in enumerate(columns):
        size = math.sqrt((rest * rest).sum())
        for _ in range(2):
            for i in range(j):
                share = (basis[i] * rest).sum()
                upper[i, j] += share
                rest -= share * basis[i]
        left = math.sqrt((rest * rest).sum())
        if left > DEPENDENT * size:
            basis[j], upper[j, j] = rest / left, left
    return np.ascontiguousarray(basis.T), upper


def _solved(upper: Array, right: Array) -> Array:
    """Return the solution of a triangular system, from its last row upwards."""
    solved = np.zeros_like(right)
    for j in reversed(range(len(right))):
        solved[j] = (right[j] - (upper[j, j + 1 :] * solved[j + 1 :]).sum()) / upper[j, j]
    return solved


def least_squares(rows: Array, values: Array) -> Array:
    """Return the solution of least squares, (columns,): 0 for a column that depends on earlier ones."""
    basis, upper = _orthonormal(rows)
    return _solved(upper, _product(basis.T, values))


def singles_of(coefficients: Array) -> tuple[float, ...]:
    """Return coefficients rounded to float32."""
    with np.errstate(over="ignore", under="ignore"):
        return tuple(coefficients.astype(np.float32).astype(np.float64).tolist())


def minimax(
    t: Array, low: Array, high: Array, size: Array, weight: Array, degrees: tuple[int, int], allowed: float
) -> tuple[float, Coefficients | None]:
    """Find the quotient p/q of given degrees whose largest weighted distance from the data is least.

    The distance at t, (n,) increasing, is the larger of |p/q/size − low| and |p/q/size − high| divided by weight,
    which all have the shape of t; q > 0 at all t. The programmes run on a few t. Those with the largest distance
    are added until no other t has a larger one, or the distance cannot be as small as `allowed`.

    Returns:
        The distance at the last few t, at most that at all t; and the coefficients of p and q as float32 numbers,
        constant first, or None if the distance exceeds `allowed`.

    """
    a, b = degrees
    # p and q may share any factor: this one keeps the powers of q similar in size, whatever the range
    near = float(min(np.max(np.abs(t)), max(1.0, np.median(np.abs(t))))) or 1.0  # a typical |t|
    powers = np.vander(t / near, max(a, b) + 1, increasing=True)
    basis, change = _orthonormal(powers / np.vander(1 + np.abs(t) / near, b + 1)[:, :1])
    basis, change = basis * math.sqrt(len(t)), change / math.sqrt(len(t))
    above, below = basis[:, : a + 1] / (size * weight)[:, None], basis[:, : b + 1]
    low, high = low / weight, high / weight

    def distance(p: Array, q: Array) -> Array:
        bottom, top = _product(below, q), _product(above, p)
        with np.errstate(all="ignore"):
            far = np.maximum(np.abs(top / bottom - low), np.abs(top / bottom - high))
        return np.where(bottom > 0, far, np.inf)

    cosine = (1 - in_long_double(np.cos)(np.linspace(0, np.pi, 3 * (a + b + 4)))) / 2
    even = np.searchsorted(t, t[0] + cosine * (t[-1] - t[0])).clip(0, len(t) - 1)
    chosen = np.unique([*even, *(cosine * (len(t) - 1)).astype(int), int(np.argmax(high - low))])
    q: Array = np.zeros(b + 1)
    q[0] = 1.0 if below[0, 0] > 0 else -1.0
    divisor = _product(below, q)
    if not np.all(divisor):  # the powers are of too many sizes for float64
        return math.inf, None
    p = least_squares(above / divisor[:, None], (low + high) / 2)
    best: tuple[float, Array, Array] = (math.inf, p, q)
    for _ in range(EXCHANGES):
        p, q, reached = _corrected(above[chosen], below[chosen], low[chosen], high[chosen], p, q)
        if reached > allowed:
            return reached, None
        far = distance(p, q)
        if far.max() < best[0]:
            best = float(far.max()), p, q
        if far.max() <= reached * CLOSE:
            break
        peak = (far >= np.roll(far, 1)) & (far >= np.roll(far, -1)) & (far > reached)
        worst = np.flatnonzero(peak)
        worst = worst[np.argsort(-far[worst], kind="stable")[:16]]
        chosen = np.union1d(chosen, worst)
    if best[0] > allowed:
        return reached, None
    units = np.vander([near], len(change), increasing=True)[0]
    top, bottom = (_solved(change[: len(c), : len(c)], c) / units[: len(c)] for c in best[1:])
    scale = np.max(np.abs(bottom))
    return reached, (singles_of(top / scale), singles_of(bottom / scale))


def _corrected(
    above: Array, below: Array, low: Array, high: Array, p: Array, q: Array
) -> tuple[Array, Array, float]:
    """Return the best p and q at a few points, by differential correction, and the distance they reach.

    From p, q and their distance e, the next p and q minimise the largest of (|p − value·q| − e·q)/q_before, with
    the coefficients of q within [−1, 1].
    """
    from scipy.optimize import linprog

    reached, expected = math.inf, 0.0
    for _ in range(CORRECTIONS):
        bottom, top = _product(below, q), _product(above, p)
        if not (bottom > 0).all():  # where points were added: begin again with q = 1
            q = np.zeros(len(q))
            q[0] = np.sign(below[0, 0])
            bottom = _product(below, q)
            p = least_squares(above / bottom[:, None], (low + high) / 2)
            top = _product(above, p)
        now = float(np.maximum(np.abs(top / bottom - low), np.abs(top / bottom - high)).max())
        # where q is still far from its size, a step comes hardly nearer, and its programme expects much of it
        if now >= reached * (1 - 1e-3 * (expected < 0.1 * now)):
            break
        reached, best = now, (p, q)
        tops, bottoms, ones = above / bottom[:, None], below / bottom[:, None], np.ones((len(low), 1))
        upper = np.hstack([-tops, (high - now)[:, None] * bottoms, -ones])
        lower = np.hstack([tops, (-low - now)[:, None] * bottoms, -ones])
        bounds = [(None, None)] * len(p) + [(-1, 1)] * len(q) + [(None, None)]
        cost = np.zeros(len(bounds))
        cost[-1] = 1.0
        away = np.hstack([np.zeros_like(above), -below, np.zeros_like(ones)])
        right = np.concatenate([np.zeros(2 * len(low)), -POSITIVE * np.abs(below[:, 0])])
        rows = np.vstack([upper, lower, away])
        result = linprog(cost, rows, right, bounds=bounds, method="highs", options=HIGHS)
        if result.x is None:
            break
        p, q, expected = result.x[: len(p)], result.x[len(p) : -1], -result.x[-1]
        if not (_product(below, q) > 0).all():
            break
    return *best, reached
