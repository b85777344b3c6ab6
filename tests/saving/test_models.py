"""Converted real models, small and with random weights: gradients, bytes, peaks, training, processes."""

import copy
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fitact
from fitact import saving
from fitact.runtime.choose.policies import SELECTIVE, changed
from fitact.runtime.measure.prepare import imported
from fitact.runtime.measure.saved import count_saved, gpu_kernels
from fitact.runtime.measure.subjects import blocks_of
from tests.support.models import NEWER, TIMM_CONV, VIT, batch_of, inputs_of, made, step
from tests.support.peak import peak_memory
from tests.support.processes import run
from tests.support.rows import full
from tests.support.saving import HALF, PRECISIONS, cast, differences, gradients

# Shares of the baseline's bytes, a little above what was measured: in float32, in bfloat16, and under autocast.
SHARES = {
    "bert": (0.61, 0.60, 0.48),
    "gpt2": (0.39, 0.38, 0.36),
    **dict.fromkeys(("llama", "mistral"), (0.53, 0.48, 0.41)),
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
    "qwen3": (0.48, 0.41, 0.35),
    "gemma3_text": (0.42, 0.33, 0.32),
    "mixtral": (0.50, 0.47, 0.46),
    "mixtral, each expert": (0.50, 0.47, 0.39),
    "gpt_oss": (0.36, 0.33, 0.32),
    "gpt_oss, each expert": (0.36, 0.34, 0.22),
    "qwen2_moe": (0.51, 0.47, 0.43),
    "qwen2_moe, each expert": (0.51, 0.48, 0.39),
    "qwen3_moe": (0.45, 0.40, 0.40),
    "qwen3_moe, each expert": (0.46, 0.41, 0.35),
}
QUICK = {("gpt2", "bfloat16"), ("llama", "bfloat16"), ("llama", "float32"), ("llama lora, dropout", "bfloat16")}
QUICK |= {("bert", "autocast"), (TIMM_CONV, "float32"), ("qwen3", "bfloat16"), ("gemma3_text", "autocast")}
QUICK |= {("mixtral, each expert", "bfloat16"), ("mixtral", "float32"), ("gpt_oss", "bfloat16")}


def both(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    baseline, model = made(name, dtype), made(name, dtype)
    fitact.convert(model)
    return baseline, model


def saved_of(model: nn.Module, autocast: Any, context: Any, inputs: dict[str, Tensor]) -> int:
    """Return the bytes that a GPU would save."""
    with gpu_kernels(), cast(autocast), count_saved(model) as saved, context:
        y = model(**inputs)
    del y
    return saved.bytes


@pytest.mark.parametrize(("name", "precision"), full(product(SHARES, PRECISIONS), QUICK))
def test_gradients_and_bytes(name: str, precision: str) -> None:
    """Models with experts, or norms of queries and keys, save less than by selective checkpointing."""
    dtype, autocast = PRECISIONS[precision]
    baseline, model = both(name, dtype)
    inputs = inputs_of(name, dtype)
    for seed in range(2):
        assert torch.equal(*(step(each, inputs, autocast, seed) for each in (baseline, model)))
        assert not differences(gradients(baseline), gradients(model))
    assert not differences(baseline.state_dict(), model.state_dict())  # of norms of batches
    newer = name.partition(",")[0] in NEWER
    inputs = inputs_of(name, dtype, size=8 if newer else 16)
    before, after = (saved_of(each, autocast, nullcontext(), inputs) for each in (baseline, model))
    assert after <= SHARES[name][[*PRECISIONS].index(precision)] * before
    if newer:
        blocks = [block for _, block in blocks_of(baseline)]
        contexts = saving("rounding"), saving(), changed(blocks, [SELECTIVE] * len(blocks))
        rounded, bare, checkpoints = (saved_of(baseline, autocast, context, inputs) for context in contexts)
        assert rounded < bare == after < checkpoints


@pytest.mark.parametrize("name", full(("gpt2", "llama", "bert", VIT, "llama lora", *NEWER), ("gpt2", "llama")))
def test_peak(name: str) -> None:
    for dtype in (torch.float32, HALF):
        inputs = inputs_of(name, dtype, size=16)
        before, after = (peak_memory(partial(step, each, inputs), each)["total"] for each in both(name, dtype))
        assert after < before


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", full(("llama", *NEWER), ("qwen3",)))
def test_a_models_own_checkpoints(name: str, reentrant: bool) -> None:
    results = []
    for model in both(name, HALF):
        newest = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        newest({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        step(model, batch_of("llama"))
        results.append(gradients(model))
    assert not differences(*results)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
def test_adapters_that_come_later() -> None:
    peft = imported("peft")
    results = []
    for model in both("llama"):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        adapted = peft.get_peft_model(model, config)
        step(adapted, batch_of("llama"))
        merged = copy.deepcopy(adapted).merge_and_unload()
        results.append((gradients(adapted), dict(merged.state_dict())))
    assert not differences(*results)


SCRIPT = """
import warnings
from contextlib import nullcontext
from torch.distributed.fsdp import MixedPrecisionPolicy

warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of layers that return views, as the baseline's do
x = torch.randn(4, 5, 24, generator=torch.Generator().manual_seed(rank))
half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

def spread(model, kind):
    if kind == "ddp":
        return DistributedDataParallel(model)
    parts = [part for block in model for part in block if kind == "parts" and [*part.parameters()]]
    return sharded(model, [*parts, *model], **({"mp_policy": half} if kind == "half" else {}))

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
    return [full(one.grad) for one in model.parameters()]

for kind in sys.argv[3:]:
    expected = gradients(kind, "")
    for converted in ("before", "after", "within"):
        found = gradients(kind, converted)
        assert all(map(torch.equal, expected, found)), (kind, converted)
"""


def test_processes(tmp_path: Path) -> None:
    """DDP and FSDP2, by block, in half precision, and by layer: each process has the baseline's gradients."""
    run(SCRIPT, tmp_path, "ddp", "blocks", "half", "parts")
