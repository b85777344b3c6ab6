"""What must hold of every case: each check returns quietly, or fails with whatever was raised."""

import contextlib
import io
import random
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import sympy
import torch
from numpy.typing import NDArray

from fitact.base import FitWarning, UsageError
from fitact.cli import main, tables
from fitact.codegen.generate import render
from fitact.fitter.analysis import Activation, Gate
from fitact.fitter.expr import value
from fitact.fitter.expr.atoms import Where, sign
from fitact.fitter.methods import make
from fitact.fitter.numerics import Weight
from fitact.fitter.records import AnyFit, StepFit, from_json
from tests.support.generated import load
from tests.support.values import LOST, NEAR, UNIT
from tests.support.values import PROMISED as ROUNDINGS

Array = NDArray[np.float64]

LONGEST = 800  # characters of a message
AT = np.array([0.0, 1.0, -1.0, 1e4, -1e4, np.inf, -np.inf, np.nan])
DERIVATIVE_ERROR = 1e-7  # and the derivative in float64, relative to the larger of it and 1
TINY = {torch.float32: 1e-36, torch.float64: 1e-280}
LARGEST = 1.3e38
HUGE, SMALL = 1e20, 1e-18  # a value beyond comes out infinite, one below 0, if parts of it are beyond float32
DIGITS = 25


def answered(read: Callable[[], Any]) -> Any:
    """Return what is read, or None if it is refused in one line."""
    try:
        return read()
    except UsageError as error:
        message = str(error)
    assert message.isprintable(), f"not one line: {message!r}"
    assert 10 < len(message) < LONGEST, message


def check_text(text: str) -> Activation | None:
    """Check that a text is refused in one line, or read and evaluated in the right shape; return what was read."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answered(lambda: Weight(text))
        activation: Activation | None = answered(lambda: Activation.of(text))
        if activation is not None:
            for values in (activation.value, activation.derivative, activation.second_derivative):
                for at in (AT, AT[0], AT.reshape(2, 2, 2)):
                    actual = values(at)
                    assert actual.dtype == np.float64 and actual.shape == at.shape
    return activation


def check_formula(text: str) -> None:
    """Check that a formula is fitted, shown, written, read and generated, with the values and gradients stated."""
    activation = answered(lambda: Activation.of(text))
    if activation is None:
        return
    shown = answered(lambda: tables.activation(activation))
    assert all(line.isprintable() for line in shown or ())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FitWarning)
        fit = answered(lambda: make("fewbit", activation, "a", bits=2))
    if fit is not None:
        again = check_fit(fit)
        warned = any("beyond the domain" not in str(each.message) for each in caught)
        check_values(again, load(fit), reported=warned)


def check_gate(text: str) -> None:
    gate = answered(lambda: Gate.of(text))
    if gate is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FitWarning)  # of a factor on which floating point fails
            fit = make("gate_recompute", gate, "a")
        check_fit(fit)


def check_fit(fit: AnyFit) -> AnyFit:
    """Check that a fit that was made can be written, read and generated; return what was read."""
    written = fit.to_json()
    again = from_json(written)
    assert again.to_json() == written
    compile(render(again), "generated", "exec")
    return again


def check_json(text: str) -> None:
    """Check that a fit file is refused in one line, or read, written again and generated."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = answered(lambda: from_json(text))
        if fit is not None:
            again = fit.to_json()
            assert from_json(again).to_json() == again
            assert not isinstance(fit, StepFit) or np.isfinite(fit(AT)).all()
            answered(lambda: render(fit))


def check_command(words: list[str]) -> None:
    """Check that a command in an empty folder ends with status 0, or with one line, and leaves nothing then."""
    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        quiet = mock.patch("fitact.cli.options.EVERY", 3600)  # no line that says how long it takes by now
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), quiet:
            status = main(words)
        left = [path for path in Path().rglob("*") if path.is_file()]
    lines = err.getvalue().splitlines()
    assert status in (0, 1, 2), status
    assert all(line.startswith("fitact: ") and len(line) < LONGEST for line in lines), lines
    if status:
        assert (len(lines), out.getvalue(), left) == (1, "", []), (lines, out.getvalue(), left)


