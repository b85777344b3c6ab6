"""Formulas as source text, in any dialect: a part that is repeated or too long for a line becomes a step."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial

import sympy

from fitact.base import UsageError
from fitact.fitter.analysis import Activation, bears
from fitact.fitter.expr import Expr, atoms, varies

from .dialects import (
    CALL,
    HALF,
    PRECISE,
    PRODUCT,
    SHORT,
    SHORT_ERROR,
    SUM,
    TORCH,
    UNARY,
    Code,
    Dialect,
    ndtr,
    number,
    private,
    tanh_softplus,
)

MAX_LENGTH = 100  # of an expression in a line of generated code


def render(formula: Expr, dialect: Dialect, variable: str = "x") -> Code:
    """Print a formula in `x` as source text of a dialect, with another name for `x` if one is given.

    A part that is used more than once becomes a step, and so does the longest part of a line that is too long.
    """
    if dialect is not TORCH:
        formula = _for_device(formula)
    unused: set[Expr] = set()
    while True:
        printer = _Printer(dialect, variable)
        named = {node: printer.name(node) for node in _repeated(formula) if node not in unused}
        result, _ = printer.short(formula)
        used = set(re.findall(r"\bu\d+\b", " ".join([result, *(text for _, text in printer.steps)])))
        # a condition is printed as a comparison and a power as a division: their parts may be steps without a use
        more = {node for node, name in named.items() if name not in used}
        if not more:
            break
        unused |= more
    if not varies(formula):
        result = dialect.constant.format(result, variable=variable)
    return Code(tuple(printer.steps), result)


def device(formula: Expr) -> tuple[Code, Code | None]:
    """Return device code for results of float32, and for half precision if there is any that is shorter.

    A formula that mostly cancels has no short forms of functions: their errors would not cancel.
    """
    full, half = (render(formula, dialect) for dialect in (PRECISE, HALF))
    return full, None if half == full or not bears(formula, SHORT, SHORT_ERROR) else half


def in_torch(activation: Activation) -> Code:
    """Return an activation in PyTorch's operators: PyTorch's own function if there is one."""
    if activation.torch is not None:
        return Code((), private(activation.torch))
    return render(activation.formula, TORCH)


def _for_device(formula: Expr) -> Expr:
    """Replace erfc(…/√2) and tanh(softplus(…)) by functions that device code computes in one go."""
    done: dict[Expr, Expr] = {}

    def rewritten(node: Expr) -> Expr:
        if node not in done and not varies(node):
            done[node] = node  # a number, which the fitter computes
        elif node not in done:
            args = [rewritten(arg) for arg in node.args]
            rule = {atoms.erfc: _by_ndtr, atoms.tanh: _of_softplus}.get(node.func)
            done[node] = rule(*args) if rule else node if list(node.args) == args else node.func(*args)
        return done[node]

    return rewritten(formula)


def _by_ndtr(u: Expr) -> Expr:
    """Return erfc(u) by the normal distribution function, if the argument of that has no √2."""
    argument = -sympy.sqrt(2) * u
    return atoms.erfc(u) if argument.has(sympy.sqrt(2)) else 2 * ndtr(argument)


def _of_softplus(u: Expr) -> Expr:
    return tanh_softplus(u.args[0]) if isinstance(u, atoms.softplus) else atoms.tanh(u)


def _costs(node: Expr) -> bool:
    return bool(node.is_Function or node.is_Pow or node.is_Add) and varies(node)


def _repeated(formula: Expr) -> list[Expr]:
    """Return the subformulas that cost something and occur more than once, inner ones first.

    It leaves out those that only occur inside another repeated one.
    """
    inner_first: dict[Expr, None] = {}

    def visit(node: Expr) -> None:
        if node not in inner_first:
            for child in node.args:
                visit(child)
            inner_first[node] = None

    visit(formula)
    count = dict.fromkeys(inner_first, 0) | {formula: 1}  # occurrences in the formula written out
    alone: set[Expr] = set()
    parent: dict[Expr, Expr] = {}
    for node in reversed(inner_first):
        for child in node.args:
            count[child] += count[node]
            if count[node] == 1 or parent.setdefault(child, node) != node:
                alone.add(child)
    return [node for node in inner_first if _costs(node) and count[node] > 1 and node in alone]


class _Printer:
    """One printing: the texts of nodes, and the steps that come first."""

    def __init__(self, dialect: Dialect, variable: str) -> None:
        self.dialect = dialect
        self.variable = variable
        self.steps: list[tuple[str, str]] = []
        self.printed: dict[Expr, tuple[str, int]] = {}  # of nodes that cost something; a step's text is its name
        self.parts: list[Expr] = []  # such nodes in the text that is being made
        self.cuts = False  # whether sums in that text are cut where a line ends

    def text(self, node: Expr, binding: int = SUM) -> str:
        """Return the text of a node, in parentheses if it binds looser than `binding`."""
        text, own = self.node(node)
        return f"({text})" if own < binding else text

    def node(self, node: Expr) -> tuple[str, int]:
        """Return the text of a node, and how strongly it binds."""
        if not _costs(node):
            return self.made(node)
        if node not in self.printed:
            self.printed[node] = self.short(node)
        self.parts.append(node)
        return self.printed[node]

    def step(self, text: str) -> str:
        """Make a text a step, and return its name."""
        name = f"u{len(self.steps)}"
        self.steps.append((name, text))
        return name

    def name(self, node: Expr) -> str:
        """Make a node a step, and return its name."""
        name = self.step(self.text(node))
        self.printed[node] = name, CALL
        return name

    def short(self, node: Expr) -> tuple[str, int]:
        """Return the same made anew, in a line: its longest parts become steps, as many as it takes.

        Where only names are left, the first terms of a sum become a step, as many as fit.
        """
        outer = self.parts, self.cuts
        self.cuts = False
        while True:
            self.parts = []
            made = self.made(node)
            if len(made[0]) <= MAX_LENGTH or self.cuts:
                break
            lengths = {part: len(self.printed[part][0]) for part in self.parts}
            self.cuts = max(lengths.values(), default=0) < len(f"u{len(self.steps)}") + 2
            if not self.cuts:
                self.name(max(lengths, key=lengths.__getitem__))
        self.parts, self.cuts = outer
        return made

    def made(self, node: Expr) -> tuple[str, int]:
        if node.is_Symbol:
            return self.variable if node == atoms.x else node.name, CALL  # any other is a learned parameter
        if not varies(node):
            return number(atoms.constant(node))
        if node.is_Add:
            return self.sum(atoms.terms(node)), SUM
        if node.is_Mul:
            return self.product(node.args)
        if node.is_Pow:
            return self.power(node)
        if isinstance(node, atoms.Where):
            condition, *values = node.args
            texts = [self.comparison(condition, node.func), *map(self.text, values)]
            if not any(map(varies, values)):
                texts[1] = self.dialect.constant.format(texts[1], variable=self.variable)
            return self.dialect.where.format(*texts), CALL
        if node.func not in self.dialect.functions:
            raise UsageError(f"{node.func.__name__} has no generated code")
        return self.dialect.functions[node.func].format(self.text(node.args[0])), CALL

    def sum(self, terms: Sequence[Expr]) -> str:
        first, *others = terms
        result = self.text(first)
        for term in others:
            minus = term.could_extract_minus_sign()
            piece = f" - {self.text(-term, PRODUCT)}" if minus else f" + {self.text(term, PRODUCT)}"
            if self.cuts and len(result) + len(piece) > MAX_LENGTH:
                result = self.step(result)
            result += piece
        return result

    def product(self, factors: Sequence[Expr]) -> tuple[str, int]:
        coefficient = atoms.constant(sympy.Mul(*(f for f in factors if not varies(f))))
        upper, lower = [], []
        for factor in factors:
            if not varies(factor):
                continue
            if _is_divisor(factor):
                lower.append(self.text(1 / factor, UNARY))
            else:
                upper.append(self.text(factor, UNARY))
        if abs(coefficient) != 1 or not upper:
            upper.insert(0, number(abs(coefficient))[0])
        sign = "-" if coefficient < 0 else ""
        if sign and len(upper) == 1 and not lower and "**" in upper[0] and upper[0][-1] != ")":
            upper[0] = f"({upper[0]})"  # as formatters write it
        text = sign + " * ".join(upper) + "".join(f" / {factor}" for factor in lower)
        return text, UNARY if len(upper) + len(lower) == 1 else PRODUCT

    def power(self, node: Expr) -> tuple[str, int]:
        base, exponent = node.base, node.exp
        if _is_divisor(node):
            return f"1.0 / {self.text(1 / node, UNARY)}", PRODUCT
        if exponent == sympy.Rational(1, 2):
            return self.dialect.functions[sympy.sqrt].format(self.text(base)), CALL
        if exponent.is_Integer:
            return self.dialect.power(partial(self.text, base), int(exponent))
        if varies(base):
            return self.node(atoms.exp(exponent * atoms.log(base)))
        return self.node(atoms.exp(math.log(atoms.constant(base)) * exponent))

    def comparison(self, u: Expr, kind: Expr) -> str:
        """Return the text of u > 0 or u >= 0, with a constant term moved to the right and no leading minus."""
        equal = "=" if kind is atoms.WhereAtLeast else ""
        constant, rest = u.as_coeff_Add()
        bound = -atoms.constant(constant)
        if rest.could_extract_minus_sign():
            return f"{self.text(-rest)} <{equal} {number(-bound)[0]}"
        return f"{self.text(rest)} >{equal} {number(bound)[0]}"


def _is_divisor(factor: Expr) -> bool:
    return bool(factor.is_Pow and factor.exp.is_number and atoms.constant(factor.exp) < 0)
