"""Activations that keep their output: the derivation, the record, the command, the runtime, the kernels.

Every oracle is independent: formulas in mpmath and closed forms written in `outputs`, PyTorch's own autograd.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import pickle
import random
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fitact
from fitact.codegen.generate import render
from fitact.errors import FitWarning, UsageError
from fitact.fitter import exact
from fitact.fitter.activation import Activation
from fitact.fitter.fit import ExactFit, from_json
from fitact.runtime import ops, registry
from fitact.runtime.memory import count_saved

from .conftest import ROOT
from .outputs import CLOSED, LINEAR, MP, SOME, Output, each_output, outputs, real
from .steps import DTYPES, HALVES, patterns

INTEGER = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
UNIT = 2.0**-24  # the rounding of float32
TANH = next(one for one in outputs() if one.plain == "tanh")
tanh_exact = TANH.function


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, the sign of 0 too, but for the payload of NaNs."""
    bits = INTEGER[a.dtype]
    a, b = a.detach().contiguous(), b.detach().contiguous()
    return a.dtype == b.dtype and bool(torch.all((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())))


def rounding(dtype: torch.dtype) -> float:
    """Half a unit in the last place, relative."""
    return torch.finfo(dtype).eps / 2


def run(function: Any, x: torch.Tensor, dy: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and gradient of a fresh leaf with the layout of x."""
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = function(leaf)
    (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y) if dy is None else dy)
    return y.detach(), dx


def derived(text: str) -> ExactFit:
    """Derive a form; whether floating point suffices for the formula is not the question here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FitWarning)
        return exact.fit(Activation.of(text), "some_exact")


def refusal(text: str) -> str:
    with pytest.raises(UsageError) as error:
        derived(text)
    message = str(error.value)
    assert message.isprintable(), "one line"
    assert len(message) < 300
    return message


# ------------------------------------------------------------------------------------------------ the derivation


def compare(value: Callable, slope: Callable, points: list[float], tolerance: str = "1e-50") -> int:
    """Compare slope(f(x)) with f′(x), differentiated numerically, where f is real; return at how many points."""
    compared = 0
    for point in points:
        x = MP.mpf(point)
        try:
            y, true = value(x), MP.diff(value, x)
        except TypeError:  # complex numbers, compared
            continue
        if (
            isinstance(y, MP.mpc)
            or isinstance(true, MP.mpc)
            or not MP.isfinite(true)
            or abs(true) < MP.mpf("1e-60")
        ):
            continue
        compared += 1
        found = slope(y)
        assert abs(found - true) <= MP.mpf(tolerance) * abs(true), (point, MP.nstr(true, 20), found)
    return compared


def sample(corners: tuple[float, ...] = (), reach: float = 30.0) -> list[float]:
    points = np.random.default_rng(0).uniform(-reach, reach, 40)
    near = [c + d for c in corners for d in (-0.7, -0.3, -1e-3, -1e-9, 1e-9, 1e-3, 0.3, 0.7)]
    return [*points.tolist(), *near]


def test_what_is_shipped() -> None:
    assert {one.plain for one in outputs()} == set(CLOSED)
    assert all(one.name == f"{one.plain}_exact" for one in outputs())


@each_output()
def test_shipped_derivative(one: Output) -> None:
    """The derived text, the closed form written here, and f′ by differences are the same."""
    value, closed, corners = CLOSED[one.plain]
    points = sample(corners)
    # PyTorch's constants of SELU, and their product, are float64
    if one.plain == "selu":
        form, exact_form = real(one.fit["derivative"], "y"), real(closed, "y")
        for point in points:
            y = real(value)(MP.mpf(point))
            assert abs(form(y) - exact_form(y)) < 1e-15
    else:
        assert compare(real(value), real(one.fit["derivative"], "y"), points) > 8
    assert compare(real(value), real(closed, "y"), points) > 8, "of the oracle itself"


@each_output()
def test_shipped_is_what_is_derived(one: Output) -> None:
    fit = exact.fit(Activation.of(one.plain), one.name)
    assert fit.to_json() == (ROOT / "generated" / "fits" / f"{one.name}.json").read_text()
    assert render(fit) == (ROOT / "generated" / f"{one.name}.py").read_text()


# f, its corners
DERIVED = [
    ("x", ()),
    ("3*x - 2", ()),
    ("x**3", ()),
    ("x**5", ()),
    ("(2*x - 1)**3 + 4", ()),
    ("relu(x)**3", (0.0,)),
    ("relu(x - 1)**2", (1.0,)),
    ("-relu(-x)**2", (0.0,)),
    ("2 - relu(x)**2", (0.0,)),
    ("relu(x)**1.5", (0.0,)),
    ("relu(tanh(x))**2", (0.0,)),
    ("x/sqrt(1+x**2)", ()),
    ("squareplus(x)", ()),
    ("asinh(x)", ()),
    ("atan(x)", ()),
    ("sinh(x)", ()),
    ("1.7159*tanh(2*x/3)", ()),
    ("log(1+exp(2*x))/2", ()),
    ("log(1+exp(x))", ()),
    ("where(x<0,0.1*x-1,2*x+3)", (0.0,)),
    ("where(x>1, 2*x - 1, x)", (1.0,)),
    ("where(x > 0, x + 3, 2*x)", (0.0,)),
    ("-elu(x)", (0.0,)),
    ("elu(-x)", (0.0,)),
    ("where(x>0,-x,-2*x)", (0.0,)),
    ("log(1+relu(x))", (0.0,)),
    ("log(2*exp(x)+3)", ()),
    ("1/(1+exp(-x))**2", ()),
    ("exp(x)/(1+exp(x))", ()),
    ("1 - 2*sigmoid(-3*x)", ()),
    ("hardsigmoid(x)", (-3.0, 3.0)),
    ("hardshrink(x)", (-0.5, 0.5)),
    ("softshrink(x)", (-0.5, 0.5)),
    ("threshold(x)", (1.0,)),
    ("logsigmoid(x)", ()),
    ("leaky_relu(x,0.3)", (0.0,)),
    ("elu(x,0.5)", (0.0,)),
    ("3*softplus(x/3)-1", ()),
    ("tanh(tanh(x))", ()),
    ("tanh(leaky_relu(x))", (0.0,)),
    ("sqrt(1+exp(x))", ()),
    ("asinh(x)**3", ()),
    ("softsign(x/4)", ()),
    ("exp(x) + 1", ()),
]
IDS = [text for text, _ in DERIVED]


@pytest.mark.parametrize(("text", "corners"), DERIVED, ids=IDS)
def test_derivation(text: str, corners: tuple[float, ...]) -> None:
    fit = derived(text)
    assert "x" not in re.findall(r"\b[a-z]\w*\b", fit.derivative)
    assert compare(real(text), real(fit.derivative, "y"), sample(corners)) > 9


REFUSED = [
    ("gelu", "x occurs more than once"),
    ("gelu_tanh", "x occurs more than once"),
    ("silu", "x occurs more than once"),
    ("quick_gelu", "x occurs more than once"),
    ("mish", "x occurs more than once"),
    ("hardswish", "x occurs more than once"),
    ("tanhshrink", "x occurs more than once"),
    ("x*abs(x)", "x occurs more than once"),
    ("sigmoid(x)+0.1*x", "x occurs more than once"),
    ("abs(x)", "no inverse"),
    ("x**2", "either sign"),
    ("tanh(x)**2", ""),
    ("x**4 + 1", "either sign"),
    ("sin(x)", "no inverse"),
    ("cosh(x)", "no inverse"),
    ("erf(x)", "no inverse"),
    ("sign(x)", ""),
    ("where(x > 0, 1, -1)", ""),
    ("where(x**2 > 1, x, 1)", "the sign of x**2 - 1 changes more than once"),
    ("exp(-exp(-x))", "rounds to 0"),
    ("leaky_relu(x, -0.1)", "no function of the output"),
    ("where(x>0, x, -0.5*x)", "no function of the output"),
    ("where(x>0, x-3, 2*x)", "no function of the output"),
    ("where(x>0, 2*x - 0.25, x)", "no function of the output"),
    ("where(x<0, 3*x + 1, x)", "no function of the output"),
    ("threshold(x, 1, 5)", "no function of the output"),
    ("threshold(x, -1, 0)", "no function of the output"),
    ("elu(x, -1)", "no function of the output"),
    ("where(x > 0, tanh(x), sinh(x) + 0.5)", "no function of the output"),
]


