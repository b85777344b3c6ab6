"""Weights that autocast casts, which are cast again in backward, and rows that are added to others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fitact.runtime.measure.saved import count_saved
from tests.support.saving import HALF, cast, differences, kept, observed, pair, train


def frozen(model: nn.Sequential, *places: int) -> nn.Sequential:
    for place in places:
        model[place].requires_grad_(False)
    return model


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh())
    model[3].weight = model[1].weight
    return model


class Readers(nn.Module):
    """Three layers that read one tensor, which autocast casts once for all if it is a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.act = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.v(self.act(self.q(x)) * self.k(x)) + self.v(x)
        return y


def mlp(*first: nn.Module) -> nn.Sequential:
    return nn.Sequential(*first, nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "without a norm": lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)),
    "frozen first": lambda: frozen(mlp(nn.Linear(16, 16)), 2),
    "frozen last": lambda: frozen(mlp(), 3),
    "all but one frozen": lambda: frozen(mlp(nn.Linear(16, 16), nn.Linear(16, 16)), 1, 3),
    "tied": tied,
    "readers": Readers,
    "convolutions": lambda: nn.Sequential(
        nn.Conv1d(3, 16, 1), nn.GroupNorm(4, 16), nn.GELU(), nn.Conv1d(16, 16, 1), nn.Conv1d(16, 16, 1)
    ),
}


def copies(model: nn.Module, x: Tensor) -> int:
    """Return the bytes that are saved of copies of weights."""
    with cast(HALF), count_saved(model, detail=True) as saved:
        y = model(x)
    del y
    return saved.by_kind().get("weights", 0)


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_cast_again(name: str) -> None:
    x = torch.randn(3, 16) if name != "convolutions" else torch.randn(3, 3, 16)
    baseline, model = pair(MODELS[name])
    with cast(HALF):
        expected, found = (observed(one, train, x) for one in (baseline, model))
    assert not isinstance(expected, str)
    assert not differences(expected, found)
    assert copies(model, x) == 0 < copies(baseline, x)


def test_a_weight_that_changes_is_noticed() -> None:
    """Between the passes: PyTorch would take the copy from before, but the weight is what is saved."""
    _, model = pair(mlp)
    with cast(HALF):
        y = model(torch.randn(3, 16))
    with torch.no_grad():
        model[3].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Scattered(nn.Module):
    """Rows that are scaled, and added to others."""

    def __init__(self, onto: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.act, self.onto = nn.Linear(16, 16), nn.GELU(), onto

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(len(x)).flip(0) // 2
        y = self.onto(x)
        y.index_add_(0, index, F.silu(self.linear(x)) * 2)
        return y.index_add_(0, index, self.linear(self.act(x)))


@pytest.mark.parametrize(
    "onto", [torch.zeros_like, lambda x: x * 2, lambda x: (x * 2)[:, :]], ids=["zeros", "another's", "a view"]
)
def test_rows_that_are_added_are_not_saved(onto: Callable[[Tensor], Tensor]) -> None:
    models, x = pair(partial(Scattered, onto)), torch.randn(6, 16)
    expected, found = (observed(one, train, x) for one in models)
    assert not isinstance(expected, str)
    assert not differences(expected, found)
    wide = torch.randn(512, 16)
    index = 512 * 2
    assert kept(models[1], wide) == 2 * wide.nbytes + index + 2 * 4  # the input, the first layer's output
