"""The text of a formula: what may stand in it, and which names, before anything is built from it.

It imports no SymPy, so that a command line finds a wrong text at once; `expr.parser` walks the tree.
"""

from __future__ import annotations

import ast
import difflib
import string
import warnings
from collections.abc import Sequence
from typing import NoReturn

from fitact.base import UsageError, quote
from fitact.fitter.catalog import CATALOG

MAX_LENGTH = 2000  # characters
# No quotes, no backslash and no #: a formula can then stand in the docstring of a generated module.
CHARACTERS = frozenset(string.ascii_letters + string.digits + " _.,+-*/()<>=!|&%@~:[]{}")
MAX_DEPTH = 60  # nesting of the syntax tree, far above any activation in the literature
# Constants and functions of the language, in the order of `atoms`, which has what they mean.
NAMES = [
    *("pi", "e", "where", "exp", "expm1", "log", "log1p", "sigmoid", "softplus", "sinh", "cosh", "tanh", "sech2"),
    *("tsech2", "logcosh", "asinh", "sin", "cos", "tan", "atan", "erf", "erfc", "hypot1", "isru", "squareplus"),
    *("softsign", "relu", "abs", "sign", "sqrt", "square", "min", "max", "clamp"),
]


class Syntax:
    """The text of a formula; `what` is how error messages call it."""

    indent = 0  # spaces before it

    def __init__(self, text: str, what: str) -> None:
        self.text = text
        self.what = what

    def tree(self) -> ast.expr:
        """Return the syntax tree of the text; only the characters and the brackets are checked."""
        text = self.text
        if len(text) > MAX_LENGTH:
            raise UsageError(f"{self.what}: {len(text)} characters are too many; at most {MAX_LENGTH} are read")
        depth = 0
        for column, character in enumerate(text, 1):
            if character == "^":
                self.refuse(column, "a power is written **, not ^")
            if character not in CHARACTERS:
                self.refuse(column, f"unexpected character {character!a}; a formula is plain ASCII")
            depth += (character in "([{") - (character in ")]}")
            if depth > MAX_DEPTH:  # Python's own parser could fail
                self.refuse(column, f"brackets are nested deeper than {MAX_DEPTH}")
        if not text.strip():
            raise UsageError(f"{self.what}: it is empty; write a formula in x such as x*sigmoid(x)")
        indent = len(text) - len(text.lstrip())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(text[indent:], mode="eval").body
        except SyntaxError as error:
            self.refuse((error.offset or 1) + indent, f"not a formula ({error.msg})")
        except (ValueError, MemoryError, RecursionError) as error:
            self.refuse(1, f"not a formula ({type(error).__name__}: {error})")
        self.indent = indent
        return tree

    def check_names(self, variables: Sequence[str]) -> None:
        """Raise UsageError if the text is no formula, or has a name that is neither known nor a variable."""
        for node in ast.walk(self.tree()):
            if isinstance(node, ast.Name) and node.id not in (*variables, *NAMES, *CATALOG):
                self.refuse(node, unknown(node.id, variables))

    def refuse(self, where: int | ast.AST, reason: str) -> NoReturn:
        """Raise UsageError at a column or a node."""
        column = where if isinstance(where, int) else getattr(where, "col_offset", 0) + self.indent + 1
        raise UsageError(f"{self.what} {quote(self.text)}, column {column}: {reason}") from None


def unknown(name: str, variables: Sequence[str]) -> str:
    """Return the message about an unknown name."""
    names = [*variables, *NAMES]
    near = difflib.get_close_matches(name.lower(), [*names, *CATALOG], 1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)} and the activations"
    return f"unknown name {quote(name)}; {hint}"
