"""Coded activations and the layers that follow: these keep the codes, and rebuild what is near their input."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from fitact.codegen import bundle
from fitact.runtime.memory.saved import count_saved
from fitact.runtime.rebuild.modules import put_back, swap
from tests.support.codes import Coded, coded, record
from tests.support.generated import same, sizes

ROWS = 300
BITS = pytest.mark.parametrize("bits", [8, 6, pytest.param(3, marks=pytest.mark.full)])


def swapped(model: nn.Module, exact: bool = False) -> nn.Module:
    """Let every layer keep what its input is rebuilt from."""
    kinds = {nn.Linear: "Linear", nn.Conv2d: "Convolution", nn.Dropout: "Dropout", nn.ReLU: "Chained"}
    for path, module in model.named_modules():
        if type(module) in kinds:
            swap(module, kinds[type(module)], path, exact=exact)
    return model


class MLP(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor], between: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.act, self.between = act, between
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.fc1(x))
        z: Tensor = self.fc2(y if self.between is None else self.between(y))
        return z


def gradients(model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:
    """Of every parameter, for a fixed gradient of the output."""
    model.zero_grad()
    y = (run or model)(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def by_hand(one: Coded, model: MLP, x: Tensor) -> dict[str, Tensor]:
    """Those by the definition: products with what is looked up by the codes of h."""
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


def codes_of(bits: int, elements: int) -> int:
    return elements if bits == 8 else -(-elements // 8192) * 1024 * bits


@BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_codes_are_all_that_is_kept(bits: int, dtype: torch.dtype) -> None:
    """By the activation and the layer that follows: k bits an element, and gradients by the definition."""
    one = coded(bits)
    model, x = swapped(MLP(one.function)).to(dtype), torch.randn(1024, 16).to(dtype) * 3
    with count_saved(model) as saved:
        y = model(x)
    assert sizes(saved) == sorted([x.nbytes, 1024 * 32 * bits // 8])
    assert same(y, MLP.forward(model, x))
    expected = by_hand(one, model, x)
    assert equal(gradients(model, x), {name: expected[name] for name, _ in model.named_parameters()})


def test_an_exact_conversion_leaves_stock_what_it_computes() -> None:
    """Also where the user has put the coded activation there, and where dropout or ReLU is between."""
    for between in (None, nn.Dropout(0.5), nn.ReLU()):
        model, x = MLP(coded(8).function, between), torch.randn(ROWS, 16)
        torch.manual_seed(1)
        stock = gradients(model, x)
        swapped(model, exact=True)
        torch.manual_seed(1)
        assert equal(gradients(model, x), stock)
        with count_saved(model) as saved:
            model(x)
        assert max(sizes(saved)) == 4 * ROWS * 32
    near = swapped(MLP(coded(8).function))
    with count_saved(near) as saved:
        near(x)
    assert max(sizes(saved)) < 4 * ROWS * 32


class Attention(nn.Module):
    """A softmax of its input, and dropout of that."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.softmax(x.float() * 2, -1, dtype=torch.float32), 0.5).to(x.dtype)


@pytest.mark.parametrize(("kind", "module"), [("Calls", Attention()), ("Composed", nn.Softsign())], ids=str)
def test_what_is_computed_again_reads_what_was_computed(kind: str, module: nn.Module) -> None:
    """Not what is looked up by the codes, also where dropout is between."""
    for before in (nn.Identity(), nn.Dropout(0.5)):
        stock = MLP(coded(3).function, nn.Sequential(before, copy.deepcopy(module))).to(torch.bfloat16)
        model, x = copy.deepcopy(stock), torch.randn(ROWS, 16).to(torch.bfloat16) * 3
        swap(model.between[1], kind, "between.1")
        if type(before) is nn.Dropout:
            swap(model.between[0], "Dropout", "between.0")
            swap(stock.between[0], "Dropout", "between.0")
        swap(model.fc2, "Linear", "fc2")
        found = []
        for one in (stock, model):
            torch.manual_seed(1)
            found.append(gradients(one, x))
        assert equal(*found)
        saved = []
        for one in (stock, model):
            with count_saved(one) as counted:
                one(x)
            saved.append(counted.bytes)
        assert saved[1] < saved[0]


def test_put_back() -> None:
    model, x = MLP(coded(8).function), torch.randn(ROWS, 16)
    stock = gradients(model, x)
    swapped(model)
    assert not equal(gradients(model, x), stock)
    for module in model.modules():
        put_back(module)
    assert equal(gradients(model, x), stock)
    assert "fitact_exact" not in vars(model.fc2)


# --------------------------------------------------------------------------------------------------- situations


def by_checkpoint(model: nn.Module, reentrant: bool) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
        return y

    return run


def on_cpu(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with save_on_cpu():
            y: Tensor = model(x)
        return y

    return run


SITUATIONS: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "checkpoint": lambda model: by_checkpoint(model, False),
    "reentrant checkpoint": lambda model: by_checkpoint(model, True),
    "save_on_cpu": on_cpu,
    "deepcopy": lambda model: model,
    "many dimensions": lambda model: lambda x: model(x.view(3, -1, 16)).view(-1, 16),
    "a view": lambda model: lambda x: model.fc2(model.act(model.fc1(x)).view(3, -1, 32)).view(-1, 16),
    "a copy of the activation": lambda model: lambda x: model.fc2(model.act(model.fc1(x)).clone()),
}


