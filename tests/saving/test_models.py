"""Converted real models, small and with random weights: gradients, bytes, peaks, training, processes."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fitact
from fitact.runtime.measure.prepare import imported
from fitact.runtime.measure.saved import gpu_kernels
from tests.support.models import TIMM_CONV, VIT, batch_of, inputs_of, made, step
from tests.support.peak import peak_memory
from tests.support.processes import run
from tests.support.saving import HALF, cast, differences, gradients, kept_of

# Shares of the baseline's bytes, a little above what was measured: in float32, in bfloat16, and under autocast.
SHARES = {
    "bert": (0.61, 0.60, 0.48),
    "gpt2": (0.39, 0.38, 0.36),
    "llama": (0.53, 0.48, 0.41),
    "mistral": (0.53, 0.48, 0.41),
    "t5": (0.50, 0.42, 0.39),
    "phi3": (0.54, 0.49, 0.45),
    "gemma2": (0.47, 0.36, 0.34),
    "albert": (0.39, 0.39, 0.38),
    "opt": (0.81, 0.75, 0.58),  # its activation is ReLU, which saves what it returns
    VIT: (0.67, 0.67, 0.55),
    TIMM_CONV: (0.61, 0.61, 0.39),
    "llama lora": (0.62, 0.56, 0.56),
    "llama lora, dropout": (0.54, 0.48, 0.51),
    "llama lora in float32": (0.62, 0.44, 0.56),
    "llama lora in float32, dropout": (0.54, 0.41, 0.51),
    "gpt2 lora, dropout": (0.38, 0.36, 0.37),
}
PRECISIONS = {"float32": (torch.float32, None), "bfloat16": (HALF, None), "autocast": (torch.float32, HALF)}
QUICK = {"gpt2-bfloat16", "llama-bfloat16", "llama-float32", "llama lora, dropout-bfloat16", "bert-autocast"}
QUICK |= {f"{TIMM_CONV}-float32"}


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
    baseline, model = made(name, dtype), made(name, dtype)
    fitact.convert(model)
    inputs = inputs_of(name, dtype)
    for seed in range(2):
        losses = [step(one, inputs, autocast, seed) for one in (baseline, model)]
        assert torch.equal(*losses)
        assert not differences(gradients(baseline), gradients(model))
    assert not differences(baseline.state_dict(), model.state_dict())  # of norms of batches
    inputs = inputs_of(name, dtype, size=16)
    with cast(autocast), gpu_kernels():
        before, after = (kept_of(one, lambda one=one: one(**inputs)) for one in (baseline, model))
    assert after <= SHARES[name][[*PRECISIONS].index(precision)] * before


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", *(pytest.param(one, marks=pytest.mark.full) for one in ("bert", VIT, "llama lora"))]
)
def test_peak(name: str) -> None:
    for dtype in (torch.float32, HALF):
        inputs = inputs_of(name, dtype, size=16)
        baseline, model = made(name, dtype), made(name, dtype)
        fitact.convert(model)
        before, after = (peak_memory(partial(step, one, inputs), one)["total"] for one in (baseline, model))
        assert after < before


BLOCKS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 172},
    "gpt2": {"n_layer": 1, "n_embd": 64, "n_head": 4},
    "bert": {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256},
    "t5": {"num_layers": 1, "d_model": 64, "d_ff": 160, "d_kv": 16, "num_heads": 4}
    | {"feed_forward_proj": "gated-gelu"},
}


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("name", BLOCKS)
def test_peak_of_a_block(name: str, dtype: torch.dtype) -> None:
    """One block alone takes less than the baseline's; of T5, one of the encoder and one of the decoder."""
    transformers = imported("transformers")
    config = transformers.AutoConfig.for_model(name, vocab_size=61, **BLOCKS[name])
    config.use_cache = False
    embeds = torch.randn(4, 128, 64).to(dtype)
    inputs = {"inputs_embeds": embeds} | ({"decoder_inputs_embeds": embeds} if name == "t5" else {})
    baseline = transformers.AutoModel.from_config(config).to(dtype).train()
    model = copy.deepcopy(baseline)
    fitact.convert(model)

    def run(model: Any) -> None:
        model(**inputs).last_hidden_state.float().square().sum().backward()

    with gpu_kernels():
        before, after = (peak_memory(partial(run, one), one)["total"] for one in (baseline, model))
    assert after < before


