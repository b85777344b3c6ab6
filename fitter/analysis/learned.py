"""A formula with learned parameters: an activation of x, and parameters that training changes."""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import sympy

from fitact.base import UsageError, quote
from fitact.fitter.catalog import CATALOG, LEARNED
from fitact.fitter.expr import (
    CONSTANTS,
    FUNCTIONS,
    LARGEST_SINGLE,
    SMALLEST_SINGLE,
    Array,
    Expr,
    evaluate,
    stable,
    text_of,
    x,
)

from .activation import Activation, Formula

MOST = 8  # learned parameters of a formula
MAX_NAME = 40  # characters
POINTS = np.linspace(-10.0, 10.0, 2001)  # where the formula must be finite at its start
# What generated modules use themselves: their own arguments, and the attributes of torch.nn.Module.
_USED = """
T_destination add_module apply bfloat16 buffers call_super_init channels children compile cpu cuda device dim
double dtype dump_patches eval extra_repr float forward get_buffer get_extra_state get_parameter
get_submodule half input ipu key load_state_dict modules mtia named_buffers named_children
named_modules named_parameters parameters register_backward_hook register_buffer
register_forward_hook register_forward_pre_hook register_full_backward_hook
register_full_backward_pre_hook register_load_state_dict_post_hook register_load_state_dict_pre_hook
register_module register_parameter register_state_dict_post_hook register_state_dict_pre_hook
requires_grad_ reset_parameters self set_extra_state set_submodule share_memory state_dict to
to_empty train training type xpu zero_grad
"""
USED = frozenset(_USED.split())


@dataclass(frozen=True)
class Number:
    """A learned parameter; a UsageError if the name has another meaning, or float32 does not hold the start."""

    name: str  # in the formula, and of the parameter
    start: float  # before training
    channel: bool = False  # whether there is one for every channel

    def __post_init__(self) -> None:
        what = f"learned parameter {quote(self.name)}"
        if reason := _taken(self.name):
            raise UsageError(f"{what}: {reason}; choose another name")
        if type(self.start) is not float or not (
            self.start == 0 or SMALLEST_SINGLE <= abs(self.start) <= LARGEST_SINGLE
        ):
            raise UsageError(f"{what}: expected a start that float32 holds, got {quote(self.start)}")


def _taken(name: object) -> str | None:
    """Return why a learned parameter cannot have a name, None if it can."""
    if not isinstance(name, str) or not name.isascii() or not name.isidentifier() or len(name) > MAX_NAME:
        return f"a name is a Python identifier of at most {MAX_NAME} characters of ASCII"
    if name.startswith("_"):
        return "names that begin with an underscore belong to generated modules"
    if name in ("x", "g", "u"):
        return f"{name} is an argument of formulas"
    if name in CONSTANTS:
        return f"{name} is a constant of formulas"
    if name in FUNCTIONS or name in CATALOG or name == "where":
        return f"{name} is a function of formulas"
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or hasattr(builtins, name):
        return "the name is Python's own"
    if name in USED or (name[0] == "u" and name[1:].isdigit()):
        return "generated modules use that name themselves"
    return None


