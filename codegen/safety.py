"""Keeps generated code safe: checks the texts of a fit before they enter it, and checks the generated code.

A fit may come from a stranger. Its texts reach a template only through `admitted`, which refuses texts that could
end a docstring, a comment or a line. `checked` then reads the generated text as Python and compares it with the
output of the same template for empty texts: it must have the same statements, and use no name that it neither
defines nor imports.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fitact.base import UsageError, quote

from .dialects import Code

# Printable ASCII without ", \ and #: such a text cannot end a docstring, string or line, or begin a comment.
_ADMITTED = re.compile(r"[ !$-\[\]-~]*")
_ADMITTED_CODE = re.compile(r"[ -\"$-\[\]-~]*")  # the catalog's calls of PyTorch have strings
# None of these binds a name out of sight, or runs anything but calls.
_EXPRESSIONS = (
    ast.Attribute,
    ast.BinOp,
    ast.BoolOp,
    ast.Call,
    ast.Compare,
    ast.Constant,
    ast.Dict,
    ast.List,
    ast.Name,
    ast.Starred,
    ast.Tuple,
    ast.UnaryOp,
)


def admitted(value: Any, what: str = "fit", pattern: re.Pattern[str] = _ADMITTED) -> Any:
    """Return a value for a template, unchanged, if all texts in it are safe in generated code.

    Args:
        value: a text, a number, a truth value, None, printed code, or a mapping or sequence of such.
        what: its name in the error message.
        pattern: the pattern that texts must match.

    Raises:
        UsageError: a text does not match. By default it must be printable ASCII without the characters " # and
            backslash.

    """
    match value:
        case None | bool() | int():
            pass
        case str():
            if not pattern.fullmatch(value):
                raise UsageError(
                    f'{what}: expected printable ASCII without ", # and backslash, got {quote(value)}'
                )
        case Code():
            admitted([*value.steps, value.result], what, _ADMITTED_CODE)
        case Mapping():
            for key, item in value.items():
                admitted(key, what, pattern)
                admitted(item, f"{what}.{key}", pattern)
        case list() | tuple():
            for item in value:
                admitted(item, what, pattern)
        case _:
            raise TypeError(f"{what}: {type(value).__name__} is no type that a template takes")
    return value


def emptied(value: Any) -> Any:
    """Return a value with all printed code in it, also in mappings and sequences, replaced by minimal code."""
    match value:
        case Code():
            return Code((), "x")
        case Mapping():
            return {key: emptied(item) for key, item in value.items()}
        case list():
            return [emptied(item) for item in value]
    return value


def checked(text: str, empty: str, name: str) -> str:
    """Return generated text if it has only its template's statements and uses no foreign name.

    Args:
        text: the generated module.
        empty: the module that the same template makes of empty texts.
        name: the fit's name, for messages.

    Raises:
        UsageError: it is not Python, has another statement, or uses a foreign name.

    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{quote(name)}: its generated module would not be Python: {error}") from None
    if [*_statements(tree)] != [*_statements(ast.parse(empty))]:
        raise UsageError(f"{quote(name)}: its generated module would hold a statement that is not in its template")
    foreign = sorted({*_foreign(tree)})
    if foreign:
        raise UsageError(f"{quote(name)}: its generated module would use undefined names: {', '.join(foreign)}")
    return text


def _statements(node: ast.AST) -> Iterator[str]:
    """Yield the statements within a node, by kind and by the names that they bind, in their order.

    Assignments in functions are left out: they are the steps of formulas, and their number varies.
    """
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt):
            continue
        if isinstance(child, ast.Assign) and isinstance(node, ast.FunctionDef):
            continue
        match child:
            case ast.Import() | ast.ImportFrom():
                yield ast.unparse(child)
            case ast.FunctionDef() | ast.ClassDef():
                yield f"{type(child).__name__} {child.name}: {', '.join(map(ast.unparse, child.decorator_list))}"
            case ast.Assign(targets=targets):
                yield f"Assign {', '.join(map(ast.unparse, targets))}"
            case _:
                yield type(child).__name__
        yield from _statements(child)


def _foreign(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module uses and neither binds nor imports, private attributes, odd expressions."""
    bound: set[str] = {"int"}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                bound |= {(alias.asname or alias.name).partition(".")[0] for alias in names}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) if name not in bound:
                yield name
            case ast.Attribute(attr=name) if name.startswith("_"):
                yield name
            case ast.expr() if not isinstance(node, _EXPRESSIONS):
                yield type(node).__name__
