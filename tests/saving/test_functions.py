"""Functions that a forward calls: outputs and all gradients are PyTorch's, bit for bit, and less is saved."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from fitact import saving
from fitact.runtime.measure.saved import count_saved
from fitact.runtime.torch_internals import innermost_mode
from tests.support.around import AROUND
from tests.support.blocks import SETTINGS
from tests.support.calls import CALLS, WIDE, Feed
from tests.support.lifetimes import HELD, lifetimes
from tests.support.peak import peak_memory
from tests.support.saving import (
    HALF,
    X,
    agree,
    cast,
    differences,
    kept,
    loss_of,
    observed,
    pair,
    train,
)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_and_bytes(name: str, setting: str) -> None:
    dtype, autocast = SETTINGS[setting]
    models, x, wide = pair(CALLS[name], dtype), X.to(dtype), torch.randn(16, 32, 16).to(dtype)
    with cast(autocast):
        for seed in range(2):  # the second gradient is added to the first
            expected, found = (observed(one, train, x, seed) for one in models)
            assert not isinstance(expected, str)
            assert not differences(expected, found)
        before, after = (kept(one, wide) for one in models)
    assert after < before


# ----------------------------------------------------------------------------------------------- each function

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(F, name) for name in ("gelu", "silu", "mish", "hardswish", "hardsigmoid", "softplus", "glu")},
    **{name: getattr(F, name) for name in ("leaky_relu", "elu", "selu", "celu", "hardtanh", "relu6", "relu")},
    "gelu, tanh": partial(F.gelu, approximate="tanh"),
    "clamp": lambda x: x.clamp(-0.5, max=0.7),
    "clamp, a tensor": lambda x: x.clamp(min=x.mean().detach()),
    "clip": lambda x: torch.clip(x, max=0.7),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "pow": lambda x: x**3,
    "power of it": lambda x: 2**x,
    "square": torch.square,
    "sigmoid": torch.sigmoid,
    "tanh": Tensor.tanh,
    "exp": torch.exp,
    "neg": lambda x: -x,
    "sum": lambda x: x + x.flip(0),
    "sum with itself": lambda x: torch.add(x, x, alpha=3),
    "difference": lambda x: 1 - x,
    "product with itself": lambda x: x * x,
    "product of slices": lambda x: x[..., :24] * x[..., 24:],
    "product with a number": lambda x: 3 * x,
    "product with a tensor": lambda x: x * torch.linspace(0, 1, x.shape[-1]).to(x.dtype),
    "quotient": lambda x: x / (1 + x.exp()),
    "quotient by a number": lambda x: x / 3,
    "quotient of a number": lambda x: 1 / (x + 9),
    "cat": lambda x: torch.cat((-x[..., :24], x[..., 24:]), -1),
    "stack": lambda x: torch.stack((x, x * 2), -1).flatten(-2)[..., ::2],
    "clone": Tensor.clone,
    "turned": lambda x: x.transpose(0, 1).contiguous(),
    "reshaped": lambda x: x.transpose(0, 1).reshape(-1, WIDE),
    "cast": lambda x: x.double().to(x.dtype),
    "type_as": lambda x: x.to(torch.float64).type_as(x),
    "rows": lambda x: x[torch.tensor([1, 0, 0])],
    "rows and columns": lambda x: x[torch.tensor([2, 0]), torch.tensor([1, 4])],
    "rows by a mask": lambda x: x[x.mean(-1) > 0],
    "rows, selected": lambda x: x.index_select(1, torch.tensor([3, 3, 1])),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "in place": lambda x: F.silu(x.clone(), inplace=True),
    "changed afterwards": lambda x: F.gelu(x).mul_(2),
    "a view changed": lambda x: _halved(F.gelu(x)),
    "softmax": lambda x: x.softmax(-1) * x,
    "composed": lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x**3))),
}


def _halved(x: Tensor) -> Tensor:
    x[..., 1:4] *= 0.5
    return x


class One(nn.Module):
    """A function after a linear layer, and after a norm, and linear functions of what it returns."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call, self.norm = call, nn.LayerNorm(WIDE)
        self.fc1, self.fc2 = nn.Linear(16, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        y, z = self.call(x), self.call(self.norm(x))
        weight = self.fc2.weight[:, : y.shape[-1]]
        both = y * z if y.shape == z.shape else z  # not of rows by a mask
        sums = F.linear(F.gelu(y), weight), F.linear(z, weight), F.linear(both, weight, self.fc2.bias)
        return torch.cat([*sums, F.linear(self.call(F.gelu(x)), weight) * x.mean()])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("name", UNARY)
def test_functions(name: str, dtype: torch.dtype) -> None:
    models, x = pair(partial(One, UNARY[name]), dtype), X.to(dtype)
    expected, found = (observed(one, train, x) for one in models)
    assert not isinstance(expected, str)
    assert not differences(expected, found)
    before, after = (kept(one, x) for one in models)
    assert after < before


class Multiplied(nn.Module):
    """A function of an activation's output and of a square weight."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.product, self.fc1, self.weight = product, nn.Linear(16, WIDE), nn.Parameter(torch.randn(WIDE, WIDE))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(F.gelu(self.fc1(x)), self.weight)


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: x @ w.t(),
        lambda x, w: torch.matmul(x, w),
        lambda x, w: torch.mm(x.flatten(0, 1), w.t()),
        lambda x, w: torch.bmm(x, w.expand(len(x), *w.shape)),
        lambda x, w: torch.baddbmm(x, x, w.expand(len(x), *w.shape).transpose(1, 2), beta=0.5),
        lambda x, w: x.flatten(0, 1).addmm(x.flatten(0, 1), w),
        lambda x, w: F.linear(x, w.t()),
        lambda x, w: F.linear(input=x, weight=w, bias=w[0]),
        lambda x, w: F.linear(x[0, 0], w),
        lambda x, w: w @ x.transpose(1, 2),
        lambda x, w: F.linear(x, w.detach()) + F.linear(x.detach(), w),
        lambda x, w: F.linear(x, F.gelu(w)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF, None])
def test_products(product: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype | None) -> None:
    """None is bfloat16 by autocast."""
    with cast(None if dtype else HALF):
        agree(partial(Multiplied, product), dtype=dtype or torch.float32)


@pytest.mark.parametrize("product", [lambda x, w: F.linear(x[:, 1:], w, w[0]), lambda x, w: x.transpose(0, 1) @ w])
def test_products_of_copies(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    """PyTorch multiplies a copy that it makes itself and saves."""
    models = pair(partial(Multiplied, product))
    before, after = (kept(one, X) for one in models)
    assert after <= before
    assert not differences(*(observed(one, train, X) for one in models))


# ---------------------------------------------------------------------------------------------- what surrounds it


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", ["clamped experts", "attention", "gelu, dropout", "adapter"])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_surroundings(name: str, around: str) -> None:
    if around == "partial" and "experts" in name:  # it asks for weights of two dimensions
        return
    agree(CALLS[name], AROUND[around])
    assert innermost_mode() is None


class Inside(Feed):
    """A checkpoint within a module's own forward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(p=0.3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        a = F.gelu(self.fc1(self.norm(x)))

        def rest(a: Tensor) -> Tensor:
            y: Tensor = self.fc2(F.dropout(F.gelu(a) * a, self.p))
            return F.linear(F.silu(y) * y, self.fc1.weight)

        return F.gelu(a) + checkpoint(rest, a, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside(reentrant: bool) -> None:
    agree(lambda: nn.Sequential(Inside(reentrant), nn.Linear(WIDE, 16), Inside(reentrant)))


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("name", ["gelu, dropout", "attention", "attention after LayerNorm", "adapter"])
def test_nothing_lives_longer(name: str, held: str) -> None:
    before, before_later, after, later = lifetimes(pair(CALLS[name]), held)
    shared = {"v"} if name == "attention after LayerNorm" else set()  # PyTorch saves a copy for each head instead
    assert after <= before | shared and later <= before_later


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_peak(name: str, dtype: torch.dtype) -> None:
    wide = torch.randn(16, 32, 16).to(dtype)
    before, after = (
        peak_memory(lambda one=one: one(wide).sum().backward(), one)["total"]
        for one in pair(lambda: nn.Sequential(*(CALLS[name]() for _ in range(4))), dtype)
    )
    assert after <= before


def tensors() -> int:
    return sum(issubclass(type(one), Tensor) for one in gc.get_objects())


@pytest.mark.parametrize("name", CALLS)
def test_no_garbage(name: str) -> None:
    """Nothing waits for the collector of garbage, forward or backward."""
    found = []
    for model in pair(CALLS[name]):
        train(model, X)
        gc.collect()
        gc.disable()
        before = tensors()
        y = model(X)
        del y
        forward = tensors()
        train(model, X)
        found.append((forward - before, tensors() - before))
        gc.enable()
    assert found == [(0, 0), (0, 0)]


class Scaled(nn.Module):
    """A residual block, whose output can be recomputed from its input and so from all blocks before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(16, 16), nn.Parameter(torch.full((16,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x) * self.scale


@pytest.mark.parametrize("blocks", [3, 60, pytest.param(250, marks=pytest.mark.full)])
def test_chains(blocks: int) -> None:
    """A chain is recomputed in parts, so that none is too long for Python's stack."""

    def make() -> nn.Module:
        chain = (Scaled() for _ in range(blocks))
        return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), *chain, nn.Linear(16, 16))

    agree(make)
    models, wide = pair(make), torch.randn(32, 16, 16)
    peaks = [peak_memory(lambda one=one: one(wide).sum().backward(), one)["total"] for one in models]
    assert peaks[1] <= peaks[0]
    before, after = (kept(one, wide) for one in models)
    assert after < 0.6 * before


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        self.names += [name] if name in ("gelu", "mul", "scaled_dot_product_attention") else []
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inside", [False, True])
def test_other_modes(inside: bool) -> None:
    """Modes of one's own, around the model or in its forward, see what they saw."""

    class Moded(Feed):
        def forward(self, x: Tensor) -> Tensor:
            mode = self.mode = Seen()
            if not inside:
                return super().forward(x)
            with mode:
                return super().forward(x)

    def step(model: Any, x: Tensor) -> Any:
        with Seen() as seen:
            train(model, x)
        return seen.names, model.mode.names

    agree(partial(Moded, lambda x: F.gelu(x) * x), step)


