"""What becomes codes, on request and never, and how near what stands for them is; graphs run without kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fitact
from benchmarks.compiled import FLOAT8, run_graphs
from fitact.runtime.compile.codes import Graph, exponents, pack, scaled, unpack
from fitact.runtime.compile.compander import Compander, error_of
from fitact.runtime.compile.report import KeptRecord
from fitact.runtime.torch_internals import FakeTensorMode
from tests.compile.test_compile import Gelu, made, off, step
from tests.support.gpu_code import gpu_kernels, loads


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def coded(
    block: Callable[[], nn.Module], shape: tuple[int, ...], **arguments: Any
) -> tuple[int, float, dict[str, KeptRecord]]:
    """Return bytes kept, the largest error of a gradient, and the last record of each operation."""
    stock = made(block)
    budget = arguments.pop("budget", 1.0)
    _, expected = step(stock, run_graphs(stock, {}, budget), shape)
    torch._dynamo.reset()
    model, options = made(block), fitact.compile_options(budget=budget, **arguments)
    kept, found = step(model, run_graphs(model, options, 1.0), shape)
    return kept, off(found, expected), {record.operation: record for record in options.report.graphs[0]}


def float8(block: Callable[[], nn.Module], shape: tuple[int, ...]) -> tuple[int, float]:
    stock = made(block)
    _, expected = step(stock, run_graphs(stock, {}, 1.0), shape)
    torch._dynamo.reset()
    model = made(block)
    kept, found = step(model, run_graphs(model, {"post_grad_fusion_options": FLOAT8}, 1.0), shape)
    return kept, off(found, expected)


class Masked(nn.Module):
    """Two layers of attention that share a mask of 0 and −∞."""

    def __init__(self, direct: bool) -> None:
        super().__init__()
        self.direct = direct
        self.qkv = nn.ModuleList(nn.Linear(64, 192, bias=False) for _ in range(2))
        self.out = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(128)
        seen = place[:, None] >= place[None]
        zero, never = torch.tensor(0.0, dtype=x.dtype), torch.tensor(-torch.inf, dtype=x.dtype)
        mask = torch.where(seen, zero, never) if self.direct else torch.where(seen, 0.0, -torch.inf).to(x.dtype)
        for layer in self.qkv:
            q, k, v = layer(x).view(2, 128, 3, 4, 16).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, mask)
            x = x + y.transpose(1, 2).reshape(2, 128, 64)
        return self.out(x)


@pytest.mark.full
@pytest.mark.long
def test_masks_of_numbers() -> None:
    """A mask of 0 and −∞ that attention keeps becomes bits or stays; as a code, or in float8, it would be NaN."""
    shape = (2, 128, 64)
    kept, error, records = coded(partial(Masked, True), shape, error="exact")
    assert error == 0
    mask = records["where"]
    assert (mask.code, mask.before, mask.after) == ("bits", 128 * 128 * 2, 128 * 128 // 8)
    less, error, records = coded(partial(Masked, False), shape, attention=True)
    assert error < 0.015
    assert records["convert_element_type"].reason == "of attention's mask"
    assert less < 0.62 * kept
    _, error = float8(partial(Masked, False), shape)
    assert math.isnan(error)


class Scored(nn.Module):
    """Attention by two batched products and a softmax, a gated layer, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate, self.out = nn.Linear(64, 192), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 128, 3, 4, 16).permute(2, 0, 3, 1, 4)
        y = (q @ k.transpose(-1, -2) / 4).softmax(-1) @ v
        y = self.out(x + y.transpose(1, 2).reshape(2, 128, 64) * self.gate(x).sigmoid())
        return F.cross_entropy(y.view(256, 64), torch.arange(256) % 64)


@pytest.mark.full
@pytest.mark.long
def test_same_choice_as_float8() -> None:
    """With the tensors coded that PyTorch's pass takes, less is kept, and gradients are nearer."""
    shape = (2, 128, 64)
    whole, error, records = coded(Scored, shape, attention=True, inputs=True, loss=True)
    left = {name: record.reason for name, record in records.items() if record.code is None}
    assert {*left.values()} <= {"a parameter", "small", "a statistic", "of int64"}, left
    kept, least = float8(Scored, shape)
    assert whole <= kept
    assert error < least
    default, _, records = coded(Scored, shape)
    assert {record.reason for record in records.values()} >= {
        "of products that attention makes",
        "an input",
        "kept by the loss",
    }
    assert whole < default