@pytest.mark.parametrize(("text", "reason"), REFUSED, ids=[text for text, _ in REFUSED])
def test_refused(text: str, reason: str) -> None:
    message = refusal(text)
    assert reason in message
    assert message.startswith("activation ")


def test_a_jump_between_equal_slopes_is_no_obstacle() -> None:
    """Branches overlap in y, but the derivative is the same on both."""
    assert derived("where(x>0, x-3, x)").derivative == "1"


def test_reasons_name_the_formula_in_its_own_language() -> None:
    """A refusal shows what may be typed, not how the expression is stored."""
    for text in ("clamp(x, -1, 2)", "max(min(x, 1), -2)", "elu(elu(x))", "x*abs(x)", "abs(x)"):
        try:
            derived(text)
        except UsageError as error:
            assert not re.search(r"\bWhere|\babsolute\b", str(error)), error


# h and how far it grows: two that explode are enough in one chain
ATOMS = {
    "exp({})": 1,
    "expm1({})": 1,
    "sinh({})": 1,
    "({})**3": 1,
    "relu({})**2": 1,
    "sigmoid({})": 0,
    "softplus({})": 0,
    "tanh({})": 0,
    "asinh({})": 0,
    "atan({})": 0,
    "softsign({})": 0,
    "isru({})": 0,
    "squareplus({})": 0,
    "elu({})": 0,
    "leaky_relu({}, 0.25)": 0,
    "log(1 + relu({}))": 0,
    "log({})": 0,
    "sqrt({})": 0,
}


def chain(chance: random.Random) -> str:
    """Return a random composition of monotone functions and affine steps."""
    text, growth = "x", 0
    for _ in range(chance.randint(1, 4)):
        a, b = (
            chance.choice(["2", "-1", "1/2", "3", "-3/4", "1", "1"]),
            chance.choice(["0", "1", "-1/4", "2", "-3"]),
        )
        text = f"{a}*{text} + {b}" if text == "x" else f"{a}*({text}) + {b}"
        atom = chance.choice([atom for atom, size in ATOMS.items() if growth + size <= 2])
        growth += ATOMS[atom]
        text = atom.format(text)
    return text


@pytest.mark.parametrize("text", ["expm1(2*x)", "exp(1000*x)", "sinh(20*x)", "x**-1", "sinh(asinh(x)**3)"])
def test_no_warning_of_numpy_s(text: str) -> None:
    """Made or refused, nothing is said of the arithmetic inside: such warnings are errors here."""
    try:
        derived(text)
    except UsageError as error:
        assert str(error).isprintable()


@pytest.mark.parametrize("text", ["1e300*x", "1e39*x", "exp(x) + 1e39", "1e60*tanh(x)"])
def test_beyond_the_range_of_every_dtype(text: str) -> None:
    assert refusal(text)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # see the test above
@pytest.mark.parametrize(
    ("first", "count"), [(0, 40), pytest.param(1000, 400, marks=pytest.mark.full)], ids=["some", "many"]
)
def test_random_chains(first: int, count: int) -> None:
    """Whatever is not refused agrees with f′ at random points."""
    made = 0
    for seed in range(first, first + count):
        chance = random.Random(seed)
        text = chain(chance)
        try:
            fit = derived(text)
        except UsageError as error:
            assert "\n" not in str(error), text
            continue
        points = [chance.uniform(-3, 3) for _ in range(8)]
        try:
            made += bool(compare(real(text), real(fit.derivative, "y"), points, "1e-25"))
        except AssertionError as error:
            raise AssertionError(f"{text}: {fit.derivative}: {error}") from None
    assert made > count / 8


# ---------------------------------------------------------------------------------------------------- its errors


