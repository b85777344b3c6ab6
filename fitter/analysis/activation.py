"""An activation: a formula, its derivatives, and what a fit must know about its shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np

from fitact.base import UsageError, quote
from fitact.fitter.catalog import CATALOG, check_known
from fitact.fitter.expr import (
    LARGEST_SINGLE,
    LEAST_ORDER,
    SMALLEST_SINGLE,
    Array,
    Expr,
    beyond_singles,
    evaluate,
    order,
    parse,
    stable,
    value,
    x,
)

from . import shape
from .roots import REALS, breaks, gap, roots
from .shape import Asymptote, Breakpoint, Monotone


@dataclass(frozen=True)
class Formula:
    """What a fit is made of. The subclasses are the kinds: activation, gate, formula with learned parameters."""

    KIND: ClassVar[str]

    name: str | None  # in the catalog; None for a user's own formula
    expression: str

    def __str__(self) -> str:
        """Return its name in messages."""
        return f"{self.KIND} {quote(self.expression)}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the learned parameters."""
        return ()

    @cached_property
    def typed(self) -> Expr:
        """The formula as typed, no idiom replaced: a SymPy expression in `atoms.x` and learned parameters."""
        return parse(self.expression, what=self.KIND, learned=self.names)

    @cached_property
    def formula(self) -> Expr:
        """The formula as a SymPy expression in `atoms.x` and learned parameters."""
        return stable(self.typed)

    @cached_property
    def derivative_formula(self) -> Expr:
        """Its derivative in x, as `formula`."""
        return stable(self.formula.diff(x))

    @property
    def torch(self) -> str | None:
        """A call of PyTorch's own function on `x`, if there is one."""
        return None

    def record(self) -> dict[str, Any]:
        """Return the formula as its JSON object."""
        return {"name": self.name, "expression": self.expression}

    def check(self) -> None:
        """Raise UsageError if the formula does not depend on x, or has a constant that float32 cannot hold."""
        if x not in self.formula.free_symbols:
            raise UsageError(f"{self} does not depend on x: write a formula in x")
        if (number := beyond_singles(self.formula)) is not None:
            raise UsageError(
                f"{self}: float32, in which it is computed, cannot hold its constant {number}: "
                f"expected {SMALLEST_SINGLE:.3g} to {LARGEST_SINGLE:.3g} in size"
            )


