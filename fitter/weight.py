"""Weights: how much an error at x counts in a fit."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

from fitact.errors import UsageError, quote

from .expression import Array, Expr, evaluate, switch_points
from .parser import MAX_LENGTH, parse

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_NORMAL = re.compile(rf"normal(?:\(\s*({_NUMBER})\s*,\s*({_NUMBER})\s*\))?")


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
    def _expr(self) -> Expr:
        if self.text == "uniform":
            return parse("1")
        if not isinstance(self.text, str) or len(self.text) > MAX_LENGTH:
            return parse(self.text, what="weight")  # which refuses it
        normal = _NORMAL.fullmatch(self.text)
        if normal is None and self.text.startswith("normal"):
            raise UsageError(f"weight {quote(self.text)}: expected normal or normal(mean, deviation)")
        if normal is None:
            return parse(self.text, what="weight")
        mean, deviation = float(normal[1] or 0), float(normal[2] or 1)
        if not (math.isfinite(mean) and 0 < deviation < math.inf):
            raise UsageError(f"weight {quote(self.text)}: expected a finite mean and a deviation above 0")
        density = f"exp(-((x - ({mean!r}))/{deviation!r})**2/2)/({deviation!r}*sqrt(2*pi))"
        return parse(density, what=f"weight {quote(self.text)}, that is")

    def __call__(self, at: Array) -> Array:
        """Return w at the points, float64 of any shape."""
        return evaluate(self._expr, at)

    def breakpoints(self, low: float, high: float) -> Array:
        """Return the points inside (low, high) where w may have a corner or a jump, increasing."""
        return switch_points(self._expr, low, high)