def nearest(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return float64 rounded once to nearest, ties to even, by the definition of the format."""
    digits, least, most = {
        torch.bfloat16: (8, -133, 128),
        torch.float16: (11, -24, 16),
        torch.float32: (24, -149, 128),
    }[dtype]
    _, exponent = np.frexp(values)
    unit = np.ldexp(1.0, np.maximum(exponent - digits, least))
    result = np.round(values / unit) * unit
    return np.where(
        np.abs(result) >= np.ldexp(1.0, most) if most < 1024 else False, np.inf * np.sign(values), result
    )


# f and f′ in float64, stable over the whole range; g is the closed form
STABLE: dict[str, tuple[Callable, Callable]] = {
    "celu": (lambda x: np.where(x > 0, x, np.expm1(x)), lambda x: np.exp(np.minimum(x, 0))),
    "elu": (lambda x: np.where(x > 0, x, np.expm1(x)), lambda x: np.exp(np.minimum(x, 0))),
    "exp": (np.exp, np.exp),
    "hardtanh": (lambda x: np.clip(x, -1, 1), lambda x: (np.abs(x) < 1).astype(float)),
    "leaky_relu": (lambda x: np.where(x > 0, x, 0.01 * x), lambda x: np.where(x > 0, 1, 0.01)),
    "relu": (lambda x: np.maximum(x, 0), lambda x: (x > 0).astype(float)),
    "relu2": (lambda x: np.maximum(x, 0) ** 2, lambda x: 2 * np.maximum(x, 0)),
    "relu6": (lambda x: np.clip(x, 0, 6), lambda x: ((x > 0) & (x < 6)).astype(float)),
    "selu": (
        lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(x)),
        lambda x: 1.0507009873554805 * np.where(x > 0, 1, 1.6732632423543772 * np.exp(np.minimum(x, 0))),
    ),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), lambda x: np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))) ** 2),
    "softplus": (lambda x: np.logaddexp(x, 0), lambda x: 1 / (1 + np.exp(-x))),
    "softsign": (lambda x: x / (1 + np.abs(x)), lambda x: (1 + np.abs(x)) ** -2),
    "tanh": (np.tanh, lambda x: 1 / np.cosh(np.clip(x, -300, 300)) ** 2),
}


def measured(one: Output, x: np.ndarray, dtype: torch.dtype) -> float:
    """Return the largest error that the rounding of y makes at the points."""
    value, slope = STABLE[one.plain]
    x = x[np.isfinite(x) & ~np.isin(x, one.corners)].astype(np.float64)
    with np.errstate(all="ignore"):
        true = slope(x)
        y = nearest(value(x), dtype)
        found = one.slope(torch.from_numpy(y)).numpy().astype(np.float32)
        valid = np.isfinite(y) & np.isfinite(true)
        error = np.abs(found[valid] - true[valid]) / np.maximum(1, np.abs(true[valid]))
    return float(error.max())


@each_output()
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_stated_error_of_half_precision(one: Output, dtype: torch.dtype) -> None:
    """Over every finite value, up to the roundings of float32 in the form, which are stated with it."""
    x = patterns(dtype).double().numpy()
    assert one.error(dtype) == pytest.approx(measured(one, x, dtype), rel=6e-4, abs=1e-9)


@each_output()
def test_stated_error_of_float32(one: Output) -> None:
    """Of another sample, up to a tenth, as both are maxima of many roundings, and two roundings in the form."""
    chance = np.random.default_rng(1)
    x = np.concatenate([chance.uniform(-20, 20, 300_000), chance.uniform(-1, 1, 100_000)]).astype(np.float32)
    found = measured(one, x, torch.float32)
    assert 0.9 * found <= one.error(torch.float32) <= 1.1 * found + 2 * 2.0**-24


@pytest.mark.parametrize("point", [-2.7, 0.0123, 0.75, 3.3])
@each_output()
def test_stable_formulas(one: Output, point: float) -> None:
    """The float64 formulas of these tests against mpmath."""
    value, slope = STABLE[one.plain]
    f = real(CLOSED[one.plain][0])
    assert abs(value(np.float64(point)) - float(f(MP.mpf(point)))) < 1e-15
    assert abs(slope(np.float64(point)) - float(MP.diff(f, MP.mpf(point)))) < 1e-15


# ---------------------------------------------------------------------------------------------------- the record

GOOD: dict[str, Any] = {
    "schema": "fitact.fit/1",
    "name": "tanh_exact",
    "method": "exact",
    "activation": {"name": "tanh", "expression": "tanh(x)"},
    "derivative": "1 - y**2",
    "error": {"bfloat16": 0.0039, "float16": 0.0005, "float32": 1e-7},
}
STEP: dict[str, Any] = {
    "bits": 1,
    "domain": [-10.0, 10.0],
    "weight": "uniform",
    "even": False,
    "borders": [0.5],
    "levels": [0.25, 1.0],
    "options": {},
}
GONE = object()


def changed(path: str, value: object) -> str:
    record = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    target: Any = record
    for part in parents:
        target = target[part]
    if value is GONE:
        del target[last]
    else:
        target[last] = value
    return json.dumps(record)


def unreadable(text: str) -> str:
    with pytest.raises(UsageError) as error:
        from_json(text)
    message = str(error.value)
    assert message.isprintable(), "one line"
    assert len(message) < 500
    return message


def test_round_trip() -> None:
    text = json.dumps(GOOD, indent=2, sort_keys=True) + "\n"
    fit = from_json(text)
    assert isinstance(fit, ExactFit)
    assert fit.to_json() == text
    assert from_json(fit.to_json()) == fit
    assert (fit.name, fit.method, fit.derivative, fit.error) == ("tanh_exact", "exact", "1 - y**2", GOOD["error"])
    assert fit.activation == Activation.of("tanh")


@pytest.mark.parametrize(
    "text",
    [
        "1.7159*tanh(2*x/3)",
        "where(x<0,0.1*x-1,2*x+3)",
        "log(2*exp(x)+3)",
        "sinh(x)",
        "asinh(x)**3",
        "tanh(leaky_relu(x))",
    ],
)
def test_round_trip_of_derived(text: str) -> None:
    fit = derived(text)
    again = from_json(fit.to_json())
    assert again == fit
    assert again.to_json() == fit.to_json()
    assert again.form == fit.form
    assert render(again) == render(fit)


def test_parameters_survive() -> None:
    fit = exact.fit(Activation.of("leaky_relu", {"negative_slope": 0.2}), "leaky02")
    again = from_json(fit.to_json())
    assert again.activation.parameters == {"negative_slope": 0.2}
    assert again.derivative == "where(y > 0, 1, 1/5)"


# a change of the good record, what the message names
WRONG = [
    *((key, GONE, f"{key}:") for key in GOOD),
    *((key, value, f"{key}: not a field of a fit of the method exact") for key, value in STEP.items()),
    ("colour", "red", "colour: not a field"),
    ("schema", "fitact.fit/2", "upgrade fitact"),
    *(("name", name, "name: expected") for name in ("", "1a", "a/b", "class", "a\n", None, 1, ["a"])),
    *(("method", method, "method: expected") for method in ("", "Exact", None, 1, ["exact"], {})),
    ("method", "fewbit", "bits: missing"),
    ("method", "relumix", "bits: missing"),
    ("activation.name", "sigmoid", "activation.expression"),
    ("activation.expression", "tanh(y)", "activation.expression"),
    ("activation", {"name": None, "expression": "tanh(y)"}, "activation"),
    ("activation", None, "activation: expected"),
    *(("derivative", value, "derivative: expected text") for value in (None, 1, 1.5, True, ["y"], {}, {"y": 1})),
    *(
        ("derivative", text, "derivative")
        for text in (
            "",
            " ",
            "x",
            "1 - x**2",
            "y + x",
            "where(x > 0, 1, 0)",
            "z",
            "Y",
            "yy",
            "y.__class__",
            "y +",
            "y\n",
            "y; 1",
            "y ^ 2",
            "__import__('os')",
            "lambda: y",
            "[y]",
            "y > 0",
            "1/0",
            "10**10**10",
            "1e400",
            "nonsense(y)",
            "y" * 3000,
            "(" * 9000,
            "y\0",
            '"""',
        )
    ),
    *(("error", value, "error: expected") for value in (None, 1, "abc", [], {}, {"max": 1})),
    (
        "error",
        {"max": 0.25, "objective": 0.1, "primitive_max": 0.0, "primitive_norm": 0.0, "rms": 0.05},
        "error: expected bfloat16",
    ),
    *((f"error.{key}", GONE, "error: expected") for key in GOOD["error"]),
    ("error.float64", 0.0, "error: expected"),
    ("error.float32", -1e-9, "error: expected no negative"),
    *(("error.float16", value, "error.float16") for value in ("0", True, None, [0.0], {})),
    ("error.bfloat16", 10**400, "error"),
]


@pytest.mark.parametrize(
    ("path", "value", "names"),
    WRONG,
    ids=[f"{path}={'gone' if value is GONE else ascii(value)[:20]}" for path, value, _ in WRONG],
)
def test_wrong_field(path: str, value: object, names: str) -> None:
    assert names in unreadable(changed(path, value))


def test_fields_of_the_other_kind() -> None:
    step = {key: value for key, value in GOOD.items() if key != "derivative"} | STEP
    errors = {"max": 0.25, "objective": 0.1, "primitive_max": 0.0, "primitive_norm": 0.0, "rms": 0.05}
    assert "derivative: not a field" in unreadable(
        json.dumps({**step, "derivative": "y", "method": "fewbit", "error": errors})
    )
    assert "error: expected max" in unreadable(json.dumps({**step, "method": "fewbit"}))
    assert "bits: not a field" in unreadable(json.dumps(step))
    assert from_json(json.dumps({**step, "method": "fewbit", "error": errors})).bits == 1


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_lacks(token: str) -> None:
    assert token in unreadable(json.dumps(GOOD).replace("1e-07", token))


def test_twins() -> None:
    assert "derivative: stands twice" in unreadable(json.dumps(GOOD)[:-1] + ', "derivative": "y"}')


def test_same_bytes_in_other_processes() -> None:
    """Whatever the hashes of Python's text are."""
    script = """if True:
        from fitact.codegen.generate import render
        from fitact.fitter import exact
        from fitact.fitter.activation import Activation
        for text in ("tanh(leaky_relu(x))", "selu", "atan(sinh(x))", "log(2*exp(x)+3)", "relu(tanh(x))**2"):
            fit = exact.fit(Activation.of(text), "some_exact")
            print(fit.to_json(), render(fit))
    """
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(found) == 1
    assert all(found)


# --------------------------------------------------------------------------------------------------- the command


def written() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*") if path.is_file())


