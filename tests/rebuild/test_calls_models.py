"""Real models whose experts and attention call functions themselves: gradients, bytes, peaks, training."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

import fitact
from fitact.runtime.compare import baselines
from fitact.runtime.compare.baselines import checkpointed
from fitact.runtime.memory.peak import peak_memory
from fitact.runtime.memory.saved import count_saved, gpu_kernels
from fitact.runtime.models.prepare import blocks_of, imported
from fitact.runtime.torch_internals import storage_id, tree_leaves
from tests.conftest import ROOT
from tests.convert.test_convert_models import GROUPED, batch_of

from .test_rebuild import HALF, cast, differences, gradients, kept_of
from .test_rebuild_models import made, step

MIXED = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}
SPARSE = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", GROUPED | {"head_dim": 16}),
    "gemma3": ("gemma3_text", GROUPED | {"head_dim": 16}),
    "mixtral": ("mixtral", MIXED),
    "gpt_oss": ("gpt_oss", MIXED | {"head_dim": 16}),
    "qwen2_moe": ("qwen2_moe", SPARSE | {"shared_expert_intermediate_size": 96}),
    "qwen3_moe": ("qwen3_moe", SPARSE | {"head_dim": 16}),
}
# Bytes kept, as a share of what is kept without looking at calls, in bfloat16: a little above what was measured.
SHARES = {
    "qwen3": 0.90,
    "gemma3": 0.91,
    "mixtral": 0.59,
    "mixtral, each expert": 0.61,
    "gpt_oss": 0.43,
    "gpt_oss, each expert": 0.44,
    "qwen2_moe": 0.69,
    "qwen2_moe, each expert": 0.70,
    "qwen3_moe": 0.60,
    "qwen3_moe, each expert": 0.62,
    "llama lora in float32": 0.59,
    "llama lora in float32, dropout": 0.64,
}


def model_of(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model in training mode; its experts are computed together unless the name says otherwise."""
    if "lora" in name:
        return made(name, dtype)
    transformers = imported("transformers")
    kind, sizes = SIZES[name.partition(",")[0]]
    config = transformers.AutoConfig.for_model(kind, **sizes)
    config.use_cache = False
    how = {"experts_implementation": "eager"} if "each" in name else {}
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, **how).to(dtype).train()
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(0.05 * torch.randn_like(one) + (one.ndim == 1))
    return model


