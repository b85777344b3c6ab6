"""What a block saved is freed as soon as its backward pass is done, without the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import fitact
from tests.support.peak import peak_memory


class Block(nn.Module):
    """A layer normed and gated, whose product is read by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(64, 128)
        self.down, self.more = nn.Linear(128, 64), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        y = F.silu(self.gate(normed)) * self.up(normed)
        return x + self.down(y) * torch.sigmoid(self.more(y))


Call = Callable[[nn.Module, Tensor], Tensor]
CALLS: dict[str, Call] = {
    "plain": lambda block, x: block(x),
    "checkpointed": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
}


class Model(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.call = nn.ModuleList(Block() for _ in range(3)), call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


@pytest.fixture
def by_counts_alone() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def still_there(model: nn.Module, x: Tensor) -> int:
    """Return how many outputs of linear layers are there when backward comes to the first; later none may be."""
    model(x).sum().backward()  # gradients are there from now on
    outputs: list[StorageWeakRef] = []
    found: list[bool] = []

    def note(_module: nn.Module, _args: object, y: Tensor) -> None:
        outputs.append(StorageWeakRef(y.untyped_storage()))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(note)
    first = model.get_parameter("blocks.0.norm.weight")
    first.register_hook(lambda _: found.extend(not one.expired() for one in outputs))
    model(x).sum().backward()
    assert all(one.expired() for one in outputs)
    return sum(found)


@pytest.mark.usefixtures("by_counts_alone")
@pytest.mark.parametrize("error", ["exact", "rounding"])
@pytest.mark.parametrize("include", [None, "blocks.*"])
@pytest.mark.parametrize("call", CALLS)
def test_as_soon_as_by_pytorch(call: str, include: str | None, error: str) -> None:
    x = torch.randn(96, 64, requires_grad=True)
    baseline, model = Model(CALLS[call]), Model(CALLS[call])
    fitact.convert(model, include=include, error=error)
    assert still_there(model, x) <= still_there(baseline, x)


@pytest.mark.parametrize("include", [None, "blocks.*"])
@pytest.mark.parametrize("call", CALLS)
def test_peak(call: str, include: str | None) -> None:
    x = torch.randn(512, 64, requires_grad=True)
    model = Model(CALLS[call])

    def peak() -> int:
        model(x).sum().backward()
        return peak_memory(lambda: model(x).sum().backward(), model)["total"]

    baseline = peak()
    fitact.convert(model, include=include)
    assert peak() <= baseline
