"""Real models with experts, and with norms of queries and keys: gradients, bytes, peaks, training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fitact
from fitact import saving
from fitact.runtime.choose.policies import SELECTIVE, changed
from fitact.runtime.measure.saved import Saved, count_saved, gpu_kernels
from fitact.runtime.measure.subjects import blocks_of
from fitact.runtime.torch_internals import storage_id, tree_leaves
from tests.support.models import NEWER, batch_of, made, step
from tests.support.peak import peak_memory
from tests.support.saving import HALF, cast, differences, gradients

PRECISIONS = {"float32": (torch.float32, None), "bfloat16": (HALF, None), "autocast": (torch.float32, HALF)}
# Shares of the baseline's bytes, by precision, and of what the last layer saves under selective checkpointing, a
# little above what was measured. Of experts, a layer saves also indices and the weights of choices.
SHARES: dict[str, tuple[tuple[float, float, float], tuple[float, float, float]]] = {
    "qwen3": ((0.48, 0.41, 0.35), (0.94, 0.94, 0.94)),
    "gemma3_text": ((0.42, 0.33, 0.32), (1.00, 1.00, 1.13)),  # norms of queries and keys would take too long again
    "mixtral": ((0.50, 0.47, 0.46), (1.01, 1.02, 1.01)),
    "mixtral, each expert": ((0.50, 0.47, 0.39), (1.02, 1.03, 1.03)),
    "gpt_oss": ((0.36, 0.33, 0.32), (1.01, 1.02, 1.03)),
    "gpt_oss, each expert": ((0.36, 0.34, 0.22), (1.01, 1.02, 1.05)),
    "qwen2_moe": ((0.51, 0.47, 0.43), (1.01, 1.02, 1.01)),
    "qwen2_moe, each expert": ((0.51, 0.48, 0.39), (1.02, 1.03, 1.02)),
    "qwen3_moe": ((0.45, 0.40, 0.40), (1.01, 1.02, 1.01)),
    "qwen3_moe, each expert": ((0.46, 0.41, 0.35), (1.02, 1.03, 1.03)),
}
QUICK = {
    "qwen3-bfloat16",
    "gemma3_text-autocast",
    "mixtral, each expert-bfloat16",
    "mixtral-float32",
    "gpt_oss-bfloat16",
}


def converted(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = made(name, dtype)
    fitact.convert(model)
    return model


Around = Callable[[Saved], AbstractContextManager[Any]]


def saved_of(
    model: nn.Module, autocast: torch.dtype | None, around: Around, call: Any, shared: tuple[int, ...] = ()
) -> int:
    """Return the bytes that a GPU would save in a call, but for those of shared storages."""
    with gpu_kernels(), cast(autocast), count_saved(model) as saved:
        saved.owned.update(shared)
        with around(saved):
            y = call()
    del y
    return saved.bytes


def last_layer(model: nn.Module, inputs: dict[str, Tensor], autocast: torch.dtype | None) -> tuple[Any, ...]:
    """Return a model's last layer, a call of it as in the model, and the storages that all layers share."""
    block = blocks_of(model)[-1][1]
    calls: list[Any] = []
    hook = block.register_forward_pre_hook(lambda _, *given: calls.append(given), with_kwargs=True)
    with hook, torch.no_grad(), gpu_kernels(), cast(autocast):
        model(**inputs)
    (((x,), kwargs),) = calls
    shared = tuple(storage_id(one) for one in tree_leaves(kwargs) if isinstance(one, Tensor))
    return block, lambda: block(x.clone().requires_grad_(), **kwargs), shared


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, id=one, marks=() if one in QUICK else pytest.mark.full)
        for name in SHARES
        for precision in PRECISIONS
        for one in [f"{name}-{precision}"]
    ],
)
def test_gradients_and_bytes(name: str, precision: str) -> None:
    dtype, autocast = PRECISIONS[precision]
    baseline, model = made(name, dtype), converted(name, dtype)
    inputs = batch_of("llama")
    for seed in range(2):
        losses = [step(one, inputs, autocast, seed) for one in (baseline, model)]
        assert torch.equal(*losses)
        assert not differences(gradients(baseline), gradients(model))
    inputs = batch_of("llama", size=8)
    blocks = [block for _, block in blocks_of(baseline)]

    def selective(saved: Saved) -> AbstractContextManager[Any]:
        return changed(blocks, [SELECTIVE] * len(blocks))

    def exact(_: Saved) -> AbstractContextManager[Any]:
        return saving()

    contexts: tuple[Around, ...] = (lambda _: nullcontext(), exact, selective)
    call = partial(baseline, **inputs)
    before, after, checkpoints = (saved_of(baseline, autocast, around, call) for around in contexts)
    place = [*PRECISIONS].index(precision)
    assert after <= SHARES[name][0][place] * before
    assert saved_of(baseline, autocast, lambda _: saving("rounding"), call) < after < checkpoints
    block, call, shared = last_layer(baseline, inputs, autocast)
    blocks = [block]
    after, checkpoints = (saved_of(baseline, autocast, around, call, shared) for around in contexts[1:])
    assert after <= SHARES[name][1][place] * checkpoints


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.full) for one in NEWER])
def test_peak(name: str) -> None:
    for dtype in (torch.float32, HALF):
        inputs = batch_of("llama", size=16)
        before, after = (
            peak_memory(partial(step, one, inputs), one)["total"]
            for one in (made(name, dtype), converted(name, dtype))
        )
        assert after < before


@pytest.mark.parametrize("name", ["qwen3", *(pytest.param(one, marks=pytest.mark.full) for one in [*NEWER][1:])])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_models_own_checkpoints(name: str, reentrant: bool) -> None:
    found = []
    for make in (made, converted):
        model: Any = make(name, HALF)
        newest = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        newest({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        step(model, batch_of("llama"))
        found.append(gradients(model))
    assert not differences(*found)


@pytest.mark.parametrize(
    "name", ["mixtral", *(pytest.param(one, marks=pytest.mark.full) for one in [*NEWER] if one != "mixtral")]
)
def test_training(name: str) -> None:
    """Five steps of two batches each: the losses and the weights are the same bits, also of a copy."""
    ends = []
    for make in (made, converted, lambda name: copy.deepcopy(converted(name))):
        model = make(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for number in range(5):
            losses += [step(model, batch_of("llama", 2 * number + part), seed=number) for part in range(2)]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        ends.append((losses, dict(model.state_dict())))
    assert not differences(ends[0], ends[1]) and not differences(ends[0], ends[2])