def test_command(command) -> None:
    status, out, err = command("fit --fn tanh --method exact")
    assert (status, err) == (0, "")
    head, row, last = out.splitlines()
    assert re.split(r"\s{2,}", head.strip()) == ["bfloat16", "float16", "float32", "f'(x) as a function of y"]
    assert re.split(r"\s{2,}", row.strip()) == ["tanh_exact", "0.003875", "0.0004868", "8.839e-08", "1 - y**2"]
    assert last == "wrote generated/fits/tanh_exact.json"
    assert written() == ["generated/fits/tanh_exact.json"]
    shipped = (ROOT / "generated" / "fits" / "tanh_exact.json").read_bytes()
    assert Path("generated/fits/tanh_exact.json").read_bytes() == shipped
    assert command("codegen") == (0, "wrote generated/__init__.py\nwrote generated/tanh_exact.py\n", "")
    assert Path("generated/tanh_exact.py").read_bytes() == (ROOT / "generated" / "tanh_exact.py").read_bytes()
    assert command("codegen --check")[0] == 0
    assert command("fit --fn tanh --method exact")[0] == 0, "the same fit again"


MAKES = [
    ("--fn tanh --fn relu2 --method exact", ["generated/fits/relu2_exact.json", "generated/fits/tanh_exact.json"]),
    ("--fn tanh --method exact --name mine", ["generated/fits/mine.json"]),
    ("--fn tanh --method exact -o here.json", ["here.json"]),
    ("--fn 'asinh(x)' --method exact --name mine", ["generated/fits/mine.json"]),
    ("--fn leaky_relu --param negative_slope=0.2 --method exact --name leaky02", ["generated/fits/leaky02.json"]),
    ("--fn tanh --method exact --weight uniform", ["generated/fits/tanh_exact.json"]),
]


@pytest.mark.parametrize(("arguments", "files"), MAKES, ids=[arguments for arguments, _ in MAKES])
def test_command_makes(arguments: str, files: list[str], command) -> None:
    status, out, err = command(f"fit {arguments}")
    assert (status, err) == (0, "")
    assert written() == files
    assert sorted(out.splitlines()[-len(files) :]) == [f"wrote {file}" for file in files]
    for file in files:
        assert from_json(Path(file).read_text()).method == "exact"


COMMANDS = [
    *(
        (f"fit --fn tanh --method exact {option}", f"--method exact has no {option.split()[0]}: nothing is fitted")
        for option in (
            "--bits 3",
            "--domain -5 5",
            "--domain -10 10",
            "--weight normal",
            "--weight x**2",
            "--seed 7",
        )
    ),
    ("fit --fn tanh --method exact --bits 0", "--method exact has no --bits"),
    ("fit --fn tanh --method Exact", "--method"),
    ("fit --fn 'asinh(x)' --method exact", "--name is required for an expression"),
    ("fit --fn tanh --fn 'asinh(x)' --method exact", "--name is required for an expression"),
    ("fit --fn leaky_relu --param negative_slope=0.2 --method exact", "--name is required for --param"),
    ("fit --fn tanh --fn relu --method exact --name a", "for a single fit"),
    ("fit --fn tanh --fn relu --method exact -o a.json", "for a single fit"),
    *(
        (f"fit --fn tanh --method exact --name {name}", "--name: expected a Python identifier")
        for name in ("../a", "1a", "''", "class")
    ),
    ("fit --fn tanh --param alpha=1 --method exact --name a", "unknown parameter"),
    ("fit --fn gelu --method exact", "no closed form"),
    ("fit --fn tanh --fn gelu --method exact", "no closed form"),
    ("fit --fn 'sin(x)' --method exact --name a", "no inverse"),
    ("fit --fn 'exp(-exp(-x))' --method exact --name a", "rounds to 0"),
    ("fit --fn leaky_relu --param negative_slope=-0.1 --method exact --name a", "no function of the output"),
    ("fit --fn '1 + 1' --method exact --name a", "does not depend on x"),
]


