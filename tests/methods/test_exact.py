"""Activations that keep their output: the derivation, the record, the command, the errors of gradients.

Every oracle is independent: formulas in mpmath and closed forms written in `outputs`, PyTorch's own autograd.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fitact.codegen.generate import render
from fitact.errors import FitWarning, UsageError
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.methods import exact
from fitact.fitter.records.fit import ExactFit
from fitact.fitter.records.reading import from_json
from tests.conftest import ROOT
from tests.support.generated import DTYPES, EACH_DTYPE, HALVES, load, patterns, run, same
from tests.support.outputs import CLOSED, LINEAR, MP, Output, each_output, outputs, points, real
from tests.support.refusals import GONE, changed, refused, written

UNIT = 2.0**-24  # the rounding of float32


def rounding(dtype: torch.dtype) -> float:
    """Half a unit in the last place, relative."""
    return torch.finfo(dtype).eps / 2


@cache
def derived(text: str) -> ExactFit:
    """Derive a formula and its errors; whether floating point suffices for it is not the question here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FitWarning)
        return exact.fit(Activation.of(text), "some_exact")


# ------------------------------------------------------------------------------------------------ the derivation


def compare(value: Callable, derivative: Callable, points: list[float], tolerance: str = "1e-50") -> int:
    """Compare derivative(f(x)) with f′(x), by differences, where f is real; return at how many points."""
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
        found = derivative(y)
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
        formula, exact_formula = real(one.fit["derivative"], "y"), real(closed, "y")
        for point in points:
            y = real(value)(MP.mpf(point))
            assert abs(formula(y) - exact_formula(y)) < 1e-15
    else:
        assert compare(real(value), real(one.fit["derivative"], "y"), points) > 8
    assert compare(real(value), real(closed, "y"), points) > 8, "of the oracle itself"


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
    ("leaky_relu(x, -0.1)", "not a function of the output"),
    ("where(x>0, x, -0.5*x)", "not a function of the output"),
    ("where(x>0, x-3, 2*x)", "not a function of the output"),
    ("where(x>0, 2*x - 0.25, x)", "not a function of the output"),
    ("where(x<0, 3*x + 1, x)", "not a function of the output"),
    ("threshold(x, 1, 5)", "not a function of the output"),
    ("threshold(x, -1, 0)", "not a function of the output"),
    ("elu(x, -1)", "not a function of the output"),
    ("where(x > 0, tanh(x), sinh(x) + 0.5)", "not a function of the output"),
]


@pytest.mark.parametrize(("text", "reason"), REFUSED, ids=[text for text, _ in REFUSED])
def test_refused(text: str, reason: str) -> None:
    message = refused(derived, text)
    assert len(message) < 300
    assert reason in message
    assert message.startswith("activation ")


def test_a_jump_between_equal_derivatives_is_no_obstacle() -> None:
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
    assert refused(derived, text)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # see the test above
@pytest.mark.parametrize(
    ("first", "count"),
    [
        (0, 12),
        pytest.param(12, 28, marks=pytest.mark.full),
        *(pytest.param(first, 200, marks=[pytest.mark.full, pytest.mark.long]) for first in (1000, 1200)),
    ],
)
def test_random_chains(first: int, count: int) -> None:
    """Whatever is not refused agrees with f′ at random points; the errors of the first are stated, too."""
    made = 0
    for seed in range(first, first + count):
        chance = random.Random(seed)
        text = chain(chance)
        try:
            formula = derived(text).derivative if first < 100 else exact.derived(Activation.of(text))
        except UsageError as error:
            assert "\n" not in str(error), text
            continue
        points = [chance.uniform(-3, 3) for _ in range(8)]
        try:
            made += bool(compare(real(text), real(formula, "y"), points, "1e-25"))
        except AssertionError as error:
            raise AssertionError(f"{text}: {formula}: {error}") from None
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
    "squareplus": (
        lambda x: np.where(x > 0, (x + np.hypot(x, 2)) / 2, 2 / (np.hypot(x, 2) - x)),
        lambda x: (1 + x / np.hypot(x, 2)) / 2,
    ),
    "tanh": (np.tanh, lambda x: 1 / np.cosh(np.clip(x, -300, 300)) ** 2),
}


def measured(one: Output, x: np.ndarray, dtype: torch.dtype) -> float:
    """Return the largest error that the rounding of y makes at the points."""
    value, derivative = STABLE[one.plain]
    x = x[np.isfinite(x) & ~np.isin(x, one.corners)].astype(np.float64)
    with np.errstate(all="ignore"):
        true = derivative(x)
        y = nearest(value(x), dtype)
        found = one.derivative(torch.from_numpy(y)).numpy().astype(np.float32)
        valid = np.isfinite(y) & np.isfinite(true)
        error = np.abs(found[valid] - true[valid]) / np.maximum(1, np.abs(true[valid]))
    return float(error.max())


