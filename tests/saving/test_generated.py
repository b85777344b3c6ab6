"""Activations that save codes, in the context: the next layer reads these too, unless gradients are exact."""

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
from fitact.runtime.memory.saved import count_saved
from tests.support.codes import Coded, coded, record
from tests.support.generated import same, sizes

ROWS = 1024
BITS = pytest.mark.parametrize("bits", [8, 6, pytest.param(3, marks=pytest.mark.full)])


class MLP(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor], between: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.act, self.between = act, between
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.fc1(x))
        z: Tensor = self.fc2(y if self.between is None else self.between(y))
        return z


def near() -> saving:
    """Return a context that does not quantise, but takes what is near: no tensor here is of attention."""
    return saving(bits={"attention": 8})


def gradients(model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:
    """Of every parameter, for a fixed gradient of the output."""
    model.zero_grad()
    torch.manual_seed(1)
    y = (run or model)(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def by_hand(one: Coded, model: MLP, x: Tensor) -> dict[str, Tensor]:
    """Those by the definition: products with what the codes of h stand for."""
    with torch.no_grad():
        h = model.fc1(x)
        dz = torch.linspace(-1, 1, x.shape[0] * 16).view(-1, 16).to(h.dtype)
        dh = one.gradient(h, dz @ model.fc2.weight)
        return {
            "fc1.weight": dh.t() @ x,
            "fc1.bias": dh.sum(0),
            "fc2.weight": dz.t() @ one.looked_up(h, "values", h.dtype),
            "fc2.bias": dz.sum(0),
        }


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


@BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_are_all_that_is_saved(bits: int, dtype: torch.dtype) -> None:
    """By the activation and the layer that follows: k bits an element, and gradients by the definition."""
    one = coded(bits)
    model, x = MLP(one.function).to(dtype), torch.randn(ROWS, 16).to(dtype) * 3
    with count_saved(model) as saved, near():
        y = model(x)
    assert sizes(saved) == sorted([x.nbytes, ROWS * 32 * bits // 8])
    assert same(y, model(x))
    assert equal(gradients(model, x, near()(model)), by_hand(one, model, x))


@pytest.mark.parametrize("between", [None, nn.Dropout(0.5), nn.ReLU(), nn.Softsign()])
def test_exact_contexts_store_what_was_computed(between: Any) -> None:
    model, x = MLP(coded(8).function, between), torch.randn(ROWS, 16)
    assert equal(gradients(model, x, saving()(model)), gradients(model, x))
    with count_saved(model) as saved, saving():
        model(x)
    assert max(sizes(saved)) == 4 * ROWS * 32


def by_checkpoint(model: nn.Module, reentrant: bool) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(near()(model), x.requires_grad_(), use_reentrant=reentrant)
        return y

    return run


def on_cpu(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def moved(x: Tensor) -> Tensor:
        with save_on_cpu():
            return run(x)

    return moved


SITUATIONS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "checkpoint": lambda model: by_checkpoint(model, False),
    "reentrant checkpoint": lambda model: by_checkpoint(model, True),
    "save_on_cpu": lambda model: on_cpu(near()(model)),
    "many dimensions": lambda model: near()(lambda x: model(x.view(4, -1, 16)).view(-1, 16)),
    "a view": lambda model: near()(lambda x: model.fc2(model.act(model.fc1(x)).view(4, -1, 32)).view(-1, 16)),
    "a copy": lambda model: near()(lambda x: model.fc2(model.act(model.fc1(x)).clone())),
}


@pytest.mark.parametrize("name", SITUATIONS)
@BITS
def test_the_same_gradients(name: str, bits: int) -> None:
    one = coded(bits)
    model, x = MLP(one.function), torch.randn(ROWS, 16) * 3
    expected = by_hand(one, model, x)
    if name == "a copy":  # which is stored as it is
        with torch.no_grad():
            dz = torch.linspace(-1, 1, ROWS * 16).view(-1, 16)
            expected["fc2.weight"] = dz.t() @ one.function(model.fc1(x))
    assert equal(gradients(model, x, SITUATIONS[name](model)), expected)


def test_two_readers_and_a_graph_that_is_kept() -> None:
    one, x = coded(6), torch.randn(ROWS, 16) * 3

    class Two(MLP):
        def __init__(self) -> None:
            super().__init__(one.function)
            self.fc3 = nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.act(self.fc1(x))
            z: Tensor = self.fc2(y) * 2 + self.fc3(y)
            return z

    model = Two()
    with count_saved(model) as saved, near():
        z = model(x)
    assert sizes(saved) == sorted([x.nbytes, ROWS * 32 * 6 // 8])
    first, again = (torch.autograd.grad(z.sum(), [*model.parameters()], retain_graph=True) for _ in range(2))
    assert all(map(same, first, again))
    values = one.looked_up(model.fc1(x), "values", torch.float32)
    assert same(first[4], torch.ones(16, ROWS) @ values)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_convolutions(layout: torch.memory_format) -> None:
    """Codes are in the order of memory, and what they stand for has the order that the convolution was given."""
    one = coded(8)
    first, second = (
        layer.to(memory_format=layout) for layer in (nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3, padding=1))
    )
    x = torch.randn(2, 3, 12, 11).to(memory_format=layout)
    with count_saved(nn.Sequential(first, second)) as saved, near():
        y = second(one.function(first(x)))
    assert sizes(saved) == sorted([x.nbytes, 2 * 8 * 10 * 9])
    h = first(x)
    values = one.looked_up(h, "values", h.dtype).to(memory_format=layout).requires_grad_()
    (expected,) = torch.autograd.grad(second(values).sum(), second.weight)
    assert same(torch.autograd.grad(y.sum(), second.weight)[0], expected)


def test_dropout_between() -> None:
    """Its mask takes a bit an element; its output, which is no activation's, is stored as it was computed."""
    model, x = MLP(coded(8).function, nn.Dropout(0.25)), torch.randn(ROWS, 16) * 3
    with count_saved(model) as saved, near():
        model(x)
    assert sizes(saved) == sorted([x.nbytes, ROWS * 32, ROWS * 32 // 8, 4 * ROWS * 32])


@pytest.fixture
def standalone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A folder that needs no fitact, imported."""
    fit = record(8, name="alone_coded8")
    for path, text in bundle.plan([fit]).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("alone_coded8").alone_coded8
    for name in [name for name in sys.modules if name.partition(".")[0] == "alone_coded8"]:
        del sys.modules[name]


def test_a_standalone_folder(standalone: Any) -> None:
    """Its outputs are found too, and it looks values up by an op of its own."""
    one, x = coded(8), torch.randn(ROWS, 16) * 3
    model = MLP(standalone)
    with count_saved(model) as saved, near():
        model(x)
    assert sizes(saved) == sorted([x.nbytes, ROWS * 32])
    assert equal(gradients(model, x, near()(model)), by_hand(one, model, x))