@pytest.mark.parametrize(("line", "message"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_command_refuses(line: str, message: str, command) -> None:
    status, out, err = command(line)
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("fitact: ")
    assert err.count("\n") == 1
    assert written() == []


def test_command_replaces_with_force_only(command) -> None:
    assert command("fit --fn tanh --bits 1 --name mine")[0] == 0
    status, _, err = command("fit --fn tanh --method exact --name mine")
    assert status == 2
    assert "another fit of that name" in err
    assert command("fit --fn tanh --method exact --name mine --force")[0] == 0
    assert from_json(Path("generated/fits/mine.json").read_text()).method == "exact"


def test_show_of_both_kinds(command) -> None:
    folder = ROOT / "generated" / "fits"
    names = ("relu2_exact", "gelu_fewbit3", "tanh_exact", "gelu_fewbit1")
    status, out, err = command("show " + " ".join(shlex.quote(str(folder / f"{name}.json")) for name in names))
    assert (status, err) == (0, "")
    heads = [line for line in out.splitlines() if line.startswith(" ")]
    rows = [line.split()[0] for line in out.splitlines() if not line.startswith(" ")]
    assert len(heads) == 2
    assert "objective" in heads[0] and "bfloat16" in heads[1]
    assert rows == ["gelu_fewbit3", "gelu_fewbit1", "relu2_exact", "tanh_exact"]
    assert out.splitlines()[-1].endswith("1 - y**2")
    assert all(line == line.rstrip() for line in out.splitlines())


@pytest.mark.parametrize(
    "name", ["torch", "derivative", "torch_derivative", "register", "backward_tile", "Exact", "forward_tile"]
)
def test_names_that_modules_use(name: str, command) -> None:
    status, _, err = command(f"fit --fn relu2 --method exact --name {name}")
    assert status == 2
    assert f"generated modules use {name!r}" in err
    assert written() == []
    text = (ROOT / "generated" / "fits" / "relu2_exact.json").read_text().replace("relu2_exact", name)
    Path("own.json").write_text(text)
    status, _, err = command("codegen own.json")
    assert status == 2
    assert f"generated modules use {name!r}" in err


def test_plot(command) -> None:
    command("fit --fn tanh --method exact")
    command("fit --fn relu2 --method exact")
    command("fit --fn tanh --bits 1")
    assert command("plot") == (0, "wrote fits.png\n", "")
    first = Path("fits.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    command("plot")
    assert Path("fits.png").read_bytes() == first


# --------------------------------------------------------------------------------------------- values, gradients


def dense(dtype: torch.dtype, corners: tuple[float, ...] = ()) -> torch.Tensor:
    """All values of a half-precision dtype; else a sample, corners with their neighbours, and special values."""
    if dtype in HALVES:
        return patterns(dtype)
    kind = np.float32 if dtype == torch.float32 else np.float64
    tails = np.geomspace(1e-42, 1e30, 2000)
    at = np.array([0.0, *corners], dtype=kind)
    near = [at, np.nextafter(at, kind(np.inf)), np.nextafter(at, kind(-np.inf))]
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, np.finfo(kind).max, np.finfo(kind).min]
    parts = [np.linspace(-30, 30, 60_001), tails, -tails, *near, special]
    return torch.from_numpy(np.concatenate([np.asarray(part, dtype=kind) for part in parts]))


EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@each_output()
@EACH_DTYPE
def test_values_are_pytorch_s(one: Output, dtype: torch.dtype) -> None:
    x = dense(dtype, one.corners)
    y, _ = run(one.function, x)
    assert same(y, one.stock(x))
    with torch.no_grad():
        assert same(one.function(x), y)


@each_output()
@EACH_DTYPE
def test_gradient_is_dy_times_g(one: Output, dtype: torch.dtype) -> None:
    """Of the rounded y, in float64, up to roundings of float32 (of float64 for float64) and the last one."""
    x = dense(dtype, one.corners)
    dy = torch.randn(x.shape).to(dtype)
    y, dx = run(one.function, x, dy)
    assert dx.dtype == dtype
    slope = one.slope(y)
    expected = dy.double() * slope
    unit = 2.0**-52 if dtype == torch.float64 else UNIT
    # g may cancel, as 1 − y² does: its roundings are relative to 1
    allowed = rounding(dtype) * expected.abs() + 4 * unit * (dy.double().abs() * slope.abs().clamp(min=1))
    allowed += torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    known = expected.to(dtype).isfinite() & expected.isfinite()
    assert bool(((dx.double() - expected).abs() <= allowed)[known].all())
    assert same(dx[~known], expected.to(dtype)[~known])


@each_output()
@EACH_DTYPE
def test_gradient_is_pytorch_s_up_to_the_stated_error(one: Output, dtype: torch.dtype) -> None:
    """PyTorch's own gradient is taken in float64, at the same x."""
    x = dense(dtype, one.corners)
    y, dx = run(one.function, x)
    true = one.stock_gradient(x.double(), torch.ones(x.shape, dtype=torch.float64))
    known = x.isfinite() & y.isfinite() & true.to(dtype).isfinite()
    if one.plain not in LINEAR:
        corner = torch.tensor(one.corners, dtype=torch.float64)
        known &= ~torch.isin(x.double(), corner)
    scale = true.abs().clamp(min=1)
    # PyTorch's softplus is x beyond 20, where the slope is 1 − 2e-9
    unit = 2.0**-50 if dtype == torch.float64 and one.plain != "softplus" else 4 * UNIT
    # PyTorch's softsign rounds 1 + |x| to half precision too
    roundings = 3 if one.plain == "softsign" and dtype in HALVES else 1
    allowed = one.error(dtype) * roundings * 1.001 * scale + rounding(dtype) * dx.double().abs() + unit * scale
    assert bool(((dx.double() - true).abs() <= allowed)[known].all())


@pytest.mark.parametrize("name", LINEAR)
@EACH_DTYPE
def test_piecewise_linear_gradient_is_pytorch_s(name: str, dtype: torch.dtype) -> None:
    """Bit for bit, at the corners and next to them and at infinity too."""
    one = next(one for one in outputs() if one.plain == name)
    x = dense(dtype, one.corners)
    x = x[~x.isnan()]
    dy = torch.randn(x.shape).to(dtype)
    _, dx = run(one.function, x, dy)
    assert bool((dx == one.stock_gradient(x, dy)).all())


def test_relu2_gradient_is_the_input_twice() -> None:
    """√(x²) is x again in float32 and float64; in half precision it is off by the rounding of one square."""
    one = next(one for one in outputs() if one.plain == "relu2")
    for dtype in DTYPES:
        x = dense(dtype)
        x = x[x.isfinite()]
        y, dx = run(one.function, x)
        _, stock = run(one.stock, x)
        inside = y.isfinite() & ((y >= torch.finfo(dtype).smallest_normal) | (x <= 0))
        error = (dx.double() - stock.double()).abs()
        # half of y's relative rounding, and that of dx where the two are rounded apart
        allowed = 1.001 * rounding(dtype) / 2 * stock.double().abs()
        if dtype in HALVES:
            allowed += rounding(dtype) * dx.double().abs()
            assert bool((error <= allowed)[inside].all())
        else:
            assert bool((error == 0)[inside].all())


SPECIAL = {
    "celu": (1.0, 0.0),
    "elu": (1.0, 0.0),
    "exp": (float("inf"), 0.0),
    "hardtanh": (0.0, 0.0),
    "leaky_relu": (1.0, 0.01),
    "relu": (1.0, 0.0),
    "relu2": (float("inf"), 0.0),
    "relu6": (0.0, 0.0),
    "selu": (1.0507009873554805, 0.0),
    "sigmoid": (0.0, 0.0),
    "softplus": (1.0, 0.0),
    "softsign": (float("nan"), float("nan")),  # ∞/∞, as in PyTorch
    "tanh": (0.0, 0.0),
}


@each_output()
@EACH_DTYPE
def test_infinity(one: Output, dtype: torch.dtype) -> None:
    x = torch.tensor([float("inf"), -float("inf")], dtype=dtype)
    y, dx = run(one.function, x)
    assert same(y, one.stock(x))
    expected = torch.tensor(SPECIAL[one.plain], dtype=torch.float64)
    allowed = one.error(dtype) * 1.001 + (2**-50 if dtype == torch.float64 else 4 * UNIT) + rounding(dtype)
    torch.testing.assert_close(dx.double(), expected, rtol=allowed, atol=allowed, equal_nan=True)


@each_output()
@EACH_DTYPE
def test_nan(one: Output, dtype: torch.dtype) -> None:
    """The value stays NaN; the gradient is g(NaN): NaN, but where only comparisons choose a constant."""
    y, dx = run(one.function, torch.tensor([float("nan")], dtype=dtype))
    assert y.isnan().all()
    if one.plain in LINEAR:
        assert dx.isfinite().all()
        assert dx.item() == pytest.approx(0.01 if one.plain == "leaky_relu" else 0.0, rel=0.01)
    else:
        assert dx.isnan().all()


@each_output()
@EACH_DTYPE
def test_zero_of_either_sign(one: Output, dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0], dtype=dtype)
    y, dx = run(one.function, x)
    assert same(y, one.stock(x))
    expected = one.stock_gradient(x, torch.ones_like(x))
    if one.plain == "selu":
        torch.testing.assert_close(dx, expected, rtol=rounding(dtype) * 2.01, atol=0.0)
    else:
        assert bool((dx == expected).all())


# ----------------------------------------------------------------------------------------- formulas of one's own


def load(fit: ExactFit, folder: Path) -> ModuleType:
    path = folder / f"{fit.name}.py"
    path.write_text(render(fit))
    spec = importlib.util.spec_from_file_location(f"of_test_exact_{abs(hash(fit.derivative))}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATED = {
    "3*x - 2",
    "x**3",
    "x/sqrt(1+x**2)",
    "squareplus(x)",
    "asinh(x)",
    "1.7159*tanh(2*x/3)",
    "where(x<0,0.1*x-1,2*x+3)",
    "log(1+relu(x))",
    "1/(1+exp(-x))**2",
    "-elu(x)",
    "hardshrink(x)",
    "tanh(leaky_relu(x))",
}


@pytest.mark.parametrize(
    "text", [pytest.param(t, marks=[] if t in GENERATED else pytest.mark.full, id=t) for t, _ in DERIVED]
)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_generated_module(text: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The gradient that the module computes is f′ up to the stated error, wherever value and f′ are finite."""
    fit = derived(text)
    function = load(fit, tmp_path).some_exact
    corners = dict(DERIVED)[text]
    x = dense(dtype, corners)
    y, dx = run(function, x)
    leaf = x.double().requires_grad_()
    value = double(text, leaf)
    (true,) = torch.autograd.grad(value.sum(), leaf)
    known = x.isfinite() & y.isfinite() & true.isfinite() & true.to(dtype).isfinite()
    known &= value.isfinite()
    if dtype == torch.float32:  # whose stated error is that of a sample, without the neighbours of corners
        for corner in corners:
            known &= (x.double() - corner).abs() > 4 * UNIT * max(abs(corner), 1e-30)
    known &= x.double().abs() >= 2e-41  # float32 loses the subnormals below in any operation
    known &= ~torch.isin(x.double(), torch.tensor(corners, dtype=torch.float64))
    scale = true.abs().clamp(min=1)
    error = fit.error[str(dtype).removeprefix("torch.")]
    # a few dozen roundings of float32; a power is exp of a multiple of log, whose rounding counts as it is large
    roundings = 32 + 4 * y.double().abs().clamp(1e-300).log().abs()
    allowed = error * 1.01 * scale + rounding(dtype) * dx.double().abs() + roundings * UNIT * scale
    wrong = known & ~((dx.double() - true).abs() <= allowed)
    at = int(wrong.nonzero()[0]) if wrong.any() else 0
    assert not wrong.any(), f"{int(wrong.sum())} wrong, x = {x[at]}, {dx[at]} in place of {true[at]}"


def double(text: str, x: torch.Tensor) -> torch.Tensor:
    """Evaluate a formula with PyTorch's operators."""
    zero = x * 0
    space = {
        name: getattr(torch, name) for name in ("abs", "asinh", "atan", "exp", "sinh", "sqrt", "tanh", "sigmoid")
    }
    space |= {
        "x": x,
        "where": lambda c, a, b: torch.where(c, zero + a, zero + b),
        "elu": F.elu,
        "hardshrink": F.hardshrink,
        "hardsigmoid": F.hardsigmoid,
        "leaky_relu": F.leaky_relu,
        "log": torch.log,
        "logsigmoid": F.logsigmoid,
        "relu": F.relu,
        "softplus": F.softplus,
        "softshrink": F.softshrink,
        "softsign": F.softsign,
        "squareplus": lambda u: torch.where(u > 0, (u + (u * u + 4).sqrt()) / 2, 2 / ((u * u + 4).sqrt() - u)),
        "threshold": lambda u: F.threshold(u, 1.0, 0.0),
    }
    found: torch.Tensor = eval(text, space)
    return found


# -------------------------------------------------------------------------------------------------- what is kept

LAYOUTS = {
    "contiguous": lambda: torch.randn(3, 50, 70),
    "transposed": lambda: torch.randn(50, 70).t(),
    "channels_last": lambda: torch.randn(2, 5, 30, 40).to(memory_format=torch.channels_last),
    "permuted": lambda: torch.randn(4, 5, 6, 7).permute(2, 0, 3, 1),
    "size_one_dims": lambda: torch.randn(3, 1, 5, 1).transpose(0, 2),
    "expanded": lambda: torch.randn(30, 1).expand(30, 50),
    "sliced": lambda: torch.randn(100, 40)[::3, 1::2],
    "overlapping": lambda: torch.randn(100).as_strided((20, 20), (2, 1)),
    "empty": lambda: torch.randn(0, 3),
    "zero_dim": lambda: torch.randn(()),
    "many_chunks": lambda: torch.randn(8192 * 9 + 5),
}
DENSE = set(LAYOUTS) - {"expanded", "sliced", "overlapping"}


def kept(saved: Any) -> set[int]:
    return {identity for identity, storage in saved.storages.items() if storage.nbytes()}


def only_output(saved: Any, y: torch.Tensor) -> bool:
    """Whether the one storage kept is that of y, and of y alone."""
    whole = y.numel() * y.element_size()
    return saved.bytes == whole and kept(saved) == ({y.untyped_storage()._cdata} if y.numel() else set())


@pytest.mark.parametrize("layout", LAYOUTS)
@EACH_DTYPE
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout]().to(dtype)
    leaf = x.detach().requires_grad_()
    assert leaf.stride() == x.stride()
    with count_saved() as saved:
        y = tanh_exact(leaf)
    assert only_output(saved, y)
    stock = torch.tanh(x)
    assert y.shape == x.shape
    if layout in DENSE:
        assert same(y, stock)
        assert y.stride() == stock.stride()
    else:
        torch.testing.assert_close(y, stock)
    dy = torch.randn(x.shape).to(dtype)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    torch.testing.assert_close(dx.double(), dy.double() * TANH.slope(y), rtol=rounding(dtype) * 2, atol=1e-6)


@each_output()
def test_the_output_is_all_that_is_kept(one: Output) -> None:
    for shape in ((5, 7), (8193,), (), (0, 3)):
        x = torch.randn(shape, requires_grad=True)
        with count_saved() as saved:
            y = one.function(x)
        assert only_output(saved, y)


def test_the_next_layer_keeps_the_same_storage() -> None:
    model = nn.Sequential(nn.Linear(30, 50), fitact.activation("tanh", method="exact"), nn.Linear(50, 20))
    x = torch.randn(7, 30)
    with count_saved(model) as saved:
        model(x)
    assert sorted(storage.nbytes() for storage in saved.storages.values() if storage.nbytes()) == [840, 1400]


def test_nothing_is_kept_without_gradient() -> None:
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, count_saved() as saved:
            y = tanh_exact(x := torch.randn(100))
        assert same(y, torch.tanh(x))
        assert not y.requires_grad
        assert saved.bytes == 0
    with count_saved() as saved:
        y = tanh_exact(torch.randn(100))
    assert not y.requires_grad
    assert saved.bytes == 0


class Relu2(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x).square()


def mlp(activation: nn.Module) -> nn.Sequential:
    half = torch.bfloat16
    return nn.Sequential(nn.Linear(1024, 4096, dtype=half), activation, nn.Linear(4096, 1024, dtype=half))


@pytest.mark.parametrize(
    ("activation", "bytes_"),
    [
        (Relu2(), 150_994_944),
        *(
            (fitact.activation(name, method="exact"), 83_886_080)
            for name in ("relu2", "tanh", "softplus", "selu", "softsign")
        ),
    ],
    ids=["stock", "relu2", "tanh", "softplus", "selu", "softsign"],
)
def test_kept_by_the_mlp(activation: nn.Module, bytes_: int) -> None:
    """1024 → 4096 → 1024, input (2, 4096, 1024) in bfloat16."""
    with FakeTensorMode():
        model, x = mlp(copy.deepcopy(activation)), torch.randn(2, 4096, 1024, dtype=torch.bfloat16)
        with count_saved(model) as saved:
            model(x)
    assert saved.bytes == bytes_


@pytest.mark.full
def test_kept_by_the_real_mlp() -> None:
    model = mlp(fitact.activation("relu2", method="exact"))
    with count_saved(model) as saved:
        model(torch.randn(2, 4096, 1024, dtype=torch.bfloat16))
    assert saved.bytes == 83_886_080


@pytest.mark.parametrize("layout", sorted(DENSE - {"empty"}))
def test_a_change_of_the_output_is_noticed(layout: str) -> None:
    x = LAYOUTS[layout]().requires_grad_()
    y = tanh_exact(x)
    y = y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), x)


