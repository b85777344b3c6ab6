"""Formulas of two arguments: products a(g)·b(u), taken apart into formulas of one argument.

The syntax tree is walked over products, quotients and signs down to factors. Each must mention g alone, u alone,
or neither; the parser then checks it as a formula of that argument.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import NamedTuple

from fitact.errors import quote

from .atoms import constant
from .catalog import CATALOG
from .parser import MAX_DEPTH, Parser

VARIABLES = ("g", "u")


class Factor(NamedTuple):
    """The part of a product that depends on one argument.

    Attributes:
        name: the activation of the catalog, if the part is a call of it with the argument; else None.
        parameters: the parameters given to that activation, by name.
        expression: a formula in `x`.

    """

    name: str | None
    parameters: dict[str, float]
    expression: str


def is_of_two(text: str) -> bool:
    """Whether a formula mentions one of the two arguments."""
    return re.search(r"\b[gu]\b", text) is not None


class Product(Parser):
    """A product a(g)·b(u), in the notation of `parser.parse`, e.g. `"silu(g)*u"`."""

    def __init__(self, text: str) -> None:
        super().__init__(text, "gate", VARIABLES[0])
        self.variables = VARIABLES
        self.products: dict[str, ast.expr] = {}  # of the factors of each argument, in their order
        self.negative = False

    def factors(self) -> tuple[Factor, Factor]:
        """Take the product apart; constants belong to a.

        Raises:
            UsageError: the text is not such a product; the message gives the reason and the column.

        """
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
                found = _variables(node)
                if len(found) > 1:
                    got = quote(ast.unparse(node))
                    self.refuse(node, f"expected a product a(g)*b(u), got the factor {got}, which mixes g and u")
                self.variable = found.pop() if found else VARIABLES[0]
                value = self.expression(node, depth)
                if divides and value.is_number and constant(value) == 0:
                    self.refuse(node, "division by zero")
                before = self.products.get(self.variable, ast.Constant(1) if divides else None)
                op = ast.Div() if divides else ast.Mult()
                self.products[self.variable] = node if before is None else ast.BinOp(before, op, node)

    def factor(self, variable: str) -> Factor:
        """Return all factors of an argument."""
        product = self.products[variable]
        if self.negative and variable == VARIABLES[0]:
            product = ast.UnaryOp(ast.USub(), product)
        match product:
            case ast.Call(func=ast.Name(id=name), args=[ast.Name(), *numbers]) if name in CATALOG:
                given = [constant(self.expression(number, 0)) for number in numbers]
                parameters = dict(zip(CATALOG[name].parameters, given, strict=False))
                entry = CATALOG[name]
                return Factor(name, parameters, entry.filled(entry.expression, parameters))
        return Factor(None, {}, ast.unparse(Substituted({variable: ast.Name("x")}).visit(product)))


class Substituted(ast.NodeTransformer):
    """Puts expressions in place of names."""

    def __init__(self, by_name: Mapping[str, ast.expr]) -> None:
        self.by_name = by_name

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return what stands in place of a name."""
        return self.by_name.get(node.id, node)


def _variables(node: ast.expr) -> set[str]:
    """Return which arguments a part of a syntax tree mentions."""
    called = {id(part.func) for part in ast.walk(node) if isinstance(part, ast.Call)}
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and id(part) not in called}
    return names & {*VARIABLES}
