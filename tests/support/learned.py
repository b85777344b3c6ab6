"""Formulas with learned parameters, and each of them in PyTorch's operators."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch

from fitact.fitter.analysis.learned import Learned
from fitact.fitter.records.fit import LearnedFit
from tests.support.generated import load

Numbers = dict[str, tuple[float, bool]]


def recomputed(text: str, name: str, numbers: Numbers | None = None) -> LearnedFit:
    formula = Learned.of(text, numbers or {})
    return LearnedFit(name=name, method="learned_recompute", activation=formula, error={})


@dataclass(frozen=True)
class Case:
    """A fit, and the formula of x and of its numbers in PyTorch's operators, differentiable."""

    fit: LearnedFit
    baseline: Callable[..., torch.Tensor]

    @property
    def wide(self) -> bool:
        return any(number.channel for number in self.fit.activation.numbers)


def xielu(x: torch.Tensor, p: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """As transformers has it."""
    ap, an = torch.nn.functional.softplus(p), 0.5 + torch.nn.functional.softplus(n)
    eps = torch.tensor(-1e-6, dtype=x.dtype)
    return torch.where(x > 0, ap * x * x + 0.5 * x, (torch.expm1(torch.min(x, eps)) - x) * an + 0.5 * x)


def prelu(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, w * x)


def dyt(x: torch.Tensor, a: torch.Tensor, g: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return g * torch.tanh(a * x) + b


def own(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(x > b, torch.atan(a * x), a * (x - b) / (1 + torch.exp(-b * x)))


OWN = "where(x > b, atan(a*x), a*(x - b)/(1 + exp(-b*x)))"
CASES: dict[str, Case] = {
    "xielu": Case(recomputed("xielu", "own_xielu"), xielu),
    "prelu": Case(recomputed("prelu", "own_prelu"), prelu),
    "prelu_channel": Case(recomputed("prelu", "own_prelu_channel", {"weight": (0.25, True)}), prelu),
    "swish_beta": Case(recomputed("swish_beta", "own_swish"), lambda x, b: x * torch.sigmoid(b * x)),
    "dyt": Case(recomputed("dyt", "own_dyt"), dyt),
    "derf": Case(recomputed("derf", "own_derf"), lambda x, a, s, g, b: g * torch.erf(a * x + s) + b),
    "own": Case(recomputed(OWN, "own", {"a": (1.3, True), "b": (0.7, False)}), own),
    "line": Case(
        recomputed("a*x + b", "own_line", {"a": (2.0, True), "b": (1.0, True)}), lambda x, a, b: a * x + b
    ),
}


@cache
def learned_module(name: str) -> ModuleType:
    return load(CASES[name].fit)


def call(name: str, x: torch.Tensor, numbers: Sequence[torch.Tensor], dim: int = -1) -> torch.Tensor:
    function = getattr(learned_module(name), CASES[name].fit.name)
    return function(x, *numbers, dim) if CASES[name].wide else function(x, *numbers)


def numbers_of(case: Case, channels: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    numbers = [(number.start, channels if number.channel else 1) for number in case.fit.activation.numbers]
    draws = (start + 0.1 * torch.randn(size, generator=generator, dtype=dtype) for start, size in numbers)
    return [draw.requires_grad_() for draw in draws]


def shaped(numbers: Sequence[torch.Tensor], x: torch.Tensor, dim: int) -> list[torch.Tensor]:
    """Numbers of channels as they meet x along a dimension."""
    after = x.dim() - (dim % x.dim()) - 1 if x.dim() else 0
    return [number.reshape(-1, *(1,) * after) if number.numel() > 1 else number.reshape(()) for number in numbers]
