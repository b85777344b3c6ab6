"""Inverted activations on the PyTorch path: values, gradients and their errors, what is kept, transforms.

Derivatives and forms are those of `inverses`, written out there; layouts, hooks and compilers are PyTorch's.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import special
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fitact
from fitact.errors import UsageError
from fitact.runtime import registry
from fitact.runtime.memory import count_saved

from .inverses import LOST, SOME, Inverse, each_inverse, inverses, made, named, same, unpacked
from .steps import DTYPES, HALVES, patterns

SLACK = 5e-6  # stated errors include the roundings of float32, which may fall otherwise here
NAMED = {one.name: one for one in inverses()}
GELU = NAMED["gelu_inverted1"]
gelu = GELU.function

EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EACH_HALF = pytest.mark.parametrize("dtype", HALVES, ids=str)


def half_ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What rounding float64 values to a dtype costs at most; the doubled unit is for values that round up."""
    info = torch.finfo(dtype)
    return values.abs() * info.eps / 2 * (1 + info.eps) + info.smallest_normal * info.eps


def run(function: Any, x: torch.Tensor, dy: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and gradient of a fresh leaf with the layout of x."""
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = function(leaf)
    (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y) if dy is None else dy)
    return y.detach(), dx


def slopes(one: Inverse, x: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The output in a dtype, and what the module takes for f′, not rounded to half precision."""
    key, dtype = one.key, dtype or x.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    y, codes = torch.ops.fitact.forward(x, (), dtype, key)
    slope = torch.ops.fitact.backward(torch.ones(x.shape, dtype=wide), y, codes, wide, key)
    return y, slope.double()


def chain(at: float, steps: int, kind: type[np.floating]) -> np.ndarray:
    """A number and the next ones on each side."""
    found = [kind(at)]
    for side in (-np.inf, np.inf):
        beside = kind(at)
        for _ in range(steps):
            beside = np.nextafter(beside, kind(side))
            found.append(beside)
    return np.array(found)


def dense(one: Inverse, dtype: torch.dtype) -> torch.Tensor:
    """All values of half precision; else a sample, dense at the minimum, with subnormals and huge numbers."""
    if dtype in HALVES:
        return patterns(dtype)
    kind = np.float32 if dtype == torch.float32 else np.float64
    near = [np.linspace(-r, r, 40_001) for r in (2e-2, 1e-3)]
    tails = np.concatenate([np.geomspace(1e-44, 1e30, 5000), [np.float32(1e30)]])
    corners = [chain(at, 3, kind) for at in (-3, 0, 3)]
    parts = [one.minimum + part for part in near] + [np.linspace(-30, 30, 120_001), tails, -tails, *corners]
    parts.append(chain(one.minimum, 1000, kind))
    return torch.from_numpy(np.concatenate([np.asarray(part, dtype=kind) for part in parts]))


# --------------------------------------------------------------------------------------------- values, gradients


def test_what_is_shipped() -> None:
    ones = ("gelu", "gelu_tanh", "silu", "mish", "quick_gelu")
    twos = ("gelu", "silu", "hardswish")
    published = {"gelu_inverted_published": 1, "silu_inverted_published": 1}
    expected = {f"{name}_inverted1": 1 for name in ones} | {f"{name}_inverted2": 2 for name in twos} | published
    assert {one.name: one.bits for one in inverses()} == expected
    assert len({one.key for one in inverses()}) == len(expected)
    assert all(registry.find(one.key).keeps_output for one in inverses())


@each_inverse()
@EACH_DTYPE
def test_values_are_pytorch_s(one: Inverse, dtype: torch.dtype) -> None:
    x = torch.cat([dense(one, dtype), torch.tensor([np.inf, -np.inf, np.nan, 0.0, -0.0], dtype=dtype)])
    y, _ = run(one.function, x)
    assert same(y, one.stock(x))
    with torch.no_grad():
        assert same(one.function(x), y)


@each_inverse()
@EACH_HALF
def test_gradient_is_the_true_one_up_to_the_stated_error(one: Inverse, dtype: torch.dtype) -> None:
    """Of every bit pattern."""
    x = patterns(dtype)
    y, dx = run(one.function, x)
    true = one.true(x)
    known = x.isfinite() & y.isfinite()
    assert bool(true[known].isfinite().all())
    allowed = one.error(dtype) * true.abs().clamp(min=1) + SLACK + half_ulp(dx.double(), dtype)
    assert bool(((dx.double() - true).abs() <= allowed)[known].all())


def check_gradient(one: Inverse, x: torch.Tensor, y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor) -> None:
    """dx is dy times the form of that very y, up to roundings, wherever y is a number; and NaN where y is."""
    code = one.code(x, y.dtype)
    expected = dy.double() * one.form(y, code)
    allowed = dy.double().abs() * one.lost(y, code)
    allowed += half_ulp(expected.abs() + allowed, dx.dtype)
    wrong = (dx.double() - expected).abs() > allowed
    wrong &= ~(dx.isinf() & (expected.abs() + allowed).to(dx.dtype).isinf())
    assert dx.shape == x.shape
    assert not bool((wrong | dx.isnan())[y.isfinite()].any())
    assert bool(dx[y.isnan()].isnan().all())


@each_inverse()
@EACH_DTYPE
def test_gradient_is_dy_times_the_form(one: Inverse, dtype: torch.dtype) -> None:
    x = torch.cat([dense(one, dtype), torch.tensor([np.nan], dtype=dtype)])
    dy = torch.randn(x.shape, dtype=torch.float64).to(dtype)
    y, dx = run(one.function, x, dy)
    assert dx.dtype == dtype
    check_gradient(one, x, y, dy, dx)


@each_inverse(SOME)
@EACH_DTYPE
def test_codes_are_the_layout_that_is_documented(one: Inverse, dtype: torch.dtype) -> None:
    """Planes of 1024 bytes, 0 where the tensor has ended."""
    splits = torch.tensor(one.fit["splits"]["bfloat16"])
    x = torch.cat([torch.randn(10_000) * 2, splits, splits + 1e-6, splits - 1e-6]).to(dtype)
    x[5] = float("nan")
    key = one.key
    y, codes = torch.ops.fitact.forward(x, (), dtype, key)
    assert (y.dtype, codes.dtype, codes.shape) == (dtype, torch.uint8, (2 * one.bits * 1024,))
    expected = torch.zeros(2 * 8192, dtype=torch.long)
    expected[: len(x)] = one.code(x, dtype)
    assert expected[5] == 0
    assert set(expected.tolist()) == set(range(2**one.bits))
    assert torch.equal(unpacked(codes, one.bits), expected)


# -------------------------------------------------------------------------------------------------- their errors

# name → the least error that any function of y and that many bits has, bfloat16 and float16, x and y of the dtype
FLOORS = {
    "gelu_inverted1": (0.0106, 0.0048),
    "silu_inverted1": (0.0114, 0.0038),
    "gelu_inverted2": (0.0066, 0.0025),
    "silu_inverted2": (0.0062, 0.0021),
}


@pytest.mark.parametrize("name", FLOORS)
@EACH_HALF
def test_half_precision_comes_near_the_floor(name: str, dtype: torch.dtype) -> None:
    one, floor = NAMED[name], FLOORS[name][HALVES.index(dtype)]
    x = patterns(dtype)
    y, slope = slopes(one, x)
    known = x.isfinite() & y.isfinite()
    error = float((slope - one.true(x))[known].abs().max())
    assert 0.99 * floor <= error <= (1.25, 1.15)[one.bits - 1] * floor


def between(one: Inverse, x: torch.Tensor) -> torch.Tensor:
    """Which float64 inputs lie between hardswish's upper corner and the split, the float32 number below it."""
    return (x < 3) & (x > np.nextafter(np.float32(3), np.float32(0))) & (one.plain == "hardswish")


# name → how far off f′ may be within 0.01 of the minimum, of the outputs that PyTorch computes in float32
NEARBY = {
    "gelu_inverted1": 2e-4,
    "gelu_inverted2": 2e-4,
    "gelu_tanh_inverted1": 3e-4,
    "hardswish_inverted2": 2e-4,
    "mish_inverted1": 3e-4,
    "quick_gelu_inverted1": 2e-4,
    "silu_inverted1": 2e-4,
    "silu_inverted2": 2e-4,
}


@pytest.mark.parametrize("name", NEARBY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_float32_and_float64(name: str, dtype: torch.dtype) -> None:
    one = NAMED[name]
    x = dense(one, dtype)
    y, dx = run(one.function, x)
    assert y.dtype == dx.dtype == dtype
    error = (dx.double() - one.true(x)).abs()
    if dtype == torch.float64:
        error = error[~between(one, x)]
        x = x[~between(one, x)]
    near = (x.double() - one.minimum).abs() <= 0.01
    assert int(near.sum()) > 2000
    assert bool(error.isfinite().all())
    assert float(error[~near].max()) <= 1e-4
    assert float(error[near].max()) <= NEARBY[name]


# float32, bfloat16, float16
PAPER = {"gelu_inverted_published": (0.0187, 0.0325, 0.0204), "silu_inverted_published": (0.0029, 0.0163, 0.0064)}


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_the_paper_s_forms_are_as_good_as_published(name: str, dtype: torch.dtype) -> None:
    one, published = NAMED[name], PAPER[name][(torch.float32, *HALVES).index(dtype)]
    x = dense(one, dtype)
    y, slope = slopes(one, x)
    known = x.isfinite() & y.isfinite()
    assert float((slope - one.true(x))[known].abs().max()) == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_corners_have_pytorch_s_gradient(dtype: torch.dtype) -> None:
    """At both corners of hardswish, and on their sides up to the error of the form and a rounding."""
    one = NAMED["hardswish_inverted2"]
    x = torch.tensor([-3.0, 3.0], dtype=dtype)
    _, dx = run(one.function, x)
    assert same(dx, one.stock_gradient(x, torch.ones_like(x)))
    assert dx.tolist() == [0, 1]
    away = torch.tensor([-np.inf, np.inf], dtype=dtype)
    for side in (away, -away):
        beside = torch.nextafter(x, side)
        if dtype == torch.float64:  # whose splits are those of float32
            beside = torch.nextafter(x.float(), side.float()).double()
        _, dx = run(one.function, beside)
        true = one.true(beside)
        torch.testing.assert_close(true, one.stock_gradient(beside.double(), torch.ones(2, dtype=torch.float64)))
        assert bool(((dx.double() - true).abs() <= one.error(dtype) + half_ulp(dx.double(), dtype)).all())


@each_inverse()
@EACH_DTYPE
def test_infinity_and_nan(one: Inverse, dtype: torch.dtype) -> None:
    """NaN where the output is, and nowhere else."""
    large = torch.finfo(dtype).max
    x = torch.tensor([np.inf, -np.inf, np.nan, large, -large, 0.0, -0.0], dtype=dtype)
    y, dx = run(one.function, x)
    stock = one.stock_gradient(x, torch.ones_like(x))
    assert torch.equal(dx.isnan(), y.isnan())
    assert dx[2].isnan()
    # only of hardswish, whose gradient PyTorch takes from the input, is there one where y is NaN
    assert one.plain == "hardswish" or bool(stock.isnan()[dx.isnan()].all())
    # beyond the interval that t is clamped to, f′ is what it is at its end
    expected = torch.tensor([1, 0, np.nan, 1, 0, *[float(one.true(torch.zeros(())))] * 2], dtype=torch.float64)
    allowed = one.error(dtype) + SLACK + half_ulp(torch.ones(7, dtype=torch.float64), dtype)
    assert bool(((dx.double() - expected).abs() <= allowed)[~dx.isnan()].all())
    assert same(dx[5], dx[6])


# ------------------------------------------------------------------------------------------------------ autocast


def least(y: torch.Tensor, code: torch.Tensor, true: torch.Tensor) -> float:
    """The least error of any function of y and code: half the widest spread among x that share them."""
    at = np.lexsort((y.double().numpy(), code.numpy()))
    keys = np.stack([code.numpy()[at], y.double().numpy()[at]])
    first = np.flatnonzero(np.r_[True, np.any(keys[:, 1:] != keys[:, :-1], axis=0)])
    slope = true.numpy()[at]
    spread = np.maximum.reduceat(slope, first) - np.minimum.reduceat(slope, first)
    return float(spread.max() / 2)


@each_inverse()
@EACH_HALF
def test_autocast(one: Inverse, dtype: torch.dtype) -> None:
    """From float32: y is of the autocast dtype; the gradient is float32, and not rounded on its way."""
    x = torch.randn(3000) * 2
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=dtype), count_saved() as saved:
        y = one.function(leaf)
    assert y.dtype == dtype
    assert same(y, one.stock(x).to(dtype))
    assert sorted(kept(saved)) == [1024 * one.bits, 6000]
    dy = torch.randn(3000).to(dtype)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    assert dx.dtype == torch.float32
    assert not same(dx, dx.to(dtype).float())
    check_gradient(one, x, y, dy, dx)


@named("gelu_inverted1", "silu_inverted1", "gelu_tanh_inverted1", "mish_inverted1", "quick_gelu_inverted1")
@EACH_HALF
def test_autocast_comes_near_its_own_floor(one: Inverse, dtype: torch.dtype) -> None:
    """All float32 inputs of an output share it: the floor is a little above that of inputs in half precision."""
    wide = torch.linspace(-12, 12, 600_001)
    x = torch.cat([wide, one.minimum + torch.linspace(-0.2, 0.2, 400_001)]).requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        y = one.function(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert (y.dtype, dx.dtype) == (dtype, torch.float32)
    true = one.true(x)
    floor = least(y.detach(), one.code(x, dtype), true)
    known = {"gelu_inverted1": 0.0111, "silu_inverted1": 0.0120}.get(one.name)
    if known and dtype == torch.bfloat16:
        assert floor == pytest.approx(known, rel=0.01)
    assert floor <= float((dx.double() - true).abs().max()) <= 1.25 * floor


@pytest.mark.parametrize("inner", DTYPES, ids=str)
@EACH_HALF
def test_autocast_of_every_dtype(inner: torch.dtype, dtype: torch.dtype) -> None:
    """float64 stays, as in PyTorch; under no_grad the dtype is the same; without autocast, the input's."""
    x = torch.randn(50).to(inner)
    expected = inner if inner == torch.float64 else dtype
    with torch.autocast("cpu", dtype=dtype):
        y, dx = run(gelu, x)
        with torch.no_grad():
            assert gelu(x).dtype == expected
        with torch.autocast("cpu", enabled=False):
            assert gelu(x).dtype == inner
    assert (y.dtype, dx.dtype) == (expected, inner)
    allowed = 2 * GELU.error(expected) + half_ulp(dx.double(), inner)
    assert bool(((dx.double() - GELU.true(x)).abs() <= allowed).all())


# -------------------------------------------------------------------------------------------------- what is kept


def kept(saved: Any) -> list[int]:
    return [storage.nbytes() for storage in saved.storages.values() if storage.nbytes()]


class Between(nn.Module):
    """An activation with a change of shape after it."""

    def __init__(self, activation: nn.Module, shape: str) -> None:
        super().__init__()
        self.activation, self.shape = activation, shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.activation(x)
        if self.shape == "view":
            y = y.view(-1, y.shape[-1])
        elif self.shape == "reshape":
            y = y.reshape(2 * y.shape[0], -1, y.shape[-1])
        elif self.shape == "transpose":
            y = y.transpose(0, 1)
        return y


def mlp(
    width: int = 1024, *, bits: int = 1, shape: str = "", dtype: torch.dtype = torch.bfloat16
) -> nn.Sequential:
    activation = Between(fitact.activation("gelu", method="inverted", bits=bits), shape)
    return nn.Sequential(
        nn.Linear(width, 4 * width, dtype=dtype), activation, nn.Linear(4 * width, width, dtype=dtype)
    )


@pytest.mark.parametrize(("bits", "bytes_"), [(1, 88_080_384), (2, 92_274_688)])
@pytest.mark.parametrize("shape", ["", "view", "reshape"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_kept_by_the_mlp(bits: int, bytes_: int, shape: str, compiled: bool) -> None:
    """1024 → 4096 → 1024, input (2, 4096, 1024) in bfloat16: input, output and k bits."""
    torch._dynamo.reset()
    with FakeTensorMode():
        model, x = mlp(bits=bits, shape=shape), torch.randn(2, 4096, 1024, dtype=torch.bfloat16)
        call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        with count_saved(model) as saved:
            call(x)
    assert saved.bytes == bytes_
    assert sorted(kept(saved)) == [bits << 22, 16_777_216, 67_108_864]


@pytest.mark.full
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_kept_by_the_real_mlp(backend: str | None) -> None:
    torch._dynamo.reset()
    model = mlp()
    call = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    with count_saved(model) as saved:
        call(torch.randn(2, 4096, 1024, dtype=torch.bfloat16))
    assert saved.bytes == 88_080_384


@pytest.mark.parametrize("shape", ["", "view", "reshape"])
@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_kept_by_a_small_mlp(bits: int, shape: str, backend: str | None) -> None:
    torch._dynamo.reset()
    model, x = mlp(32, bits=bits, shape=shape), torch.randn(2, 128, 32, dtype=torch.bfloat16)
    call = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    with count_saved(model) as saved:
        y = call(x)
    assert sorted(kept(saved)) == sorted([2 * x.numel(), 2 * 4 * x.numel(), bits * 4 * x.numel() // 8])
    y.sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_a_transposed_view_makes_the_next_layer_copy() -> None:
    model, x = mlp(32, shape="transpose"), torch.randn(2, 128, 32, dtype=torch.bfloat16)
    with count_saved(model) as saved:
        model(x)
    assert kept(saved).count(8 * x.numel()) == 2


@pytest.mark.parametrize("inner", [torch.float32, torch.bfloat16], ids=str)
def test_kept_under_autocast(inner: torch.dtype) -> None:
    """Copies in bfloat16 of both weights, of the first one where the gradient goes on to the input."""
    bytes_ = {}
    for onward in (False, True):
        with FakeTensorMode():
            model, x = mlp(dtype=torch.float32), torch.randn(2, 4096, 1024, dtype=inner, requires_grad=onward)
            with torch.autocast("cpu", dtype=torch.bfloat16), count_saved(model) as saved:
                model(x)
        bytes_[onward] = saved.bytes
    assert bytes_ == {False: 88_080_384 + 8_388_608, True: 104_857_600}


@pytest.mark.parametrize("shape", ["", "view", "reshape"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_the_next_layer_keeps_the_output_that_is_returned(shape: str, autocast: bool) -> None:
    model, x = mlp(32, shape=shape, dtype=torch.float32), torch.randn(2, 128, 32)
    outputs, packed = [], []
    model[1].activation.register_forward_hook(lambda _module, _args, y: outputs.append(y))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), hooks:
        model(x)
    (y,) = outputs
    assert y.dtype == (torch.bfloat16 if autocast else torch.float32)
    storages = [t.untyped_storage().data_ptr() for t in packed if t.numel() == y.numel()]
    assert storages == [y.untyped_storage().data_ptr()] * 2, "kept by the activation and by the next layer"
    assert [t.data_ptr() for t in packed if t.numel() == y.numel()] == [y.data_ptr()] * 2


@each_inverse()
@pytest.mark.parametrize("n", [0, 1, 8191, 8192, 8193, 100_000])
def test_exactly_k_bits_are_kept_beside_the_output(one: Inverse, n: int) -> None:
    x = torch.randn(n, requires_grad=True)
    with count_saved() as saved:
        y = one.function(x)
    codes = -(-n // 8192) * 1024 * one.bits
    assert sorted(kept(saved)) == sorted(filter(None, [4 * n, codes]))
    assert not n or y.untyped_storage()._cdata in saved.storages


def test_nothing_is_kept_without_gradient() -> None:
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, count_saved() as saved:
            y = gelu(x := torch.randn(100, requires_grad=True))
            assert same(y.mul_(2), 2 * F.gelu(x))
        assert not y.requires_grad
        assert saved.bytes == 0
    with count_saved() as saved:
        y = gelu(x := torch.randn(100))
    assert not y.requires_grad
    assert saved.bytes == 0
    assert same(y.mul_(2), 2 * F.gelu(x))


# ------------------------------------------------------------------------------------------------------- layouts

LAYOUTS = {
    "contiguous": lambda: torch.randn(3, 50, 70),
    "transposed": lambda: torch.randn(50, 70).t(),
    "channels_last": lambda: torch.randn(2, 5, 30, 40).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: torch.randn(2, 5, 6, 7, 8).to(memory_format=torch.channels_last_3d),
    "permuted": lambda: torch.randn(4, 5, 6, 7).permute(2, 0, 3, 1),
    "size_one_dims": lambda: torch.randn(3, 1, 5, 1).transpose(0, 2),
    "expanded": lambda: torch.randn(30, 1).expand(30, 50),
    "sliced": lambda: torch.randn(100, 40)[::3, 1::2],
    "overlapping": lambda: torch.randn(100).as_strided((20, 20), (2, 1)),
    "empty": lambda: torch.randn(0, 3),
    "zero_dim": lambda: torch.randn(()),
    "below_a_tile": lambda: torch.randn(8191),
    "one_tile": lambda: torch.randn(8192),
    "above_a_tile": lambda: torch.randn(8193),
    "many_chunks": lambda: torch.randn(8192 * 9 + 5),
}
DENSE = set(LAYOUTS) - {"expanded", "sliced", "overlapping"}


@each_inverse(SOME | {"gelu_inverted2"})
@EACH_HALF
def test_small_and_large_tensors_agree(one: Inverse, dtype: torch.dtype) -> None:
    """What is looked up for half precision is what is computed, in whatever order they come."""
    x, dy = torch.randn(20_000).to(dtype), torch.randn(20_000)
    for order in ((50, 20_000, 50), (20_000, 50)):
        # under a key of its own nothing is known yet
        twin = dataclasses.replace(registry.find(one.key), key=f"{one.key}-{order}")
        registry.register(twin)
        found = []
        for n in order:
            y, codes = torch.ops.fitact.forward(x[:n], (), dtype, twin.key)
            found.append(torch.ops.fitact.backward(dy[:n], y, codes, torch.float32, twin.key))
            assert torch.equal(unpacked(codes, one.bits)[:n], one.code(x[:n], dtype))
        for dx in found:
            torch.testing.assert_close(dx[:50], found[0][:50], rtol=1e-6, atol=1e-6)


@EACH_DTYPE
def test_another_default_device(dtype: torch.dtype) -> None:
    """The tensors that come decide, not `torch.device` around them; and they decide for later ones too."""
    twin = dataclasses.replace(registry.find(GELU.key), key=f"{GELU.key}-{dtype}")
    registry.register(twin)
    x = torch.randn(20_000).to(dtype)
    dy = torch.ones_like(x)
    for context in (torch.device("meta"), torch.device("cpu")):
        with context:
            y, codes = torch.ops.fitact.forward(x, (), dtype, twin.key)
            dx = torch.ops.fitact.backward(dy, y, codes, dtype, twin.key)
        assert {tensor.device.type for tensor in (y, codes, dx)} == {"cpu"}
        check_gradient(GELU, x, y, dy, dx)


@named("gelu_inverted1", "hardswish_inverted2")
@pytest.mark.parametrize("layout", LAYOUTS)
@EACH_DTYPE
def test_layouts(one: Inverse, layout: str, dtype: torch.dtype) -> None:
    x = (LAYOUTS[layout]() * 2).to(dtype)
    leaf = x.detach().requires_grad_()
    assert leaf.stride() == x.stride()
    with count_saved() as saved:
        y = one.function(leaf)
    whole, tiles = y.numel() * y.element_size(), -(-y.numel() // 8192)
    assert sorted(kept(saved)) == sorted(filter(None, [whole, tiles * 1024 * one.bits]))
    stock = one.stock(x)
    assert y.shape == x.shape
    if layout in DENSE:
        assert same(y, stock)
        assert y.stride() == stock.stride()
    else:
        torch.testing.assert_close(y, stock)
    dy = torch.randn(x.shape).to(dtype)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    check_gradient(one, x, y, dy, dx)


@pytest.mark.parametrize(
    "shape_gradient",
    [
        lambda y: torch.randn(1, dtype=y.dtype).expand_as(y),
        lambda y: torch.randn(y.shape[::-1], dtype=y.dtype).permute(*reversed(range(y.dim()))),
        lambda y: torch.randn(*y.shape, 2, dtype=y.dtype)[..., 0],
    ],
    ids=["expanded", "other order", "strided"],
)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels_last"])
def test_gradients_of_any_layout(layout: str, shape_gradient: Callable) -> None:
    x = LAYOUTS[layout]().requires_grad_()
    y = gelu(x)
    dy = shape_gradient(y.detach())
    (dx,) = torch.autograd.grad(y, x, dy)
    check_gradient(GELU, x, y, dy, dx)


@each_inverse(SOME)
def test_finite_differences(one: Inverse) -> None:
    """PyTorch's own check of gradients, in float64, up to the error of the form."""
    x = torch.cat([torch.randn(300) * 2, torch.linspace(-6, 6, 101)]).double()
    # within the differences of a corner there is no one derivative
    x = x[(x.abs() - 3).abs() > 1e-3].requires_grad_()
    error = float((run(one.function, x)[1] - one.true(x)).abs().max())
    assert error <= (0.02 if one.published else 2e-4)
    assert torch.autograd.gradcheck(one.function, x, eps=1e-6, atol=1.01 * error + 1e-8, rtol=0.0)


# ----------------------------------------------------------------------------------------------- changes in place

BACKENDS = [None, "eager", "aot_eager"]


def compiled(function: Callable, backend: str | None, **options: Any) -> Callable:
    torch._dynamo.reset()
    return function if backend is None else torch.compile(function, fullgraph=True, backend=backend, **options)


@pytest.mark.parametrize("layout", sorted(DENSE - {"empty"}))
def test_a_change_of_the_output_is_noticed(layout: str) -> None:
    x = LAYOUTS[layout]().requires_grad_()
    y = gelu(x).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), x)


def first_row(y: torch.Tensor) -> torch.Tensor:
    y[0].zero_()
    return y


CHANGES = {
    "product": lambda y: y.mul_(2),
    "relu": lambda y: F.relu(y, inplace=True),
    "row": first_row,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_a_change_inside_what_is_compiled_is_noticed(backend: str | None, change: str, layout: str) -> None:
    """PyTorch's error, in backward or already in the compiler."""
    function = compiled(lambda t: CHANGES[change](gelu(t)), backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        function(LAYOUTS[layout]().requires_grad_()).sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recorded", [True, False])
def test_a_change_after_what_is_compiled_is_noticed(backend: str | None, recorded: bool) -> None:
    x = torch.randn(30, 10, requires_grad=True)
    y = compiled(gelu, backend)(x)
    with torch.set_grad_enabled(recorded):
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_gradient_the_output_may_change(backend: str | None) -> None:
    x = torch.randn(30, 10)
    expected = 2 * F.gelu(x)
    function = compiled(lambda t: gelu(t).mul_(2), backend)
    assert same(function(x), expected)
    with torch.no_grad():
        assert same(function(x.clone().requires_grad_()), expected)


def test_the_input_may_change() -> None:
    x = torch.randn(100, requires_grad=True)
    expected = run(gelu, x)[1]
    h = x * 1
    y = gelu(h)
    h.zero_()
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert same(dx, expected)


# ------------------------------------------------------------------------------------------- the compiler, export


@each_inverse(SOME)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_fullgraph(one: Inverse, backend: str) -> None:
    function = compiled(one.function, backend)
    x = torch.randn(300, 50, requires_grad=True)
    with count_saved() as saved:
        y = function(x)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert same(y, one.stock(x))
    assert same(dx, run(one.function, x, dy)[1])
    assert sorted(kept(saved)) == [2 * 1024 * one.bits, 60_000]


@pytest.mark.full
@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
def test_compile_with_the_default_backend(budget: float) -> None:
    """Between two operations that the compiler would like to fuse and to recompute: gradients as without it."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return gelu(x * 2).sin() + 1

    x = torch.randn(64, 128, requires_grad=True)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        y = compiled(f, "inductor")(x)
    torch.testing.assert_close(y, f(x))
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, torch.autograd.grad(f(x).sum(), x)[0])


def test_compile_dynamic_recompiles_once() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(gelu, fullgraph=True, backend=counter)
    for n in (100, 8192, 9000, 20_001, 7):
        x = torch.randn(n, requires_grad=True)
        y = function(x)
        y.sum().backward()
        assert same(y, F.gelu(x))
        assert same(x.grad, run(gelu, x)[1])
    assert counter.frame_count <= 2


@pytest.mark.parametrize("layout", ["transposed", "channels_last"])
def test_compile_other_layouts_with_dynamic_sizes(layout: str) -> None:
    function = compiled(gelu, "aot_eager", dynamic=True)
    for n in (8, 9, 30):
        x = torch.randn(2, n, 4, 5)
        x = x.transpose(1, 2) if layout == "transposed" else x.to(memory_format=torch.channels_last)
        x.requires_grad_()
        y = function(x)
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        torch.testing.assert_close(y, F.gelu(x))
        check_gradient(GELU, x, y, dy, dx)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_compile_and_autocast(inside: bool, layout: str) -> None:
    def casting(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return gelu(x)

    function = compiled(casting if inside else gelu, "aot_eager")
    x = LAYOUTS[layout]().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside), count_saved() as saved:
        y = function(x)
    assert same(y, F.gelu(x).bfloat16())
    assert sorted(kept(saved)) == sorted([2 * x.numel(), -(-x.numel() // 8192) * 1024])
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.dtype == torch.float32
    check_gradient(GELU, x, y, torch.ones_like(x), dx)


def test_export() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return gelu(x) + 1

    rows = torch.export.Dim("rows", min=2)
    for shapes in (None, {"x": {0: rows}}):
        program = torch.export.export(Model(), (torch.randn(3, 4),), dynamic_shapes=shapes).module()
        x = torch.randn(3 if shapes is None else 7, 4)
        assert same(program(x), F.gelu(x) + 1)


@pytest.mark.parametrize("shape", [(), (0,), pytest.param((8192,), marks=pytest.mark.full), (4, 2500)], ids=str)
@EACH_DTYPE
def test_opcheck(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, key = torch.randn(shape).to(dtype), GELU.key
    forward, backward = torch.ops.fitact.forward, torch.ops.fitact.backward
    for out in {dtype, torch.bfloat16} if dtype != torch.float64 else {dtype}:
        for order in {(), tuple(reversed(range(x.dim())))}:
            torch.library.opcheck(forward.default, (x, order, out, key))
        y, codes = forward(x, (), out, key)
        assert (y.dtype, y.shape, codes.numel()) == (out, x.shape, -(-x.numel() // 8192) * 1024)
        torch.library.opcheck(backward.default, (torch.ones_like(y), y, codes, dtype, key))


# ----------------------------------------------------------------------------------------------------- transforms


def penalty(x: torch.Tensor, function: Callable) -> None:
    y = function(x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.sum() + dx.square().sum()).backward()


def power(x: torch.Tensor, function: Callable) -> None:
    (dx,) = torch.autograd.grad(function(x).pow(2).sum(), x, create_graph=True)
    torch.autograd.grad(dx.sum(), x)


def of_dy(x: torch.Tensor, function: Callable) -> None:
    dy = torch.randn_like(x, requires_grad=True)
    (dx,) = torch.autograd.grad(function(x), x, dy, create_graph=True)
    torch.autograd.grad(dx.sum(), dy)


REFUSAL = "gelu_inverted1: a second derivative was asked for"


@pytest.mark.parametrize("twice", [penalty, power, of_dy])
@pytest.mark.parametrize("backend", BACKENDS)
def test_double_backward_raises(twice: Callable, backend: str | None) -> None:
    """The activation's own error, or that of a compiler that has none."""
    message = "does not currently support double backward" if backend == "aot_eager" else REFUSAL
    with pytest.raises(RuntimeError, match=message):
        twice(torch.randn(3, requires_grad=True), compiled(gelu, backend))


@pytest.mark.parametrize(
    "twice",
    [
        lambda x: torch.func.grad(torch.func.grad(lambda t: gelu(t).sum()))(x[0]),
        lambda x: torch.func.jacrev(torch.func.jacrev(gelu))(x),
        lambda x: torch.autograd.functional.hessian(lambda t: gelu(t).sum(), x),
    ],
    ids=["func.grad", "jacrev", "hessian"],
)
def test_second_derivatives_by_transforms_raise(twice: Callable) -> None:
    with pytest.raises(RuntimeError, match=REFUSAL):
        twice(torch.randn(3, requires_grad=True))


def test_forward_mode_raises() -> None:
    x = torch.randn(3)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(gelu, (x,), (x,))


@named("gelu_inverted1", "hardswish_inverted2")
def test_torch_func(one: Inverse) -> None:
    f, x = one.function, torch.randn(5, 70) * 2
    slope = run(f, x)[1]
    grad, vmap = torch.func.grad(lambda t: f(t).sum()), torch.func.vmap
    assert same(grad(x), slope)
    assert same(vmap(grad)(x), slope)
    assert same(vmap(grad, in_dims=1)(x), slope.t())
    assert same(vmap(vmap(grad))(x), slope)
    assert same(vmap(f)(x), torch.stack([f(row) for row in x]))
    assert same(vmap(f, in_dims=1, out_dims=1)(x), torch.stack([f(column) for column in x.t()], 1))
    assert bool((torch.func.jacrev(f)(x[0]) == torch.diag(slope[0])).all())
    assert bool((vmap(torch.func.jacrev(f))(x) == torch.diag_embed(slope)).all())
    y, pullback = torch.func.vjp(f, x)
    assert same(y, one.stock(x))
    assert same(pullback(torch.ones_like(y))[0], slope)


@pytest.mark.parametrize("n", [0, 1, 8192, 2 * 8192 + 77])
def test_vmap_of_many_sizes(n: int) -> None:
    x = torch.randn(3, n)
    grad = torch.func.grad(lambda t: (gelu(t) ** 2).sum())
    alone = torch.stack([grad(row) for row in x])
    # PyTorch's own values round differently with and without vectors
    torch.testing.assert_close(torch.func.vmap(grad)(x), alone, rtol=1e-4, atol=1e-6)
    y = F.gelu(x)
    torch.testing.assert_close(
        alone, (2 * y * GELU.form(y, GELU.code(x, x.dtype))).float(), rtol=1e-4, atol=LOST[x.dtype]
    )
    assert torch.func.vmap(gelu)(torch.randn(0, 7)).shape == (0, 7)


def test_vmap_under_autocast() -> None:
    x = torch.randn(4, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.func.vmap(gelu)(x)
        slope = torch.func.vmap(torch.func.grad(lambda t: gelu(t).float().sum()))(x)
    assert same(y, F.gelu(x).bfloat16())
    assert slope.dtype == torch.float32
    check_gradient(GELU, x, y, torch.ones_like(x), slope)


def test_per_sample_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 30), fitact.activation("silu", method="inverted"), nn.Linear(30, 1))
    parameters = dict(model.named_parameters())
    x = torch.randn(6, 4)

    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (sample,)).sum()

    each_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(6):
        alone = torch.func.grad(loss)(parameters, x[i])
        for name in parameters:
            torch.testing.assert_close(each_sample[name][i], alone[name])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_checkpoint(reentrant: bool, autocast: bool) -> None:
    x = torch.randn(5000, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = checkpoint(lambda t: gelu(t * 2), x, use_reentrant=reentrant)
        expected = run(lambda t: gelu(t * 2), x)[1]
    assert y.dtype == (torch.bfloat16 if autocast else torch.float32)
    y.sum().backward()
    assert same(x.grad, expected)


def test_selective_checkpoint_can_keep_output_and_codes() -> None:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def keep(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        ours = op == torch.ops.fitact.forward.default
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    x = torch.randn(5000, requires_grad=True)
    y = checkpoint(
        lambda t: gelu(t.sin()).cos(),
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(keep),
    )
    y.sum().backward()
    assert same(x.grad, run(lambda t: gelu(t.sin()).cos(), x)[1])


def test_save_on_cpu() -> None:
    x = torch.randn(9000, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = gelu(x)
    y.sum().backward()
    assert same(x.grad, run(gelu, x)[1])


def test_a_graph_that_is_kept_gives_the_same_twice() -> None:
    x = torch.randn(9000, requires_grad=True)
    y = gelu(x)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    assert same(torch.autograd.grad(y.sum(), x)[0], first)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(y.sum(), x)


# -------------------------------------------------------------------------------------------------------- modules


@each_inverse()
def test_modules(one: Inverse) -> None:
    module = (
        fitact.activation(one.name)
        if one.published
        else fitact.activation(one.plain, method="inverted", bits=one.bits)
    )
    assert type(module).__module__ == f"fitact.generated.{one.name}"
    x = torch.randn(50)
    for twin in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(twin) is type(module)
        assert same(twin(x), one.stock(x))
    assert not module.state_dict()
    assert list(module.parameters()) == []
    plain = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    plain.load_state_dict(nn.Sequential(nn.Linear(3, 4), module, nn.Linear(4, 2)).state_dict())


def test_shipped_ones_by_name() -> None:
    assert type(fitact.activation("gelu", method="inverted")).__name__ == "GeluInverted1"
    assert type(fitact.activation("hardswish", method="inverted")).__name__ == "HardswishInverted2"
    with pytest.raises(UsageError, match=r"gelu_inverted3.*there are .*gelu_inverted1"):
        fitact.activation("gelu", method="inverted", bits=3)


def test_dtypes_and_objects_refused() -> None:
    for wrong in (torch.arange(3), torch.ones(3, dtype=torch.complex64), torch.ones(3, dtype=torch.bool), 1.0):
        with pytest.raises(TypeError, match=r"gelu_inverted1: expected a tensor of float16.*, got "):
            gelu(wrong)


def losses(activation: nn.Module, autocast: bool = False, rate: float = 0.1) -> list[float]:
    """Those of a regression by gradient descent."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), activation, nn.Linear(64, 1))
    x = torch.rand(256, 2) * 4 - 2
    target = (x[:, :1] * x[:, 1:]).sin()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    found = []
    for _ in range(100):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = F.mse_loss(model(x).float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_trains_as_pytorch_s() -> None:
    ours, stock = losses(fitact.activation("gelu", method="inverted")), losses(nn.GELU())
    assert ours[0] == stock[0]
    assert ours[-1] < ours[0] / 1.5
    np.testing.assert_allclose(ours, stock, rtol=1e-3)


def test_trains_under_autocast() -> None:
    ours, stock = losses(fitact.activation("gelu", method="inverted"), True), losses(nn.GELU(), True)
    assert ours[-1] < ours[0] / 1.5
    np.testing.assert_allclose(ours, stock, rtol=0.05)


# ----------------------------------------------------------------------------------------- formulas of one's own


def bumps(x: np.ndarray) -> np.ndarray:
    return 1 + np.sin(2 * x)


# text, domain, pieces, f′, and f in PyTorch
OWN: list[tuple[str, tuple[float, float] | None, int, Callable, Callable]] = [
    ("softplus(x)", None, 1, special.expit, lambda x: F.softplus(x, threshold=80)),
    ("softplus(x) - 0.3*x", None, 2, lambda x: special.expit(x) - 0.3, lambda x: F.softplus(x) - 0.3 * x),
    ("x + sin(x)**2", (-1, 2), 1, bumps, lambda x: x + x.sin() ** 2),
    # the ones above in the ordinary run
    ("x**3", (-1e12, 1e12), 1, lambda x: 3 * x**2, lambda x: x**3),
    ("x + sin(x)**2", (-3, 3), 4, bumps, lambda x: x + x.sin() ** 2),
    ("x**3 - x", (-10, 10), 3, lambda x: 3 * x**2 - 1, lambda x: x**3 - x),
    ("x**4 - 2*x**2", (-2, 2), 4, lambda x: 4 * x**3 - 4 * x, lambda x: x**4 - 2 * x**2),
    (
        "x*sigmoid(2*x) + 0.1*x**2",
        (-20, 20),
        2,
        lambda x: special.expit(2 * x) * (1 + 2 * x * special.expit(-2 * x)) + 0.2 * x,
        lambda x: x * torch.sigmoid(2 * x) + 0.1 * x**2,
    ),
    ("x*cos(x)", (-6, 6), 7, lambda x: np.cos(x) - x * np.sin(x), lambda x: x * x.cos()),
]
EACH_OWN = pytest.mark.parametrize(
    ("text", "domain", "pieces", "slope", "stock"),
    [
        pytest.param(*row, id=f"{row[0]} {row[1] or ''}".strip(), marks=pytest.mark.full if i > 2 else [])
        for i, row in enumerate(OWN)
    ],
)


@EACH_OWN
def test_formulas_from_text_to_gradient(
    text: str,
    domain: tuple[float, float] | None,
    pieces: int,
    slope: Callable,
    stock: Callable,
    tmp_path: Path,
) -> None:
    one = made(text, domain, tmp_path)
    assert one.bits == (pieces - 1).bit_length()
    low, high = domain or (-1e30, 1e30)
    for dtype in (torch.float32, *HALVES):
        x = patterns(dtype)[patterns(dtype).isfinite()] if dtype in HALVES else sample(one, low, high)
        x = x[(x.double() >= low) & (x.double() <= high)]
        y, dx = run(one.function, x)
        eps = torch.finfo(dtype).eps * (4 if dtype == torch.float32 else 1)
        known = y.isfinite()
        torch.testing.assert_close(y[known].double(), stock(x[known].double()), rtol=eps, atol=4e-6)
        assert bool(((1 + 2 * eps) * stock(x.double())).to(dtype)[~known].isinf().all())
        true = torch.from_numpy(slope(x.double().numpy()))
        scale = true.abs().clamp(min=1)
        # of half precision all inputs were judged, of float32 a sample
        stated = one.error(dtype) * (1.1 if dtype == torch.float32 else 1)
        allowed = (stated + 1e-6) * scale + half_ulp(dx.double(), dtype)
        assert bool(((dx.double() - true).abs() <= allowed)[known].all()), dtype
        dy = torch.randn(x.shape).to(dtype)
        check_gradient(one, x, y, dy, run(one.function, x, dy)[1])


def sample(one: Inverse, low: float, high: float) -> torch.Tensor:
    """float32 numbers in a domain, dense at its ends, where f′ is 0 or jumps, and about 0."""
    tails = np.geomspace(1e-30, 1e30, 2000)
    parts = [np.linspace(max(low, -30), min(high, 30), 50_001), tails, -tails]
    for split in (*one.fit["splits"]["float32"], low, high):
        if abs(split) < 1e30:
            parts += [chain(split, 100, np.float32), split + np.linspace(-1e-2, 1e-2, 10_001)]
    return torch.from_numpy(np.concatenate([np.asarray(part, dtype=np.float32) for part in parts]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_formula_without_codes(backend: str | None, tmp_path: Path) -> None:
    """Of a monotone formula the output is all that is kept; codes are empty everywhere."""
    one = made("softplus(x)", None, tmp_path)
    assert one.bits == 0
    x = torch.randn(100, 90).t().requires_grad_()
    with count_saved() as saved:
        y = compiled(one.function, backend)(x)
    assert kept(saved) == [36_000]
    dy = torch.randn(90, 100)
    (dx,) = torch.autograd.grad(y, x, dy)
    check_gradient(one, x, y, dy, dx)
    key = one.key
    torch.library.opcheck(torch.ops.fitact.forward.default, (x.detach().t(), (1, 0), torch.bfloat16, key))
    grad = torch.func.grad(lambda t: one.function(t).sum())
    torch.testing.assert_close(torch.func.vmap(grad)(x.detach()), grad(x.detach()), rtol=1e-5, atol=1e-6)


def test_a_formula_trains(tmp_path: Path) -> None:
    one = made("softplus(x) - 0.3*x", None, tmp_path)

    class Stock(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.softplus(x) - 0.3 * x

    ours = losses(one.module.OwnInverted(), rate=0.01)
    assert ours[-1] < ours[0] / 1.5
    np.testing.assert_allclose(ours, losses(Stock(), rate=0.01), rtol=1e-3)