def test_a_change_by_the_next_layer_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(4, 5), fitact.activation("elu", method="exact"), nn.ReLU(inplace=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(3, 4)).sum().backward()


def test_the_input_may_change() -> None:
    x = torch.randn(100, requires_grad=True)
    h = x * 1
    y = tanh_exact(h)
    expected = TANH.slope(y).float()
    h.zero_()
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, expected)
    h = (x * 1).detach().requires_grad_()
    y = tanh_exact(h)
    with torch.no_grad():
        h.zero_()
    y.sum().backward()
    torch.testing.assert_close(h.grad, expected)


# ------------------------------------------------------------------------------------------------------ autocast


@each_output()
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast(one: Output, dtype: torch.dtype) -> None:
    """From float32: y is rounded to the autocast dtype; the gradient is float32, and not rounded on its way."""
    x = torch.randn(3000) * 2
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=dtype), count_saved() as saved:
        y = one.function(leaf)
    assert y.dtype == dtype
    assert same(y, one.stock(x).to(dtype))
    assert only_output(saved, y)
    dy = torch.randn(3000).to(dtype)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    expected = dy.double() * one.slope(y)
    assert dx.dtype == torch.float32
    torch.testing.assert_close(dx.double(), expected, rtol=1e-6, atol=1e-6)
    if one.plain not in LINEAR:
        assert not same(dx, expected.to(dtype).float())