@pytest.mark.parametrize("name", SITUATIONS)
@BITS
def test_the_same_gradients(name: str, bits: int) -> None:
    one = coded(bits)
    model, x = swapped(MLP(one.function)), torch.randn(ROWS, 16) * 3
    expected = gradients(model, x)
    if name == "a copy of the activation":  # which is nothing that a note is on
        with torch.no_grad():
            y = one.function(model.fc1(x))
            dz = torch.linspace(-1, 1, ROWS * 16).view(-1, 16)
            expected["fc2.weight"] = dz.t() @ y
    model = copy.deepcopy(model) if name == "deepcopy" else model
    assert equal(gradients(model, x, SITUATIONS[name](model)), expected)


def test_autocast() -> None:
    one = coded(8)
    model, x = swapped(MLP(one.function)), torch.randn(ROWS, 16) * 3
    with torch.autocast("cpu", torch.bfloat16), count_saved(model) as saved:
        y = model(x)
    assert y.dtype == torch.bfloat16
    copied, codes = 2 * x.numel(), ROWS * 32
    assert sizes(saved) == sorted([copied, codes])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        h = model.fc1(x)
    dz = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    y.backward(dz)
    assert same(model.fc2.weight.grad, (dz.t() @ one.looked_up(h, "values", h.dtype)).float())


def test_a_change_in_place_of_the_output() -> None:
    """Then the layer keeps what it was given; after the layer has read it, PyTorch does not mind."""
    one, x = coded(8), torch.randn(ROWS, 16) * 3
    model = swapped(MLP(one.function, lambda y: y.mul_(2)))
    with count_saved(model) as saved:
        model(x)
    assert 4 * ROWS * 32 in sizes(saved)
    stock = MLP(one.function, lambda y: y.mul_(2))
    stock.load_state_dict(model.state_dict())
    assert equal(gradients(model, x), gradients(stock, x))


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

    model = swapped(Two())
    with count_saved(model) as saved:
        z = model(x)
    assert sizes(saved) == sorted([x.nbytes, codes_of(6, ROWS * 32)])
    first = torch.autograd.grad(z.sum(), [*model.parameters()], retain_graph=True)
    again = torch.autograd.grad(z.sum(), [*model.parameters()])
    assert all(map(same, first, again))
    h = model.fc1(x)
    values = one.looked_up(h, "values", h.dtype)
    assert same(first[4], torch.ones(16, ROWS) @ values)


def test_without_gradients_nothing_is_kept() -> None:
    model, x = swapped(MLP(coded(8).function)), torch.randn(ROWS, 16)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, count_saved(model) as saved:
            model(x)
        assert saved.bytes == 0
    model.fc2.requires_grad_(False)
    with count_saved(model) as saved:
        model(x)
    assert sizes(saved) == sorted([x.nbytes, ROWS * 32])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_convolutions(layout: torch.memory_format) -> None:
    """Codes are in the order of memory, and what is rebuilt has the order that the convolution was given."""
    one = coded(8)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.second(one.function(self.first(x)))
            return y

    model = swapped(Net()).to(memory_format=layout)
    x = torch.randn(2, 3, 12, 11).to(memory_format=layout)
    with count_saved(model) as saved:
        y = model(x)
    assert sizes(saved) == sorted([x.nbytes, 2 * 8 * 10 * 9])
    h = model.first(x)
    assert h.is_contiguous(memory_format=layout)
    values = one.looked_up(h, "values", h.dtype).to(memory_format=layout).requires_grad_()
    weight = model.second.weight
    (expected,) = torch.autograd.grad(model.second(values).sum(), weight)
    assert same(torch.autograd.grad(y.sum(), weight)[0], expected)


def test_dropout_hands_the_codes_on() -> None:
    one, x = coded(8), torch.randn(1024, 16) * 3
    model = swapped(MLP(one.function, nn.Dropout(0.25)))
    with count_saved(model) as saved:
        z = model(x)
    assert sizes(saved) == sorted([x.nbytes, 1024 * 32, 1024 * 32 // 8])
    read: list[Tensor] = []
    model.between.register_forward_hook(lambda _module, _args, y: read.append(y.detach()))
    torch.manual_seed(1)
    z = model(x)
    h = model.fc1(x)
    mask = (read[0] != 0) | (h == 0)
    values = one.looked_up(h, "values", h.dtype) * (mask.float() / 0.75)
    (found,) = torch.autograd.grad(z.sum(), model.fc2.weight)
    assert same(found, torch.ones(16, 1024) @ values)


def test_a_transform_and_the_compiler_keep_the_output() -> None:
    """Nothing is noted there: gradients are those of an exact layer."""
    one, x = coded(8), torch.randn(ROWS, 16) * 3
    stock = MLP(one.function)
    model = swapped(copy.deepcopy(stock))
    expected = gradients(stock, x)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert equal(gradients(model, x, lambda x: compiled(x)), expected)

    def loss(weight: Tensor) -> Tensor:
        z: Tensor = torch.func.functional_call(model, {"fc2.weight": weight}, x)
        return (z * torch.linspace(-1, 1, z.numel()).view(z.shape)).sum()

    torch.testing.assert_close(torch.func.grad(loss)(model.fc2.weight.detach()), expected["fc2.weight"])


def test_a_second_derivative_is_refused() -> None:
    model, x = swapped(MLP(coded(8).function)), torch.randn(ROWS, 16)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(model(x).sum(), model.fc1.weight, create_graph=True)


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
    x = torch.randn(ROWS, 16) * 3
    model, near = swapped(MLP(standalone)), swapped(MLP(coded(8).function))
    near.load_state_dict(model.state_dict())
    with count_saved(model) as saved:
        model(x)
    assert sizes(saved) == sorted([x.nbytes, ROWS * 32])
    assert equal(gradients(model, x), gradients(near, x))