def points(count: int, seed: int = 0) -> Array:
    chance = random.Random(seed)
    near = [chance.gauss(0, 3) for _ in range(count * 7 // 10)]
    far = [chance.choice((-1, 1)) * 10.0 ** chance.uniform(-6, 6) for _ in range(count * 3 // 10)]
    return np.array([*near, *far]).astype(np.float32).astype(np.float64)


def check_values(fit: StepFit, module: Any, *, reported: bool, count: int = 1000) -> None:
    """Compare a module's value, unless a warning reported it, and its gradient's error with many digits."""
    activation, at = fit.activation, points(count)
    formulas = (activation.typed, activation.derivative_formula)
    true, slope = (np.array([_exact(formula, float(point)) for point in at]) for formula in formulas)
    known = np.isfinite(true) & np.isfinite(slope) & (np.abs(true) < LARGEST) & (np.abs(slope) < LARGEST)
    low, high = fit.domain
    inner = known & (at > low) & (at <= high)
    if reported:  # then the derivative itself may have another value in float64, such as sign(x**-1000)
        with np.errstate(invalid="ignore"):  # both may be infinite
            inner &= np.abs(activation.derivative(at) - slope) <= DERIVATIVE_ERROR * np.maximum(np.abs(slope), 1)
    for dtype in (torch.float32, torch.float64):
        x = torch.from_numpy(at).to(dtype).requires_grad_()
        y = module.a(x)
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
        step = fit(at).astype(np.float32).astype(np.float64)
        np.testing.assert_array_equal(gradient.double().numpy(), step)
        error, most = np.abs(step - slope), fit.error["max"]
        for i in np.flatnonzero(inner & ~(error <= most * (1 + 1e-6) + 1e-9)):
            decided = not _undecided(activation.typed, at[i], UNIT[dtype])
            assert not decided, f"the derivative is off by {error[i]} at x = {at[i]!r}, stated {most}"
        if reported:
            continue
        actual = y.detach().double().numpy()
        with np.errstate(all="ignore"):
            scale = ROUNDINGS * UNIT[dtype] * (np.abs(true) + np.abs(at * slope))
            off = np.abs(actual - true)
        # `float_check` tries float32; in float64 the roundings fall otherwise
        lost = LOST if dtype == torch.float32 else 8 * LOST * UNIT[torch.float64] / UNIT[torch.float32]
        beyond = np.isinf(actual) & (np.sign(actual) == np.sign(true)) & (np.abs(true) > HUGE)
        below = (actual == 0) & (np.abs(true) < SMALL)
        wrong = known & ~beyond & ~below & ~(off <= np.maximum(scale, lost * np.abs(true)) + TINY[dtype])
        for i in np.flatnonzero(wrong):
            if _undecided(activation.typed, at[i], UNIT[dtype]):
                continue
            sides = [_exact(activation.typed, at[i] + d) for d in np.linspace(-NEAR, NEAR, 9)]
            near_root = min(sides) * max(sides) <= 0 or max(map(abs, sides)) > 10 * min(map(abs, sides))
            parts = [_exact(node, at[i]) for node in sympy.preorder_traversal(activation.typed)]
            largest = max(abs(size) for size in [*sides, *parts] if np.isfinite(size))
            assert near_root and off[i] <= ROUNDINGS * UNIT[dtype] * largest * 4, (
                f"in {dtype} the value is {actual[i]!r} at x = {at[i]!r} in place of {true[i]!r}"
            )


def _undecided(formula: Any, at: float, unit: float) -> bool:
    """Whether roundings of its terms decide a condition of the formula, or a sign."""
    for node in formula.atoms(Where, sign):
        terms = [abs(_exact(term, at)) for term in sympy.Add.make_args(node.args[0])]
        if not abs(_exact(node.args[0], at)) > ROUNDINGS * unit * max(terms):
            return True
    return False


def _exact(formula: Any, at: float) -> float:
    actual = value(formula, at, DIGITS)
    return float(actual) if actual.is_finite() else float("nan")