@pytest.mark.parametrize("inner", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast_of_every_dtype(inner: torch.dtype, dtype: torch.dtype) -> None:
    """float64 stays, as in PyTorch; under no_grad the dtype is the same; without autocast, the input's."""
    x = torch.randn(50).to(inner)
    expected = inner if inner == torch.float64 else dtype
    with torch.autocast("cpu", dtype=dtype):
        y, dx = run(tanh_exact, x)
        with torch.no_grad():
            assert tanh_exact(x).dtype == expected
        with torch.autocast("cpu", enabled=False):
            assert tanh_exact(x).dtype == inner
    assert (y.dtype, dx.dtype) == (expected, inner)


@each_output()
def test_autocast_of_half_precision_is_pytorch_s(one: Output) -> None:
    """Also where PyTorch's own operator is on autocast's float32 list."""
    x = torch.randn(500).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = run(one.function, x)
    assert same(y, one.stock(x))


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "zero_dim", "sliced"])
def test_autocast_of_layouts(layout: str) -> None:
    x = LAYOUTS[layout]().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16), count_saved() as saved:
        y = tanh_exact(x)
    assert only_output(saved, y)
    assert same(y, torch.tanh(x).bfloat16())
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, TANH.slope(y).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["softplus", "tanh", "relu2"])
def test_autocast_shares_with_the_next_layer(name: str) -> None:
    model = nn.Sequential(nn.Linear(16, 64), fitact.activation(name, method="exact"), nn.Linear(64, 16))
    with torch.autocast("cpu", dtype=torch.bfloat16), count_saved(model) as saved:
        y = model(torch.randn(333, 16))
    sizes = [storage.nbytes() for storage in saved.storages.values()]
    assert sizes.count(333 * 64 * 2) == 1, "the output, once"
    assert max(sizes) == 333 * 64 * 2
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_autocast_with_a_float32_input_to_the_activation() -> None:
    """After a layer norm, which autocast leaves in float32."""
    norm, linear = nn.LayerNorm(64), nn.Linear(64, 16)
    x = torch.randn(333, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = norm(x)
        assert h.dtype == torch.float32
        h = h.detach().requires_grad_()
        with count_saved(linear) as saved:
            y = tanh_exact(h)
            linear(y)
    sizes = [storage.nbytes() for storage in saved.storages.values()]
    assert sizes.count(333 * 64 * 2) == 1
    assert y.untyped_storage()._cdata in saved.storages
    assert max(sizes) == 333 * 64 * 2


# ----------------------------------------------------------------------------------- the compiler and transforms


@each_output(SOME)
def test_compile_fullgraph(one: Output) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(one.function, fullgraph=True, backend="aot_eager")
    x = torch.randn(300, 50, requires_grad=True)
    with count_saved() as saved:
        y = compiled(x)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert same(y, one.stock(x))
    assert same(dx, run(one.function, x, dy)[1])
    assert only_output(saved, y)


@pytest.mark.full
def test_compile_with_the_default_backend() -> None:
    """Between two operations that the compiler would like to fuse: gradients as without it."""
    torch._dynamo.reset()

    def f(x: torch.Tensor) -> torch.Tensor:
        return tanh_exact(x * 2).sin() + 1

    x = torch.randn(64, 128, requires_grad=True)
    y = torch.compile(f, fullgraph=True)(x)
    torch.testing.assert_close(y, f(x))
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, torch.autograd.grad(f(x).sum(), x)[0])


def test_compile_dynamic_recompiles_once() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(tanh_exact, fullgraph=True, backend=counter)
    for n in (100, 8192, 9000, 20_001, 7):
        x = torch.randn(n, requires_grad=True)
        y = compiled(x)
        y.sum().backward()
        assert same(x.grad, run(tanh_exact, x)[1])
    assert counter.frame_count <= 2


