"""What tests of exact activations share: the shipped ones, and formulas of their own in PyTorch."""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from tests.support.generated import Generated, each_of, fits, half_ulp, same
from tests.support.steps import PIECEWISE_LINEAR

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
    "squareplus": ("(x + sqrt(x*x + 4))/2", "1/(1 + y**-2)", ()),
    "tanh": ("tanh(x)", "1 - y**2", ()),
}


def _where(condition: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
    return torch.where(condition, *(torch.as_tensor(part, dtype=torch.float64) for part in (a, b)))


@dataclass(frozen=True)
class Output(Generated):
    """An activation that saves its output alone; `closed` is f′ as a function of y, for one's own formula."""

    closed: str = ""

    saves_output = True

    @property
    def corners(self) -> tuple[float, ...]:
        return CLOSED[self.plain][2]

    def error(self, dtype: torch.dtype) -> float:
        """The stated error; float64 has none, and the rounding of float32 is far above its own."""
        return 0.0 if dtype == torch.float64 else self.fit["error"][str(dtype).removeprefix("torch.")]

    def derivative(self, y: torch.Tensor) -> torch.Tensor:
        space = {"where": _where, "expm1": torch.expm1, "sqrt": torch.sqrt, "cosh": torch.cosh}
        actual: torch.Tensor = eval(self.closed or CLOSED[self.plain][1], space | {"y": y.detach().double()})
        return actual

    def check_gradient(self, x: torch.Tensor, y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor) -> None:
        """dy · g(y) up to roundings; where g is constant between corners, PyTorch's own gradient bit for bit."""
        derivative = self.derivative(y)
        expected = dy.double() * derivative
        unit = 2.0**-52 if y.dtype == torch.float64 else 2.0**-24
        # g may cancel, as 1 − y² does: its roundings are relative to 1
        allowed = 4 * unit * (dy.double().abs() * derivative.abs().clamp(min=1))
        allowed += half_ulp(expected, dx.dtype)
        known = expected.to(dx.dtype).isfinite() & expected.isfinite()
        assert bool(((dx.double() - expected).abs() <= allowed)[known].all())
        assert same(dx[~known], expected.to(dx.dtype)[~known])
        if self.own is None and self.plain in PIECEWISE_LINEAR and x.dtype == y.dtype:
            assert bool((dx == self.baseline_gradient(x, dy))[~x.isnan()].all())


@cache
def outputs() -> list[Output]:
    return [Output(name, fit) for name, fit in fits().items() if fit["method"] == "output"]


each_output = partial(each_of, outputs)
