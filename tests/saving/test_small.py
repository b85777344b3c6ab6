"""Masks and indices take few bytes: dropout's a bit an element, and gradients are PyTorch's own from them."""

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
from fitact.runtime.measure import count_saved
from fitact.runtime.saving.capture import FEW
from tests.support.blocks import built
from tests.support.saving import both_ways, cast, differences, observed, pair, precisions, saving_less, train


def mask_of(*sizes: int) -> Tensor:
    return torch.rand(sizes, generator=torch.Generator().manual_seed(0)) < 0.7


SIZES = [0, 1, 63, 64, 65, 71, 1024, 20001]
MASKS: dict[str, Tensor] = {
    **{str(size): mask_of(size) for size in SIZES},
    "contiguous": mask_of(7, 11, 130),
    "turned": mask_of(7, 11, 130).transpose(0, 1),
    "columns": mask_of(7, 11, 130).transpose(1, 2),
    "channels last": mask_of(1, 7, 11, 130).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    """A bit an element, and up to seven bytes, in any order of memory; few elements stay as they are."""
    mask = MASKS[name]
    _, after = both_ways(lambda x: x.masked_fill(mask, 0), torch.randn(mask.shape, requires_grad=True))
    assert after == (sum(divmod(mask.numel(), 8)) if mask.numel() >= FEW else mask.numel())


WIDTH, EXPERTS, ROWS = 16, 5, 300


def routed(change: bool = False) -> nn.Module:
    """Return a model that sends rows to experts and back; it may change the order of the rows afterwards."""

    def call(m: Any, x: Tensor) -> Tensor:
        odds = F.softmax(m.gate(x.round()).float(), -1)  # some are equal
        weights, experts = torch.topk(odds, 2, dim=-1)
        weights /= weights.sum(-1, keepdim=True)
        best, place = m.gate(x).max(1)
        expert, order = torch.sort(experts.reshape(-1), stable=True)
        rows = F.gelu(m.layer(F.gelu(x)))[order // 2].sin() + m.layer.weight[expert]
        rows = rows * weights.reshape(-1)[order, None] + best[order // 2][:, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(order.size(0))
        y = rows[back].view(len(x), 2, WIDTH).sum(1) + rows[order.argsort()][: len(x)]
        y = y.index_add(0, order // 2, rows.to(y.dtype))
        both = torch.where(experts == 3)
        y = y + F.gelu(x)[both].sum() + weights[:, m.table[:1] - 5].sum() + (place * 1.0).mean()
        if change:
            order.zero_()
        return y

    parts = {"gate": nn.Linear(WIDTH, EXPERTS), "layer": nn.Linear(WIDTH, WIDTH)}
    return built(call, **parts, table=nn.Buffer(torch.arange(EXPERTS).flip(0)))


@precisions
def test_experts(dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    """The same bits; indices of up to 300 rows take one or two bytes each."""
    x = torch.randn(ROWS, WIDTH)
    before, after = saving_less(routed, x, dtype=dtype, autocast=autocast)
    assert after < before
    tensors: list[Tensor] = []
    hooks = saved_tensors_hooks(lambda each: tensors.append(each) or each, lambda each: each)
    with hooks, cast(autocast), saving():
        y = routed().to(dtype)(x.to(dtype).requires_grad_())
    del y
    numbers = [tensor for tensor in tensors if not tensor.is_floating_point() and tensor.numel() > ROWS // EXPERTS]
    assert {number.dtype for number in numbers} <= {torch.int8, torch.int16, torch.uint8} and numbers


def test_an_index_that_is_changed_later() -> None:
    """What is saved is a copy, so gradients are those of the index as it was; PyTorch raises."""
    torch.manual_seed(0)
    baseline, x = routed(), torch.randn(ROWS, WIDTH)
    changing, model = pair(partial(routed, change=True))
    model.load_state_dict(baseline.state_dict())
    assert str(observed(changing, train, x)).startswith("raises")
    assert not differences(observed(baseline, train, x), observed(model, train, x))


@pytest.mark.parametrize(("size", "bytes_of_one"), [(128, 1), (129, 2), (2**15, 2), (2**15 + 1, 4)])
def test_the_fewest_bytes(size: int, bytes_of_one: int) -> None:
    """Of all numbers that index a dimension, also from its end."""
    index = torch.arange(-size, size)[::2].contiguous()
    _, after = both_ways(lambda x: x[index], torch.randn(size, requires_grad=True))
    assert after == bytes_of_one * index.numel()


POOLS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], int]] = {
    "1d": (F.max_pool1d, (3, 300), 2),
    "1d, few": (F.max_pool1d, (2, 3, 128), 1),
    "2d": (F.max_pool2d, (2, 3, 181, 181), 2),
    "2d, wide": (torch.max_pool2d, (1, 1, 182, 182), 4),
    "3d": (F.max_pool3d, (2, 3, 7, 8, 9), 2),
    "adaptive": (F.adaptive_max_pool2d, (2, 9, 12, 12), 2),
}


@pytest.mark.parametrize("name", POOLS)
def test_where_pooling_takes_its_results_from(name: str) -> None:
    """A place in a plane or a volume, whatever the batch; and of the input the shape."""
    pool, shape, bytes_of_one = POOLS[name]
    x = torch.randn(shape, requires_grad=True)
    before, after = both_ways(lambda x: pool(x, 3), x)
    assert before - after == (8 - bytes_of_one) * pool(x, 3).numel() + x.nbytes


BY_NAME: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda x, index: torch.gather(input=x * 2, dim=0, index=index),
    "rows": lambda x, index: torch.index_select(input=x * 2, dim=0, index=index[:, 0]),
    "topk": lambda x, _: torch.topk(input=x * 2, k=150, dim=0).values,
}


@pytest.mark.parametrize("name", BY_NAME)
def test_tensors_given_by_name(name: str) -> None:
    """They too say how large an index may be."""
    index = torch.arange(900).view(300, 3) % 200
    both_ways(lambda x: BY_NAME[name](x, index), torch.randn(200, 3, requires_grad=True))


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
    index = GIVEN[given](torch.randint(40, (30, 90)))
    with around():
        before, after = both_ways(lambda x: (x * 2).gather(0, index), torch.randn(40, 90, requires_grad=True))
    assert before - after >= (0 if given == "expanded" else 7 * index.numel())


@pytest.mark.parametrize("error", ["exact", "rounding"])
@pytest.mark.parametrize("around", [nullcontext, count_saved, partial(saved_tensors_hooks, *[Tensor.detach] * 2)])
def test_sparse_tensors_pass(around: Callable[[], AbstractContextManager[Any]], error: str) -> None:
    x, w, results = torch.eye(3).to_sparse().requires_grad_(), torch.randn(3, 2, requires_grad=True), []
    for context in nullcontext(), saving(error):
        with around(), context:
            assert (x + x).sum(1, keepdim=True).is_sparse
            assert (torch.eye(3).long().to_sparse() // 2).is_sparse
            y = torch.sparse.mm(x, w * 2) * x.sum()
        results.append(torch.autograd.grad(y.square().sum(), w)[0])
    assert not differences(*results)
