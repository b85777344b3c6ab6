"""Generated formulas and gates in the context: the next layer's input is recomputed from what they save."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fitact import saving
from fitact.codegen import bundle
from fitact.generated.swish_beta_recompute import SwishBetaRecompute
from fitact.runtime.measure.saved import count_saved
from tests.support.around import AROUND
from tests.support.blocks import Of
from tests.support.generated import same, sizes
from tests.support.learned import recomputed
from tests.support.saving import agree

ROWS = 1024


def mlp(act: nn.Module, view: bool = False) -> nn.Module:
    def call(m: Any, x: Tensor) -> Tensor:
        y = m.act(m.fc1(x))
        return m.fc2(y.view(4, -1, 32)).view(-1, 16) if view else m.fc2(y)

    return Of(call, fc1=nn.Linear(16, 32), act=act, fc2=nn.Linear(32, 16))


@pytest.mark.parametrize("around", ["checkpoint", "save_on_cpu", "accumulated", "retained"])
def test_the_same_gradients(around: str) -> None:
    x = torch.randn(ROWS, 16) * 3
    for view in (False, True):
        agree(lambda view=view: mlp(SwishBetaRecompute(), view), AROUND[around], x)
    agree(lambda: mlp(SwishBetaRecompute()), AROUND[around], x.view(4, -1, 16))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_convolutions(layout: torch.memory_format) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), SwishBetaRecompute(), nn.Conv2d(8, 4, 3, padding=1))
    model, x = model.to(memory_format=layout), torch.randn(2, 3, 12, 11).to(memory_format=layout)
    with count_saved(model) as saved, saving():
        y = model(x)
    assert sizes(saved) == sorted([x.nbytes, 4 * 2 * 8 * 10 * 9])
    found = torch.autograd.grad(y.sum(), [*model.parameters()])
    assert all(map(same, found, torch.autograd.grad(model(x).sum(), [*model.parameters()])))


@pytest.fixture
def standalone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for path, text in bundle.plan([recomputed("swish_beta", "alone")]).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("alone").Alone()
    for name in [name for name in sys.modules if name.partition(".")[0] == "alone"]:
        del sys.modules[name]


def test_a_standalone_folder(standalone: nn.Module) -> None:
    """Its outputs are found too, and recomputed by an op of its own."""
    model, x = mlp(standalone), torch.randn(ROWS, 16) * 3
    with count_saved(model) as saved, saving():
        model(x)
    assert sizes(saved) == sorted([x.nbytes, 4 * ROWS * 32])
    agree(lambda: mlp(standalone), x=x)
