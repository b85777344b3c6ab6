"""What is stored in which bits, and how far gradients are off; graphs run without kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fitact
from benchmarks import compiled as benchmark
from fitact.runtime.compile.report import SavedRecord
from fitact.runtime.measure.saved import count_saved
from fitact.runtime.saving import blocks
from tests.compile.test_compile import Gelu, SwiGLU, made, off, step

run_graphs = benchmark.run_graphs


def coded(
    block: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **arguments: Any
) -> tuple[int, float, list[SavedRecord]]:
    """Return bytes saved, the largest error of a gradient, and the records of what is not a parameter or small."""
    baseline = made(block, dtype=dtype)
    budget = arguments.pop("budget", 1.0)
    _, expected = step(baseline, run_graphs(baseline, {}, budget), shape)
    torch._dynamo.reset()
    model, options = made(block, dtype=dtype), fitact.compile_options(budget=budget, **arguments)
    size, found = step(model, run_graphs(model, options, 1.0), shape)
    (records,) = options.report.graphs
    return size, off(found, expected), [one for one in records if one.reason not in ("a parameter", "small")]


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


def test_masks_of_numbers() -> None:
    """A mask of 0 and −∞ that attention saves becomes bits or stays; as a code it would be NaN."""
    shape = (2, 128, 64)
    _, error, records = coded(partial(Masked, True), shape, torch.bfloat16, error="exact")
    assert error == 0
    (mask,) = (one for one in records if one.operation == "where")
    assert (mask.kind, mask.bits, mask.before, mask.after) == ("mask", 1, 128 * 128 * 2, 128 * 128 // 8)
    _, error, records = coded(partial(Masked, False), shape, torch.bfloat16, bits=8)
    assert error < 0.02
    assert {one.reason for one in records if one.operation == "convert_element_type"} == {"attention's mask"}


class Scored(nn.Module):
    """Attention by two batched products and a softmax of masked scores, a gated layer, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate, self.out = nn.Linear(64, 192), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 128, 3, 4, 16).permute(2, 0, 3, 1, 4)
        seen = torch.ones(128, 128, dtype=torch.bool).tril()
        weights = (q @ k.transpose(-1, -2) / 4).masked_fill(~seen, -torch.inf).softmax(-1)
        y = (weights @ v).transpose(1, 2).reshape(2, 128, 64)
        y = self.out(x + y * self.gate(x).sigmoid())
        return F.cross_entropy(y.view(256, 64), torch.arange(256) % 64)


class Sharp(nn.Module):
    """Attention whose queries and keys are normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(64, 192), nn.Linear(64, 64), nn.RMSNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 128, 3, 4, 16).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.norm(q), self.norm(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(2, 128, 64))


class Convolved(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(8, 64, 3), norm(), nn.Conv2d(64, 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.norm(self.first(x))))


class Scaled(nn.Module):
    """A factor for each channel, from a mean over the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(512, 512), nn.Conv2d(512, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x * self.layer(x.mean((2, 3))).sigmoid()[:, :, None, None])


class Rectified(Gelu):
    """An activation whose slope jumps at 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.leaky_relu(self.up(x), -1.0))


class Sine(Gelu):
    """A layer of a SIREN, whose sine goes through many periods."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sin(30 * self.up(x)))


