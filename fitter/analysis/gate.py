"""A gate: a product of two activations, of two arguments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fitact.errors import UsageError, quote
from fitact.fitter.expr.atoms import x
from fitact.fitter.expr.catalog import GATES
from fitact.fitter.expr.product import VARIABLES, Factor, Product, is_of_two

from .activation import Activation, Formula


@dataclass(frozen=True)
class Gate(Formula):
    """A gate h = a(g)·b(u).

    Attributes:
        name: its name among `GATES`, or None for a user's own product.
        expression: the product's text.

    Raises:
        UsageError: the expression is not a product of a formula in g and one in u; or one of these has a constant
            that float32 cannot hold, or does not vary.

    """

    KIND = "gate"
    ARITY = 2

    def __post_init__(self) -> None:
        _ = self.a, self.b

    @classmethod
    def of(cls, text: str) -> Gate:
        """Return the gate that a name or a product stands for."""
        if text in GATES:
            return cls(text, GATES[text])
        if not is_of_two(text):
            raise UsageError(
                f"unknown gate {quote(text)}: expected one of {', '.join(GATES)}, or a product such as silu(g)*u"
            )
        return cls(None, text)

    @cached_property
    def a(self) -> Activation:
        """The factor of g, with all constants, as an activation of x."""
        return self._activation(0)

    @cached_property
    def b(self) -> Activation:
        """The factor of u as an activation of x."""
        return self._activation(1)

    @cached_property
    def _factors(self) -> tuple[Factor, Factor]:
        return Product(self.expression).factors()

    def _activation(self, which: int) -> Activation:
        factor = self._factors[which]
        if factor.name is not None:
            return Activation.of(factor.name, factor.parameters)
        try:
            return Activation(None, factor.expression)
        except UsageError as error:
            raise UsageError(f"{self}: of its factor of {VARIABLES[which]}, called x: {error}") from None


def is_gate(text: str) -> bool:
    """Whether a text names a gate or is meant as one."""
    return text in GATES or is_of_two(text)


def is_identity(activation: Activation) -> bool:
    """Whether an activation returns its argument."""
    return bool(activation.formula == x)