@pytest.mark.parametrize(("bits", "error"), [(4, 0.11), (6, 0.027), (8, 0.0075)])
def test_bits(bits: int, error: float) -> None:
    kept, least, _ = coded(Gelu, (512, 256), error="coarse", bits=bits, budget=0.9)
    assert kept == 512 * (1024 * bits // 8 + 1 + 8)  # an exponent, and two statistics
    assert error / 2 < least < error


def test_what_cannot_be_evaluated() -> None:
    """A note says then that the error is that of the numbers themselves."""
    code = Compander(8)
    for operator, note in ((torch.ops.aten.bitwise_not, "not known: what bitwise_not makes of it"), (F.gelu, "")):
        graph = torch.fx.Graph()
        x, dy = graph.placeholder("x"), graph.placeholder("dy")
        target = getattr(operator, "default", torch.ops.aten.gelu.default)
        graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (dy, graph.call_function(target, (x,)))))
        error, found = error_of([x], code)
        assert found == note
        assert error == pytest.approx(code.error() if note else code.error([F.gelu]), rel=1e-9)


@pytest.mark.parametrize("bits", [1, 4, 6])
def test_packing(bits: int) -> None:
    """Parts lie in bytes one after the other, the first in the lowest bits, as the integer they make together."""
    graph, mode = torch.fx.Graph(), FakeTensorMode()
    parts = torch.randint(1 << bits, (3, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    x = graph.placeholder("x")
    x.meta["val"] = mode.from_tensor(parts)
    end = graph.output(x)
    module = torch.fx.GraphModule(nn.Module(), graph)
    builder = Graph(module, end)
    packed = pack(builder, x, bits)
    end.args = ((packed, unpack(builder, packed, bits)),)
    module.recompile()
    found, again = module(parts)
    assert torch.equal(again, parts)
    for row, own in zip(found.tolist(), parts.tolist(), strict=True):
        assert int.from_bytes(bytes(row), "little") == sum(part << bits * i for i, part in enumerate(own))


def test_numbers_out_of_the_usual() -> None:
    """NaN, an infinity or a number that has no finite square leaves the codes of the others in its row."""
    graph, mode = torch.fx.Graph(), FakeTensorMode()
    numbers = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    numbers[0, 0], numbers[1, 0], numbers[2, 0] = torch.nan, -torch.inf, 1e30
    x = graph.placeholder("x")
    x.meta["val"] = mode.from_tensor(numbers)
    end = graph.output(x)
    module = torch.fx.GraphModule(nn.Module(), graph)
    builder, code = Graph(module, end), Compander(8)
    power = exponents(builder, x)
    codes = code.encode(builder, scaled(builder, x, power, -1))
    end.args = (scaled(builder, code.decode(builder, codes), power, 1),)
    module.recompile()
    miss = (module(numbers) - numbers)[:, 1:].norm(dim=1) / numbers[:, 1:].norm(dim=1)
    assert miss.max() < 0.012


@pytest.mark.full
@pytest.mark.long
def test_kernels_of_a_gpu() -> None:
    """Codes are made in the kernels that make the tensors or read them anyway; backward has few kernels more."""
    x = torch.randn(512, 256, dtype=torch.bfloat16).requires_grad_()
    stock = gpu_kernels(made(Gelu, Gelu), {}, 0.9, x)
    options = fitact.compile_options()
    coded = gpu_kernels(made(Gelu, Gelu), options, 0.9, x)
    codes = sum(record.code is not None for record in options.report.graphs[0])
    assert codes == 3
    # One is read by GELU, and one by a norm, whose kernel makes its sum; these read nothing twice.
    assert len(coded[0]) == len(stock[0])
    for text, plain in zip(coded[0].values(), stock[0].values(), strict=True):
        assert loads(text) <= loads(plain) + 1  # a power of two that another kernel made
    assert sum(map(loads, coded[0].values())) <= sum(map(loads, stock[0].values())) + 1
    stores = [sum(text.count("tl.store(") for text in graph.values()) for graph in (coded[0], stock[0])]
    assert stores[0] - stores[1] <= 2 * codes  # codes, and powers of two
    assert len(coded[1]) <= len(stock[1]) + codes
