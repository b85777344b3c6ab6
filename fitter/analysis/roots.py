"""All roots of a formula, all its breaks, and its sign between them, by bisecting boxes with enclosures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import sympy
from numpy.typing import NDArray

from fitact.fitter.expr import atoms
from fitact.fitter.expr.atoms import SWITCHES, Expr, x
from fitact.fitter.expr.evaluate import Array
from fitact.fitter.expr.multiprecision import MP, Number, evaluate_multiprecision
from fitact.fitter.expr.work import remembered, stage

from .search import Part, Point, Search, gap

REALS = float(np.finfo(np.float32).max)  # the end of the default domain
MAX_SWITCHES = 256


@dataclass(frozen=True)
class Roots:
    """The roots of a formula in an open interval, and its signs between them.

    Attributes:
        at: where it is zero or jumps from one sign to the other, float64, increasing.
        exact: the same points to 25 digits or more.
        below, above: the sign of the formula just below and just above each point, −1 or 1.
        flats: the intervals on which it is identically 0.
        signs: (low, high, sign) of all intervals on which the sign is −1, 0 or 1 except at isolated roots,
            increasing; where the formula is undefined there is no interval.
        complete: whether these are all roots.
        reach: the |x| up to which these are all roots; infinite if complete.

    """

    at: Array
    exact: tuple[Number, ...]
    below: NDArray[np.int8]
    above: NDArray[np.int8]
    flats: tuple[tuple[float, float], ...]
    signs: tuple[Part, ...]
    complete: bool
    reach: float


def roots(expr: Expr, low: float, high: float, limit: int = 64) -> Roots:
    """Find all roots of a formula in (low, high), outward from 0.

    A formula that fades below 1e-290 toward an end of the interval keeps its last sign.

    Args:
        expr: the formula.
        low: the interval's lower end, at least −1.7e308.
        high: its upper end, at most 1.7e308.
        limit: the search stops when it has found more roots than this.

    Returns:
        The roots: exact where the formula is linear, otherwise correct to the last bit of float64.

    """
    return _roots(expr, float(low), float(high), limit)


@remembered(512)
def _roots(expr: Expr, low: float, high: float, limit: int) -> Roots:
    if x not in expr.free_symbols:
        value = evaluate_multiprecision(expr, 0)
        signs = () if MP.isnan(value) else ((low, high, int(MP.sign(value))),)
        return _assembled(signs, {}, math.inf)
    cuts, reach = breaks(expr, low, high)
    with stage("the search for roots", "write it with fewer conditions and fewer oscillations"):
        return _assembled(*Search(expr, low, high, limit, cuts, reach).run())


def _assembled(signs: Sequence[Part], points: dict[float, Point], reach: float) -> Roots:
    """Return the record of what a search has found."""
    at = sorted(points)
    return Roots(
        np.array(at, dtype=np.float64),
        tuple(points[point][0] for point in at),
        np.array([points[point][1] for point in at], dtype=np.int8),
        np.array([points[point][2] for point in at], dtype=np.int8),
        tuple((a, b) for a, b, sign in signs if sign == 0),
        tuple(signs),
        math.isinf(reach),
        reach,
    )


def breaks(
    expr: Expr, low: float, high: float, *, switches_only: bool = False
) -> tuple[dict[float, Number], float]:
    """Return the points inside (low, high) where a formula may not be smooth, and up to which |x| they are all.

    They are the roots of the arguments of `where`, `relu`, `abs` and `sign` and, unless `switches_only`, the roots
    of denominators and of bases of fractional powers, and the ends of domains.

    Returns:
        Point in float64 → the same point to 25 digits or more, increasing; and the reach, infinite if complete.

    """
    found: dict[float, Number] = {}
    reach = math.inf
    for u in _arguments(expr, switches_only):
        result = roots(u, low, high, MAX_SWITCHES)
        found.update(zip(result.at.tolist(), result.exact, strict=True))
        ends = {end for flat in result.flats for end in flat if low < end < high}
        found.update({end: MP.mpf(end) for end in ends - set(found)})
        reach = min(reach, result.reach)
    kept: dict[float, Number] = {}
    last = -math.inf
    for point in sorted(found):
        if point - last > 4 * gap(point) and abs(point) < reach:
            kept[point] = found[point]
            last = point
    return kept, reach


def _arguments(expr: Expr, switches_only: bool) -> list[Expr]:
    arguments: dict[Expr, None] = {}
    for node in sympy.preorder_traversal(expr):
        u = None
        if isinstance(node, SWITCHES):
            u = node.args[0]
        elif switches_only:
            continue
        elif node.is_Pow and not (node.exp.is_Integer and node.exp.p > 0):
            u = node.base
        elif isinstance(node, atoms.log):
            u = node.args[0]
        elif isinstance(node, atoms.log1p):
            u = 1 + node.args[0]
        elif isinstance(node, atoms.tan):
            u = atoms.cos(node.args[0])
        if u is not None and x in u.free_symbols:
            arguments[u] = None
    return list(arguments)
