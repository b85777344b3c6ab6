"""Weights: how much an error at x counts in a fit."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fitact.errors import UsageError, quote

from .analysis import switch_points
from .expression import Array, Expr, evaluate
from .parser import MAX_LENGTH, parse

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

    def breakpoints(self, low: float, high: float) -> Array:
        """Return the points inside (low, high) that a grid must have for w to be integrated, increasing.

        Where w may have a corner or a jump; and some that keep a narrow normal density from being missed.
        """
        found = switch_points(self._expr, low, high)
        if self._normal is not None:
            mean, deviation = self._normal
            around = mean + deviation * np.arange(-8.0, 8.5, 0.5)
            found = np.union1d(found, around[(low < around) & (around < high)])
        return found
