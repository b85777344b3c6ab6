"""Checkpoints whose inputs are quantised: what backward starts from, PyTorch's options, nesting and memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint as torchs
from torch.utils.checkpoint import create_selective_checkpoint_contexts, set_checkpoint_early_stop

import fitact
from fitact.base import UsageError
from fitact.runtime.saving import storage
from fitact.runtime.saving.blocks import decode, encode
from tests.support.blocks import Layer
from tests.support.saving import differences, stepped

WIDE = torch.randn(8, 64, 64, generator=torch.Generator().manual_seed(3))
ERRORS = {"exact": None, "rounding": 8, "coarse": 4}
Call = Callable[..., Tensor]


def step(layer: Any, call: Call) -> Any:
    return stepped(layer, WIDE, call)


@pytest.fixture
def coded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What was coded."""
    found: list[Tensor] = []
    monkeypatch.setattr(storage, "encode", lambda x, *given: found.append(x) or encode(x, *given))
    return found


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("error", ERRORS)
def test_backward_starts_from_the_decoded_input(error: str, reentrant: bool) -> None:
    """Dropout draws the same mask again."""
    layer, bits = Layer(p=0.2), ERRORS[error]
    found = step(layer, partial(fitact.checkpoint, error=error, use_reentrant=reentrant))
    y = step(layer, Layer.__call__)[0]
    again = WIDE if bits is None else decode(*encode(WIDE, bits, True), WIDE.shape, WIDE.dtype)

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(again)
            return y.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            with torch.enable_grad():
                x = again.clone().requires_grad_()
                torch.manual_seed(1)
                layer(x).backward(dy)
            return x.grad

    assert not differences(found, step(layer, lambda _, x: Again.apply(x)))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"preserve_rng_state": False},
        {"determinism_check": "none"},
        {"debug": True},
        {"context_fn": partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])},
    ],
)
def test_options_of_pytorch(options: dict[str, Any], early: bool) -> None:
    layer = Layer(p=0.2)
    with set_checkpoint_early_stop(early):
        expected = step(layer, partial(torchs.checkpoint, use_reentrant=False, **options))
        assert not differences(expected, step(layer, partial(fitact.checkpoint, error="exact", **options)))
        assert differences(expected, step(layer, partial(fitact.checkpoint, **options)))


def test_each_input_is_stored_once(coded: list[Tensor]) -> None:
    """Of a residual stream, which a checkpoint hands to the next; and where several read the same tensor."""
    layers = [Layer() for _ in range(3)]
    stream = []

    def call(_: Any, x: Tensor) -> Tensor:
        for layer in layers:
            stream.append(x.detach())
            x = fitact.checkpoint(layer, x)
        return x

    step(layers[0], call)
    assert len(coded) == 3
    assert all(torch.equal(a.view(b.shape), b) for a, b in zip(coded, stream, strict=True))
    coded.clear()
    parts = (Layer.attention, Layer.mlp, lambda layer, x: layer(x.transpose(0, 1)).transpose(0, 1))
    step(layers[0], lambda layer, x: torch.stack([fitact.checkpoint(part, layer, x) for part in parts]).sum(0))
    assert len(coded) == 1


def test_tensors_by_name(coded: list[Tensor]) -> None:
    def function(layer: Layer, x: Tensor, *, more: Tensor, factor: float) -> Tensor:
        return layer(x) + factor * layer(more)

    def call(check: Any, layer: Layer, x: Tensor, **options: Any) -> Tensor:
        return check(function, layer, x, more=x.sin(), factor=2.0, **options)

    layer = Layer()
    expected = step(layer, partial(call, torchs.checkpoint, use_reentrant=False))
    assert not differences(expected, step(layer, partial(call, fitact.checkpoint, error="exact")))
    assert not coded
    step(layer, partial(call, fitact.checkpoint))
    assert len(coded) == 2


@pytest.mark.parametrize("error", ["rounding", "coarse"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_memory(error: str, reentrant: bool) -> None:
    """An input is gone as soon as nothing else needs it."""
    layer, x = Layer(), WIDE.clone().requires_grad_()
    hidden = x * 1
    gone = StorageWeakRef(hidden.untyped_storage())
    y = fitact.checkpoint(layer, hidden, error=error, use_reentrant=reentrant)
    del hidden
    assert gone.expired()
    y.sum().backward()


@pytest.mark.parametrize("outside", ["checkpoint", "fitact"])
def test_inside_of_another(outside: str) -> None:
    """What the inner one stores is dropped with the rest, and stored when the outer one runs it again."""
    check = partial(torchs.checkpoint, use_reentrant=False) if outside == "checkpoint" else fitact.checkpoint
    inner: list[StorageWeakRef] = []

    def function(layer: Layer, x: Tensor, error: str) -> Tensor:
        hidden = layer(x)
        inner.append(StorageWeakRef(hidden.untyped_storage()))
        return fitact.checkpoint(layer, hidden, error=error)

    def call(layer: Layer, x: Tensor, error: str) -> Tensor:
        y: Tensor = check(function, layer, x, error)
        assert inner[-1].expired()
        return y

    layer = Layer()
    baseline = step(layer, partial(call, error="exact"))
    found = step(layer, partial(call, error="rounding"))
    flat = [torch.cat([one[1].flatten(), *(g.flatten() for g in one[2].values())]) for one in (baseline, found)]
    assert 1e-5 < (flat[1] - flat[0]).norm() / flat[0].norm() < 8e-3


def test_inside_of_saving() -> None:
    """With the exact class nothing changes; what is outside of checkpoints is recomputed."""
    layer = Layer()

    def call(context: Any, check: Any, layer: Layer, x: Tensor) -> Tensor:
        with context:
            y: Tensor = check(layer, layer(x).sin()).cos()
        return y

    expected = step(layer, partial(call, nullcontext(), partial(torchs.checkpoint, use_reentrant=False)))
    exact = partial(fitact.checkpoint, error="exact")
    assert not differences(expected, step(layer, partial(call, fitact.saving(), exact)))
    assert differences(expected, step(layer, partial(call, fitact.saving(), fitact.checkpoint)))


def test_changed_in_place() -> None:
    layer, x = Layer(), WIDE.clone().requires_grad_()
    hidden = x * 1
    y = fitact.checkpoint(layer, hidden)
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_refused() -> None:
    with pytest.raises(UsageError, match="error: expected 'exact', 'rounding' or 'coarse', got 'none'"):
        fitact.checkpoint(Layer(), WIDE, error="none")
    with pytest.raises(RuntimeError, match="checkpoint is for eager code"):
        torch.compile(lambda x: fitact.checkpoint(torch.sin, x), backend="aot_eager", fullgraph=True)(WIDE)
