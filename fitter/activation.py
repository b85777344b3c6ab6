"""An activation: a formula, its derivatives, and what a fit must know about its shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fitact.errors import UsageError, quote

from .catalog import CATALOG
from .expression import Array, Expr, evaluate, switch_points, x
from .parser import parse

# Two values of f′ that differ by less than this, relative to its largest, are taken as equal: a thousand
# roundings of float64.
TOLERANCE = 1e-12
SAMPLES = 4001  # points at which a shape that has no closed form is looked for


@dataclass(frozen=True)
class Activation:
    """A pointwise activation y = f(x).

    Attributes:
        name: its name in the catalog, or None for a formula of the user's.
        expression: the formula's text.
        parameters: those of the catalog's entry that are not as by default, by name.

    Raises:
        UsageError: the expression is not a formula in x.

    """

    name: str | None
    expression: str
    parameters: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if x not in self._f.free_symbols:
            raise UsageError(f"activation {quote(self.expression)} does not depend on x: write a formula in x")

    @classmethod
    def of(cls, text: str, parameters: Mapping[str, float] | None = None) -> Activation:
        """Return the activation that a name of the catalog or an expression in `x` stands for.

        Raises:
            UsageError: neither, or a parameter that the catalog's entry does not have.

        """
        parameters = parameters or {}
        if text in CATALOG:
            entry = CATALOG[text]
            expression = entry.filled(entry.expression, parameters)
            changed = {k: float(v) for k, v in sorted(parameters.items()) if float(v) != entry.parameters[k]}
            return cls(text, expression, changed)
        if parameters:
            raise UsageError(f"an expression has no parameters: write the numbers into {quote(text)}")
        if text.isidentifier() and text != "x":
            names = ", ".join(CATALOG)
            raise UsageError(
                f"unknown activation {quote(text)}: expected one of {names}, or an expression in x "
                "such as x*sigmoid(x)"
            )
        return cls(None, text)

    @cached_property
    def _f(self) -> Expr:
        return parse(self.expression, what="activation")

    @cached_property
    def _df(self) -> Expr:
        return self._f.diff(x)

    @cached_property
    def _d2f(self) -> Expr:
        return self._df.diff(x)

    @property
    def torch(self) -> str | None:
        """A call of PyTorch's own function on `x`, if there is one."""
        if self.name is None or (entry := CATALOG[self.name]).torch is None:
            return None
        return entry.filled(entry.torch, self.parameters)

    @property
    def formula(self) -> Expr:
        """The activation as a SymPy expression in `expression.x`."""
        return self._f

    def value(self, at: Array) -> Array:
        """Return f at the points, float64 of any shape."""
        return evaluate(self._f, at)

    def derivative(self, at: Array) -> Array:
        """Return f′ at the points; at a breakpoint, the one-sided value that PyTorch gives."""
        return evaluate(self._df, at)

    def second_derivative(self, at: Array) -> Array:
        """Return f″ at the points, away from breakpoints."""
        return evaluate(self._d2f, at)

    def breakpoints(self, low: float, high: float) -> Array:
        """Return the points inside (low, high) where f or f′ may have a corner or a jump, increasing."""
        return switch_points(self._f, low, high)

    def has_even_derivative(self, high: float) -> bool:
        """Whether f′(−x) = f′(x) on [0, high], to 1e-12 of its largest value."""
        at = np.linspace(0.0, high, SAMPLES)[1:]
        at = np.setdiff1d(at, np.abs(self.breakpoints(-high, high)))
        right, left = self.derivative(at), self.derivative(-at)
        if not (np.isfinite(right).all() and np.isfinite(left).all()):
            return False
        scale = np.max(np.abs(right), initial=0.0)
        return bool(np.all(np.abs(right - left) <= TOLERANCE * scale))

    def pieces(self, low: float, high: float) -> int | None:
        """Return into how many intervals of constant f′ the breakpoints cut (low, high); None if f′ varies."""
        corners = self.breakpoints(low, high)
        edges = np.concatenate([[low], corners, [high]])
        inside = edges[:-1, None] + np.diff(edges)[:, None] * np.linspace(0.02, 0.98, 49)
        slopes = self.derivative(inside)
        scale = TOLERANCE * np.max(np.abs(slopes), initial=0.0)
        if not np.all(np.ptp(slopes, axis=1) <= scale):
            return None
        return 1 + int(np.count_nonzero(np.abs(np.diff(slopes[:, 0])) > scale))
