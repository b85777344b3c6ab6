"""Rows that are sent to experts and back: their order and weights follow from the numbers of the largest."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fitact
from fitact.runtime.rebuild.calls import Looking
from fitact.runtime.rebuild.recipes import source
from fitact.runtime.rebuild.routing import numbers

from .test_narrow import PRECISIONS
from .test_rebuild import cast, differences, observed, train

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
        y: Tensor = self.leave(
            self.each(x, weights, experts) if self.how == "each" else self.all(x, weights, experts)
        )
        return y

    def all(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        expert, order = torch.sort(experts.reshape(-1))
        rows = x[order // CHOSEN].sin() * weights.reshape(-1)[order][:, None]
        if self.how == "inverse":
            back = torch.empty_like(order)
            back[order] = torch.arange(order.size(0))
        else:
            back = order.argsort()
        rows = rows + self.leave.weight[expert]
        y: Tensor = rows[back].view(len(x), CHOSEN, WIDTH).sum(1)
        return y

    def each(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(experts, num_classes=EXPERTS).permute(2, 1, 0)
        for one in mask:
            place, row = torch.where(one)
            y.index_add_(0, row, (x[row].sin() * weights[row, place, None]).to(y.dtype))
        return y


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("how", ["inverse", "argsort", "each"])
def test_experts(how: str, precision: str) -> None:
    """The same bits; of the routing, the likelihoods and one byte for each choice are kept."""
    dtype, autocast = PRECISIONS[precision]
    torch.manual_seed(0)
    stock = Experts(how).to(dtype)
    model, x = copy.deepcopy(stock), torch.randn(ROWS, WIDTH).to(dtype)
    with cast(autocast):
        fitact.rebuild(model, example_inputs=x)
        assert not differences(observed(stock, train, x), observed(model, train, x))
        tensors: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one: tensors.append(one) or one, lambda one: one):
            y = model(x.requires_grad_())
    del y
    kept = [(one.dtype, *one.shape) for one in tensors if WIDTH not in one.shape]  # neither rows nor weights
    odds = [(autocast or dtype, ROWS, EXPERTS)]
    assert {(torch.int8, ROWS, CHOSEN), *odds} == {*kept}


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (0, 3)])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_places(shape: tuple[int, ...], share: float) -> None:
    torch.manual_seed(0)
    x = (torch.rand(shape) < share).long()
    places = torch.where(x)
    assert torch.equal(numbers._places(len(places[0]), x), torch.stack(places, 1))


def chosen(x: Tensor) -> Tensor:
    """Return where the largest are, which is kept."""
    return (x * 2.0).topk(3, -1).indices.reshape(-1)


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "part of an order": lambda at: _inverse(at.argsort()[:6], torch.arange(6), at.numel()),
    "no order": lambda at: _inverse(at),
    "changed": lambda at: _inverse(at.argsort().clamp_(max=3)),
    "from 1 on": lambda at: _inverse(at.argsort(), torch.arange(1, at.numel() + 1)),
    "changed numbers": lambda at: _inverse(at.argsort(), torch.arange(at.numel()).mul_(2)),
    "one number": lambda at: _inverse(at.argsort(), torch.tensor(1)),
    "changed afterwards": lambda at: _inverse(at.argsort()).mul_(2),
    "of fewer bytes": lambda at: _inverse(
        at.argsort(), torch.arange(at.numel(), dtype=torch.int32), dtype=torch.int32
    ),
    "by a mask": lambda at: _inverse(at > 1, torch.arange(int((at > 1).sum()))),
}


def _inverse(
    order: Tensor, values: Tensor | None = None, count: int | None = None, dtype: torch.dtype = torch.int64
) -> Tensor:
    back = torch.zeros(order.numel() if count is None else count, dtype=dtype)
    back[order] = torch.arange(order.numel()) if values is None else values
    return back


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_inverse_is_kept(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, requires_grad=True)
    with Looking():
        at = chosen(x)
        assert source(at) is not None and source(_inverse(at.argsort())) is not None
        assert source(WRONG[name](at)) is None


def test_numbers_that_follow() -> None:
    """What is noted gives the same numbers, in the same layout."""
    torch.manual_seed(0)
    x = torch.randn(40, 6, requires_grad=True)
    with Looking():
        at = chosen(x)
        found = [at, *at.sort(), at.argsort(descending=True), at.sort(stable=True).indices // 3]
        found += [_inverse(at.argsort()), F.one_hot(at, 6), F.one_hot(at, num_classes=6).T[4]]
        found += torch.where(F.one_hot(at, 6).T[4])
    for one in found:
        near = source(one)
        assert near is not None and [kept.dtype for kept in near.state] == [torch.int8]
        again = near.function(*near.state)
        assert torch.equal(again, one) and again.stride() == one.stride()


@pytest.mark.parametrize(("size", "dtype"), [(128, torch.int8), (129, torch.int16), (2**15, torch.int16)])
def test_the_fewest_bytes(size: int, dtype: torch.dtype) -> None:
    """Of all numbers that index a dimension, also from its end."""
    index = torch.arange(-size, size)
    found = numbers.fewer(index, size)
    assert found is not None and found.state[0].dtype == dtype
    assert torch.equal(found.function(*found.state), index)


def test_numbers_hold_no_graph() -> None:
    x = torch.randn(50, 8, requires_grad=True)
    with Looking():
        odds = F.softmax(x * 2.0, -1)
        held = weakref.ref(odds.untyped_storage())
        values, index = odds.topk(2, -1)
        order = index.reshape(-1).argsort()
    del odds, values
    assert held() is None and len(order) == 100


def _view(x: Tensor) -> Tensor:
    y = x[1:]
    y /= y.sum(-1, keepdim=True)
    return x


def _twice(x: Tensor) -> Tensor:
    x /= x.sum(-1, keepdim=True)
    x.div_(x.sum(-1, True))
    return x


def _rows(x: Tensor) -> Tensor:
    x /= torch.linspace(1, 2, len(x), requires_grad=True)[:, None]
    return x


def _wide(x: Tensor) -> Tensor:
    x /= x.double().sum(-1, keepdim=True)
    return x


def _number(x: Tensor) -> Tensor:
    x /= 3
    x /= torch.tensor(2.0)
    return x


def _seen(x: Tensor) -> Tensor:
    y = x[1:]
    x /= x.sum(-1, keepdim=True)
    x *= y.sum()
    return x


@pytest.mark.parametrize("divide", [_view, _seen, _twice, _rows, _wide, _number])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_divided_in_place(divide: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, found = torch.randn(7, 9, dtype=dtype), []
    for looking in (False, True):
        given = x.clone().requires_grad_()
        with Looking(looking):
            values = F.softmax(given * 2, -1).topk(3, -1).values
            before = values.data_ptr()
            y = divide(values)
            assert y is values and y.data_ptr() == before
            z = y.sin() * y
        z.sum().backward()
        found.append((y.detach(), given.grad))
    assert not differences(*found)


def test_a_quotient_after_another_read_raises() -> None:
    """As PyTorch does: the product keeps what is changed."""
    x = torch.randn(7, 9, requires_grad=True)
    for looking in (False, True):
        with Looking(looking):
            values = F.softmax(x * 2, -1).topk(3, -1).values
            z = torch.cos(values)
            values /= values.sum(-1, keepdim=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (z.sum() + values.sum()).backward()


def test_what_is_no_tensor() -> None:
    x = torch.randn(7, 9, requires_grad=True)
    with Looking():
        at = chosen(x)
        with pytest.raises(TypeError, match="unsupported operand"):
            at // "a"  # type: ignore[operator]
        assert source(at // 2.5) is None and (at // 2.5).is_floating_point()
        assert torch.equal(torch.where(at[0])[0], torch.where(at[:1])[0])


def test_sparse_tensors_pass() -> None:
    x = torch.eye(3).to_sparse().requires_grad_()
    with Looking():
        assert (x + x).sum(1, keepdim=True).is_sparse
        assert (torch.eye(3).long().to_sparse() // 2).is_sparse
