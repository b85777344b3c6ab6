"""Functions of others whose outputs are recomputed: Liger's, which no mode sees, and fitact's generated ones."""

import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fitact import saving
from fitact.codegen import bundle
from fitact.codegen.generate import generate
from fitact.generated.swish_beta_recompute import SwishBetaRecompute
from fitact.runtime.measure.saved import count_saved
from fitact.runtime.saving.storage import Stored
from tests.support.around import AROUND
from tests.support.blocks import built
from tests.support.generated import same, sizes
from tests.support.learned import recomputed
from tests.support.package import load
from tests.support.saving import agree, off


def pulled(function: Callable[..., Tensor], tensors: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of what a function saved."""
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in tensors]
        y = function(*leaves)
    return torch.autograd.grad(y, leaves, grad.view(y.shape))


class LigerSiLUMulFunction(torch.autograd.Function):
    """silu(g·a)·b·d, whose backward writes over what it has saved."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, *numbers: float) -> Tensor:
        ctx.gate_multiplier, ctx.down_multiplier = numbers or (1.0, 1.0)
        ctx.save_for_backward(a.view(-1, a.shape[-1]), b.view(-1, a.shape[-1]))
        return gate(ctx, a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grads = pulled(partial(gate, ctx), ctx.saved_tensors, grad)
        for each, new in zip(ctx.saved_tensors, grads, strict=True):
            each.data.copy_(new)
        return *(each.view(grad.shape) for each in grads), None, None


def gate(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
    y = F.silu(a * ctx.gate_multiplier) * b
    return y if ctx.down_multiplier == 1 else y * ctx.down_multiplier


class LigerRMSNormFunction(torch.autograd.Function):
    """x/rms(x)·(offset + w), cast as LLaMA's or Gemma's; its node does not have eps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor | None, offset: float, casting_mode: int) -> Tensor:
        tensors = [x.view(-1, x.shape[-1]), *([] if w is None else [w])]
        ctx.offset, ctx.casting_mode = offset, casting_mode
        inverse = (tensors[0].float().square().mean(1) + 1e-2).rsqrt()
        ctx.save_for_backward(*tensors, inverse)
        return norm(ctx, inverse, *tensors).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        *tensors, inverse = ctx.saved_tensors  # as if the deviations were numbers
        dx, *dw = pulled(partial(norm, ctx, inverse), tensors, grad)
        return dx.view(grad.shape), *(dw or [None]), None, None


def norm(ctx: Any, inverse: Tensor, x: Tensor, *weights: Tensor) -> Tensor:
    y = x.float() * inverse[:, None]
    y = y if ctx.casting_mode else y.to(x.dtype)
    for w in weights:
        y = y * (ctx.offset + (w.float() if ctx.casting_mode else w))
    return y.to(x.dtype)


@pytest.fixture(autouse=True)
def _imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))


def trained(context: Any, function: Any, factors: str, dtype: torch.dtype) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    weights = [torch.randn(64, 64, dtype=dtype, requires_grad=True) for _ in range(4)]
    scale, x = torch.randn(64, dtype=dtype, requires_grad=True), torch.randn(4, 64, 64, dtype=dtype)
    with count_saved(nn.ParameterList([*weights, scale])) as saved, context:
        a, b = F.linear(x, weights[0]), F.linear(x, weights[1])
        if factors == "recomputed":
            a, b = a.sin(), b * 1.5
        y = function(a, b, scale)
        loss = F.linear(F.dropout(y, 0.25), weights[2]).float().square().mean()
        loss = loss + F.linear(y, weights[3]).float().mean()
    return [*torch.autograd.grad(loss, [*weights, scale], materialize_grads=True)], saved.bytes


FUNCTIONS = {
    "gate": (lambda a, b, scale: LigerSiLUMulFunction.apply(a, b)),
    "gate with numbers": (lambda a, b, scale: LigerSiLUMulFunction.apply(a, b, 1.25, 0.5)),
    "a view of a norm": (
        lambda a, b, scale: LigerRMSNormFunction.apply(a + b, scale, 0.0, 0).unsqueeze(0).squeeze(0)
    ),
    "LLaMA's norm": (lambda a, b, scale: LigerRMSNormFunction.apply(a + b, scale, 0.0, 0)),
    "Gemma's norm": (lambda a, b, scale: LigerRMSNormFunction.apply(a + b, scale, 1.0, 1)),
    "norm without a weight": (lambda a, b, scale: LigerRMSNormFunction.apply(a + b, None, 0.0, 0)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factors", ["stored", "recomputed"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_outputs_are_recomputed(name: str, factors: str, dtype: torch.dtype) -> None:
    expected, before = trained(nullcontext(), FUNCTIONS[name], factors, dtype)
    for around in (nullcontext(), torch.autograd.graph.save_on_cpu()):
        with around:
            actual, after = trained(saving(), FUNCTIONS[name], factors, dtype)
        assert all(map(torch.equal, actual, expected))
    assert after <= before - 4 * 64 * 64 * dtype.itemsize  # of the output; dropout's factors are in bits
    coded, least = trained(saving("rounding"), FUNCTIONS[name], factors, dtype)
    assert off(coded, expected) < 0.02 and least <= after


def checkpointed(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """A checkpoint gives each tensor once, and is asked for none."""
    norm = Mock(side_effect=LigerRMSNormFunction.apply)
    y: Tensor = checkpoint(norm, a + b, scale, 0.0, 0, use_reentrant=False)
    F.linear(y, y[0])
    norm.assert_called_once()
    return y


LEFT = {
    "another cast": lambda a, b, scale: LigerRMSNormFunction.apply(a + b, scale, 0.0, -1),
    "LLaMA's cast and an offset": lambda a, b, scale: LigerRMSNormFunction.apply(a + b, scale, 1.0, 0),
    "changed since": lambda a, b, _: torch.no_grad()(Tensor.mul_)(LigerSiLUMulFunction.apply(a, b, 1.25, 0.5), 2),
    "made in a checkpoint": checkpointed,
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_as_it_is(name: str) -> None:
    """Saved as without fitact."""
    given = LEFT[name], "stored", torch.float32
    (expected, _), (actual, size) = (trained(context, *given) for context in (nullcontext(), saving()))
    assert all(map(torch.equal, actual, expected))
    if "cast" in name:
        assert size >= trained(saving(), FUNCTIONS["LLaMA's norm"], *given[1:])[1] + 4 * 64 * 64 * 4


ORDERS = "one gradient, then another", "a head on what was detached", "detached after backward", "two passes"


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_a_gate_that_has_overwritten_its_factors(order: str, recomputed: bool) -> None:
    """Whoever reads its output after its own backward pass gets it as it was."""

    def gradients(context: Callable[[], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        x, *w = torch.randn(32, 64), *(torch.randn(64, 64, requires_grad=True) for _ in range(4))
        with context():
            a, b = F.linear(x, w[0]), F.linear(x, w[1])
            y = LigerSiLUMulFunction.apply(*((a.sin(), b * 1.5) if recomputed else (a, b)))
            loss = F.linear(y, w[2]).square().mean()
            head = F.linear(y.detach(), w[3]).square().mean()
        if order == ORDERS[0]:
            first = torch.autograd.grad(loss, w[0], retain_graph=True)
            return [*first, *torch.autograd.grad(loss, w[2])]
        actual = torch.autograd.grad(loss, w[:3], retain_graph=order == "two passes")
        if order == "detached after backward":
            with context():
                head = F.linear(y.detach(), w[3]).square().mean()
        again = torch.autograd.grad(loss, w[2]) if order == "two passes" else ()
        return [*actual, *torch.autograd.grad(head, w[3]), *again]

    assert all(map(torch.equal, gradients(saving), gradients(nullcontext)))


def test_a_gate_of_an_earlier_context() -> None:
    """Nobody saw its backward pass, which may have overwritten its factors."""
    w = torch.randn(64, 64, requires_grad=True)
    with saving():
        y = LigerSiLUMulFunction.apply(w * 2, w * 3)
    torch.autograd.grad(y, w, torch.ones_like(y), retain_graph=True)
    expected, x = y.detach().clone(), torch.randn(64, 64, requires_grad=True)
    with saving():
        loss = F.linear(y, x).sum()
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.ones(64, 64) @ expected)


def test_nothing_outlives_its_graph() -> None:
    """What was freed cannot be read again; what a function returned can."""

    def stored() -> int:
        return sum(type(each) is Stored for each in gc.get_objects())

    others, x = stored(), torch.randn(32, 64, requires_grad=True)
    with saving():
        y = LigerRMSNormFunction.apply((x * 1).sin(), None, 0.0, 0)
        loss = F.linear(y, y.detach()).sum()
        assert stored() > others
        loss.backward()
        del loss
        assert stored() == others
        assert F.linear(y, y.detach()).shape == (32, 32)


ROWS = 1024


def mlp(act: nn.Module, view: bool = False) -> nn.Module:
    def call(m: Any, x: Tensor) -> Tensor:
        y = m.act(m.fc1(x))
        return m.fc2(y.view(4, -1, 32)).view(-1, 16) if view else m.fc2(y)

    return built(call, fc1=nn.Linear(16, 32), act=act, fc2=nn.Linear(32, 16))


@pytest.mark.parametrize("around", ["checkpoint", "save_on_cpu", "accumulated", "retained"])
def test_the_same_gradients(around: str) -> None:
    x = torch.randn(ROWS, 16) * 3
    for view in (False, True):
        agree(lambda view=view: mlp(SwishBetaRecompute(), view), AROUND[around], x)
    agree(lambda: mlp(SwishBetaRecompute()), AROUND[around], x.view(4, -1, 16))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_convolutions(layout: torch.memory_format) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), SwishBetaRecompute(), nn.Conv2d(8, 4, 3, padding=1))
    model, x = model.to(memory_format=layout), torch.randn(2, 3, 12, 11).to(memory_format=layout)
    with count_saved(model) as saved, saving():
        y = model(x)
    assert sizes(saved) == sorted([4, x.nbytes, 4 * 2 * 8 * 10 * 9])  # and the number
    actual = torch.autograd.grad(y.sum(), [*model.parameters()])
    assert all(map(same, actual, torch.autograd.grad(model(x).sum(), [*model.parameters()])))


def test_a_standalone_folder(tmp_path: Path) -> None:
    """Its outputs are found too, and recomputed by an op of its own."""
    generate(bundle.plan([recomputed("swish_beta", "alone")]), tmp_path, prune=False, layout=bundle.STANDALONE)
    model, x = mlp(load(tmp_path / "alone", "alone").Alone()), torch.randn(ROWS, 16) * 3
    with count_saved(model) as saved, saving():
        model(x)
    assert sizes(saved) == sorted([4, x.nbytes, 4 * ROWS * 32])  # and the number
    agree(lambda: model, x=x)
