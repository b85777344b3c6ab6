"""A gate: a product a(g)·b(u) of two activations, of two arguments.

The syntax tree of its text is walked over products, quotients and signs down to factors. Each must mention g
alone, u alone, or neither; the parser then checks it as a formula of that argument.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cached_property

from fitact.base import UsageError, quote
from fitact.fitter.catalog import CATALOG, GATES, is_gate
from fitact.fitter.expr import Parser, constant
from fitact.fitter.syntax import MAX_DEPTH

from .activation import Activation, Formula

VARIABLES = ("g", "u")


@dataclass(frozen=True)
class Gate(Formula):
    """A gate h = a(g)·b(u); its name is one of `GATES`, or None for a user's own product.

    Raises:
        UsageError: the expression is not a product of a formula in g and one in u; or one of these has a constant
            that float32 cannot hold, or does not vary.

    """

    KIND = "gate"

    def __post_init__(self) -> None:
        _ = self._factors

    @classmethod
    def of(cls, text: str) -> Gate:
        """Return the gate that a name or a product means."""
        if text in GATES:
            return cls(text, GATES[text])
        if not is_gate(text):
            raise UsageError(
                f"unknown gate {quote(text)}: expected one of {', '.join(GATES)}, or a product such as silu(g)*u"
            )
        return cls(None, text)

    @property
    def a(self) -> Activation:
        """The factor of g, with all constants, as an activation of x."""
        return self._factors[0]

    @property
    def b(self) -> Activation:
        """The factor of u as an activation of x."""
        return self._factors[1]

    @cached_property
    def _factors(self) -> tuple[Activation, Activation]:
        return _Product(self.expression).factors()


class _Product(Parser):
    """A product a(g)·b(u), in the notation of `parser.parse`, e.g. `"silu(g)*u"`."""

    def __init__(self, text: str) -> None:
        super().__init__(text, "gate", VARIABLES[0])
        self.variables = VARIABLES
        self.products: dict[str, ast.expr] = {}  # of the factors of each argument, in their order
        self.negative = False

    def factors(self) -> tuple[Activation, Activation]:
        """Take the product apart; constants belong to a. Refuse a text that is no such product."""
        self.walk(self.tree(), 0, divides=False)
        for variable in VARIABLES:
            if variable not in self.products or variable not in _variables(self.products[variable]):
                self.refuse(1, f"expected a product a(g)*b(u) with both g and u, got no factor of {variable}")
        a, b = (self.factor(variable) for variable in VARIABLES)
        return a, b

    def walk(self, node: ast.expr, depth: int, *, divides: bool) -> None:
        """Find the factors of a product, and give each to the argument that it mentions."""
        if depth > MAX_DEPTH:
            self.refuse(node, f"nested deeper than {MAX_DEPTH}")
        match node:
            case ast.BinOp(op=ast.Mult() | ast.Div(), left=left, right=right):
                self.walk(left, depth + 1, divides=divides)
                self.walk(right, depth + 1, divides=divides != isinstance(node.op, ast.Div))
            case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
                self.negative ^= isinstance(node.op, ast.USub)
                self.walk(operand, depth + 1, divides=divides)
            case _:
                variables = _variables(node)
                if len(variables) > 1:
                    got = quote(ast.unparse(node))
                    self.refuse(node, f"expected a product a(g)*b(u), got the factor {got}, which mixes g and u")
                self.variable = variables.pop() if variables else VARIABLES[0]
                value = self.expression(node, depth)
                if divides and value.is_number and constant(value) == 0:
                    self.refuse(node, "division by zero")
                before = self.products.get(self.variable, ast.Constant(1) if divides else None)
                op = ast.Div() if divides else ast.Mult()
                self.products[self.variable] = node if before is None else ast.BinOp(before, op, node)

    def factor(self, variable: str) -> Activation:
        """Return all factors of an argument as an activation: that of the catalog if they are one call of it."""
        product = self.products[variable]
        if self.negative and variable == VARIABLES[0]:
            product = ast.UnaryOp(ast.USub(), product)
        match product:
            case ast.Call(func=ast.Name(id=name), args=[ast.Name(), *numbers]) if name in CATALOG:
                given = [constant(self.expression(number, 0)) for number in numbers]
                return Activation.of(name, dict(zip(CATALOG[name].parameters, given, strict=False)))
        try:
            return Activation(None, re.sub(rf"\b{variable}\b", "x", ast.unparse(product)))
        except UsageError as error:
            what = f"gate {quote(self.text)}: of its factor of {variable}, called x"
            raise UsageError(f"{what}: {error}") from None


def _variables(node: ast.expr) -> set[str]:
    """Return which arguments a part of a syntax tree mentions."""
    called = {id(part.func) for part in ast.walk(node) if isinstance(part, ast.Call)}
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and id(part) not in called}
    return names & {*VARIABLES}