@pytest.mark.parametrize("layout", ["transposed", "channels_last"])
def test_compile_other_layouts_with_dynamic_sizes(layout: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(tanh_exact, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (8, 9, 30):
        x = torch.randn(2, n, 4, 5)
        x = x.transpose(1, 2) if layout == "transposed" else x.to(memory_format=torch.channels_last)
        x.requires_grad_()
        y = compiled(x)
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        torch.testing.assert_close(y, torch.tanh(x))
        torch.testing.assert_close(dx, (dy * TANH.slope(y)).float())


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_compile_and_autocast(inside: bool, layout: str) -> None:
    torch._dynamo.reset()

    def casting(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return tanh_exact(x)

    compiled = torch.compile(casting if inside else tanh_exact, fullgraph=True, backend="aot_eager")
    x = LAYOUTS[layout]().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside), count_saved() as saved:
        y = compiled(x)
    assert same(y, torch.tanh(x).bfloat16())
    assert only_output(saved, y)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.dtype == torch.float32
    torch.testing.assert_close(dx, TANH.slope(y).float(), rtol=1e-6, atol=1e-6)


def test_compiled_change_in_place() -> None:
    """Autograd's error, as for PyTorch's own, or the right gradient: no wrong one."""
    torch._dynamo.reset()
    x = torch.randn(100, requires_grad=True)
    compiled = torch.compile(lambda t: tanh_exact(t).mul_(2), fullgraph=True, backend="aot_eager")
    try:
        compiled(x).sum().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    torch.testing.assert_close(x.grad, (2 * TANH.slope(torch.tanh(x))).float())


def test_torch_func() -> None:
    x = torch.randn(5, 70)
    slopes = run(tanh_exact, x)[1]
    grad = torch.func.grad(lambda t: tanh_exact(t).sum())
    vmap = torch.func.vmap
    assert same(grad(x), slopes)
    assert same(vmap(grad)(x), slopes)
    assert same(vmap(grad, in_dims=1)(x), slopes.t())
    assert same(vmap(vmap(grad))(x), slopes)
    assert same(vmap(tanh_exact)(x), torch.tanh(x))
    assert same(vmap(tanh_exact, in_dims=1, out_dims=1)(x), torch.tanh(x.t()).t())
    jacobian = torch.func.jacrev(tanh_exact)(x[0])
    assert bool((jacobian == torch.diag(slopes[0])).all())
    y, pullback = torch.func.vjp(tanh_exact, x)
    assert same(pullback(torch.ones_like(y))[0], slopes)


def test_vmap_of_many_sizes() -> None:
    for n in (0, 1, 8192, 8193):
        x = torch.randn(3, n)
        grad = torch.func.vmap(torch.func.grad(lambda t: (tanh_exact(t) ** 2).sum()))(x)
        torch.testing.assert_close(grad, (2 * torch.tanh(x) * (1 - torch.tanh(x) ** 2)), rtol=1e-5, atol=1e-6)
    assert torch.func.vmap(tanh_exact)(torch.randn(0, 7)).shape == (0, 7)


def test_vmap_under_autocast() -> None:
    x = torch.randn(4, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.func.vmap(tanh_exact)(x)
        slopes = torch.func.vmap(torch.func.grad(lambda t: tanh_exact(t).float().sum()))(x)
    assert same(y, torch.tanh(x).bfloat16())
    assert slopes.dtype == torch.float32
    torch.testing.assert_close(slopes, TANH.slope(y).float(), rtol=1e-6, atol=1e-6)


def test_per_sample_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 30), fitact.activation("softplus", method="exact"), nn.Linear(30, 1))
    parameters = dict(model.named_parameters())
    x = torch.randn(6, 4)

    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (sample,)).sum()

    each_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(6):
        alone = torch.func.grad(loss)(parameters, x[i])
        for name in parameters:
            torch.testing.assert_close(each_sample[name][i], alone[name])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant: bool) -> None:
    x = torch.randn(5000, requires_grad=True)
    checkpoint(lambda t: tanh_exact(t * 2).sum(), x, use_reentrant=reentrant).backward()
    assert same(x.grad, 2 * run(tanh_exact, 2 * x)[1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_under_autocast(reentrant: bool) -> None:
    x = torch.randn(5000, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = checkpoint(tanh_exact, x, use_reentrant=reentrant)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    torch.testing.assert_close(x.grad, TANH.slope(y).float(), rtol=1e-6, atol=1e-6)


def test_save_on_cpu() -> None:
    x = torch.randn(9000, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = tanh_exact(x)
    y.sum().backward()
    assert same(x.grad, run(tanh_exact, x)[1])


@pytest.mark.parametrize(
    "twice",
    [
        lambda x: torch.autograd.grad(tanh_exact(x).sum(), x, create_graph=True)[0].sum().backward(),
        lambda x: torch.autograd.grad(
            torch.autograd.grad(tanh_exact(x).pow(2).sum(), x, create_graph=True)[0].sum(), x
        ),
        lambda x: torch.func.grad(torch.func.grad(lambda t: tanh_exact(t).sum()))(x[0]),
        lambda x: torch.func.jacrev(torch.func.jacrev(tanh_exact))(x),
    ],
    ids=["backward", "grad", "func.grad", "jacrev"],
)
def test_double_backward_raises(twice: Callable) -> None:
    with pytest.raises(RuntimeError, match="tanh_exact: a second derivative was asked for"):
        twice(torch.randn(3, requires_grad=True))


def test_forward_mode_raises() -> None:
    x = torch.randn(3)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(tanh_exact, (x,), (x,))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (4, 2500)], ids=str)
@EACH_DTYPE
def test_opcheck(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, key = torch.randn(shape).to(dtype), TANH.module.KEY
    forward, backward = torch.ops.fitact.forward, torch.ops.fitact.backward
    for out in {dtype, torch.bfloat16} if dtype != torch.float64 else {dtype}:
        for order in {(), tuple(reversed(range(x.dim())))}:
            torch.library.opcheck(forward.default, (x, order, out, key))
        y, codes = forward(x, (), out, key)
        assert (y.dtype, y.shape, codes.numel()) == (out, x.shape, 0)
        torch.library.opcheck(backward.default, (torch.ones_like(y), y, codes, dtype, key))


def test_export() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return tanh_exact(x) + 1

    x = torch.randn(3, 4)
    assert same(torch.export.export(Model(), (x,)).module()(x), torch.tanh(x) + 1)


def test_dtypes_and_objects_refused() -> None:
    for wrong in (torch.arange(3), torch.ones(3, dtype=torch.complex64), torch.ones(3, dtype=torch.bool), 1.0):
        with pytest.raises(TypeError, match=r"tanh_exact: expected a tensor of float16.*, got "):
            tanh_exact(wrong)


@each_output()
def test_modules(one: Output) -> None:
    module = fitact.activation(one.plain, method="exact")
    assert type(module).__module__ == f"fitact.generated.{one.name}"
    x = torch.randn(50)
    for twin in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(twin) is type(module)
        assert same(twin(x), one.stock(x))
    assert not module.state_dict()
    assert list(module.parameters()) == []


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("gelu", {"method": "exact"}, "gelu_exact"),
        ("tanh", {"method": "exact", "bits": 3}, "tanh_exact3"),
        ("tanh", {"method": "other"}, "tanh_other3"),
        ("tanh_exact", {"method": "relumix"}, "tanh_exact_relumix3"),
    ],
)
def test_activations_that_are_not_there(name: str, options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UsageError, match=rf"{wanted}.*there are .*tanh_exact"):
        fitact.activation(name, **options)


def test_without_a_method_steps_are_meant_or_the_fit_of_that_name() -> None:
    assert type(fitact.activation("tanh")).__name__ == "TanhFewbit3"
    assert type(fitact.activation("tanh_exact")).__name__ == "TanhExact"


def test_trains_as_pytorch_s() -> None:
    """The same losses as with PyTorch's own, but for roundings."""

    def losses(activation: nn.Module) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 64), activation, nn.Linear(64, 1))
        x = torch.rand(256, 2) * 4 - 2
        target = (x[:, :1] * x[:, 1:]).sin()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(100):
            loss = F.mse_loss(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    ours, stock = losses(fitact.activation("elu", method="exact")), losses(nn.ELU())
    assert ours[-1] < ours[0] / 1.5
    np.testing.assert_allclose(ours, stock, rtol=1e-4)


def test_keys_differ() -> None:
    keys = sorted(one.module.KEY for one in outputs())
    assert all(a != b for a, b in pairwise(keys))
    assert all(registry.find(key).keeps_output and ops.find(key).bits == 0 for key in keys)


# --------------------------------------------------------------------------- the kernels, compiled ahead of time

FLOATS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
TARGETS = ["sm_90", pytest.param("sm_80", marks=pytest.mark.full), pytest.param("gfx942", marks=pytest.mark.full)]


def compiled(one: Output, pass_: str, dtype: str, output: str, target: str) -> Any:
    """Compile as the ops launch it; `output` is the dtype of y and dy, which autocast may make another."""
    triton = pytest.importorskip("triton", reason="Triton is for Linux only")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    targets = {
        "sm_80": GPUTarget("cuda", 80, 32),
        "sm_90": GPUTarget("cuda", 90, 32),
        "gfx942": GPUTarget("hip", "gfx942", 64),
    }
    signature = {
        "forward": {"x": f"*{dtype}", "y": f"*{output}", "n": "i64"},
        "backward": {"dy": f"*{output}", "y": f"*{output}", "dx": f"*{dtype}", "n": "i64"},
    }[pass_]
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    threads = registry.find(one.module.KEY).threads(
        *(torch.empty(0, dtype=FLOATS[kind]) for kind in (dtype, output))
    )
    return triton.compile(
        ASTSource(
            fn=getattr(one.module, f"{one.name}_{pass_}"), signature=signature, constexprs={}, attrs=aligned
        ),
        target=targets[target],
        options={"num_warps": threads // targets[target].warp_size, "enable_fp_fusion": True},
    )


@each_output({"relu2_exact", "tanh_exact"})
@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize(
    ("dtype", "output"),
    [
        ("bf16", "bf16"),
        pytest.param("fp16", "fp16", marks=pytest.mark.full),
        pytest.param("fp32", "fp32", marks=pytest.mark.full),
        ("fp32", "bf16"),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_compiled_ahead_of_time(
    one: Output, pass_: str, dtype: str, output: str, target: str, tmp_path: Path
) -> None:
    """No spills, no stack, no shared memory; whole rows are read and written in vectors of 16 bytes.

    Where autocast makes y another dtype than x, the vectors of one of them may be of 8.
    """
    made = compiled(one, pass_, dtype, output, target)
    mixed = dtype != output
    if target == "gfx942":
        code = made.asm["amdgcn"]
        for what in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
            assert re.findall(rf"\.{what}:\s+(\d+)", code) == ["0"], what
        assert "scratch_" not in code
        width = "dwordx[24]" if mixed else "dwordx4"
        assert re.search(rf"(?:buffer|global)_load_{width}\b", code)
        assert re.search(rf"(?:buffer|global)_store_{width}\b", code)
        return
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])

    def tool(name: str, *arguments: str) -> str:
        return subprocess.run([tools / name, *arguments], capture_output=True, text=True, check=True).stdout

    usage = re.search(
        r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", tool("cuobjdump", "-res-usage", str(cubin))
    )
    assert usage is not None
    registers, stack, shared, local = map(int, usage.groups())
    assert registers < 255
    assert (stack, shared, local) == (0, 0, 0)
    code = tool("nvdisasm", "-c", str(cubin))
    assert not re.search(r"\b(LDL|STL|SHFL|BAR)\b", code)
    width = "(?:64|128)" if mixed else "128"
    assert re.search(rf"\bLDG\.E\S*\.{width}\b", code)
    assert re.search(rf"\bSTG\.E\S*\.{width}\b", code)


@each_output({"relu2_exact", "tanh_exact"})
def test_kernels_load_nothing_but_their_arguments(one: Output) -> None:
    """Forward loads and stores once a row; backward loads twice and stores once; each has its masked twin."""
    for pass_, loads in (("forward", 1), ("backward", 2)):
        code = compiled(one, pass_, "fp32", "fp32", "sm_90").asm["ttir"]
        assert code.count("tt.load") == 2 * loads
        assert code.count("tt.store") == 2
