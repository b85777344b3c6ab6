"""Small models of transformers and timm with random weights, and inputs for them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fitact.runtime.models.prepare import imported

WORDS = 61
LAYERS = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 192, "num_hidden_layers": 2}
TEXT = LAYERS | {"vocab_size": WORDS}
GROUPED = TEXT | {"num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": TEXT,
    "roberta": TEXT,
    "gpt2": {"n_embd": 48, "n_head": 4, "n_layer": 2, "vocab_size": WORDS},
    "vit": LAYERS | {"image_size": 32, "patch_size": 8},
    "llama": GROUPED,
    "mistral": GROUPED,
    "qwen2": GROUPED,
}
HEADS = {"bert": "MaskedLM", "roberta": "MaskedLM", "vit": "ImageClassification"}
TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 4},
    "mobilenetv3_small_050": {},
}
TIMM_CONV = "mobilenetv3_small_050"  # of convolutions, with activations in place
MODELS = [*FAMILIES, *TIMM]
QUICK = ["bert", "gpt2", "llama", "mobilenetv3_small_050"]


@cache
def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name in TIMM:
        model: nn.Module = imported("timm").create_model(name, num_classes=10, **TIMM[name])
        return model
    transformers = imported("transformers")
    config = transformers.AutoConfig.for_model(name, **FAMILIES[name])
    config.use_cache = False
    made: nn.Module = getattr(transformers, f"AutoModelFor{HEADS.get(name, 'CausalLM')}").from_config(config)
    return made


def model_of(name: str) -> nn.Module:
    """Return a new model, the same each time."""
    return copy.deepcopy(_model(name)).train()


def batch_of(name: str, seed: int = 0, size: int = 4, seq: int = 32) -> dict[str, Tensor]:
    """Return inputs whose labels can be learned."""
    generator = torch.Generator().manual_seed(seed)
    if name in TIMM or name == "vit":
        side = 32
        labels = torch.randint(2, (size,), generator=generator)
        images = torch.randn(size, 3, side, side, generator=generator) + labels[:, None, None, None]
        return {"x": images} if name in TIMM else {"pixel_values": images, "labels": labels}
    ids = torch.randint(2, 12, (size, seq), generator=generator)
    ids = ids.sort(1).values  # so that a word tells of the next
    return {"input_ids": ids, "labels": ids}


def logits(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    output = model(**inputs)
    return output if isinstance(output, Tensor) else output.logits
