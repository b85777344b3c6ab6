"""What takes fewer bytes to keep: of sums that norms read, of repeated tensors, of indices."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fitact
from fitact.runtime.memory.saved import count_saved
from fitact.runtime.rebuild.calls import Looking
from fitact.runtime.torch_internals import storage_id

from .test_rebuild import HALF, cast, differences, kept, observed, train

WIDTH = 16


class Composed(nn.Module):
    """A norm of several operations, as transformers' are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        y: Tensor = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)
        return y


class Block(nn.Module):
    """Two residual sums, after norms of what is added or before them."""

    def __init__(self, norm: Callable[[int], nn.Module], after: bool, turned: bool, dropout: float) -> None:
        super().__init__()
        self.before = nn.ModuleList(norm(WIDTH) for _ in range(2))
        self.after = nn.ModuleList(norm(WIDTH) if after else nn.Identity() for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.drop, self.turned = nn.Dropout(dropout), turned

    def forward(self, x: Tensor) -> Tensor:
        for before, layer, after in zip(self.before, self.layers, self.after, strict=True):
            y = after(self.drop(layer(before(x))))
            x = y + x if self.turned else x + y
        return x


class Scale(nn.Module):
    """A residual stream begins; under autocast it is in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * self.weight
        return y


class Last(nn.Module):
    """A sum that is normed, as BERT's; the next block reads what the norm makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.drop, self.norm = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.drop(self.dense(x)) + x)
        return y


def stack(make: Callable[[], nn.Module], count: int = 2) -> nn.Module:
    return nn.Sequential(Scale(), *(make() for _ in range(count)), Last())


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: Block(nn.LayerNorm, False, False, 0.0),
    "RMSNorm": lambda: Block(nn.RMSNorm, False, True, 0.0),
    "composed": lambda: Block(Composed, False, False, 0.0),
    "composed, dropout": lambda: Block(Composed, False, True, 0.1),
    "norms of what is added": lambda: Block(Composed, True, False, 0.0),
    "LayerNorm of what is added": lambda: Block(nn.LayerNorm, True, True, 0.1),
    "last": Last,
}
PRECISIONS = {"float32": (torch.float32, None), "bfloat16": (HALF, None), "autocast": (torch.float32, HALF)}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", BLOCKS)
def test_sums_under_norms(name: str, precision: str) -> None:
    """The same bits; where it takes fewer bytes, a norm keeps what its input is a sum of."""
    dtype, autocast = PRECISIONS[precision]
    torch.manual_seed(0)
    stock = stack(BLOCKS[name]).to(dtype).train()
    with_run, without = copy.deepcopy(stock), copy.deepcopy(stock)
    x, wide = torch.randn(3, 5, WIDTH).to(dtype), torch.randn(32, 128, WIDTH).to(dtype)
    fitact.rebuild(without)
    with cast(autocast):
        fitact.rebuild(with_run, example_inputs=x)
        assert not differences(observed(stock, train, x), observed(with_run, train, x))
        saved, of_all = kept(without, wide) - kept(with_run, wide), wide.numel()
    if "added" in name:  # the second norm of each block keeps nothing: both terms are kept
        assert saved >= 2 * of_all * dtype.itemsize
    elif autocast is not None and "dropout" not in name:  # it keeps what is added, in half precision
        assert saved >= of_all * 2
    else:
        assert saved >= 0


def test_a_norm_keeps_one_term_of_half_precision() -> None:
    """By hand: of one block under autocast, both norms' inputs, x and what is added, and the inputs of layers."""
    torch.manual_seed(0)
    model = Block(nn.LayerNorm, False, False, 0.0).train()
    x = torch.randn(256, WIDTH, requires_grad=True)
    with cast(HALF):
        fitact.rebuild(model, example_inputs=x.detach())
        with count_saved(model) as saved:
            y = model(x)
    sizes = sorted(one.nbytes() for one in saved.storages.values())
    assert y.dtype == torch.float32
    rows = 2 * 256 * 4  # mean and 1/σ of the first norm, in float32
    assert sum(sizes) == 256 * WIDTH * (4 + 2) + rows


