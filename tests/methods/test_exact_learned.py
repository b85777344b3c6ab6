"""`exact` for formulas with learned numbers: what is derived, what it is compared with, and what is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import mpmath
import pytest
import torch
from click.testing import CliRunner

from fitact.cli import cli
from fitact.errors import UsageError
from fitact.fitter.analysis.learned import Learned
from fitact.fitter.methods.table import again, make_learned
from fitact.fitter.records.learned import ExactLearnedFit
from fitact.fitter.records.reading import from_json
from tests.conftest import ROOT
from tests.support.generated import EACH_HALF, load, patterns

FULL = pytest.mark.full
# Each formula in mpmath, and the starts of its numbers.
FORMULAS = {
    "tanh(a*x)": (lambda x, a: mpmath.tanh(a * x), {"a": 1.0}),
    "sigmoid(x + b)": (lambda x, b: 1 / (1 + mpmath.exp(-x - b)), {"b": 0.0}),
    "sigmoid(a*x + b)": (lambda x, a, b: 1 / (1 + mpmath.exp(-a * x - b)), {"a": 1.0, "b": 0.5}),
    "relu(x + b)": (lambda x, b: max(x + b, mpmath.mpf(0)), {"b": 0.1}),
    "exp(x + b)": (lambda x, b: mpmath.exp(x + b), {"b": 0.0}),
    "c*exp(a*x) + b": (lambda x, a, b, c: c * mpmath.exp(a * x) + b, {"a": 0.5, "b": 0.3, "c": 2.0}),
    "softplus(a*(x + b))": (lambda x, a, b: mpmath.log1p(mpmath.exp(a * (x + b))), {"a": 1.0, "b": 0.2}),
    "softsign(a*x)": (lambda x, a: a * x / (1 + abs(a * x)), {"a": 0.7}),
    "a*x + b": (lambda x, a, b: a * x + b, {"a": 2.0, "b": -1.0}),
    "tanh(exp(s)*x)": (lambda x, s: mpmath.tanh(mpmath.exp(s) * x), {"s": 0.0}),
    "atan(a*x)": (lambda x, a: mpmath.atan(a * x), {"a": 1.5}),
}
QUICK = ("relu(x + b)", "a*x + b", "softsign(a*x)", "tanh(a*x)")
NAMES = [pytest.param(name, marks=[] if name in QUICK else FULL) for name in FORMULAS]


@cache
def made(text: str) -> ExactLearnedFit:
    starts = FORMULAS[text][1]
    fit = make_learned("exact", Learned.of(text, {name: (one, True) for name, one in starts.items()}), "own")
    assert isinstance(fit, ExactLearnedFit)
    return fit


@pytest.mark.parametrize("text", NAMES)
def test_derived(text: str) -> None:
    """The module's functions of y, in float64, are mpmath's derivatives in x, far from the starts too."""
    fit, formula = made(text), FORMULAS[text][0]
    module = load(fit)
    ours = (module._torch_derivative, *(getattr(module, f"_torch_by_{name}") for name in FORMULAS[text][1]))
    count, signs = len(FORMULAS[text][1]), (1, -1, 1)
    for factor in (1, -1, 3):
        starts = [
            factor * sign * (one or 0.4) for one, sign in zip(FORMULAS[text][1].values(), signs, strict=False)
        ]
        for x in (-3.0, -1.1, -0.2, 0.3, 0.9, 2.5):
            at = [mpmath.mpf(one) for one in (x, *starts)]
            with mpmath.workdps(40):
                y = formula(*at)
                true = [
                    mpmath.diff(formula, at, tuple(int(i == k) for i in range(count + 1)))
                    for k in range(count + 1)
                ]
            numbers = [torch.tensor(one, dtype=torch.float64) for one in (float(y), *starts)]
            for one, expected in zip(ours, true, strict=True):
                assert float(one(*numbers)) == pytest.approx(float(expected), rel=1e-8, abs=1e-8)


@EACH_HALF
@pytest.mark.parametrize("text", ["tanh(a*x)", pytest.param("softplus(a*(x + b))", marks=FULL)])
def test_the_stated_error(text: str, dtype: torch.dtype) -> None:
    """Of every x of half precision: numbers of channels give the derivative in them of each element."""
    fit = made(text)
    x = patterns(dtype)
    x = x[x.isfinite()].requires_grad_()
    numbers = [torch.full(x.shape, one, requires_grad=True) for one in FORMULAS[text][1].values()]
    y = load(fit).own(x, *numbers)
    found = torch.autograd.grad(y.sum(), [x, *numbers])
    leaves = [one.detach().double().requires_grad_() for one in (x, *numbers)]
    names = dict(zip(("x", *FORMULAS[text][1]), leaves, strict=True))
    space = {"tanh": torch.tanh, "softplus": torch.nn.functional.softplus}
    true = torch.autograd.grad(eval(text, space | names).sum(), leaves)
    name, rounding = str(dtype).removeprefix("torch."), torch.finfo(dtype).eps
    for k, (one, expected) in enumerate(zip(found, true, strict=True)):
        known = y.isfinite() & expected.isfinite()
        scale = expected.abs().clamp(min=1)
        stated = fit.error[f"{'learned' if k else 'derivative'}_{name}"]
        apart = ((one.double() - expected).abs() / scale)[known]
        assert float(apart.max()) <= 1.01 * stated + (1e-5 if k else rounding)


@pytest.mark.parametrize("text", ["relu(x + b)", "a*x + b"])
def test_a_record_is_read_and_made_again(text: str) -> None:
    fit = made(text)
    assert from_json(fit.to_json()) == fit
    assert again(from_json(fit.to_json())).to_json() == fit.to_json()


def test_the_document_states_the_errors() -> None:
    errors = (f"{made('tanh(a*x)').error[f'learned_{dtype}']:.2g}" for dtype in ("bfloat16", "float16"))
    text = " ".join((ROOT / "docs" / "learned.md").read_text("utf-8").split())
    assert "are at most {} in bfloat16 and {} in float16".format(*errors) in text


REFUSED = {
    "c*tanh(x)": (
        "in x would be divided by c, which training may take through 0; --method rebuild keeps x",
        {"c": 1.0},
    ),
    "c*relu(x)": ("in x would be divided by c, which training may take through 0", {"c": 1.0}),
    "x*sigmoid(b*x)": ("its derivatives are not functions of the output: x occurs more than once", {"b": 1.0}),
    "where(x > 0, x, a*x)": ("which branch of a where was taken cannot be told", {"a": 0.25}),
    "erf(a*x)": (r"erf\(x\) has no inverse in this language; --method rebuild keeps x", {"a": 1.0}),
    "(a*x)**3": (r"it has the power x\*\*3", {"a": 1.0}),
    "tanh(y*x)": ("learned number 'y': the output has that name; choose another one", {"y": 1.0}),
    "tanh(a*x)": ("its derivative in a is not a function of the output alone: at x = .*, a = 0", {"a": 0.0}),
    "tanh(x*a)": ("computed from the output in bfloat16, would be off by 1 of the larger of itself", {"a": 1e-3}),
}


@pytest.mark.parametrize("text", [pytest.param(one, marks=[FULL] * (one == "tanh(x*a)")) for one in REFUSED])
def test_refused(text: str) -> None:
    message, starts = REFUSED[text]
    with pytest.raises(UsageError, match=message) as caught:
        make_learned("exact", Learned.of(text, {name: (one, False) for name, one in starts.items()}), "own")
    assert "\n" not in str(caught.value)


def test_a_record_whose_gradients_are_of_other_numbers() -> None:
    text = made("relu(x + b)").to_json().replace('"b": "where', '"c": "where')
    with pytest.raises(UsageError, match="gradients: expected those in b, got 'c'"):
        from_json(text)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--learn", "b=0.1", "--method", "exact", "--name", "shifted"]
    done = CliRunner().invoke(cli, ["fit", "--fn", "relu(x + b)", *options], catch_exceptions=False)
    assert "0/0   where(y > 0, 1, 0); in b: where(y > 0, 1, 0)" in done.output
    for command in (["codegen"], ["plot"], ["show", "generated/fits/shifted.json"]):
        assert CliRunner().invoke(cli, command, catch_exceptions=False).exit_code == 0
    assert {path.name for path in Path("generated").iterdir()} == {"__init__.py", "fits", "shifted.py"}
    assert Path("shifted.png").exists()