@dataclass(frozen=True)
class Learned(Formula):
    """A formula with learned parameters, y = f(x; a, b, …); its name is in `LEARNED`, or None for a user's own.

    Raises:
        UsageError: the expression is not a formula in x and the numbers, does not mention one of them, has a
            constant that float32 cannot hold, or is not finite for the starts of its numbers.

    """

    KIND = "formula"

    numbers: tuple[Number, ...]  # in the order in which modules take them

    def __post_init__(self) -> None:
        if not 1 <= len(self.numbers) <= MOST:
            raise UsageError(f"{self}: expected 1 to {MOST} learned parameters, got {len(self.numbers)}")
        if len(set(self.names)) < len(self.names):
            raise UsageError(f"{self}: two learned parameters have one name, got {', '.join(self.names)}")
        for number, symbol in zip(self.numbers, self.symbols, strict=True):
            if symbol not in self.typed.free_symbols:
                raise UsageError(f"{self}: the learned parameter {number.name} is used nowhere")
        self.check()
        self._check_start()

    @classmethod
    def of(cls, text: str, numbers: Mapping[str, tuple[float, bool]]) -> Learned:
        """Return what a name of `LEARNED` or a formula means.

        The learned parameters are by name, each with its start and whether every channel has its own; for a name
        of `LEARNED`, those that differ.
        """
        if text in LEARNED:
            expression, own = LEARNED[text]
            for name in numbers:
                if name not in own:
                    raise UsageError(
                        f"{text} has no learned parameter {quote(name)}: expected one of {', '.join(own)}"
                    )
            return cls(text, expression, tuple(Number(name, *pair) for name, pair in {**own, **numbers}.items()))
        formula = cls(None, text, tuple(Number(name, *pair) for name, pair in numbers.items()))
        for name, gradient in zip(formula.names, formula.gradient_formulas, strict=True):
            if gradient == 0:  # it stands in conditions and signs alone
                raise UsageError(
                    f"{formula}: the derivative in {name} is 0 at every x, so {name} would never change: write "
                    "its number into the formula"
                )
        return formula

    def record(self) -> dict[str, Any]:
        """As in `Formula`."""
        return super().record() | {"learned": [vars(number) for number in self.numbers]}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the learned parameters."""
        return tuple(number.name for number in self.numbers)

    @property
    def symbols(self) -> tuple[Expr, ...]:
        """The learned parameters as SymPy symbols."""
        return tuple(map(sympy.Symbol, self.names))

    @cached_property
    def gradient_formulas(self) -> tuple[Expr, ...]:
        """Its derivatives in the learned parameters."""
        return tuple(stable(self.formula.diff(symbol)) for symbol in self.symbols)

    def at_start(self, formula: Expr, at: Array) -> Array:
        """Return a formula in x and the learned parameters at the points, these at their starts."""
        filled = self.filled(formula)
        if filled.has(sympy.zoo, sympy.nan, sympy.oo):
            return np.full(np.shape(at), np.nan)
        return evaluate(filled, at)

    def start(self) -> Activation | None:
        """Return the activation that the formula is at the starts; None where that is computed as a constant."""
        varies = x in self.filled(self.formula).free_symbols
        return Start(None, text_of(self.filled(self.typed)), learned=self) if varies else None

    def filled(self, formula: Expr) -> Expr:
        """Return a formula in x and the learned parameters with these at their starts."""
        starts = [sympy.Rational(repr(number.start)) for number in self.numbers]
        return formula.xreplace(dict(zip(self.symbols, starts, strict=True)))

    def _check_start(self) -> None:
        """Refuse starts at which the formula or one of its derivatives is not finite."""
        whats = ["", *(f"the derivative in {name} of " for name in ("x", *self.names))]
        formulas = self.formula, self.derivative_formula, *self.gradient_formulas
        for what, formula in zip(whats, formulas, strict=True):
            at_points = self.at_start(formula, POINTS)
            if not np.isfinite(at_points).all():
                i = np.flatnonzero(~np.isfinite(at_points))[0]
                starts = ", ".join(f"{number.name}={number.start:g}" for number in self.numbers)
                raise UsageError(
                    f"{self}: with its start {starts} {what}the formula is {at_points[i]:g} at x = {POINTS[i]:g}: "
                    "expected finite numbers from x = -10 to 10; start elsewhere, or write where(condition, a, b)"
                )


@dataclass(frozen=True)
class Start(Activation):
    """A formula with its numbers at their starts; rewritten as generated code is, for any numbers."""

    learned: Learned = field(kw_only=True)

    @cached_property
    def formula(self) -> Expr:
        """As in `Formula`."""
        return self.learned.filled(self.learned.formula)

    @cached_property
    def derivative_formula(self) -> Expr:
        """As in `Formula`."""
        return self.learned.filled(self.learned.derivative_formula)
