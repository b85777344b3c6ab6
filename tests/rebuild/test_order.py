"""What is computed again reads its input several times, and others read it too: gradients are still stock's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fitact
from fitact.runtime.models.prepare import imported
from fitact.runtime.rebuild import functions
from fitact.runtime.rebuild.derivatives import READS
from fitact.runtime.rebuild.modules import KINDS, Rebuilding

from .test_rebuild import Own, kept

WIDTH = 48
NAMES = ("gelu_new", "quick_gelu", "gelu_fast", "gelu_accurate", "relu2")


class Layer(nn.Module):
    """A LayerNorm of its own, of several operations."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(size)), nn.Parameter(torch.rand(size))
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        z = x - x.mean(-1, keepdim=True)
        return self.weight * (z / (x.var(-1, keepdim=True, unbiased=False) + self.eps).sqrt()) + self.bias


def named(kind: str, name: str, *given: int) -> nn.Module:
    """Return an activation or a norm of transformers."""
    imported("transformers")
    if kind == "activations":
        return imported("transformers.activations").ACT2FN[name]
    made: nn.Module = getattr(imported(f"transformers.models.{kind}.modeling_{kind}"), name)(*given)
    return made


MAKE: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(named, "activations", name) for name in NAMES},
    "own": Own,
    "llama": lambda: named("llama", "LlamaRMSNorm", WIDTH),
    "t5": lambda: named("t5", "T5LayerNorm", WIDTH),
    "gemma": lambda: named("gemma", "GemmaRMSNorm", WIDTH),
    "rms": lambda: nn.RMSNorm(WIDTH),
    "layer": lambda: Layer(WIDTH),
}
AROUND: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "alone": lambda m, x: m.fc(m.act(x)),
    "residual": lambda m, x: x + m.fc(m.act(x)),
    "residual after": lambda m, x: m.fc(m.act(x)) + x,
    "before": lambda m, x: x.exp() * 1e-3 + (x * x).sin() + m.fc(m.act(x)),
    "after": lambda m, x: m.fc(m.act(x)) * x.sin() + x * 0.37,
    "both": lambda m, x: x.cos() * m.fc(m.act(x)) + (x * 1.3).tanh() + x,
    "twice": lambda m, x: m.fc(m.act(x)) + x.sin() * m.fc(m.act(x)),
}
SETTINGS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "autocast": (torch.float32, torch.bfloat16),
}


class Around(nn.Module):
    def __init__(self, act: nn.Module, around: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.act, self.fc, self.around = nn.Linear(WIDTH, WIDTH), act, nn.Linear(WIDTH, WIDTH), around

    def forward(self, x: Tensor) -> Tensor:
        return self.around(self, self.first(x))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # PyTorch's own
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MAKE)
def test_order_of_sums(name: str, setting: str) -> None:
    dtype, autocast = SETTINGS[setting]
    torch.manual_seed(0)
    for how, around in AROUND.items():
        stock = Around(copy.deepcopy(MAKE[name]()), around).to(dtype)
        rebuilt = copy.deepcopy(stock)
        fitact.rebuild(rebuilt)
        assert isinstance(rebuilt.act, Rebuilding) and rebuilt.act.fitact_kind in KINDS
        for rows in (1, 7, 64):
            x = torch.randn(rows, WIDTH).to(dtype)
            found = []
            for model in (stock, rebuilt):
                given = x.clone().requires_grad_()
                with torch.autocast("cpu", autocast) if autocast else nullcontext():
                    y = model(given)
                (y.float() * torch.linspace(-1, 2, y.numel()).view(y.shape)).square().sum().backward()
                found.append([y.detach(), given.grad, *(one.grad for one in model.parameters())])
                model.zero_grad()
            for a, b in zip(*found, strict=True):
                assert a is not None
                assert torch.equal(a, b), (how, rows)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "t5", "gemma", "layer"])
def test_a_norm_keeps_its_input(name: str, dtype: torch.dtype, trained: bool) -> None:
    """And nothing else, whether its parameters are trained or not."""
    model = nn.Sequential(MAKE[name](), nn.Linear(WIDTH, WIDTH)).to(dtype)
    model[0].requires_grad_(trained)
    fitact.rebuild(model)
    x = torch.randn(64, WIDTH).to(dtype)
    assert kept(model, x) == x.nbytes


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "one node, two edges": lambda x: x * x * torch.sigmoid(x),
    "two edges, two gradients": lambda x: torch.lerp(x, x, 0.3) / (torch.atan2(x, x) + x.abs() + 2),
    "an operation that is several": lambda x: torch.nn.functional.cosine_similarity(x, x.exp(), -1)[..., None] * x,
    "a list": lambda x: torch.stack([x, x.sin(), x]).prod(0),
    "a view": lambda x: x.t().sin().t() + x[:, :1] * x.flip(0),
    "many": lambda x: x.sin() + x.cos() * x.tanh() - x.exp() * 1e-3 + x.sigmoid(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    """One tensor read by one operation twice, in lists, as views."""
    function = FUNCTIONS[name]
    torch.manual_seed(0)
    weight = torch.randn(WIDTH, WIDTH)
    for around in (
        lambda f, x: f(x) @ weight,
        lambda f, x: x.sin() * (f(x) @ weight) + x * 0.3,
        lambda f, x: x.cos() + f(x) * f(x * 1.0001) + x.cos() * f(x),
    ):
        x = torch.randn(20, WIDTH)
        found = []
        for how in (function, lambda x: functions.again(function, x)):
            leaf = x.clone().requires_grad_()
            around(how, leaf.tanh() * 2).square().sum().backward()
            found.append(leaf.grad)
        assert torch.equal(*found)


def test_a_function_that_reads_more_often() -> None:
    """Alone it is right to the last bit; else it is not taken."""

    def many(x: Tensor) -> Tensor:
        return torch.stack([(x * (i + 0.7)).sin() for i in range(READS + 5)]).prod(0)

    found = []
    for how in (many, lambda x: functions.again(many, x)):
        x = torch.linspace(-1, 1, 100, requires_grad=True)
        (x.exp() + how(x.sin())).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)

    class Many(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x
            for _ in range(READS):
                y = y + 0 * x
            return nn.functional.gelu(y, approximate="tanh")

    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Many(), nn.Linear(WIDTH, WIDTH))
    assert [one.before for one in fitact.rebuild(model).replaced] == ["LayerNorm"]
