"""The expression language: a formula in `x`, as text, turned into SymPy without running it.

Python's own grammar is parsed into a syntax tree, and the tree is walked against a whitelist: numbers,
`x`, `pi`, `e`, arithmetic, comparisons inside `where`, and the functions of `atoms.FUNCTIONS`. Nothing
is ever handed to `eval`, `exec` or `sympify`, so text from a stranger is safe to read; whatever could take
long (towers of powers, deep nesting, huge numbers) is refused before any work is done on it.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import sympy
from sympy.core.parameters import distribute
from sympy.printing.str import StrPrinter

from fitact.base import UsageError, quote
from fitact.fitter.catalog import CATALOG
from fitact.fitter.syntax import MAX_DEPTH, Syntax, unknown

from .atoms import CONSTANTS, FUNCTIONS, Expr, Where, WhereAtLeast, constant, depth, exp, log, raised, sizes, x
from .exact import value

MAX_NODES = 1000  # of the formula written out: gelu, silu, min and max are short for formulas that repeat theirs
MAX_PARTS = 5000  # of f″ written out, the bound on the work that a formula takes; the literature's longest has 600
MAX_NESTED = 30  # of SymPy's tree: its functions call themselves
MAX_NUMBER = 1e300  # beyond it float64 arithmetic on the constant itself may overflow
MIN_NUMBER = 1e-300  # and below it underflow
MAX_DENOMINATOR = 10**6  # of a fraction that is written as one
MAX_BITS = 1024  # of an exact power of a number
MAX_EXPONENT = 1000  # in size
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
# Comparison → the conditional, and whether the left side has to be the larger one.
_COMPARISONS: dict[type[ast.cmpop], tuple[Any, bool]] = {
    ast.Gt: (Where, True),
    ast.Lt: (Where, False),
    ast.GtE: (WhereAtLeast, True),
    ast.LtE: (WhereAtLeast, False),
}


def parse(text: str, *, what: str = "expression", variable: str = "x", learned: Sequence[str] = ()) -> Expr:
    """Return a formula in Python's notation, e.g. `"x*sigmoid(1.702*x)"`, as a SymPy expression in the symbol `x`.

    `variable` is what the text calls `x`, and `what` how messages call the text. The names of learned parameters
    become symbols. If the text is not a formula of this language, a UsageError gives the reason and the column.
    """
    if not isinstance(text, str):
        raise UsageError(f"{what}: expected text, got {quote(text)}")
    return _parsed(text, what, variable, tuple(learned))


@lru_cache(maxsize=256)
def _parsed(text: str, what: str, variable: str, learned: tuple[str, ...]) -> Expr:
    return Parser(text, what, variable, learned).parse()


def text_of(expr: Expr, variable: str = "x") -> str:
    """Return a formula as text that `parse` reads, numbers that are no short fractions rounded to float64."""
    long = [number for number in expr.atoms(sympy.Rational) if number.q > MAX_DENOMINATOR]
    numbers = {number: sympy.sign(number) * sympy.Symbol(repr(abs(constant(number)))) for number in long}
    with distribute(False):
        return str(_Text().doprint(expr.xreplace({x: sympy.Symbol(variable), **numbers})))


class _Text(StrPrinter):
    """SymPy's own notation, which is Python's, with the names of the language."""

    def _print_Where(self, node: Expr) -> str:
        u, a, b = node.args
        comparison = ">" if node.func is Where else ">="
        bound, rest = u.as_coeff_Add()
        if rest.could_extract_minus_sign():
            bound, rest, comparison = -bound, -rest, comparison.replace(">", "<")
        return f"where({self._print(rest)} {comparison} {self._print(-bound)}, {self._print(a)}, {self._print(b)})"

    _print_WhereAtLeast = _print_Where


class Parser(Syntax):
    """One walk over one syntax tree; methods return SymPy expressions or refuse."""

    def __init__(self, text: str, what: str, variable: str, learned: Sequence[str] = ()) -> None:
        super().__init__(text, what)
        self.variable = variable  # what `expression` takes for x
        self.learned = frozenset(learned)
        self.variables: tuple[str, ...] = (variable, *learned)  # what messages name

    def parse(self) -> Expr:
        """Return the formula."""
        with distribute(False):  # a*(x - b) multiplied out would lose what the sum cancels
            parsed = self.expression(self.tree(), 0)
        # a sign loses nothing
        signs = [m for m in parsed.atoms(sympy.Mul) if len(m.args) == 2 and m.args[0] == -1 and m.args[1].is_Add]
        parsed = parsed.xreplace({m: sympy.Mul(*m.args) for m in signs})
        if max(sizes(parsed)) > MAX_PARTS:
            raise UsageError(
                f"{self.what}: too long: its derivatives, written out, would have more than {MAX_PARTS} parts"
            )
        if depth(parsed) > MAX_NESTED:
            raise UsageError(f"{self.what}: its functions are nested deeper than {MAX_NESTED}")
        return parsed

    def expression(self, node: ast.AST, depth: int) -> Expr:
        """Return the formula of a node."""
        if depth > MAX_DEPTH:
            self.refuse(node, f"nested deeper than {MAX_DEPTH}")
        depth += 1
        match node:
            case ast.Constant(value=bool() | complex() | str() | bytes() | None):
                self.refuse(node, f"expected a number, got {quote(node.value)}")
            case ast.Constant(value=int() | float()):
                return self.number(node)
            case ast.Name(id=self.variable):
                return x
            case ast.Name(id=name) if name in self.learned:
                return sympy.Symbol(name)
            case ast.Name(id=name) if name in CONSTANTS:
                return CONSTANTS[name]
            case ast.Name(id=name):
                called = name in FUNCTIONS or name in CATALOG or name == "where"
                hint = f"{name} is a function: write {name}(...)" if called else unknown(name, self.variables)
                self.refuse(node, hint)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.expression(operand, depth)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self.checked(node, -self.expression(operand, depth))
            case ast.BinOp(op=op, left=left, right=right):
                return self.binary(node, op, self.expression(left, depth), self.expression(right, depth))
            case ast.Call():
                return self.call(node, depth)
            case ast.Compare() | ast.IfExp():
                self.refuse(node, "a comparison belongs in where(condition, a, b)")
            case _:
                kind = type(node).__name__
                self.refuse(node, f"{kind} is not part of the language: use numbers, x, + - * / ** and calls")

    def number(self, node: ast.Constant) -> Expr:
        """Return a number, exactly as it is written."""
        if node.value > MAX_NUMBER:  # type: ignore[operator]
            self.refuse(node, f"the number is out of range: at most {MAX_NUMBER:g} in size")
        # repr is the shortest decimal that names this float: 0.1 becomes 1/10, as its writer meant
        return sympy.Rational(repr(node.value))

    def checked(self, node: ast.AST, expr: Expr) -> Expr:
        """Refuse what would hang or overflow later, before anything is built on it.

        That is a formula of too many parts, a constant that is not a real number of moderate size, and a
        coefficient that SymPy has multiplied out and float64 does not hold.
        """
        if sizes(expr)[0] > MAX_NODES:
            self.refuse(node, f"too long: written out, it has more than {MAX_NODES} parts")
        if expr.is_number:
            number = value(expr, 0)
            if not number.is_finite() or abs(number) > MAX_NUMBER:
                self.refuse(node, f"the constant {quote(str(expr))} is not a real number below {MAX_NUMBER:g}")
            if number == 0:  # as sin(pi) and erfc(1e9) are; dividing by it is refused
                return sympy.Integer(0)
            if abs(number) < MIN_NUMBER:
                self.refuse(node, f"the constant {quote(str(expr))} is too small: at least {MIN_NUMBER:g} in size")
        else:
            for term in sympy.Add.make_args(expr):
                factor = term.as_coeff_Mul()[0]
                size = abs(constant(factor)) if factor.is_Rational else math.inf
                if size > MAX_NUMBER or size < MIN_NUMBER:
                    self.refuse(node, f"a coefficient is out of range: {MIN_NUMBER:g} to {MAX_NUMBER:g} in size")
        return expr

    def binary(self, node: ast.AST, op: ast.operator, left: Expr, right: Expr) -> Expr:
        """Return the result of an operator."""
        if isinstance(op, ast.Pow):
            return self.power(node, left, right)
        if type(op) not in _OPERATORS:
            name = type(op).__name__
            self.refuse(node, f"the operator {name} is not part of the language: use + - * / **")
        if isinstance(op, ast.Div) and right.is_number and constant(right) == 0:
            self.refuse(node, "division by zero")
        return self.checked(node, _OPERATORS[type(op)](left, right))

    def power(self, node: ast.AST, base: Expr, exponent: Expr) -> Expr:
        """Return a power whose base or exponent is a number."""
        if not exponent.is_number:
            if base.is_number and constant(base) <= 0:
                self.refuse(node, "a power with x in its exponent needs a positive base")
            return self.checked(node, exp(exponent) if base == CONSTANTS["e"] else exp(exponent * log(base)))
        size = constant(exponent)
        if base.is_number:
            try:
                result = math.pow(constant(base), size)
            except (OverflowError, ValueError):
                result = math.inf
            if not math.isfinite(result) or abs(result) > MAX_NUMBER:
                self.refuse(node, "this power of numbers is out of range")
        elif abs(size) > MAX_EXPONENT:
            self.refuse(node, f"the exponent {size:g} is out of range: at most {MAX_EXPONENT} in size")
        number = base.as_coeff_Mul()[0]  # whose power SymPy multiplies out, exactly
        if max(abs(number.p), number.q).bit_length() * abs(size) > MAX_BITS:
            self.refuse(node, "this power of numbers is out of range")
        if base == CONSTANTS["e"]:
            return self.checked(node, exp(exponent))
        return self.checked(node, raised(base, exponent))

    def call(self, node: ast.Call, depth: int) -> Expr:
        """Return a function's value."""
        if not isinstance(node.func, ast.Name):
            self.refuse(node, "only the functions of the language can be called, by name")
        name = node.func.id
        if node.keywords or any(isinstance(arg, ast.Starred) for arg in node.args):
            self.refuse(node, f"{name} takes plain arguments only")
        if name == "where":
            return self.where(node, depth)
        if name in self.variables:
            self.refuse(node, f"{name} is an argument, not a function")
        if name not in FUNCTIONS and name not in CATALOG:
            self.refuse(node, unknown(name, self.variables))
        least = FUNCTIONS[name][0] if name in FUNCTIONS else 1
        most = least if name in FUNCTIONS else 1 + len(CATALOG[name].parameters)
        if not least <= len(node.args) <= most:
            count = f"{least} argument{'s'[: least > 1]}" if least == most else f"{least} to {most} arguments"
            self.refuse(node, f"{name} takes {count}, got {len(node.args)}")
        args = [self.expression(arg, depth) for arg in node.args]
        if name in FUNCTIONS:
            return self.checked(node, FUNCTIONS[name][1](*args))
        return self.checked(node, self.activation(node, name, *args))

    def activation(self, node: ast.Call, name: str, u: Expr, *parameters: Expr) -> Expr:
        """Return an activation of the catalog at u, its parameters in PyTorch's order."""
        entry = CATALOG[name]
        values = {}
        for key, number, at in zip(entry.parameters, parameters, node.args[1:], strict=False):
            if not number.is_number:
                self.refuse(at, f"{key} of {name} is a number, without {' or '.join(self.variables)}")
            values[key] = constant(number)
        return parse(entry.filled(entry.expression, values), what=name).xreplace({x: u})

    def where(self, node: ast.Call, depth: int) -> Expr:
        """Return a conditional."""
        if len(node.args) != 3 or not isinstance(node.args[0], ast.Compare):
            self.refuse(node, "where takes a comparison and two values: where(x > 0, a, b)")
        test = node.args[0]
        a, b = (self.expression(arg, depth) for arg in node.args[1:])
        if len(test.ops) != 1:
            self.refuse(test, "a condition is one comparison: where(x > 0, a, b)")
        left = self.expression(test.left, depth)
        right = self.expression(test.comparators[0], depth)
        if type(test.ops[0]) not in _COMPARISONS:
            self.refuse(test, "a condition compares with <, <=, > or >=")
        kind, larger = _COMPARISONS[type(test.ops[0])]
        return self.checked(node, kind(left - right if larger else right - left, a, b))
