"""What tests of exact activations share: the shipped ones, and formulas of their own in mpmath and in PyTorch.

The formulas are texts written here, and are evaluated here: nothing of the language under test takes part.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import ModuleType
from typing import Any

import mpmath
import pytest
import torch

from .steps import STOCK

MP = mpmath.MPContext()
MP.dps = 200
_HUNDREDTH = MP.mpf("0.01")

SELU = "1.0507009873554804934193349852946"
SELU_ALPHA = "1.6732632423543772848170429916717"

# name → f in x, its derivative in y = f(x), the points where f has a corner
CLOSED: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "celu": ("where(x > 0, x, expm1(x))", "where(y > 0, 1, 1 + y)", (0.0,)),
    "elu": ("where(x > 0, x, expm1(x))", "where(y > 0, 1, 1 + y)", (0.0,)),
    "exp": ("exp(x)", "y", ()),
    "hardtanh": ("where(x > 1, 1, where(x < -1, -1, x))", "where(abs(y) < 1, 1, 0)", (-1.0, 1.0)),
    "leaky_relu": ("where(x > 0, x, 0.01*x)", "where(y > 0, 1, 0.01)", (0.0,)),
    "relu": ("where(x > 0, x, 0)", "where(y > 0, 1, 0)", (0.0,)),
    "relu2": ("where(x > 0, x, 0)**2", "2*sqrt(y)", (0.0,)),
    "relu6": ("where(x > 6, 6, where(x < 0, 0, x))", "where(y > 0, where(y < 6, 1, 0), 0)", (0.0, 6.0)),
    "selu": (
        f"{SELU}*where(x > 0, x, {SELU_ALPHA}*expm1(x))",
        f"where(y > 0, {SELU}, y + {SELU}*{SELU_ALPHA})",
        (0.0,),
    ),
    "sigmoid": ("1/(1 + exp(-x))", "y*(1 - y)", ()),
    "softplus": ("log(1 + exp(x))", "-expm1(-y)", ()),
    "softsign": ("x/(1 + abs(x))", "(1 - abs(y))**2", ()),
    "tanh": ("tanh(x)", "1 - y**2", ()),
}
# constant between corners, so that PyTorch's own gradient is the reference at every float
LINEAR = ("hardtanh", "leaky_relu", "relu", "relu6")

REAL: dict[str, Any] = {
    "where": lambda condition, a, b: a if condition else b,
    "abs": abs,
    "asinh": MP.asinh,
    "atan": MP.atan,
    "cos": MP.cos,
    "cosh": MP.cosh,
    "elu": lambda u, a=1: u if u > 0 else a * MP.expm1(u),
    "exp": MP.exp,
    "expm1": MP.expm1,
    "hardshrink": lambda u: u if abs(u) > MP.mpf("0.5") else MP.mpf(0),
    "hardsigmoid": lambda u: min(max(u / 6 + MP.mpf("0.5"), 0), 1),
    "hypot1": lambda u: MP.sqrt(1 + u * u),
    "isru": lambda u: u / MP.sqrt(1 + u * u),
    "leaky_relu": lambda u, a=_HUNDREDTH: u if u > 0 else a * u,
    "log": MP.log,
    "log1p": MP.log1p,
    "logsigmoid": lambda u: -MP.log1p(MP.exp(-u)),
    "relu": lambda u: max(u, MP.mpf(0)),
    "sigmoid": lambda u: 1 / (1 + MP.exp(-u)),
    "sign": MP.sign,
    "sinh": MP.sinh,
    "softplus": lambda u: MP.log1p(MP.exp(u)),
    "softshrink": lambda u: MP.sign(u) * max(abs(u) - MP.mpf("0.5"), 0),
    "softsign": lambda u: u / (1 + abs(u)),
    "sqrt": MP.sqrt,
    "squareplus": lambda u: (u + MP.sqrt(u * u + 4)) / 2,
    "tan": MP.tan,
    "tanh": MP.tanh,
    "threshold": lambda u: u if u > 1 else MP.mpf(0),
}
_NUMBER = re.compile(r"(?<![\w.])(\d+\.?\d*(?:e[+-]?\d+)?)")


def real(text: str, variable: str = "x") -> Callable[[Any], Any]:
    """Return a formula as a function of mpmath numbers, to 200 digits."""
    code = compile(_NUMBER.sub(r"number('\1')", text), text, "eval")
    return lambda at: MP.mpmathify(eval(code, {**REAL, "number": MP.mpf, variable: at}))


def _where(condition: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
    return torch.where(condition, *(torch.as_tensor(part, dtype=torch.float64) for part in (a, b)))


@dataclass(frozen=True)
class Output:
    """A shipped activation that keeps its output, its fit as plain JSON."""

    name: str
    fit: Any

    @property
    def plain(self) -> str:
        return self.fit["activation"]["name"]

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(f"fitact.generated.{self.name}")

    @property
    def function(self) -> Any:
        return getattr(self.module, self.name)

    @property
    def stock(self) -> Any:
        return STOCK[self.plain]

    @property
    def corners(self) -> tuple[float, ...]:
        return CLOSED[self.plain][2]

    def error(self, dtype: torch.dtype) -> float:
        """The stated error; float64 has none, and the rounding of float32 is far above its own."""
        return 0.0 if dtype == torch.float64 else self.fit["error"][str(dtype).removeprefix("torch.")]

    def slope(self, y: torch.Tensor) -> torch.Tensor:
        """g(y) in float64, from the closed form written here."""
        space = {"where": _where, "expm1": torch.expm1, "sqrt": torch.sqrt, "y": y.detach().double()}
        found: torch.Tensor = eval(CLOSED[self.plain][1], space)
        return found

    def stock_gradient(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """PyTorch's own, by autograd."""
        leaf = x.detach().clone().requires_grad_()
        (dx,) = torch.autograd.grad(self.stock(leaf), leaf, dy)
        return dx


@cache
def outputs() -> list[Output]:
    """The shipped exact activations."""
    folder = files("fitact.generated") / "fits"
    fits = sorted((path.name, json.loads(path.read_text())) for path in folder.iterdir())
    return [Output(file.removesuffix(".json"), fit) for file, fit in fits if fit["method"] == "exact"]


# A step, a square root, a branch, a product, a function of its own.
SOME = {"relu_exact", "relu2_exact", "selu_exact", "tanh_exact", "softplus_exact"}


def each_output(only: set[str] | None = None) -> pytest.MarkDecorator:
    """Parametrise `one` by the shipped activations; those not in `only` run in the full product alone."""
    return pytest.mark.parametrize(
        "one",
        [
            pytest.param(one, id=one.name, marks=[] if only is None or one.name in only else pytest.mark.full)
            for one in outputs()
        ],
    )
