"""The targets of generated code: how Triton device code and PyTorch write functions and powers.

The texts call `_rt` and `_tiles`, the runtime as generated modules see it, `_tl`, `_torch` and `_F`: no fit can
have these names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import sympy

from fitact.fitter.expr import atoms

# Binding strength of a printed text, loosest first.
SUM, PRODUCT, UNARY, CALL = range(4)


@dataclass(frozen=True)
class Code:
    """A formula printed.

    Attributes:
        steps: assignments to make first, as (name, text), of parts that the formula uses more than once.
        result: the value's text.

    """

    steps: tuple[tuple[str, str], ...]
    result: str


@dataclass(frozen=True)
class Dialect:
    """How a target writes functions and powers.

    Attributes:
        functions: SymPy class → the text of a call, with {0} for the argument.
        where: the conditional, with {0}, {1}, {2} for condition and values.
        constant: a number as a tensor like {variable}, for a constant and for a conditional between two numbers.
        clamp: {0} clamped to {1} and {2}, NaN kept.
        power: a function that prints the base so that it binds as strongly as asked, and an integer → the text of
            the power, and how strongly that binds.

    """

    functions: dict[Any, str]
    where: str
    constant: str
    clamp: str
    power: Callable[[Callable[[int], str], int], tuple[str, int]]


# Functions that device code computes in one go, and that the language of formulas lacks.
ndtr = sympy.Function("ndtr")  # erfc(−u/√2)/2
tanh_softplus = sympy.Function("tanh_softplus")

TRITON = Dialect(
    functions={
        **{atom: f"{atom.triton}({{0}})" for atom in atoms.ATOMS},
        **{function: f"_tiles.{function.__name__}({{0}})" for function in (ndtr, tanh_softplus)},
        sympy.sqrt: "_tl.sqrt({0})",
    },
    where="_tl.where({0}, {1}, {2})",
    constant="{0}",
    clamp="_tl.clamp({0}, {1}, {2}, propagate_nan=_tl.PropagateNan.ALL)",
    power=lambda base, n: (f"_tiles.power({base(SUM)}, {n})", CALL),
)
# For results of float32, where Triton's exponential is not accurate.
PRECISE = replace(TRITON, functions=TRITON.functions | {atoms.exp: "_tiles.exp_full({0})"})
# For results of half precision: some functions have a shorter form there.
_SHORT = ("exp", "expm1", "sech2", "sigmoid", "softplus", "tanh")
HALF = replace(
    TRITON,
    functions=TRITON.functions
    | {getattr(atoms, name): f"_tiles.{name}_half({{0}})" for name in _SHORT}
    | {function: f"_tiles.{function.__name__}_half({{0}})" for function in (ndtr, tanh_softplus)},
)
SHORT = frozenset(getattr(atoms, name) for name in (*_SHORT, "erfc"))  # functions of formulas that become those
SHORT_ERROR = 6e-5  # of each, relative, at most


def _stars(base: Callable[[int], str], n: int) -> tuple[str, int]:
    text = base(CALL)
    return f"{text}**{n}" if text.isidentifier() else f"{text} ** {n}", UNARY


TORCH = Dialect(
    functions={
        **{atom: f"{atom.torch}({{0}})" for atom in atoms.ATOMS},
        atoms.softplus: "_F.softplus({0}, threshold=50.0)",  # above its default, 20, float64 loses digits
        sympy.sqrt: "_torch.sqrt({0})",
    },
    where="_torch.where({0}, {1}, {2})",
    constant="_torch.full_like({variable}, {0})",  # where of two numbers would have the default dtype
    clamp="_torch.clamp({0}, {1}, {2})",
    power=_stars,
)


def private(call: str) -> str:
    """Return a call of PyTorch from the catalog, with generated modules' names for PyTorch."""
    return re.sub(r"\b(F|torch)\.", r"_\1.", call)


def number(value: float) -> tuple[str, int]:
    """Return the shortest text of a float, and how strongly it binds."""
    return repr(value + 0.0), UNARY if value < 0 else CALL