class Logarithm(Gelu):
    """A logarithm that goes far down."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.log(self.up(x).abs() + 0.01))


Kind = tuple[str, str, int | None, str]
SOFTMAX: Kind = ("bmm", "", None, "of a softmax")
OUTPUT: Kind = ("_scaled_dot_product_flash_attention_for_cpu", "attention", 8, "")
KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float, set[Kind]]] = {
    "scores": (
        Scored,
        (2, 128, 64),
        0.9,
        {SOFTMAX, ("bmm", "attention", 8, ""), ("clone", "attention", 8, ""), ("addmm", "activation", 4, "")},
    ),
    "weights and a loss": (
        Scored,
        (2, 128, 64),
        1.0,
        {
            *(("bmm", "attention", 8, ""), ("clone", "attention", 8, ""), ("addmm", "activation", 4, "")),
            *(("div", "attention", 8, ""), ("bitwise_not", "mask", 1, ""), ("add", "linear", 4, "")),
            ("addmm", "", None, "saved by the loss"),
        },
    ),
    # Attention reads what is computed from these queries and keys: 8 bits, not 4.
    "normalised": (Sharp, (2, 128, 64), 0.9, {("addmm", "norm", 8, ""), OUTPUT}),
    "batch norm": (
        partial(Convolved, partial(nn.BatchNorm2d, 64)),
        (4, 8, 16, 16),
        0.9,
        {("convolution", "", None, "of a norm over the batch")},
    ),
    "group norm": (
        partial(Convolved, partial(nn.GroupNorm, 4, 64)),
        (4, 8, 16, 16),
        0.9,
        {("convolution", "norm", 4, "")},
    ),
    "statistic": (
        Scaled,
        (32, 512, 8, 8),
        1.0,
        {("mean", "linear", 4, ""), ("addmm", "", None, "a statistic"), ("mul", "linear", 4, "")},
    ),
    "sine": (Sine, (128, 256), 0.9, {("addmm", "", None, "of a sine")}),
    "logarithm": (Logarithm, (128, 256), 0.9, {("addmm", "", None, "of a logarithm or root")}),
    "swiglu": (SwiGLU, (128, 256), 0.9, {("mm", "activation", 4, ""), ("mm", "gate", 4, "")}),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds(name: str) -> None:
    block, shape, budget, expected = KINDS[name]
    _, error, records = coded(block, shape, error="coarse", budget=budget)
    found = {(one.operation, one.kind, one.bits, one.reason) for one in records if one.operation != "input"}
    assert found == expected
    assert error < 0.3


def test_bits_by_kind() -> None:
    """Of the kinds that are named; the others have those of the class of errors."""
    _, _, records = coded(SwiGLU, (128, 256), bits={"gate": 6, "attention": 8}, budget=0.9)
    assert {(one.kind, one.bits) for one in records if one.kind} == {("gate", 6), ("activation", 8)}
    errors = {one.bits: one.error for one in records if one.kind}
    assert 0.004 < errors[8] < 0.007 and 0.015 < errors[6] < 0.03


def llama(layers: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return benchmark.LastHidden("llama", benchmark.KINDS["llama"] | {"num_hidden_layers": layers}).to(dtype)


TOKENS = torch.arange(256)[None]


@pytest.mark.parametrize("error", ["exact", "rounding", pytest.param("coarse", marks=pytest.mark.full)])
def test_a_layer_saves_no_more_than_in_the_context(error: str) -> None:
    """A LLaMA layer: the difference between models of two layers and of one."""
    sizes: dict[bool, list[int]] = {False: [], True: []}
    for layers in (1, 2):
        for compiled in sizes:
            torch._dynamo.reset()
            model = llama(layers, torch.bfloat16)
            call = run_graphs(model, fitact.compile_options(error=error), 1.0) if compiled else model
            with count_saved(model) as saved, nullcontext() if compiled else fitact.saving(error):
                y = call(TOKENS)
            sizes[compiled].append(saved.bytes)
            del y
    layer = {compiled: two - one for compiled, (one, two) in sizes.items()}
    statistics = 2 * 4 * 256  # of the norms, which the context recomputes
    assert layer[True] <= layer[False] + statistics
    units = {"exact": 11.7, "rounding": 8.0, "coarse": 4.2}  # its input is one
    assert layer[True] / (256 * 256 * 2) < units[error]


def test_the_whole_gradient() -> None:
    """In float32, beside the compiler alone."""
    gradients = []
    for options in ({}, fitact.compile_options(error="rounding"), fitact.compile_options(error="coarse")):
        torch._dynamo.reset()
        model = llama(2, torch.float32)
        dy = torch.randn(1, 256, 256, generator=torch.Generator().manual_seed(1))
        run_graphs(model, options, 0.9)(TOKENS).backward(dy)
        gradients.append(torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]))
    expected, *others = gradients
    rounding, coarse = (float((found - expected).norm() / expected.norm()) for found in others)
    assert 0.002 < rounding < 0.01 and 0.05 < coarse < 0.13


def test_signs_at_a_jump() -> None:
    """An element that is not 0 keeps its sign, where a slope jumps at 0, however small it is beside its block."""
    model = made(Rectified, dtype=torch.float32)
    with torch.no_grad():
        model[0].up.weight.mul_(1e-5)
        model[0].up.weight[::64] *= 1e5
        model[0].up.bias.zero_()
    _, expected = step(model, run_graphs(model, {}, 0.9), (128, 256))
    torch._dynamo.reset()
    options = fitact.compile_options()
    _, found = step(model, run_graphs(model, options, 1.0), (128, 256))
    assert [one.kind for one in options.report.graphs[0] if one.bits] == ["activation"]
    assert off(found[:1], expected[:1]) < 1e-5  # of the input, which the slopes alone decide


class Split(nn.Module):
    """Parts of one product that are saved, one of them transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).chunk(2, -1)
        return self.down(a.exp() * b.t().tanh().t())


def test_views_of_one_storage() -> None:
    """What is saved of one storage is encoded once, as it lies in memory."""
    _, error, records = coded(Split, (128, 64), budget=1.0)
    found = [(one.before, one.after) for one in records if one.operation == "addmm"]
    assert found == [(4 * 128 * 256, blocks.nbytes((128, 256), 8))]
    assert error < 0.02


def test_inputs() -> None:
    """On request those that are no parameters."""
    for inputs, bits in ((False, None), (True, 8)):
        torch._dynamo.reset()
        _, error, records = coded(Gelu, (128, 256), inputs=inputs, budget=0.9)
        assert {one.bits for one in records if one.operation == "input"} == {bits}
        assert error < 0.02
