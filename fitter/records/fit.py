"""The record of a fit: the only thing that passes from the fitter to the generator."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, Literal, get_origin

import numpy as np

from fitact.base import UsageError, check_keys, label, number, quote, read, readable, whole
from fitact.fitter.analysis import REALS, Activation, Formula, Gate, Learned
from fitact.fitter.catalog import check_name
from fitact.fitter.expr import Array, Expr, parse, stable
from fitact.fitter.files import FIT
from fitact.fitter.numerics import DTYPES, LARGEST, Weight

from .approximants import Approximant, Bits, Single, codes
from .validate import check_bits, check_domain, check_increasing, check_numbers, free_text

# The options that each method may record, each with what it must be.
_SEED, _SOURCE = {"seed": whole}, {"source": free_text}
Option = float | str  # an integer stays one
OPTIONS: dict[str, dict[str, Any]] = {
    "fewbit": {"cells": whole, **_SEED},
    "relumix": {"objective": Literal["primitive", "derivative"], "restarts": whole, **_SEED, **_SOURCE},
    "inverted": {"family": Literal["rational"], "tol": number, **_SOURCE},
}


def check_options(method: str, options: Mapping[str, object]) -> None:
    """Raise UsageError unless the method has every option, and every value is valid."""
    for key, value in options.items():
        what = f"options.{label(key)}"
        if key not in OPTIONS[method]:
            raise UsageError(f"{what}: unknown option; those of {method} are {', '.join(OPTIONS[method])}")
        check = OPTIONS[method][key]
        read(check, value, what, {}) if get_origin(check) else check(value, what)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What every fit has. The subclasses are the kinds of fit, and each serves one or more methods.

    Raises:
        UsageError: a field is not valid; the message names it.

    """

    METHODS: ClassVar[tuple[str, ...]]
    ERRORS: ClassVar[tuple[str, ...]] = ()

    name: str  # and that of the module generated from it
    method: str
    activation: Formula
    error: Mapping[str, float]  # by name, none negative

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.method not in self.METHODS:
            raise UsageError(f"method: expected one of {', '.join(self.METHODS)}, got {quote(self.method)}")
        if tuple(sorted(self.error)) != self.ERRORS:
            raise UsageError(f"error: expected {', '.join(self.ERRORS)}, got {quote(sorted(self.error))}")
        for key, value in self.error.items():
            if not 0 <= value < math.inf:
                got = f"got {value}" + "; fit it on a smaller domain" * (value == math.inf)
                raise UsageError(f"error.{key} of {quote(self.activation.expression)}: expected 0 or more, {got}")

    @property
    def made_with(self) -> dict[str, Any]:
        """The arguments, beside the activation and the name, with which the method makes the fit again."""
        return {}

    def to_json(self) -> str:
        """Return the fit's file: the same fit gives the same bytes."""
        record = {"schema": FIT.schema, **{part.name: getattr(self, part.name) for part in fields(self)}}
        return json.dumps(record, indent=2, sort_keys=True, allow_nan=False, default=_plain) + "\n"

    def digest(self) -> str:
        """Return the SHA-256 of the fit's file, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


@readable
@dataclass(frozen=True, kw_only=True)
class StepFit(Fit):
    """A step function in place of f′: level i on (border i − 1, border i].

    Calling it evaluates the step function, shape of the argument, float64. NaN gets the first level.

    Attributes:
        bits: k, 1 to 4.
        domain: the interval over which the errors are taken.
        weight: how much an error counts.
        even: whether |x| is compared with the borders in place of x.
        borders: 2^k − 1 numbers, increasing, each a float32.
        levels: 2^k numbers, each a float32.
        error: `objective`, what was minimised; and `rms`, `max`, `primitive_norm` and `primitive_max` over the
            domain, see `errors.step_errors`.
        options: what else is needed to make the fit again.

    """

    METHODS = ("fewbit", "relumix")
    BITS: ClassVar = range(1, 5)
    ERRORS = ("max", "objective", "primitive_max", "primitive_norm", "rms")

    activation: Activation
    bits: int
    domain: tuple[float, float]
    weight: Weight
    even: bool
    borders: tuple[float, ...]
    levels: tuple[float, ...]
    options: Mapping[str, Option] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bits(self.bits, self.BITS)
        check_options(self.method, self.options)
        check_domain(self.domain, LARGEST)
        check_numbers("borders", self.borders, 2**self.bits - 1, single=True)
        check_numbers("levels", self.levels, 2**self.bits, single=True)
        check_increasing("borders", self.borders)
        if self.even and self.borders[0] < 0:
            raise UsageError(f"borders: an even fit has none below 0, got {self.borders[0]!r}")
        self.weight.check(*self.domain)

    @property
    def made_with(self) -> dict[str, Any]:
        """As in `Fit`."""
        over = {"domain": self.domain, "weight": self.weight} if self.method == "fewbit" else {}
        return {"bits": self.bits, **self.options, **over}

    @property
    def mass(self) -> float:
        """The integral of the weight over the domain."""
        return self.weight.mass(*self.domain)

    def __call__(self, x: Array) -> Array:
        """Return the step function at x."""
        return np.asarray(self.levels)[codes(self.borders, np.abs(x) if self.even else x)]


@readable
@dataclass(frozen=True, kw_only=True)
class OutputFit(Fit):
    """f′ as a function of the output y, so that only y is saved.

    Attributes:
        derivative: f′ as an expression in `y`.
        error: by storage dtype, the error from the rounding of y, see `output.errors`.

    """

    METHODS = ("output",)
    ERRORS = DTYPES

    activation: Activation
    derivative: str

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.formula  # the parser may refuse it

    @property
    def made_with(self) -> dict[str, Any]:
        """As in `Fit`."""
        return {"derivative": self.derivative}

    @cached_property
    def formula(self) -> Expr:
        """The derivative as a SymPy expression, with `atoms.x` for y."""
        return stable(parse(self.derivative, what="derivative", variable="y"))


@readable
@dataclass(frozen=True, kw_only=True)
class InvertedFit(Fit):
    """f′ as a function of the output y and of a code, which tells the cell that x lies in.

    Attributes:
        bits: of a code, 0 to 4; 0 where f is monotone and smooth.
        domain: the interval of x that the fit is made for; None for the reals.
        borders: by storage dtype of y, float32 numbers, increasing; the code of x is the number of those below x.
        approximants: by storage dtype, one for each code.
        error: by storage dtype, max |approximant − f′| / max(1, |f′|), for x and y of the dtype, below 1e37 in
            size: in half precision over all x, in float32 over a dense sample. It counts y of the catalog's
            activations as rounded once; PyTorch's own float32 values are off by more, which near an extremum
            causes up to three times the error.
        floor: by storage dtype, the least such error that any function of that y and code has.
        options: what else is needed to make the fit again.

    """

    METHODS = ("inverted",)
    ERRORS = DTYPES

    activation: Activation
    bits: int
    domain: tuple[float, float] | None
    borders: Mapping[str, tuple[float, ...]]
    approximants: Mapping[str, tuple[Approximant, ...]]
    floor: Mapping[str, float]
    options: Mapping[str, Option] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bits(self.bits, range(5))
        check_options(self.method, self.options)
        if self.domain is not None:
            check_domain(self.domain, REALS)
        for what in ("borders", "approximants", "floor"):
            check_keys(getattr(self, what), DTYPES, f"{what}.")
        for dtype in DTYPES:
            borders, approximants = self.borders[dtype], self.approximants[dtype]
            if not 1 <= len(approximants) <= 2**self.bits:
                raise UsageError(
                    f"approximants.{dtype}: expected 1 to {2**self.bits} approximants, got {len(approximants)}"
                )
            if len({(getattr(each, "anchor", None), each.approximates) for each in approximants}) > 1:
                raise UsageError(
                    f"approximants.{dtype}: expected quotients, "
                    "or approximants of one anchor that approximate the same"
                )
            check_numbers(f"borders.{dtype}", borders, len(approximants) - 1, single=True)
            check_increasing(f"borders.{dtype}", borders)
            for what in ("error", "floor"):
                stated = getattr(self, what)[dtype]
                worst = max(getattr(approximant, what) for approximant in approximants)
                if stated != worst:
                    raise UsageError(
                        f"{what}.{dtype}: expected that of the worst approximant, {worst!r}, got {stated!r}"
                    )

    @property
    def made_with(self) -> dict[str, Any]:
        """As in `Fit`."""
        tol = {key: value for key, value in self.options.items() if key == "tol"}
        return {"bits": self.bits, "domain": self.domain, **tol}

    def code(self, x: Array, dtype: str = "float32") -> Bits:
        """Return the code of x, any shape; that of NaN is 0."""
        return codes(self.borders[dtype], x)

    def evaluate(self, y: Array, code: Bits, dtype: str = "float32") -> Single:
        """Return f′ in float32, as kernels compute it.

        Args:
            y: outputs, already rounded to `dtype`, any shape.
            code: of their x, same shape.
            dtype: the storage dtype, one of `DTYPES`.

        """
        y, code = np.broadcast_arrays(np.asarray(y, dtype=np.float32), code)
        derivative = np.full(y.shape, np.nan, dtype=np.float32)
        for s, approximant in enumerate(self.approximants[dtype]):
            derivative[code == s] = approximant(y[code == s])
        return derivative


@readable
@dataclass(frozen=True, kw_only=True)
class GateFit(Fit):
    """A gate that saves g and u for backward and nothing else: a, a′, b and b′ are recomputed, exactly."""

    METHODS = ("gate_recompute",)

    activation: Gate


@readable
@dataclass(frozen=True, kw_only=True)
class LearnedFit(Fit):
    """A formula with learned parameters that saves x for backward, and recomputes all else from it, exactly."""

    METHODS = ("learned_recompute",)

    activation: Learned


AnyFit = StepFit | OutputFit | InvertedFit | GateFit | LearnedFit
KINDS: tuple[type[AnyFit], ...] = (StepFit, OutputFit, InvertedFit, GateFit, LearnedFit)


def _plain(value: Any) -> object:
    """Return a part of a fit as JSON has it, if JSON has no such type."""
    if isinstance(value, Formula | Weight):
        return value.record()
    return {part.name: getattr(value, part.name) for part in fields(value)}
