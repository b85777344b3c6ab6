"""The approximants of an inverted fit: functions of the output y in place of f′ on one cell of x."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fitact.base import UsageError, readable
from fitact.fitter.analysis import float_check
from fitact.fitter.expr import Array, Expr, in_long_double, parse, stable

from .validate import check_numbers

MOST_RADICALS = 3  # at both ends of a cell and inside
MOST_COEFFICIENTS = 33
MOST_ORDER = 64
FLAT = 1000.0  # the paper's approximants clamp y to it; their exponentials are 0 there

Bits = NDArray[np.intp]
Single = NDArray[np.float32]
Floats = NDArray[Any]  # float32 or float64
Kind = Literal["power", "exponential", "root"]
Approximates = Literal["derivative", "sigmoid"]


@readable
@dataclass(frozen=True)
class Radical:
    """One term of the variable t: a radical of y − anchor.

    For `side` 1 it is max(y − anchor, 0)^(1/m), for −1 max(anchor − y, 0)^(1/m), and for 0 the signed radical on
    both sides.
    """

    anchor: float  # f at a root of f′, a float32
    order: int  # m, 1 + the order of that root; 1 for y − anchor itself
    side: int
    sign: int = 1  # or −1, of the term in the sum

    def __post_init__(self) -> None:
        for what, allowed in (("side", (-1, 0, 1)), ("sign", (-1, 1))):
            if getattr(self, what) not in allowed:
                expected = ", ".join(map(str, allowed))
                raise UsageError(f"{what}: expected an integer, one of {expected}, got {getattr(self, what)!r}")
        if not 1 <= self.order <= MOST_ORDER:
            raise UsageError(f"order: expected an integer from 1 to {MOST_ORDER}, got {self.order!r}")

    def __call__(self, y: Floats, anchor: float | None = None) -> Floats:
        """Return the term, for float32 as kernels compute it; `anchor` may be given more exactly."""
        d = y - y.dtype.type(self.anchor if anchor is None else anchor)
        size = np.abs(d) if self.side == 0 else np.maximum(d if self.side > 0 else -d, y.dtype.type(0))
        if self.order == 2:
            size = np.sqrt(size)
        elif self.order != 1:
            with np.errstate(divide="ignore"):
                size = in_long_double(np.exp2)(in_long_double(np.log2)(size) * y.dtype.type(1 / self.order))
        if self.side == 0:
            size = np.copysign(size, d)
        return np.asarray(size if self.sign > 0 else -size)


def variable(radicals: Sequence[Radical], y: Floats, anchors: Sequence[float | None] | None = None) -> Floats:
    """Return t of y, the sum of the radicals, in the shape and dtype of y; `anchors` as in `Radical`."""
    terms = zip(radicals, anchors or [None] * len(radicals), strict=True)
    return np.asarray(sum(radical(y, anchor) for radical, anchor in terms))


@readable
@dataclass(frozen=True, kw_only=True)
class Quotient:
    """f′ = p(t)/q(t), where t is a sum of radicals of y.

    All numbers but the last two are float32. If they define no such function, a UsageError is raised.
    """

    radicals: tuple[Radical, ...]  # the terms of t
    low: float  # of the interval that t is clamped to; q > 0 on it
    high: float
    numerator: tuple[float, ...]  # coefficients of p, constant first
    denominator: tuple[float, ...]  # and of q; (1,) for a polynomial
    error: float = 0.0  # max |p/q − f′| / max(1, |f′|) over the x of this cell, for y rounded to the storage dtype
    floor: float = 0.0  # the least such error that any function of that y has
    kind: Literal["quotient"] = "quotient"
    approximates: Literal["derivative"] = "derivative"

    def __post_init__(self) -> None:
        for what, values in (("numerator", self.numerator), ("denominator", self.denominator)):
            check_numbers(what, values, min(max(len(values), 1), MOST_COEFFICIENTS), single=True)
        if not 1 <= len(self.radicals) <= MOST_RADICALS:
            raise UsageError(f"radicals: expected 1 to {MOST_RADICALS}, got {len(self.radicals)}")
        check_numbers(
            "anchor", tuple(radical.anchor for radical in self.radicals), len(self.radicals), single=True
        )
        check_numbers("low, high", (self.low, self.high), 2, single=True)
        if self.low > self.high:
            raise UsageError(f"low: expected at most high, {self.high!r}, got {self.low!r}")
        if has_pole(self.denominator, self.low, self.high):
            raise UsageError(f"denominator: expected no root from {self.low!r} to {self.high!r}")

    def __call__(self, y: Single, *, fused: bool = False) -> Single:
        """Return f′ of outputs of this cell, shape of y, in float32 as kernels compute it.

        With `fused`, product and sum are rounded once, as a GPU does, and not each.
        """
        t = np.minimum(np.maximum(variable(self.radicals, y), np.float32(self.low)), np.float32(self.high))
        p = _horner(self.numerator, t, fused)
        return p if len(self.denominator) == 1 else p / _horner(self.denominator, t, fused)


def has_pole(denominator: Sequence[float], low: float, high: float) -> bool:
    """Return whether a polynomial, constant first, has a root from low to high."""
    poles = np.roots(denominator[::-1])
    poles = poles[np.abs(poles.imag) <= 1e-9 * np.abs(poles)].real
    return not any(denominator) or bool(np.any((poles >= low) & (poles <= high)))


def _horner(coefficients: Sequence[float], t: Single, fused: bool) -> Single:
    value = np.full(t.shape, coefficients[-1], dtype=np.float32)
    for coefficient in coefficients[-2::-1]:
        if fused:
            value = (value.astype(np.float64) * t + coefficient).astype(np.float32)
        else:
            value = value * t + np.float32(coefficient)
    return value


@readable
@dataclass(frozen=True, kw_only=True)
class PublishedApproximant:
    """An approximant of the paper, in v = y − anchor, where the anchor is the minimum of f.

    `power` is c0 + c1·u^c2·(1 − u)^c3 with u = v/|anchor|, `root` is c0 + c1·√v + c2·v + c3·v², and
    `exponential` is 1 + (c0 + c1·√v + c2·v)·exp(c3·(c4 − v)³).
    """

    kind: Kind
    approximates: Approximates  # the derivative, or q = sigmoid(x), with f′ = q·(1 − y) + y for SiLU
    anchor: float
    coefficients: tuple[float, ...]  # c0, c1, …
    error: float = 0.0  # as those of `Quotient`
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_numbers("coefficients", self.coefficients, SHAPES[self.kind][0])
        check_numbers("anchor", (self.anchor,), 1)
        if not -FLAT < self.anchor < 0:
            raise UsageError(f"anchor: expected a number below 0, got {self.anchor!r}")

    @cached_property
    def shape(self) -> Expr:
        """The approximant as a SymPy expression in v, with `atoms.x` for v."""
        numbers = {f"c{i}": f"({c!r})" for i, c in enumerate(self.coefficients)}
        return stable(
            parse(SHAPES[self.kind][1].format(m=repr(-self.anchor), **numbers), what="approximant", variable="v")
        )

    def __call__(self, y: Single, *, fused: bool = False) -> Single:
        """Return f′ of outputs of this cell, shape of y, in float32; `fused` has no effect."""
        y = np.clip(y, np.float32(self.anchor), np.float32(FLAT))
        with np.errstate(all="ignore"):
            q = float_check.FLOAT32.evaluate(self.shape, y - np.float32(self.anchor))
            derivative = q * (1 - y) + y if self.approximates == "sigmoid" else q
        return np.asarray(derivative, dtype=np.float32)


# Kind of the paper's approximants → the number of coefficients, and the formula.
SHAPES = {
    "power": (4, "{c0} + {c1}*(v/{m})**{c2}*relu(1 - v/{m})**{c3}"),
    "exponential": (5, "1 + ({c0} + {c1}*sqrt(v) + {c2}*v)*exp({c3}*({c4} - v)**3)"),
    "root": (4, "{c0} + {c1}*sqrt(v) + {c2}*v + {c3}*v**2"),
}
Approximant = Quotient | PublishedApproximant


def codes(borders: Sequence[float], x: Array) -> Bits:
    """Return how many of the borders are less than x; 0 for NaN."""
    x = np.asarray(x, dtype=np.float64)
    # searchsorted puts NaN last; no comparison with NaN holds, so it belongs in front
    return np.asarray(np.searchsorted(np.asarray(borders, dtype=np.float64), np.where(np.isnan(x), -np.inf, x)))
