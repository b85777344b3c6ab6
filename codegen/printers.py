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
        for node in _repeated(formula):
            if node not in unused:
                printer.shorten(node)
                printer.name(node)
        printer.shorten(formula)
        result = printer.text(formula)
        texts = " ".join([result, *(text for _, text in printer.steps)])
        names = set(re.findall(r"\bu\d+\b", texts))
        # a condition is printed as a comparison and a power as a division: their parts may be steps without a use
        more = {node for node, name in printer.known.items() if name not in names}
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
    """One printing: the texts of nodes, and the steps that come first.

    A text is made once, and again when a part of it gets a name.
    """

    def __init__(self, dialect: Dialect, variable: str) -> None:
        self.dialect = dialect
        self.variable = variable
        self.steps: list[tuple[str, str]] = []
        self.known: dict[Expr, str] = {}  # subformulas that have a name already
        self.parts: dict[Expr, list[Expr]] = {}  # the parts of a sum or product, after some became a step
        self.printed: dict[Expr, tuple[str, int]] = {}
        self.above: dict[Expr, set[Expr]] = {}  # node → nodes whose texts contain its text
        self.below: dict[Expr, list[Expr]] = {}  # node → nodes whose texts its text contains, in order
        self.open: list[Expr] = []  # the nodes that are being printed

    def text(self, node: Expr, binding: int = SUM) -> str:
        """Return the text of a node, in parentheses if it binds looser than `binding`."""
        text, own = self.node(node)
        return f"({text})" if own < binding else text

    def node(self, node: Expr) -> tuple[str, int]:
        """Return the text of a node, and how strongly it binds."""
        if self.open:
            self.above.setdefault(node, set()).add(self.open[-1])
            self.below[self.open[-1]].append(node)
        if node in self.known:
            return self.known[node], CALL
        if node not in self.printed:
            self.below[node] = []
            self.open.append(node)
            self.printed[node] = self.made(node)
            self.open.pop()
        return self.printed[node]

    def name(self, node: Expr) -> None:
        """Make a node a step."""
        name = f"u{len(self.steps)}"
        self.steps.append((name, self.text(node)))
        self.known[node] = name
        self.forget(node)

    def forget(self, node: Expr) -> None:
        """Forget the texts that contain the text of a node."""
        for parent in self.above.pop(node, ()):
            if self.printed.pop(parent, None):
                self.forget(parent)

    def shorten(self, node: Expr) -> None:
        """Make steps of parts of a node until its text fits into a line, or nothing can make it shorter.

        In the innermost part that is too long, the longest part that fits becomes a step. In a sum or product of
        names, as many as fit become a step. Each step makes the text shorter, so this ends.
        """
        whole: set[Expr] = set()
        while len(self.text(node)) > MAX_LENGTH:
            at = node
            while long := [n for n in self.inside(at) if self.length(n) > MAX_LENGTH and n not in whole]:
                at = long[0]
            least = len(f"u{len(self.steps)}") + 2
            fitting = [n for n in self.inside(at) if _costs(n) and least <= self.length(n) <= MAX_LENGTH]
            if fitting:
                self.name(max(fitting, key=self.length))
            elif not self.cut(at):
                if at == node:
                    return
                whole.add(at)

    def inside(self, node: Expr) -> list[Expr]:
        """Return the nodes without a name whose texts the text of a node contains, outer ones first."""
        parts: dict[Expr, None] = {}
        todo = self.below[node][::-1]
        while todo:
            part = todo.pop()
            if part not in parts and part not in self.known:
                parts[part] = None
                todo += self.below[part][::-1]
        return list(parts)

    def length(self, node: Expr) -> int:
        return len(self.text(node))

    def cut(self, node: Expr) -> bool:
        """Make a step of the first parts of a sum or a product, as many as fit; return False if there are none."""
        if not (node.is_Add or node.is_Mul):
            return False
        parts = self.parts_of(node)
        if node.is_Add:
            kinds = [(1, parts)]
        else:  # numerators, or denominators
            moving = [part for part in parts if varies(part)]
            kinds = [
                (sign, [factor for factor in moving if _is_divisor(factor) == (sign < 0)]) for sign in (1, -1)
            ]
        for power, chosen in kinds:
            for count in range(len(chosen) - 1, 1, -1):
                first = [part**power for part in chosen[:count]]
                text = self.sum(first) if node.is_Add else self.product(first)[0]
                if len(text) <= MAX_LENGTH:
                    step = sympy.Dummy()
                    self.known[step] = f"u{len(self.steps)}"
                    self.steps.append((self.known[step], text))
                    self.parts[node] = [step**power, *(part for part in parts if part not in chosen[:count])]
                    del self.printed[node]
                    self.forget(node)
                    return True
        return False

    def parts_of(self, node: Expr) -> list[Expr]:
        """Return the terms of a sum or the factors of a product, in the order of their texts."""
        if node in self.parts or not node.is_Add:
            return self.parts.get(node, list(node.args))
        return list(atoms.terms(node))

    def made(self, node: Expr) -> tuple[str, int]:
        if node.is_Symbol:
            return self.variable if node == atoms.x else node.name, CALL  # any other is a learned parameter
        if not varies(node):
            return number(atoms.constant(node))
        if node.is_Add:
            return self.sum(self.parts_of(node)), SUM
        if node.is_Mul:
            return self.product(self.parts_of(node))
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
        result = ""
        for term in terms:
            if not result:
                result = self.text(term)
            elif term.could_extract_minus_sign():
                result += f" - {self.text(-term, PRODUCT)}"
            else:
                result += f" + {self.text(term, PRODUCT)}"
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
