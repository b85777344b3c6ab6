"""The record of a code that is drawn at random, such that the value looked up is f(x) in the mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fitact.errors import UsageError
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.expr.evaluate import Array
from fitact.fitter.numerics import stochastic
from fitact.fitter.numerics.weight import Weight

from .approximants import Reader
from .coded import MAX_DOMAIN, by_deviation
from .fit import Fit
from .validate import as_it_is, check_bits, check_domain, check_increasing, check_numbers, numbers, text


@dataclass(frozen=True, kw_only=True)
class StochasticFit(Fit):
    """A code of x drawn at random, and for each code a value in place of f and a number in place of f′.

    Code i stands for node i. Between nodes i and i + 1 one of these two codes is drawn, the upper one with the
    probability (f(x) − F_i) / (F_{i+1} − F_i); beyond the nodes the outer codes hold. The code of NaN is 0.

    Attributes:
        bits: k, 3 to 8.
        domain: the interval over which the objective is taken.
        weight: how much an error at x counts.
        nodes: 2^k numbers, increasing, each a bfloat16: from the first to the last of them F is f(x) in the mean.
        values: F, 2^k numbers, each a float32.
        derivatives: D, 2^k numbers, each a float32.
        error: `objective`, J; and for each of DEVIATIONS σ and x normal with deviation σ, cut off at the ends of
            the domain: `value_σ` and `derivative_σ`, the root mean square error of F and D over x and the random
            numbers; and `value_bias_σ` and `derivative_bias_σ`, that of their means over the random numbers. All
            four are relative to the root mean square of f or f′. The variance is the difference of the squares.

    """

    METHODS = ("coded_stochastic",)
    BITS: ClassVar = range(3, 9)
    ERRORS = (
        *by_deviation("derivative", "derivative_bias"),
        "objective",
        *by_deviation("value", "value_bias"),
    )
    READ: ClassVar[Mapping[str, Reader]] = {
        "bits": as_it_is,
        "domain": numbers,
        "weight": lambda value, what: Weight(text(value, what)),
        "nodes": numbers,
        "values": numbers,
        "derivatives": numbers,
    }

    activation: Activation
    bits: int
    domain: tuple[float, float]
    weight: Weight
    nodes: tuple[float, ...]
    values: tuple[float, ...]
    derivatives: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bits(self.bits, self.BITS)
        check_domain(self.domain, MAX_DOMAIN)
        for what in ("nodes", "values", "derivatives"):
            check_numbers(what, getattr(self, what), 2**self.bits, single=True)
        check_increasing("nodes", self.nodes)
        for i, node in enumerate(self.nodes):
            if int(np.float32(node).view(np.uint32)) & 0xFFFF:
                raise UsageError(f"nodes[{i}]: expected a number that bfloat16 holds exactly, got {node!r}")
        self.weight.check(*self.domain)

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """The positions of all numbers of bfloat16, by their bits; see `numerics.stochastic`."""
        return stochastic.positions(np.array(self.nodes), np.array(self.values), self.activation.value)

    def looked_up(self, x: Array) -> tuple[Array, Array]:
        """Return the means of F and D over the random numbers, and their variances, both (2, *shape of x).

        x is rounded to float32.
        """
        return stochastic.looked_up(x, self.positions, np.array([self.values, self.derivatives]))