def test_threads() -> None:
    def step(model: Any, x: Tensor) -> Any:
        found: dict[int, Tensor] = {}

        def run(i: int) -> None:
            y = model(x + i)
            found[i] = torch.autograd.grad(loss_of(y), model.fc1.weight)[0]

        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        return [found[i] for i in range(4)]

    agree(Feed, step)


# What changes a tensor in place, and the number of tensors that are stored in 8 bits and as they are.
CHANGED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int, int]] = {
    "product": (lambda h, u: h.mul_(u), 1, 1),  # PyTorch copies h, which is about to be changed
    "activation": (lambda h, u: (h + u).relu_(), 1, 0),
    "by keyword": (lambda h, u: torch.pow(input=h + u, exponent=2), 0, 1),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_quantised(name: str) -> None:
    """Functions that change a tensor have the kinds of those that do not."""
    call, quantised, whole = CHANGED[name]
    x, v, w = torch.randn(64, 32), *(torch.randn(32, 128, requires_grad=True) for _ in "vw")
    found = []
    for context in nullcontext(), saving("rounding"):
        with count_saved() as saved, context:
            y = call(x @ v, x @ w)
        found.append(torch.autograd.grad(y.sum(), [v, w]))
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 0.02 * a.norm()
    bits, scales = y.numel(), 5 * 64
    assert saved.bytes == x.nbytes + quantised * (bits + scales) + whole * y.nbytes