@dataclass(frozen=True)
class Activation(Formula):
    """A pointwise activation y = f(x).

    Attributes:
        name: its name in the catalog, or None for a user's own formula.
        expression: the formula's text.
        parameters: parameters of the catalog's entry that differ from its defaults, by name.

    Raises:
        UsageError: the expression is not a formula in x, or has a constant that float32 cannot hold.

    """

    KIND = "activation"

    parameters: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        self.check()

    def record(self) -> dict[str, Any]:
        """As in `Formula`."""
        return super().record() | ({"parameters": dict(self.parameters)} if self.parameters else {})

    @classmethod
    def of(cls, text: str, parameters: Mapping[str, float] | None = None) -> Activation:
        """Return the activation that a name of the catalog or an expression in `x` means.

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
        check_known(text)
        return cls(None, text)

    @cached_property
    def second_derivative_formula(self) -> Expr:
        """Its second derivative as a SymPy expression in `atoms.x`."""
        return stable(self.derivative_formula.diff(x))

    @property
    def torch(self) -> str | None:
        """A call of PyTorch's own function on `x`, if there is one."""
        if self.name is None or (entry := CATALOG[self.name]).torch is None:
            return None
        return entry.filled(entry.torch, self.parameters)

    def value(self, at: Array) -> Array:
        """Return f at the points, float64 of any shape."""
        return evaluate(self.formula, at)

    def derivative(self, at: Array) -> Array:
        """Return f′ at the points; at a breakpoint, the one-sided value that PyTorch gives."""
        return evaluate(self.derivative_formula, at)

    def second_derivative(self, at: Array) -> Array:
        """Return f″ at the points, away from breakpoints."""
        return evaluate(self.second_derivative_formula, at)

    def switch_points(self, low: float, high: float) -> Array:
        """Return the points inside (low, high) where f or f′ may have a corner or a jump, increasing.

        They include the points where a `where`, `relu`, `abs` or `sign` switches smoothly.
        """
        return shape.switch_points(self.formula, low, high)

    def breakpoints(self, low: float = -REALS, high: float = REALS) -> tuple[Breakpoint, ...]:
        """Return the jumps of f and of f′ inside (low, high), increasing."""
        return shape.breakpoints(self.formula, self.derivative_formula, low, high)

    def derivative_parity(self, high: float) -> Literal["even", "odd"] | None:
        """Return whether f′ is even or odd on [−high, high], to 1e-12 of its largest value; None if neither.

        If f′ is not finite somewhere, it has no parity.
        """
        at = np.concatenate([(np.arange(4000) + 1 / math.sqrt(2)) / 4000, np.geomspace(1e-6, 1.0, 200) / 1.0123])
        extrema = np.abs(roots(self.second_derivative_formula, -high, high).at)  # narrow features lie at these
        edges = np.unique(np.append(np.abs(self.switch_points(-high, high)), high))  # and between these
        at = np.concatenate([at * high, extrema[extrema > 0], (edges[1:] + edges[:-1]) / 2])
        right, left = self.derivative(at), self.derivative(-at)
        scale = shape.TOLERANCE * np.max(np.abs([right, left]))
        if not np.isfinite(scale):
            return None
        if np.all(np.abs(right - left) <= scale):
            return "even"
        return "odd" if np.all(np.abs(right + left) <= scale) else None

    @cached_property
    def asymptotes(self) -> tuple[Asymptote, Asymptote]:
        """How f behaves toward −∞ and toward +∞."""
        return shape.asymptote(self.formula, -1), shape.asymptote(self.formula, 1)

    def monotone(self, low: float = -REALS, high: float = REALS) -> Monotone:
        """Return the intervals of (low, high) on which f is monotone, and the roots of f′ with their orders."""
        return shape.pieces(self.formula, self.derivative_formula, low, high)

    def derivative_range(self, low: float = -REALS, high: float = REALS) -> tuple[float, float]:
        """Return the least and the largest value of f′ on (low, high): at its extrema, beside breaks, at the ends.

        Larger ones than 1e15, and those at a pole, count as ±∞. If f′ has more extrema than `roots` looks for, it
        may have values beyond these.
        """
        formula = self.derivative_formula
        points = breaks(formula, low, high)[0]
        sides = [
            (at + side * gap(at), order(formula, points[at], side) < -LEAST_ORDER)
            for at in points
            for side in (-1, 1)
        ]
        extrema = roots(self.second_derivative_formula, low, high).at
        sides += [(at, False) for at in (low, high, shape.inside(low, high), *extrema.tolist())]
        # by many digits: the formula may overflow
        sides = [(at, pole) for at, pole in sides if not value(self.formula, at, 20).is_nan()]
        values = np.array([float(value(formula, at, 20)) * (math.inf if pole else 1.0) for at, pole in sides])
        values = values[~np.isnan(values)]
        values[np.abs(values) > 1e15] *= np.inf
        return shape.snapped(values.min(initial=math.inf)), shape.snapped(values.max(initial=-math.inf))

    def steps(self, low: float = -REALS, high: float = REALS) -> Array | None:
        """Return where f′ jumps inside (low, high) if it is constant in between, None if it varies."""
        bends = roots(self.second_derivative_formula, low, high)
        if bends.reach < math.inf or any(sign for *_, sign in bends.signs):
            return None
        jumps = shape.breakpoints(self.derivative_formula, self.second_derivative_formula, low, high)
        return np.array([point.at for point in jumps if point.kind == "jump"])
