"""Generated formulas and gates in the context: the next layer's input is computed again from what they save."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from fitact import saving
from fitact.codegen import bundle
from fitact.generated.swish_beta_rebuild import SwishBetaRebuild
from fitact.runtime.measure.saved import count_saved
from tests.support.generated import same, sizes
from tests.support.learned import rebuilt

ROWS = 1024


class MLP(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act, self.fc1, self.fc2 = act, nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(self.act(self.fc1(x)))
        return y


def gradients(model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Of every parameter, for a fixed gradient of the output."""
    y = run(x)
    return [*torch.autograd.grad(y, [*model.parameters()], torch.linspace(-1, 1, y.numel()).view(y.shape))]


def by_checkpoint(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(saving()(model), x, use_reentrant=False)
        return y

    return run


def on_cpu(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def moved(x: Tensor) -> Tensor:
        with save_on_cpu():
            y: Tensor = saving()(model)(x)
        return y

    return moved


SITUATIONS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "alone": lambda model: saving()(model),
    "checkpoint": by_checkpoint,
    "save_on_cpu": on_cpu,
    "many dimensions": lambda model: saving()(lambda x: model(x.view(4, -1, 16)).view(-1, 16)),
    "a view": lambda model: saving()(lambda x: model.fc2(model.act(model.fc1(x)).view(4, -1, 32)).view(-1, 16)),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_same_gradients(name: str) -> None:
    model, x = MLP(SwishBetaRebuild()), torch.randn(ROWS, 16) * 3
    expected = gradients(model, x, model)
    assert all(map(same, gradients(model, x, SITUATIONS[name](model)), expected))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_convolutions(layout: torch.memory_format) -> None:
    """What is computed again has the order in memory that the convolution was given."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), SwishBetaRebuild(), nn.Conv2d(8, 4, 3, padding=1))
    model, x = model.to(memory_format=layout), torch.randn(2, 3, 12, 11).to(memory_format=layout)
    with count_saved(model) as saved, saving():
        y = model(x)
    assert sizes(saved) == sorted([x.nbytes, 4 * 2 * 8 * 10 * 9])
    found = torch.autograd.grad(y.sum(), [*model.parameters()])
    assert all(map(same, found, torch.autograd.grad(model(x).sum(), [*model.parameters()])))


@pytest.fixture
def standalone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A folder that needs no fitact, imported."""
    for path, text in bundle.plan([rebuilt("swish_beta", "alone")]).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("alone").Alone()
    for name in [name for name in sys.modules if name.partition(".")[0] == "alone"]:
        del sys.modules[name]


def test_a_standalone_folder(standalone: nn.Module) -> None:
    """Its outputs are found too, and computed again by an op of its own."""
    model, x = MLP(standalone), torch.randn(ROWS, 16) * 3
    with count_saved(model) as saved, saving():
        model(x)
    assert sizes(saved) == sorted([x.nbytes, 4 * ROWS * 32])
    assert all(map(same, gradients(model, x, saving()(model)), gradients(model, x, model)))