@each_output()
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_stated_error_of_half_precision(one: Output, dtype: torch.dtype) -> None:
    """Over every finite value, up to the roundings of float32 in the formula, which are stated with it."""
    x = patterns(dtype).double().numpy()
    assert one.error(dtype) == pytest.approx(measured(one, x, dtype), rel=6e-4, abs=1e-9)


@each_output()
def test_stated_error_of_float32(one: Output) -> None:
    """Of another sample, up to a tenth, as both are maxima of many roundings, and two roundings in the formula."""
    chance = np.random.default_rng(1)
    x = np.concatenate([chance.uniform(-20, 20, 300_000), chance.uniform(-1, 1, 100_000)]).astype(np.float32)
    found = measured(one, x, torch.float32)
    assert 0.9 * found <= one.error(torch.float32) <= 1.1 * found + 2 * 2.0**-24


@pytest.mark.parametrize("point", [-2.7, 0.0123, 0.75, 3.3])
@each_output()
def test_stable_formulas(one: Output, point: float) -> None:
    """The float64 formulas of these tests against mpmath."""
    value, derivative = STABLE[one.plain]
    f = real(CLOSED[one.plain][0])
    assert abs(value(np.float64(point)) - float(f(MP.mpf(point)))) < 1e-15
    assert abs(derivative(np.float64(point)) - float(MP.diff(f, MP.mpf(point)))) < 1e-15


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
    assert again.formula == fit.formula
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
    ids=[f"{path}={value!a:.20}" for path, value, _ in WRONG],
)
def test_wrong_field(path: str, value: object, names: str) -> None:
    assert names in refused(from_json, changed(GOOD, path, value))


def test_fields_of_the_other_kind() -> None:
    step = {key: value for key, value in GOOD.items() if key != "derivative"} | STEP
    errors = {"max": 0.25, "objective": 0.1, "primitive_max": 0.0, "primitive_norm": 0.0, "rms": 0.05}
    assert "derivative: not a field" in refused(
        from_json, json.dumps({**step, "derivative": "y", "method": "fewbit", "error": errors})
    )
    assert "error: expected max" in refused(from_json, json.dumps({**step, "method": "fewbit"}))
    assert "bits: not a field" in refused(from_json, json.dumps(step))
    assert from_json(json.dumps({**step, "method": "fewbit", "error": errors})).bits == 1


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_lacks(token: str) -> None:
    assert token in refused(from_json, json.dumps(GOOD).replace("1e-07", token))


def test_twins() -> None:
    assert "derivative: appears twice" in refused(from_json, json.dumps(GOOD)[:-1] + ', "derivative": "y"}')


def test_same_bytes_in_other_processes() -> None:
    """Whatever the hashes of Python's text are."""
    script = """if True:
        from fitact.codegen.generate import render
        from fitact.fitter.methods import exact
        from fitact.fitter.analysis.activation import Activation
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
    ("fit --fn leaky_relu --param negative_slope=-0.1 --method exact --name a", "not a function of the output"),
    ("fit --fn '1 + 1' --method exact --name a", "does not depend on x"),
]


@pytest.mark.parametrize(("line", "message"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_command_refuses(line: str, message: str, refuses) -> None:
    assert message in refuses(line)


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


@each_output()
@EACH_DTYPE
def test_gradient_is_pytorch_s_up_to_the_stated_error(one: Output, dtype: torch.dtype) -> None:
    """PyTorch's own gradient is taken in float64, at the same x."""
    x = one.numbers(dtype)
    y, dx = run(one.function, x)
    true = one.stock_gradient(x.double(), torch.ones(x.shape, dtype=torch.float64))
    known = x.isfinite() & y.isfinite() & true.to(dtype).isfinite()
    if one.plain not in LINEAR:
        corner = torch.tensor(one.corners, dtype=torch.float64)
        known &= ~torch.isin(x.double(), corner)
    scale = true.abs().clamp(min=1)
    # PyTorch's softplus is x beyond 20, where the derivative is 1 − 2e-9
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
    x = one.numbers(dtype)
    x = x[~x.isnan()]
    dy = torch.randn(x.shape).to(dtype)
    _, dx = run(one.function, x, dy)
    assert bool((dx == one.stock_gradient(x, dy)).all())


def test_relu2_gradient_is_the_input_twice() -> None:
    """√(x²) is x again in float32 and float64; in half precision it is off by the rounding of one square."""
    one = next(one for one in outputs() if one.plain == "relu2")
    for dtype in DTYPES:
        x = one.numbers(dtype)
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
    "squareplus": (1.0, 0.0),
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


# --------------------------------------------------------------------------------------------- formulas of users


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
def test_generated_module(text: str, dtype: torch.dtype) -> None:
    """The gradient that the module computes is f′ up to the stated error, wherever value and f′ are finite."""
    fit = derived(text)
    function = load(fit).some_exact
    corners = dict(DERIVED)[text]
    x = patterns(dtype) if dtype in HALVES else points(dtype, corners)
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
