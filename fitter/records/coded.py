"""The record of a coded input: one code of x that stands for the value and for the derivative."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from fitact.errors import UsageError, quote
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.expr.evaluate import Array
from fitact.fitter.numerics.weight import Weight

from .approximants import Bits, Reader, codes
from .fit import Fit, check_options
from .validate import (
    as_it_is,
    check_bits,
    check_domain,
    check_increasing,
    check_numbers,
    number,
    numbers,
    options,
    text,
)

MAX_DOMAIN = 65504.0  # in size, the largest number of float16; beyond, the outer cells hold
DEVIATIONS = (0.5, 1.0, 2.0, 4.0)  # of the normal densities for which errors are stated


def by_deviation(*names: str) -> tuple[str, ...]:
    """Return the names of errors that are stated for each of DEVIATIONS."""
    return tuple(f"{name}_{deviation:g}" for name in names for deviation in DEVIATIONS)


@dataclass(frozen=True, kw_only=True)
class CodedFit(Fit):
    """A code of x, and for each code a value in place of f and a number in place of f′.

    The code of x counts the borders strictly below x; that of NaN is 0.

    Attributes:
        bits: k, 3 to 8.
        domain: the interval over which the objective is taken; beyond it the outer cells hold.
        weight: how much an error at x counts.
        borders: 2^k − 1 numbers, increasing, each a float32.
        values: F, 2^k numbers, each a float32.
        derivatives: D, 2^k numbers, each a float32.
        reach: the largest r such that |f − F| is at most 5 % of max(|f|, √(E f²)) for all |x| ≤ r, where E is the
            mean under the weight over the domain; 0 if it is more at x = 0, and the largest float32 if there is no
            largest.
        error: `objective`, J; and for each of DEVIATIONS σ, `value_σ` and `derivative_σ`: the root mean square
            error of F and D, relative to the root mean square of f and f′, for x normal with deviation σ, cut off
            at the ends of the domain.
        options: what else is needed to make the fit again.

    """

    METHODS = ("coded",)
    BITS: ClassVar = range(3, 9)
    ERRORS = (*by_deviation("derivative"), "objective", *by_deviation("value"))
    READ: ClassVar[Mapping[str, Reader]] = {
        "bits": as_it_is,
        "domain": numbers,
        "weight": lambda value, what: Weight(text(value, what)),
        "borders": numbers,
        "values": numbers,
        "derivatives": numbers,
        "reach": number,
        "options": options,
    }

    activation: Activation
    bits: int
    domain: tuple[float, float]
    weight: Weight
    borders: tuple[float, ...]
    values: tuple[float, ...]
    derivatives: tuple[float, ...]
    reach: float
    options: Mapping[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bits(self.bits, self.BITS)
        check_options(self.method, self.options)
        check_domain(self.domain, MAX_DOMAIN)
        check_numbers("borders", self.borders, 2**self.bits - 1, single=True)
        check_numbers("values", self.values, 2**self.bits, single=True)
        check_numbers("derivatives", self.derivatives, 2**self.bits, single=True)
        check_increasing("borders", self.borders)
        check_numbers("reach", (self.reach,), 1)
        if self.reach < 0:
            raise UsageError(f"reach: expected no negative number, got {quote(self.reach)}")
        self.weight.check(*self.domain)

    def code(self, x: Array) -> Bits:
        """Return the code of x, shape of the argument, int64."""
        return codes(self.borders, x)
