"""Indices are saved in few bytes: of rows that are sent to experts and back, and of the largest numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from fitact import saving
from fitact.runtime.measure.saved import count_saved
from tests.support.saving import PRECISIONS, agree, cast, differences, observed, pair, saves, train

WIDTH, EXPERTS, CHOSEN, ROWS = 16, 5, 2, 300


class Router(nn.Module):
    """The weights of the likeliest experts, divided in place by their sum, and the experts' numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        odds = F.softmax(self.gate(x.round()).float(), -1)  # some are equal
        weights, experts = odds.topk(CHOSEN, -1)
        weights /= weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), experts


class Experts(nn.Module):
    """Activations instead of experts, together or one by one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.router, self.how = Router(), how
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = self.router(x)
        x = self.enter(x)
        return self.leave(self.each(x, weights, experts) if self.how == "each" else self.all(x, weights, experts))

    def all(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        expert, order = torch.sort(experts.reshape(-1))
        rows = x[order // CHOSEN].sin() * weights.reshape(-1)[order][:, None]
        if self.how == "inverse":
            back = torch.empty_like(order)
            back[order] = torch.arange(order.size(0))
        else:
            back = order.argsort()
        rows = rows + self.leave.weight[expert]
        return rows[back].view(len(x), CHOSEN, WIDTH).sum(1)

    def each(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(experts, num_classes=EXPERTS).permute(2, 1, 0)
        for one in mask:
            place, row = torch.where(one)
            y.index_add_(0, row, (x[row].sin() * weights[row, place, None]).to(y.dtype))
        return y


class Routed(nn.Module):
    """Rows in the order of their experts, and back."""

    def __init__(self, change: bool = False) -> None:
        super().__init__()
        self.gate, self.layer, self.change = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, WIDTH), change
        self.register_buffer("table", torch.arange(5).flip(0))

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = torch.topk(self.gate(x), 2, dim=-1)
        best, place = self.gate(x).max(1)
        order = experts.reshape(-1).argsort(stable=True)
        rows = F.gelu(self.layer(F.gelu(x)))[order // 2]
        rows = rows * weights.reshape(-1)[order, None] + best[order // 2][:, None]
        y = torch.zeros_like(x).index_add_(0, order // 2, rows.to(x.dtype))
        both = torch.where(experts == 3)
        y = y + F.gelu(x)[both].sum() + weights[:, self.table[:1] - 5].sum() + (place * 1.0).mean()
        if self.change:
            order.zero_()
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{how: partial(Experts, how) for how in ("inverse", "argsort", "each")},
    "routed": Routed,
}


@pytest.mark.parametrize(("dtype", "autocast"), PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_experts(name: str, dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    """The same bits; indices of up to 300 rows take one or two bytes each."""
    x = torch.randn(ROWS, WIDTH).to(dtype)
    models = agree(MODELS[name], x=x, dtype=dtype, autocast=autocast)
    before, after = saves(models, x, autocast)
    assert after < before
    tensors: list[Tensor] = []
    hooks = saved_tensors_hooks(lambda one: tensors.append(one) or one, lambda one: one)
    with hooks, cast(autocast), saving():
        y = models[0](x.requires_grad_())
    del y
    numbers = [one for one in tensors if not one.is_floating_point() and one.numel() > ROWS // EXPERTS]
    assert {one.dtype for one in numbers} <= {torch.int8, torch.int16, torch.uint8} and numbers


def test_an_index_that_is_changed_later() -> None:
    """What is saved is a copy, so gradients are those of the index as it was; PyTorch raises."""
    torch.manual_seed(0)
    baseline, x = Routed(), torch.randn(300, WIDTH)
    changing, model = pair(partial(Routed, change=True))
    model.load_state_dict(baseline.state_dict())
    assert str(observed(changing, train, x)).startswith("raises")
    assert not differences(observed(baseline, train, x), observed(model, train, x))


@pytest.mark.parametrize(("size", "bytes_of_one"), [(128, 1), (129, 2), (2**15, 2), (2**15 + 1, 4)])
def test_the_fewest_bytes(size: int, bytes_of_one: int) -> None:
    """Of all numbers that index a dimension, also from its end."""
    x, index = torch.randn(size, requires_grad=True), torch.arange(-size, size)[::2].contiguous()
    with count_saved() as saved, saving():
        y = x[index]
    assert saved.bytes == bytes_of_one * index.numel()
    found, expected = (torch.autograd.grad(one, x, index.float())[0] for one in (y, x[index]))
    assert torch.equal(found, expected)


GIVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": lambda index: index.t().contiguous().t(),
    "part": lambda index: index[:, 1:],
    "part, turned": lambda index: index.t().contiguous().t()[:, 1:],
    "expanded": lambda index: index[:1].expand(len(index), -1),
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("around", [nullcontext, save_on_cpu])
def test_layouts_of_indices(given: str, around: Callable[[], AbstractContextManager[Any]]) -> None:
    """Also outside of hooks; and an expanded index is not stored once for each row."""
    x, index = torch.randn(40, 90, requires_grad=True), GIVEN[given](torch.randint(40, (30, 90)))
    found, sizes = [], []
    for context in nullcontext(), saving():
        with around(), count_saved() as saved, context:
            y = (x * 2).gather(0, index)
        found.append(torch.autograd.grad(y, x, torch.linspace(-1, 1, y.numel()).view(y.shape))[0])
        sizes.append(saved.bytes)
    assert torch.equal(*found)
    assert sizes[0] - sizes[1] >= (0 if given == "expanded" else 7 * index.numel())


@pytest.mark.parametrize(
    "around", [nullcontext, partial(saved_tensors_hooks, Tensor.detach, Tensor.detach)], ids=["alone", "in hooks"]
)
def test_sparse_tensors_pass(around: Callable[[], AbstractContextManager[Any]]) -> None:
    x, w = torch.eye(3).to_sparse().requires_grad_(), torch.randn(3, 2, requires_grad=True)
    found = []
    for context in nullcontext(), saving():
        with around(), context:
            assert (x + x).sum(1, keepdim=True).is_sparse
            assert (torch.eye(3).long().to_sparse() // 2).is_sparse
            y = torch.sparse.mm(x, w * 2) * x.sum()
        found.append(torch.autograd.grad(y.square().sum(), w)[0])
    assert not differences(*found)