def rebuilt(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = model_of(name, dtype)
    done = fitact.rebuild(model, example_inputs=batch_of("llama"))
    calls = [site.after for site in done if site.kind == "calls"]
    assert calls and all(calls)
    return model


QUICK = {
    "qwen3-bfloat16",
    "gemma3-autocast",
    "mixtral, each expert-bfloat16",
    "mixtral-float32",
    "gpt_oss-bfloat16",
}
# Their rows in docs/rebuilding.md: the share of what selective checkpointing keeps.
LABELS = {
    "gemma3": "Gemma 3",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3_moe": "Qwen3-MoE",
    "gpt_oss": "gpt-oss",
    "gpt_oss, each expert": "gpt-oss, each expert alone",
}
CASES = [
    pytest.param(name, precision, id=one, marks=() if one in QUICK else pytest.mark.full)
    for name in SHARES
    for precision in (["bfloat16"] if "lora" in name else ["float32", "bfloat16", "autocast"])
    for one in [f"{name}-{precision}"]
]


def layer_kept(model: nn.Module, inputs: dict[str, Tensor], selective: bool) -> int:
    """Return the bytes that the last layer of a model keeps, of a call that it gets in the model."""
    block = blocks_of(model)[-1][1]
    calls: list[Any] = []
    with block.register_forward_pre_hook(lambda _, *given: calls.append(given), with_kwargs=True), torch.no_grad():
        model(**inputs)
    ((args, kwargs),) = calls
    shared = [storage_id(one) for one in tree_leaves(kwargs) if isinstance(one, Tensor)]
    (x,) = (one.clone().requires_grad_() for one in args)
    with count_saved(model) as saved:
        saved.owned.update(shared)
        with checkpointed([block], saved, selective=True) if selective else nullcontext():
            y = block(x, **kwargs)
    del y
    return saved.bytes


def of_layers(
    name: str,
    stock: nn.Module,
    model: nn.Module,
    inputs: dict[str, Tensor],
    autocast: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer alone keeps one byte for each choice of an expert more than under selective checkpointing.

    That chooses again. Where it keeps what was chosen, it keeps more; so it does without experts.
    """
    policy = baselines._policy

    def keeping(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        chosen = operation is torch.ops.aten.topk.default
        return CheckpointPolicy.MUST_SAVE if chosen else policy(context, operation, *args, **kwargs)

    with cast(autocast), gpu_kernels():
        exact, selective = (layer_kept(one, inputs, one is stock) for one in (model, stock))
        monkeypatch.setattr(baselines, "_policy", keeping)
        choosing_once = layer_kept(stock, inputs, True)
    experts = "moe" in name or name.startswith(("mixtral", "gpt_oss"))
    counts = 0 if "each" in name else 4 * 4  # of rows by expert, once for all tokens
    assert exact <= selective + (inputs["input_ids"].numel() * 2 + counts if experts else 0)
    assert exact < choosing_once or (name == "gemma3" and exact == choosing_once)


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_gradients_and_bytes(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = HALF if precision == "bfloat16" else torch.float32
    autocast = HALF if precision == "autocast" else None
    stock, modules = model_of(name, dtype), model_of(name, dtype)
    fitact.rebuild(modules)
    with cast(autocast):
        model = rebuilt(name, dtype)
    inputs = batch_of("llama")
    for seed in range(2):
        losses = [step(one, inputs, autocast, seed) for one in (stock, model)]
        assert torch.equal(*losses)
        assert not differences(gradients(stock), gradients(model))
    inputs = batch_of("llama", size=8)
    blocks = [block for _, block in blocks_of(stock)]
    with cast(autocast), gpu_kernels():
        before, after = (kept_of(one, lambda one=one: one(**inputs)) for one in (modules, model))
        with count_saved(stock) as selective, checkpointed(blocks, selective, selective=True):
            y = stock(**inputs)
    del y
    assert after <= (SHARES[name] if precision == "bfloat16" else 0.99) * before
    assert after < selective.bytes
    if "lora" not in name:
        of_layers(name, stock, model, inputs, autocast, monkeypatch)
    if name in LABELS and precision != "bfloat16":
        lines = (ROOT / "docs" / "rebuilding.md").read_text("utf-8").splitlines()
        (row,) = (line for line in lines if line.startswith(f"| {LABELS[name]} |"))
        stated = row.split("|")[2 if precision == "float32" else 3]
        assert stated.strip() == f"{100 * after / selective.bytes:.0f} %"


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one == "gemma3" else pytest.mark.full) for one in SHARES]
)
def test_auto_under_autocast(name: str) -> None:
    """It keeps less than selective checkpointing does, with exact gradients and with codes."""
    inputs = batch_of("llama", size=8)
    for error in ("exact", "rounding"):
        stock, model = model_of(name), model_of(name)
        blocks = [block for _, block in blocks_of(stock)]
        with cast(HALF):
            fitact.convert(model, "auto", error=error, example_inputs=batch_of("llama"))
        with cast(HALF), gpu_kernels():
            after = kept_of(model, lambda model=model: model(**inputs))
            with count_saved(stock) as selective, checkpointed(blocks, selective, selective=True):
                y = stock(**inputs)
        del y
        assert after < selective.bytes


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.full) for one in SIZES])
def test_peak(name: str) -> None:
    for dtype in (torch.float32, HALF):
        inputs = batch_of("llama", size=16)
        stock, model = (
            peak_memory(partial(step, one, inputs), one)["total"]
            for one in (model_of(name, dtype), rebuilt(name, dtype))
        )
        assert model < stock


@pytest.mark.parametrize("name", ["qwen3", *(pytest.param(one, marks=pytest.mark.full) for one in [*SIZES][1:])])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_models_own_checkpoints(name: str, reentrant: bool) -> None:
    found = []
    for make in (model_of, rebuilt):
        model: Any = make(name, HALF)
        newest = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        newest({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        step(model, batch_of("llama"))
        found.append(gradients(model))
    assert not differences(*found)


@pytest.mark.parametrize(
    "name", ["mixtral", *(pytest.param(one, marks=pytest.mark.full) for one in [*SIZES] if one != "mixtral")]
)
def test_training(name: str) -> None:
    """Five steps of two batches each: the losses and the weights are the same bits, also of a copy."""
    ends = []
    for make in (model_of, rebuilt, lambda name: copy.deepcopy(rebuilt(name))):
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
