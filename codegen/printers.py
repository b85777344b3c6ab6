"""Formulas as source text: one printer, two dialects, Triton device code and PyTorch."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from fitact.errors import UsageError
from fitact.fitter import expression as language
from fitact.fitter.forms import FLAT, Form, Printed, Root

Expr = Any

MAX_LENGTH = 100  # of an expression in a line of generated code

# Binding strength of a printed text, loosest first.
_SUM, _PRODUCT, _UNARY, _CALL = range(4)


@dataclass(frozen=True)
class Code:
    """A formula printed.

    Attributes:
        steps: assignments to make first, as (name, text), for what the formula uses more than once.
        result: the value's text.
        names: the functions of `runtime.functions` that the texts call.

    """

    steps: tuple[tuple[str, str], ...]
    result: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Dialect:
    """How a target writes functions and powers.

    Attributes:
        functions: SymPy class → the text of a call, with {0} for the argument.
        where: the conditional, with {0}, {1}, {2} for condition and values.
        constant: a number as a tensor like {variable}, for a constant and for a conditional between two numbers.
        clamp: {0} clamped to {1} and {2}, NaN kept.
        power: an integer power of a formula, and how strongly the result binds.

    """

    functions: dict[Any, str]
    where: str
    constant: str
    clamp: str
    power: Callable[[_Printer, Expr, int], tuple[str, int]]


# Atoms that are functions of `runtime.functions`, under the same names.
_DEVICE_ATOMS = (
    language.asinh,
    language.atan,
    language.cosh,
    language.erfc,
    language.expm1,
    language.hypot1,
    language.isru,
    language.log1p,
    language.logcosh,
    language.relu,
    language.sech2,
    language.sign,
    language.sinh,
    language.softplus,
    language.softsign,
    language.squareplus,
    language.tan,
    language.tanh,
    language.tsech2,
)


# What the language of formulas has no name for, and device code computes in one go.
_ndtr = sympy.Function("ndtr")  # erfc(−u/√2)/2
_tanh_softplus = sympy.Function("tanh_softplus")

# Functions that device code has in a shorter form, accurate enough for results of half precision.
SHORT = {name: f"{name}_half" for name in ("ndtr", "sigmoid", "softplus", "tanh_softplus")}
SHORT["exp_full"] = "tl.exp"
DEVICE_FUNCTIONS = (
    "power",
    "ndtr",
    "sigmoid",
    "tanh_softplus",
    "exp_full",
    *(name for name in SHORT.values() if "." not in name),
    *(atom.__name__ for atom in _DEVICE_ATOMS),
)

TRITON = Dialect(
    functions={
        language.exp: "tl.exp({0})",
        language.log: "tl.log({0})",
        language.erf: "tl.erf({0})",
        language.sin: "tl.sin({0})",
        language.cos: "tl.cos({0})",
        sympy.sqrt: "tl.sqrt({0})",
        language.sigmoid: "sigmoid({0})",
        _ndtr: "ndtr({0})",
        _tanh_softplus: "tanh_softplus({0})",
        language.absolute: "tl.abs({0})",
        **{atom: f"{atom.__name__}({{0}})" for atom in _DEVICE_ATOMS},
    },
    where="tl.where({0}, {1}, {2})",
    constant="{0}",
    clamp="tl.clamp({0}, {1}, {2}, propagate_nan=tl.PropagateNan.ALL)",
    power=lambda printer, base, n: (printer.call("power({0}, {1})", printer.text(base), str(n)), _CALL),
)


def _stars(printer: _Printer, base: Expr, n: int) -> tuple[str, int]:
    text = printer.text(base, _CALL)
    return f"{text}**{n}" if text.isidentifier() else f"{text} ** {n}", _UNARY


TORCH = Dialect(
    functions={
        sympy.sqrt: "torch.sqrt({0})",
        language.absolute: "torch.abs({0})",
        # PyTorch's softplus is the identity from a threshold on, by default 20: too early for float64
        language.softplus: "F.softplus({0}, threshold=50.0)",
        language.relu: "F.relu({0})",
        language.softsign: "F.softsign({0})",
        **{
            atom: f"torch.{atom.__name__}({{0}})"
            for atom in (
                language.asinh,
                language.atan,
                language.cos,
                language.cosh,
                language.erf,
                language.erfc,
                language.exp,
                language.expm1,
                language.log,
                language.log1p,
                language.sigmoid,
                language.sign,
                language.sin,
                language.sinh,
                language.tan,
                language.tanh,
            )
        },
        **{
            atom: f"composed.{atom.__name__}({{0}})"
            for atom in (
                language.hypot1,
                language.isru,
                language.logcosh,
                language.sech2,
                language.squareplus,
                language.tsech2,
            )
        },
    },
    where="torch.where({0}, {1}, {2})",
    constant="torch.full_like({variable}, {0})",  # where of two numbers would have the default dtype
    clamp="torch.clamp({0}, {1}, {2})",
    power=_stars,
)


def render(formula: Expr, dialect: Dialect, variable: str = "x") -> Code:
    """Print a formula in `x` as source text of a dialect, with another name for `x` if one is given.

    What is used more than once becomes a step, and of what would make a line too long the longest part.
    """
    printer = _Printer(dialect, variable)
    steps: list[tuple[str, str]] = []
    if dialect is TRITON:
        formula = formula.replace(language.erfc, _by_ndtr).replace(language.tanh, _of_softplus)

    def name(node: Expr) -> None:
        steps.append((f"u{len(steps)}", printer.text(node)))
        printer.known[node] = steps[-1][0]

    for node in [*_repeated(formula), formula]:
        while len(printer.text(node)) > MAX_LENGTH:
            texts = {part: printer.text(part) for part in sympy.preorder_traversal(node) if _costs(part)}
            parts = [
                part for part, text in texts.items() if part != node and 1 < len(text) - len("u0") <= MAX_LENGTH
            ]
            if not parts:
                break
            name(max(parts, key=lambda part: len(texts[part])))
        if node is not formula:
            name(node)
    result = printer.text(formula)
    if not formula.free_symbols:
        result = dialect.constant.format(result, variable=variable)
    return Code(tuple(steps), result, tuple(sorted(printer.names)))


def precise(code: Code) -> Code:
    """Return device code for results of float32, where Triton's exponential is not accurate."""
    steps = tuple((step, text.replace("tl.exp(", "exp_full(")) for step, text in code.steps)
    result = code.result.replace("tl.exp(", "exp_full(")
    if (steps, result) == (code.steps, code.result):
        return code
    return Code(steps, result, tuple(sorted([*code.names, "exp_full"])))


