"""The records of formulas with learned numbers: x is kept, or the output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import sympy

from fitact.errors import UsageError, quote
from fitact.fitter.analysis.learned import Learned
from fitact.fitter.expr.atoms import Expr
from fitact.fitter.expr.evaluate import evaluate
from fitact.fitter.expr.parser import parse
from fitact.fitter.expr.rewrite import stable
from fitact.fitter.numerics.dtypes import DTYPES, from_output, halves, in_single, rounded

from .approximants import Reader
from .fit import Fit
from .validate import label, mapping, text

Setting = dict[Expr, Expr]  # values of learned numbers, by their symbols
DRAWS = 4  # of learned numbers, beside their starts
OUTPUT = "y"  # what formulas in the output call it
# x in float32 for errors from the output: dense round 0, and out to where activations have met their asymptotes
SINGLES = np.concatenate([np.linspace(-20.0, 20.0, 40_001), np.geomspace(1e-30, 1e4, 4001)])
SINGLES = np.concatenate([SINGLES, -SINGLES]).astype(np.float32).astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class LearnedFit(Fit):
    """A formula that keeps x for backward, and computes all else from it again, exactly.

    Attributes:
        activation: the formula.
        error: empty.

    """

    METHODS = ("learned_rebuild",)
    ERRORS = ()

    activation: Learned


def _texts(value: object, what: str) -> Mapping[str, str]:
    return {key: text(one, f"{what}.{label(key)}") for key, one in mapping(value, what, (str,)).items()}


@dataclass(frozen=True, kw_only=True)
class ExactLearnedFit(Fit):
    """A formula whose derivatives are functions of its output y and of the learned numbers; only y is kept.

    Attributes:
        activation: the formula.
        derivative: its derivative in x, as an expression in `y` and the learned numbers.
        gradients: likewise, for each learned number the derivative in it.
        error: by storage dtype, the error from the rounding of y, see `errors_from_output`: `derivative_dtype`
            of the derivative in x, and `learned_dtype` of those in the learned numbers the largest.

    """

    METHODS = ("learned_exact",)
    ERRORS = tuple(f"{what}_{dtype}" for what in ("derivative", "learned") for dtype in DTYPES)
    READ: ClassVar[Mapping[str, Reader]] = {"derivative": text, "gradients": _texts}

    activation: Learned
    derivative: str
    gradients: Mapping[str, str]

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.activation.names
        if OUTPUT in names:
            raise UsageError(f"learned number {quote(OUTPUT)}: the output has that name; choose another one")
        if {*self.gradients} != {*names}:
            raise UsageError(
                f"gradients: expected those in {', '.join(names)}, got {quote(', '.join(self.gradients))}"
            )
        _ = self.formulas  # the parser may refuse one

    @cached_property
    def formulas(self) -> tuple[Expr, ...]:
        """The derivatives in x and in each learned number as SymPy expressions, with `atoms.x` for y."""
        texts = {"derivative": self.derivative}
        texts |= {f"gradients.{name}": self.gradients[name] for name in self.activation.names}
        return tuple(
            stable(parse(one, what=what, variable=OUTPUT, learned=self.activation.names))
            for what, one in texts.items()
        )


def told(formula: Learned, k: int) -> str:
    """Return what messages call a derivative: number 0 is that in x."""
    return f"its derivative in {('x', *formula.names)[k]}"


def settings(formula: Learned) -> Iterator[Setting]:
    """Yield values of the learned numbers that float32 holds: the starts, and others near them of either sign."""
    starts = np.array([number.start for number in formula.numbers])
    random = np.random.default_rng(0)
    sizes = random.uniform(0.5, 2.0, (DRAWS, len(starts))) * np.where(starts, starts, 0.5)
    signs = random.choice((-1.0, 1.0), sizes.shape)
    signs[0] = -1
    for values in (starts, *(sizes * signs)):
        yield dict(zip(formula.symbols, (sympy.Rational(float(np.float32(one))) for one in values), strict=True))


def errors_from_output(formula: Learned, own: Sequence[Expr], near: Iterable[Setting]) -> dict[str, float]:
    """Return the errors from rounding y to each storage dtype, for x of the same dtype; see the record.

    Each is the maximum of |g(y) − f′(x)| / max(1, |f′(x)|) with g in float32, over all finite x in half precision
    and over a dense sample in float32, and over the settings of the learned numbers.

    Args:
        formula: the formula.
        own: its derivatives in x and in each number, as formulas in y.
        near: the settings.

    """
    truths = (formula.derivative_formula, *formula.gradient_formulas)
    found: dict[str, float] = {}
    for setting in near:
        value = formula.formula.xreplace(setting)
        for dtype in DTYPES:
            at = SINGLES if dtype == "float32" else halves(dtype)
            y = rounded(in_single(value, at), dtype)
            for k, (truth, one) in enumerate(zip(truths, own, strict=True)):
                true = evaluate(truth.xreplace(setting), at)
                error = from_output(formula, told(formula, k), true, y, one.xreplace(setting), dtype)
                key = f"{'learned' if k else 'derivative'}_{dtype}"
                found[key] = max(found.get(key, 0.0), error)
    return found
