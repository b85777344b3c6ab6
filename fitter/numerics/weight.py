"""Weights: how much an error at x counts in a fit."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fitact.base import UsageError, quote
from fitact.fitter.analysis import switch_points
from fitact.fitter.expr import Array, Expr, evaluate, parse
from fitact.fitter.syntax import MAX_LENGTH

from . import histogram
from .histogram import NUMBER, Histogram
from .moments import quadrature

LARGEST = 1e30  # of a weight, and of the ends of a domain
CELLS = 2000  # least number of cells over which the mass is summed
_TWO = rf"({NUMBER}) *, *({NUMBER})"
_NORMAL = re.compile(rf"normal()(?:\( *{_TWO} *\))?", re.ASCII)
_STUDENT = re.compile(rf"student(?:\( *({NUMBER}) *(?:, *{_TWO} *)?\))?", re.ASCII)
_DATA = re.compile(rf"(?:({NUMBER})\*)?(histogram\([^()]*\))(?: \+ ({NUMBER})\*(student.*))?", re.ASCII)
MOST_FREEDOM = 1000.0  # degrees: beyond, Student's density is the normal one to three digits


@dataclass(frozen=True)
class _Density:
    """A density round `centre`, whose width is about `scale`."""

    centre: float
    scale: float
    freedom: float  # of Student's density, degrees; infinite for the normal one
    text: str  # the density as a formula

    def marks(self, width: float) -> Array:
        """Return points that find the density on an interval of that width, however narrow it is."""
        offsets = np.arange(-8.0, 8.5, 0.5)
        if math.isfinite(self.freedom):  # the tails fall as a power of |x|: cells that double
            octaves = 2.0 ** np.arange(3, 3 + max(math.ceil(math.log2(width / self.scale)), 0))
            offsets = np.concatenate([-octaves[::-1], offsets, octaves])
        return np.asarray(self.centre + self.scale * offsets)


@dataclass(frozen=True)
class Weight:
    """A weight w(x) ≥ 0, by its text.

    Attributes:
        text: `uniform` (w = 1); `normal` or `normal(mean, deviation)`, or `student`, `student(freedom)` or
            `student(freedom, mean, scale)`, the densities of the normal distribution and of Student's t, by
            default of mean 0, width 1 and 3 degrees of freedom; `histogram(edges; masses)`, the density that is
            constant between numbers that increase, or `A*histogram(...) + B*student(...)`, as `fitact calibrate`
            writes it; or an expression in x.

    Raises:
        UsageError: the text is none of these.

    """

    text: str = "uniform"

    def __post_init__(self) -> None:
        _ = self._parts or self._expr

    def record(self) -> str:
        """Return the weight as JSON has it: its text."""
        return self.text

    @cached_property
    def _parts(self) -> list[tuple[float, Histogram | Weight]]:
        """The histogram that the text holds, if it holds one, and its tail, each with its share."""
        if "histogram" not in self.text:
            return []
        name = f"weight {quote(self.text)}"
        if len(self.text) > histogram.LONGEST:
            raise UsageError(f"{name}: expected at most {histogram.LONGEST} characters, got {len(self.text)}")
        match = _DATA.fullmatch(self.text)
        if match is None:
            raise UsageError(f"{name}: expected histogram(edges; masses) or A*histogram(...) + B*student(...)")
        share, tail_share = float(match[1] or 1), float(match[3] or 0)
        if not 0 < share <= 1 or not (0 < tail_share <= 1 or match[3] is None):
            raise UsageError(f"{name}: expected shares above 0 and up to 1, got {share!r} and {tail_share!r}")
        try:
            first = histogram.parsed(match[2])
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None
        return [(share, first), *([(tail_share, Weight(match[4]))] if match[4] else [])]

    @cached_property
    def _density(self) -> _Density | None:
        """The density that the text names, if it names one."""
        normal = self.text.startswith("normal")
        if len(self.text) > MAX_LENGTH or not (normal or self.text.startswith("student")):
            return None
        match = (_NORMAL if normal else _STUDENT).fullmatch(self.text)
        if match is None:
            forms = "normal or normal(mean, deviation)"
            forms = forms if normal else "student, student(freedom) or student(freedom, mean, scale)"
            raise UsageError(f"weight {quote(self.text)}: expected {forms}")
        freedom, mean, scale = float(match[1] or 3), float(match[2] or 0), float(match[3] or 1)
        if not (0 < freedom <= MOST_FREEDOM and math.isfinite(mean) and 0 < scale < math.inf):
            expected = f"degrees of freedom above 0 and up to {MOST_FREEDOM:g}, a finite mean and a scale above 0"
            expected = "a finite mean and a deviation above 0" if normal else expected
            raise UsageError(f"weight {quote(self.text)}: expected {expected}")
        if normal:
            text = f"exp(-((x - ({mean!r}))/{scale!r})**2/2)/({scale!r}*sqrt(2*pi))"
            return _Density(mean, scale, math.inf, text)
        gammas = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
        height = gammas / math.sqrt(freedom * math.pi)
        power = f"(1 + ((x - ({mean!r}))/{scale!r})**2/{freedom!r})**({-(freedom + 1) / 2!r})"
        return _Density(mean, scale, freedom, f"{height!r}/{scale!r}*{power}")

    @cached_property
    def _expr(self) -> Expr:
        if self.text == "uniform":
            return parse("1")
        if self._density is None:
            return parse(self.text, what="weight")
        return parse(self._density.text, what=f"weight {quote(self.text)}, that is")

    def __call__(self, at: Array) -> Array:
        """Return w at the points, float64 of any shape."""
        if self._parts:
            return np.asarray(sum(share * part(at) for share, part in self._parts))
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
        mass = self.mass(low, high)
        if not 0 < mass < math.inf:
            what = "infinite at a point of" if mass else "zero all over"
            raise UsageError(f"weight {quote(self.text)}: it is {what} the domain {low:g} {high:g}")

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

        They are the points where w may have a corner or a jump, and some that find a narrow density.
        """
        if self._parts:
            return np.unique(np.concatenate([part.breakpoints(low, high) for _, part in self._parts]))
        points = switch_points(self._expr, low, high)
        if self._density is not None:
            marks = self._density.marks(high - low + abs(self._density.centre))
            points = np.union1d(points, marks[(low < marks) & (marks < high)])
        return points