def short(code: Code) -> Code | None:
    """Return device code for results of half precision, None if there is none that is shorter."""
    found = {name: SHORT[name] for name in code.names if name in SHORT}
    if not found:
        return None
    steps = tuple((step, _renamed(text, found)) for step, text in code.steps)
    names = tuple(sorted(name for name in (found.get(name, name) for name in code.names) if "." not in name))
    return Code(steps, _renamed(code.result, found), names)


def _by_ndtr(u: Expr) -> Expr:
    """Return erfc of u by the normal distribution function, where its argument is that of a rational formula."""
    argument = -sympy.sqrt(2) * u
    return language.erfc(u) if argument.has(sympy.sqrt(2)) else 2 * _ndtr(argument)


def _of_softplus(u: Expr) -> Expr:
    return _tanh_softplus(u.args[0]) if isinstance(u, language.softplus) else language.tanh(u)


def _costs(node: Expr) -> bool:
    return bool(node.free_symbols) and bool(node.is_Function or node.is_Pow or node.is_Add)


def choice(forms: Sequence[Form], dialect: Dialect, size: int) -> Code:
    """Print what an inverted fit makes of `y` and `code`: t of its quotients, or f′ by the paper's forms.

    Args:
        forms: of the codes, all of one sort.
        dialect: the target.
        size: how many codes there may be; device code has other bits above those of a code.

    """
    steps: list[tuple[str, str]] = []
    names: set[str] = set()
    results: list[str] = []
    for i, form in enumerate(forms):
        if isinstance(form, Printed):
            code = render(form.shape, dialect, "v")
            own = {name: f"{name}_{i}" for name, _ in code.steps}
            steps += [(own[name], _renamed(text, own)) for name, text in code.steps]
            steps.append((f"q{i}", _renamed(code.result, own)))
            names |= set(code.names)
            results.append(f"q{i}")
        elif len(form.numerator) + len(form.denominator) == 2:  # the same whatever t is
            results.append(results[-1] if results else "")
        else:
            results.append(_variable(form.roots, dialect))
    first = next((result for result in results if result), "y")
    runs = [(result, len(list(group))) for result, group in itertools.groupby(r or first for r in results)]
    chosen, start = runs[-1][0], sum(count for _, count in runs[:-1])
    for result, count in reversed(runs[:-1]):
        chosen = dialect.where.format(f"code < {start}", result, chosen)
        start -= count
    if len(runs) > 1 and dialect is TRITON:
        steps.insert(0, ("code", f"code & {size - 1}"))
    if isinstance(forms[0], Printed):
        at, sigmoid = forms[0].anchor, forms[0].approximates == "sigmoid"
        steps = [("y", dialect.clamp.format("y", number(at)[0], FLAT)), ("v", _away("y", at)), *steps]
        chosen = _times_slope(chosen, steps) if sigmoid else chosen
    names |= {"root"} if dialect is TRITON and "root(" in chosen else set()
    return Code(tuple(steps), chosen, tuple(sorted(names)))


