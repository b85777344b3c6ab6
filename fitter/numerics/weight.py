"""Weights: how much an error at x counts in a fit."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fitact.errors import UsageError, quote
from fitact.fitter.analysis.shape import switch_points
from fitact.fitter.expr.atoms import Expr
from fitact.fitter.expr.evaluate import Array, evaluate
from fitact.fitter.expr.parser import MAX_LENGTH, parse

from .moments import quadrature

LARGEST = 1e30  # of a weight, and of the ends of a domain
CELLS = 2000  # least number of cells over which the mass is summed
_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_NORMAL = re.compile(rf"normal(?:\( *({_NUMBER}) *, *({_NUMBER}) *\))?", re.ASCII)


@dataclass(frozen=True)
class Weight:
    """A weight w(x) ≥ 0, by its text.

    Attributes:
        text: `uniform` (w = 1), `normal` or `normal(mean, deviation)` (the density), or an expression in x.

    Raises:
        UsageError: the text is none of these.

    """

    text: str = "uniform"

    def __post_init__(self) -> None:
        _ = self._expr

    @cached_property
    def _normal(self) -> tuple[float, float] | None:
        """Mean and deviation, if it is a normal density."""
        if len(self.text) > MAX_LENGTH or not self.text.startswith("normal"):
            return None
        match = _NORMAL.fullmatch(self.text)
        if match is None:
            raise UsageError(f"weight {quote(self.text)}: expected normal or normal(mean, deviation)")
        mean, deviation = float(match[1] or 0), float(match[2] or 1)
        if not (math.isfinite(mean) and 0 < deviation < math.inf):
            raise UsageError(f"weight {quote(self.text)}: expected a finite mean and a deviation above 0")
        return mean, deviation

    @cached_property
    def _expr(self) -> Expr:
        if self.text == "uniform":
            return parse("1")
        if self._normal is None:
            return parse(self.text, what="weight")
        mean, deviation = self._normal
        density = f"exp(-((x - ({mean!r}))/{deviation!r})**2/2)/({deviation!r}*sqrt(2*pi))"
        return parse(density, what=f"weight {quote(self.text)}, that is")

    def __call__(self, at: Array) -> Array:
        """Return w at the points, float64 of any shape."""
        return evaluate(self._expr, at)

    def check(self, low: float, high: float) -> None:
        """Raise UsageError unless w is finite and not negative from `low` to `high`, and not 0 everywhere."""
        if self.text == "uniform":
            return
        at = np.linspace(low, high, 2 * CELLS + 1)
        heights = self(at)
        wrong = ~((heights >= 0) & (heights <= LARGEST))
        if wrong.any():
            raise UsageError(
                f"weight {quote(self.text)} is {heights[wrong][0]:g} at x = {at[wrong][0]:g}: expected 0 to "
                f"{LARGEST:g} all over the domain"
            )
        if not 0 < self.mass(low, high) < math.inf:
            raise UsageError(f"weight {quote(self.text)}: it is zero all over the domain {low:g} {high:g}")

    def mass(self, low: float, high: float) -> float:
        """Return the integral of w from `low` to `high`."""
        if self.text == "uniform":
            return high - low
        near = (high - low) * 0.5 ** np.arange(1, 38)  # to 0, where formulas may be narrow
        edges = np.union1d(np.linspace(low, high, CELLS + 1), np.concatenate([-near, near, [0.0]]))
        edges = np.union1d(edges[(low <= edges) & (edges <= high)], self.breakpoints(low, high))
        return float(quadrature(self, edges).sum())

    def breakpoints(self, low: float, high: float) -> Array:
        """Return the points inside (low, high) that a grid needs to integrate w, increasing.

        They are the points where w may have a corner or a jump, and some that find a narrow normal density.
        """
        found = switch_points(self._expr, low, high)
        if self._normal is not None:
            mean, deviation = self._normal
            around = mean + deviation * np.arange(-8.0, 8.5, 0.5)
            found = np.union1d(found, around[(low < around) & (around < high)])
        return found
