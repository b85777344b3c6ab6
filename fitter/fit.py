"""The record of a fit, and its JSON: the only thing that passes from the fitter to the generator."""

from __future__ import annotations

import hashlib
import json
import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np

from fitact.errors import FitactError, UsageError, quote
from fitact.files import read_text

from .activation import Activation
from .catalog import CATALOG
from .expression import Array, Expr
from .forms import Bits, Form, Printed, Single, codes, form_of, form_record
from .moments import quadrature
from .parser import parse
from .records import NAME, check_increasing, check_keys, check_numbers, label, mapping, numbers, text
from .stable import stable
from .storage import DTYPES
from .weight import Weight

SCHEMA = "fitact.fit/1"
MAX_BYTES = 1 << 20


def check_name(name: object, what: str = "name") -> str:
    """Return `name` if it can name a module, a function and a file; UsageError otherwise."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise UsageError(
            f"{what}: expected a Python identifier that starts with a letter and is no keyword (80 characters at "
            f"most), got {quote(name)}"
        )
    return name


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What every fit has; its subclasses are the kinds of fit, one or more methods each.

    Attributes:
        name: the fit's name, and that of the module generated from it.
        method: how it was made.
        activation: the activation f.
        error: errors by name, none negative.

    Raises:
        UsageError: the parts do not make a fit; the message names the offending one.

    """

    METHODS: ClassVar[tuple[str, ...]]
    ERRORS: ClassVar[tuple[str, ...]]

    name: str
    method: str
    activation: Activation
    error: Mapping[str, float]

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.method not in self.METHODS:
            raise UsageError(f"method: expected one of {', '.join(self.METHODS)}, got {quote(self.method)}")
        if tuple(sorted(self.error)) != self.ERRORS:
            raise UsageError(f"error: expected {', '.join(self.ERRORS)}, got {quote(sorted(self.error))}")
        check_numbers("error", tuple(self.error.values()), len(self.ERRORS))
        if min(self.error.values()) < 0:
            raise UsageError(f"error: expected no negative number, got {quote(dict(self.error))}")

    def record(self) -> dict[str, Any]:
        """Return the fit as JSON has it."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "method": self.method,
            "activation": _activation_record(self.activation),
            "error": dict(self.error),
        }

    def to_json(self) -> str:
        """Return the fit's file: the same fit gives the same bytes."""
        return json.dumps(self.record(), indent=2, sort_keys=True, allow_nan=False) + "\n"

    def digest(self) -> str:
        """Return the SHA-256 of the fit's file, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


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
            domain, see `accuracy.step_errors`.
        options: what else is needed to make the fit again.

    """

    METHODS = ("fewbit", "relumix")
    ERRORS = ("max", "objective", "primitive_max", "primitive_norm", "rms")

    bits: int
    domain: tuple[float, float]
    weight: Weight
    even: bool
    borders: tuple[float, ...]
    levels: tuple[float, ...]
    options: Mapping[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.bits) is not int or not 1 <= self.bits <= 4:
            raise UsageError(f"bits: expected 1, 2, 3 or 4, got {quote(self.bits)}")
        if not isinstance(self.even, bool):
            raise UsageError(f"even: expected true or false, got {quote(self.even)}")
        check_numbers("domain", self.domain, 2)
        check_numbers("borders", self.borders, 2**self.bits - 1, single=True)
        check_numbers("levels", self.levels, 2**self.bits, single=True)
        check_increasing("domain", self.domain)
        check_increasing("borders", self.borders)
        if self.even and self.borders[0] < 0:
            raise UsageError(f"borders: an even fit has none below 0, got {self.borders[0]!r}")

    @property
    def mass(self) -> float:
        """The integral of the weight over the domain."""
        edges = np.union1d(np.linspace(*self.domain, 2001), self.weight.breakpoints(*self.domain))
        return float(quadrature(self.weight, edges).sum())

    def __call__(self, x: Array) -> Array:
        """Return the step function at x."""
        x = np.asarray(x, dtype=np.float64)
        # searchsorted puts NaN last; no comparison with NaN holds, so it belongs in front
        at = np.where(np.isnan(x), -np.inf, np.abs(x) if self.even else x)
        return np.asarray(self.levels)[np.searchsorted(self.borders, at)]

    def record(self) -> dict[str, Any]:
        """Return the fit as JSON has it."""
        return super().record() | {
            "bits": self.bits,
            "domain": list(self.domain),
            "weight": self.weight.text,
            "even": self.even,
            "borders": list(self.borders),
            "levels": list(self.levels),
            "options": dict(self.options),
        }

    @classmethod
    def parts(cls, record: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a record that only this kind of fit has."""
        return {
            "bits": record["bits"],
            "domain": numbers(record["domain"], "domain"),
            "weight": Weight(text(record["weight"], "weight")),
            "even": record["even"],
            "borders": numbers(record["borders"], "borders"),
            "levels": numbers(record["levels"], "levels"),
            "options": mapping(record["options"], "options", (int, float, str)),
        }


@dataclass(frozen=True, kw_only=True)
class ExactFit(Fit):
    """f′ as a function of the output y: nothing but y is kept.

    Attributes:
        derivative: f′ as an expression in `y`.
        error: by storage dtype, what the rounding of y costs, see `exact.errors`.

    """

    METHODS = ("exact",)
    ERRORS = ("bfloat16", "float16", "float32")

    derivative: str

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.form  # which the parser may refuse

    @cached_property
    def form(self) -> Expr:
        """The derivative as a SymPy expression, with `expression.x` for y."""
        return stable(parse(self.derivative, what="derivative", variable="y"))

    def record(self) -> dict[str, Any]:
        """Return the fit as JSON has it."""
        return super().record() | {"derivative": self.derivative}

    @classmethod
    def parts(cls, record: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a record that only this kind of fit has."""
        return {"derivative": text(record["derivative"], "derivative")}


@dataclass(frozen=True, kw_only=True)
class InvertedFit(Fit):
    """f′ as a function of the output y and of which cell of x it came from, told by a code.

    Attributes:
        bits: of a code, 0 to 4; 0 where f is monotone and smooth.
        domain: the interval of x that the fit is made for; None for the reals.
        splits: by storage dtype of y, float32 numbers, increasing; the code of x is how many are less than x.
        forms: by storage dtype, one for each code.
        error: by storage dtype, max |form − f′| / max(1, |f′|), x and y being of the dtype and |y| < 1e37: of half
            precision over all of its x, of float32 over a dense sample. y of the catalog's activations is rounded
            once; in float32 PyTorch's own is off by more, and near an extremum up to thrice the error comes of it.
        floor: by storage dtype, the least such error that any function of that y and code has.
        options: what else is needed to make the fit again.

    """

    METHODS = ("inverted",)
    ERRORS = DTYPES

    bits: int
    domain: tuple[float, float] | None
    splits: Mapping[str, tuple[float, ...]]
    forms: Mapping[str, tuple[Form, ...]]
    floor: Mapping[str, float]
    options: Mapping[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.bits) is not int or not 0 <= self.bits <= 4:
            raise UsageError(f"bits: expected 0, 1, 2, 3 or 4, got {quote(self.bits)}")
        if self.domain is not None:
            check_numbers("domain", self.domain, 2)
            check_increasing("domain", self.domain)
        for what, values in (("splits", self.splits), ("forms", self.forms), ("floor", self.floor)):
            check_keys(what, values, DTYPES)
        for dtype in DTYPES:
            splits, forms = self.splits[dtype], self.forms[dtype]
            if not 1 <= len(forms) <= 2**self.bits:
                raise UsageError(f"forms.{dtype}: expected 1 to {2**self.bits} forms, got {len(forms)}")
            if len({_sort(form) for form in forms}) > 1:
                raise UsageError(
                    f"forms.{dtype}: expected quotients, or forms of one anchor that approximate the same"
                )
            check_numbers(f"splits.{dtype}", splits, len(forms) - 1, single=True)
            check_increasing(f"splits.{dtype}", splits)
            for what in ("error", "floor"):
                stated, found = getattr(self, what)[dtype], max(getattr(form, what) for form in forms)
                if stated != found:
                    raise UsageError(f"{what}.{dtype}: expected that of the worst form, {found!r}, got {stated!r}")

    def code(self, x: Array, dtype: str = "float32") -> Bits:
        """Return the code of x, any shape; that of NaN is 0."""
        return codes(self.splits[dtype], x)

    def evaluate(self, y: Array, code: Bits, dtype: str = "float32") -> Single:
        """Return f′ in float32, as kernels compute it.

        Args:
            y: outputs, already rounded to `dtype`, any shape.
            code: of their x, same shape.
            dtype: the storage dtype, one of `DTYPES`.

        Raises:
            UsageError: another dtype.

        """
        if dtype not in DTYPES:
            raise UsageError(f"dtype: expected one of {', '.join(DTYPES)}, got {quote(dtype)}")
        y, code = np.broadcast_arrays(np.asarray(y, dtype=np.float32), code)
        slope = np.full(y.shape, np.nan, dtype=np.float32)
        for s, form in enumerate(self.forms[dtype]):
            slope[code == s] = form(y[code == s])
        return slope

    def record(self) -> dict[str, Any]:
        """Return the fit as JSON has it."""
        return super().record() | {
            "bits": self.bits,
            "domain": None if self.domain is None else list(self.domain),
            "splits": {dtype: list(splits) for dtype, splits in self.splits.items()},
            "forms": {dtype: [form_record(form) for form in forms] for dtype, forms in self.forms.items()},
            "floor": dict(self.floor),
            "options": dict(self.options),
        }

    @classmethod
    def parts(cls, record: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a record that only this kind of fit has."""
        splits, forms = (mapping(record[what], what, (list,)) for what in ("splits", "forms"))
        return {
            "bits": record["bits"],
            "domain": None if record["domain"] is None else numbers(record["domain"], "domain"),
            "splits": {dtype: numbers(values, f"splits.{label(dtype)}") for dtype, values in splits.items()},
            "forms": {
                dtype: tuple(form_of(value, f"forms.{label(dtype)}[{i}]") for i, value in enumerate(values))
                for dtype, values in forms.items()
            },
            "floor": mapping(record["floor"], "floor", (int, float)),
            "options": mapping(record["options"], "options", (int, float, str)),
        }


def _sort(form: Form) -> tuple[Any, ...]:
    """Return what all forms of a fit have in common."""
    return (form.anchor, form.approximates) if isinstance(form, Printed) else ()


KINDS = (StepFit, ExactFit, InvertedFit)
AnyFit = StepFit | ExactFit | InvertedFit


def read(path: Path) -> AnyFit:
    """Read a fit from its file, checking every field; UsageError names the file and the field."""
    source = read_text(path, MAX_BYTES)
    try:
        return from_json(source)
    except FitactError as error:
        raise UsageError(f"{path}: {error}") from None


def from_json(source: str) -> AnyFit:
    """Read a fit from its JSON. Nothing in it is ever executed.

    Raises:
        UsageError: the text is not such a record; the message names the field.

    """
    try:
        record = json.loads(source, parse_constant=_no_constant, object_pairs_hook=_no_twins)
    except (ValueError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(record, dict):
        raise UsageError(f"expected a JSON object, got {quote(record)}")
    schema = record.get("schema")
    if schema != SCHEMA:
        newer = isinstance(schema, str) and re.fullmatch(r"fitact\.fit/[1-9]\d{0,5}", schema)
        remedy = "upgrade fitact to read it" if newer else "this is not a fit of fitact's"
        raise UsageError(f"schema: expected {SCHEMA}, got {quote(schema)}: {remedy}")
    method = record.get("method")
    kind = next((kind for kind in KINDS if method in kind.METHODS), None)
    if kind is None:
        methods = ", ".join(name for kind in KINDS for name in kind.METHODS)
        raise UsageError(f"method: expected one of {methods}, got {quote(method)}")
    expected = {"schema", *(part.name for part in fields(kind))}
    for name in sorted(expected ^ set(record)):
        if name in expected:
            raise UsageError(f"{name}: missing")
        raise UsageError(f"{label(name)}: not a field of a fit of the method {method}")
    return kind(
        name=record["name"],
        method=record["method"],
        activation=_activation(record["activation"]),
        error=mapping(record["error"], "error", (int, float)),
        **kind.parts(record),
    )


def _activation_record(activation: Activation) -> dict[str, Any]:
    record: dict[str, Any] = {"name": activation.name, "expression": activation.expression}
    if activation.parameters:
        record["parameters"] = dict(activation.parameters)
    return record


def _activation(value: object) -> Activation:
    record = mapping(value, "activation", (str, type(None), dict))
    if set(record) - {"parameters"} != {"name", "expression"}:
        raise UsageError(f"activation: expected name and expression, got {quote(sorted(record))}")
    name, expression = record["name"], text(record["expression"], "activation.expression")
    parameters = mapping(record.get("parameters", {}), "activation.parameters", (int, float))
    if name is None and not parameters:
        return Activation(None, expression)
    if not isinstance(name, str) or name not in CATALOG:
        raise UsageError(
            f"activation.name: {quote(name)} is not in this catalog; a formula of one's own has the name null"
        )
    activation = Activation.of(name, parameters)
    if _activation_record(activation) != record:
        raise UsageError(
            f"activation.expression: {quote(expression)} is not that of {quote(name)} in this catalog, "
            f"{quote(activation.expression)}"
        )
    return activation


def _no_constant(name: str) -> NoReturn:
    raise UsageError(f"not JSON: {name} is not a number of JSON's")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for key, value in pairs:
        if key in record:
            raise UsageError(f"{label(key)}: stands twice in the same object")
        record[key] = value
    return record