def _times_slope(sigmoid: str, steps: list[tuple[str, str]]) -> str:
    """Return f′ of SiLU, of which the sigmoid is known; the sigmoid becomes a step."""
    steps.append(("q", sigmoid))
    return "q * (1.0 - y) + y"


def _renamed(text: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        text = re.sub(rf"\b{old}\b", new, text)
    return text


def _variable(roots: Sequence[Root], dialect: Dialect) -> str:
    text = ""
    for root in roots:
        sign = "-" if root.sign < 0 else "+"
        text += f" {sign} {_root(root, dialect)}" if text else f"{sign.strip('+')}{_root(root, dialect)}"
    return text


def _away(text: str, anchor: float) -> str:
    return f"{text} {'-' if anchor > 0 else '+'} {abs(anchor)!r}" if anchor else text


def _root(root: Root, dialect: Dialect) -> str:
    away = _away("y", root.anchor)
    if root.order == 1 and root.side == 0:
        return away if away == "y" else f"({away})"
    return f"{'' if dialect is TRITON else 'composed.'}root({away}, order={root.order}, side={root.side})"


def _repeated(formula: Expr) -> list[Expr]:
    """Return the subformulas that cost something and occur more than once, inner ones first.

    One that only occurs inside another repeated one is left where it is.
    """
    count: dict[Expr, int] = {}
    parents: dict[Expr, set[Expr]] = {}
    todo = [formula]
    for node in todo:  # grows while it is walked: every occurrence of every node, once
        for child in node.args:
            count[child] = count.get(child, 0) + 1
            parents.setdefault(child, set()).add(node)
            todo.append(child)
    found = []
    for node in sympy.postorder_traversal(formula):
        alone = len(parents.get(node, ())) > 1 or any(count.get(p, 1) == 1 for p in parents.get(node, ()))
        if _costs(node) and count.get(node, 0) > 1 and alone and node not in found:
            found.append(node)
    return found


class _Printer:
    def __init__(self, dialect: Dialect, variable: str) -> None:
        self.dialect = dialect
        self.variable = variable
        self.names: set[str] = set()
        self.known: dict[Expr, str] = {}  # subformulas that have a name already

    def text(self, node: Expr, binding: int = _SUM) -> str:
        """Return the text of a node, in parentheses if it binds looser than `binding`."""
        text, own = self.node(node)
        return f"({text})" if own < binding else text

    def node(self, node: Expr) -> tuple[str, int]:
        if node in self.known:
            return self.known[node], _CALL
        if node.is_Symbol:
            return self.variable, _CALL
        if not node.free_symbols:
            return number(language.constant(node))
        if node.is_Add:
            return self.sum(node), _SUM
        if node.is_Mul:
            return self.product(node)
        if node.is_Pow:
            return self.power(node)
        if isinstance(node, language.Where):
            condition, *values = node.args
            texts = [self.comparison(condition, node.func), *map(self.text, values)]
            if not any(value.free_symbols for value in values):
                texts[1] = self.dialect.constant.format(texts[1], variable=self.variable)
            return self.call(self.dialect.where, *texts), _CALL
        if node.func not in self.dialect.functions:
            raise UsageError(f"{node.func.__name__} has no generated code")
        return self.call(self.dialect.functions[node.func], self.text(node.args[0])), _CALL

    def call(self, template: str, *texts: str) -> str:
        name = template.partition("(")[0]
        if "." not in name and "{" not in name:
            self.names.add(name)
        return template.format(*texts)

    def sum(self, node: Expr) -> str:
        result = ""
        for term in sorted(sympy.Add.make_args(node), key=_place):
            if not result:
                result = self.text(term)
            elif term.could_extract_minus_sign():
                result += f" - {self.text(-term, _PRODUCT)}"
            else:
                result += f" + {self.text(term, _PRODUCT)}"
        return result

    def product(self, node: Expr) -> tuple[str, int]:
        factors = sympy.Mul.make_args(node)
        coefficient = language.constant(sympy.Mul(*(f for f in factors if not f.free_symbols)))
        upper, lower = [], []
        for factor in factors:
            if not factor.free_symbols:
                continue
            if factor.is_Pow and factor.exp.is_number and language.constant(factor.exp) < 0:
                lower.append(self.text(1 / factor, _UNARY))
            else:
                upper.append(self.text(factor, _UNARY))
        if abs(coefficient) != 1 or not upper:
            upper.insert(0, number(abs(coefficient))[0])
        sign = "-" if coefficient < 0 else ""
        if sign and len(upper) == 1 and not lower and "**" in upper[0] and upper[0][-1] != ")":
            upper[0] = f"({upper[0]})"  # as formatters write it
        text = sign + " * ".join(upper) + "".join(f" / {factor}" for factor in lower)
        return text, _UNARY if len(upper) + len(lower) == 1 else _PRODUCT

    def power(self, node: Expr) -> tuple[str, int]:
        base, exponent = node.base, node.exp
        if exponent.is_number and language.constant(exponent) < 0:
            return f"1.0 / {self.text(1 / node, _UNARY)}", _PRODUCT
        if exponent == sympy.Rational(1, 2):
            return self.call(self.dialect.functions[sympy.sqrt], self.text(base)), _CALL
        if exponent.is_Integer:
            return self.dialect.power(self, base, int(exponent))
        if base.free_symbols:
            return self.node(language.exp(exponent * language.log(base)))
        return self.node(language.exp(math.log(language.constant(base)) * exponent))

    def comparison(self, u: Expr, kind: Expr) -> str:
        """Return the text of u > 0 or u >= 0, with a constant term moved to the right and no leading minus."""
        equal = "=" if kind is language.WhereAtLeast else ""
        constant, rest = u.as_coeff_Add()
        bound = -language.constant(constant)
        if rest.could_extract_minus_sign():
            return f"{self.text(-rest)} <{equal} {number(-bound)[0]}"
        return f"{self.text(rest)} >{equal} {number(bound)[0]}"


def _place(term: Expr) -> tuple[bool, bool]:
    """Sort key of a term: first those that need no leading minus, of each kind constants last."""
    return term.could_extract_minus_sign(), not term.free_symbols


def number(value: float) -> tuple[str, int]:
    """Return the shortest text of a float."""
    return repr(value + 0.0), _UNARY if value < 0 else _CALL