@pytest.mark.parametrize(
    "name", ["llama lora, dropout", *(pytest.param(one, marks=pytest.mark.full) for one in ("gpt2", "bert"))]
)
def test_training(name: str) -> None:
    """Five steps with dropout, the norm of the gradients clipped: the losses and the weights are the same bits."""
    ends = []
    for converted in (False, True):
        model = made(name, HALF if "lora" in name else torch.float32)
        if converted:
            fitact.convert(model)
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
        losses = []
        for number in range(5):
            batches = (batch_of(name.split()[0], 2 * number + part) for part in range(2))
            losses += [step(model, batch, seed=number) for batch in batches]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        ends.append((losses, model.state_dict()))
    assert not differences(*ends)


@pytest.mark.full
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_models_own_checkpoints(reentrant: bool) -> None:
    models = []
    for converted in (False, True):
        model: Any = made("llama", HALF)
        newest = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        newest({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        if converted:
            fitact.convert(model)
        step(model, batch_of("llama"))
        models.append(gradients(model))
    assert not differences(*models)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
def test_adapters_that_come_later() -> None:
    """They get the baseline's gradients."""
    peft = imported("peft")
    found = []
    for converted in (False, True):
        model = made("llama")
        if converted:
            fitact.convert(model)
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        adapted = peft.get_peft_model(model, config)
        step(adapted, batch_of("llama"))
        merged = copy.deepcopy(adapted).merge_and_unload()
        found.append((gradients(adapted), dict(merged.state_dict())))
    assert not differences(*found)


SCRIPT = """
from contextlib import nullcontext
import os, sys, torch, torch.distributed as dist, warnings
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
import fitact

warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of layers that return views, as the baseline's do
rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
x = torch.randn(4, 5, 24, generator=torch.Generator().manual_seed(rank))
half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

def spread(model, kind):
    if kind == "ddp":
        return DistributedDataParallel(model)
    policy = {"mp_policy": half} if kind == "half" else {}
    for block in model:
        for part in block if kind == "parts" else ():
            if [*part.parameters()]:
                fully_shard(part, mesh=mesh)
        fully_shard(block, mesh=mesh, **policy)
    return fully_shard(model, mesh=mesh, **policy)

def gradients(kind, converted):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 96), act(), nn.Dropout(0.1), nn.Linear(96, 24))
              for act in (nn.GELU, nn.SiLU)]
    model = nn.Sequential(*blocks)
    if converted == "before":
        fitact.convert(model)
    model = spread(model, kind)
    if converted == "after":
        fitact.convert(model)
    for _ in range(2):
        torch.manual_seed(1)
        with fitact.saving() if converted == "within" else nullcontext():
            y = model(x)
        y.float().square().mean().backward()
    grads = [one.grad for one in model.parameters()]
    return [one.full_tensor() if isinstance(one, DTensor) else one for one in grads]

for kind in sys.argv[3:]:
    expected = gradients(kind, "")
    for converted in ("before", "after", "within"):
        found = gradients(kind, converted)
        assert all(map(torch.equal, expected, found)), (kind, converted)
dist.barrier()
dist.destroy_process_group()
os._exit(0)
"""


def test_processes(tmp_path: Path) -> None:
    """DDP and FSDP2, by block, in half precision, and by layer: each process has the baseline's gradients."""
    run(SCRIPT, tmp_path, "ddp", "blocks", "half", "parts")