class Repeats(nn.Module):
    """Attention whose keys and values are shared by heads, after a product with float32."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(len(x), -1, 4, 8).transpose(1, 2)
        k, v = (layer(x).view(len(x), -1, 2, 8).transpose(1, 2) for layer in (self.k, self.v))
        k = k * torch.linspace(0.5, 1, 8, dtype=self.k.weight.dtype)
        k, v = (one[:, :, None].expand(-1, -1, 2, -1, -1).reshape(len(x), 4, -1, 8) for one in (k, v))
        y: Tensor = F.softmax(q @ k.transpose(2, 3), -1) @ v
        return y


@pytest.mark.parametrize("precision", PRECISIONS)
def test_repeated_keys_and_values(precision: str) -> None:
    dtype, autocast = PRECISIONS[precision]
    torch.manual_seed(0)
    stock = Repeats().to(dtype)
    model, x = copy.deepcopy(stock), torch.randn(2, 6, WIDTH).to(dtype)
    with cast(autocast):
        fitact.rebuild(model, example_inputs=x)
        assert not differences(observed(stock, train, x), observed(model, train, x))
        wide = torch.randn(2, 64, WIDTH).to(dtype)
        fewer = kept(stock, wide) - kept(model, wide)
    width = dtype.itemsize if autocast is None else autocast.itemsize
    assert fewer >= 2 * 2 * 64 * (32 - 16) * width


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


@pytest.mark.parametrize("precision", PRECISIONS)
def test_indices(precision: str) -> None:
    """They take a byte or two each, also if two share a storage; those of a buffer are left alone."""
    dtype, autocast = PRECISIONS[precision]
    torch.manual_seed(0)
    stock = Routed().to(dtype)
    model, x = copy.deepcopy(stock), torch.randn(300, WIDTH).to(dtype)
    with cast(autocast):
        fitact.rebuild(model, example_inputs=x)
        assert not differences(observed(stock, train, x), observed(model, train, x))
        tensors: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one: tensors.append(one) or one, lambda one: one):
            y = model(x.requires_grad_())
    del y
    numbers = [one for one in tensors if not one.is_floating_point() and one.numel() > 1]
    assert {torch.int8, torch.int16} == {one.dtype for one in numbers}


def test_an_index_that_is_changed_later() -> None:
    """What is kept is a copy, so gradients are those of the index as it was; PyTorch raises."""
    torch.manual_seed(0)
    stock, x = Routed(), torch.randn(30, WIDTH)
    model = Routed(change=True)
    model.load_state_dict(stock.state_dict())
    assert str(observed(copy.deepcopy(model), train, x)).startswith("raises")
    fitact.rebuild(model, example_inputs=x)
    assert not differences(observed(stock, train, x), observed(model, train, x))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("keep", [False, True])
def test_the_largest(dim: int, keep: bool) -> None:
    x = torch.randn(7, 9).round(decimals=1)  # some are equal
    found = []
    for looking in (False, True):
        given = x.clone().requires_grad_()
        with Looking(looking):
            result = (given * 2).max(dim, keepdim=keep)
            some = (given * 3).topk(3, dim, largest=keep)
        assert type(result).__name__ == "max" and type(some).__name__ == "topk"
        (result.values.sin().sum() + some[0].cos().sum()).backward()
        found.append((result.values, result.indices, some.values, some.indices, given.grad))
    assert not differences(*found)


def test_what_none_keeps_is_let_go() -> None:
    """A term of a sum lives no longer than the module, if nothing has kept it."""
    x = torch.randn(50, 8, requires_grad=True)
    with Looking():
        term = (x * 2.0).half()
        y = term + torch.ones(50, 8)  # float32, of half precision: fewer bytes
        held = weakref.ref(term.untyped_storage())
        key = storage_id(term)
        del term
    assert key and held() is None and y.requires_grad
