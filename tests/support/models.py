"""Real models by name, small and with random weights, and a step of training."""

import copy
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fitact.runtime.measure import Source, Subject, Training
from fitact.runtime.measure.prepare import imported

from .saving import cast

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
MORE: dict[str, dict[str, Any]] = {
    "t5": {"d_model": 48, "d_ff": 96, "d_kv": 12, "num_heads": 4, "num_layers": 2, "vocab_size": WORDS}
    | {"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0},
    "phi3": GROUPED | {"pad_token_id": 0},
    "gemma2": GROUPED | {"head_dim": 12, "hidden_activation": "gelu_pytorch_tanh"},
    "albert": TEXT | {"embedding_size": 24},
    "opt": TEXT | {"ffn_dim": 192},
    "bloom": {"hidden_size": 48, "n_head": 4, "n_layer": 2, "vocab_size": WORDS},
    "apertus": GROUPED | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
EXPERTS = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}
MANY = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
NEWER: dict[str, dict[str, Any]] = {  # with norms of q and k, or experts
    "qwen3": GROUPED | {"head_dim": 16},
    "gemma3_text": GROUPED | {"head_dim": 16},
    "mixtral": EXPERTS,
    "gpt_oss": EXPERTS | {"head_dim": 16},
    "qwen2_moe": MANY | {"shared_expert_intermediate_size": 96},
    "qwen3_moe": MANY | {"head_dim": 16},
}
HEADS = {
    **dict.fromkeys(("bert", "roberta", "albert"), "MaskedLM"),
    "vit": "ImageClassification",
    "t5": "Seq2SeqLM",
}
TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 4},
    "mobilenetv3_small_050": {},
}
TIMM_CONV = "mobilenetv3_small_050"  # of convolutions, with activations in place
MODELS = [*FAMILIES, *TIMM]
QUICK = ["bert", "gpt2", "llama", "mobilenetv3_small_050"]
VIT = "vit_tiny_patch16_224"
ADAPTERS = {  # dropout, adapters in float32
    "lora": (0.0, False),
    "lora, dropout": (0.1, False),
    "lora in float32": (0.0, True),
    "lora in float32, dropout": (0.1, True),
}


@cache
def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name in TIMM:
        return imported("timm").create_model(name, num_classes=10, **TIMM[name])
    transformers = imported("transformers")
    name, _, each = name.partition(", ")
    config = transformers.AutoConfig.for_model(name, **(FAMILIES | MORE | NEWER)[name])
    config.use_cache = False
    how = {"experts_implementation": "eager"} if each else {}
    head = getattr(transformers, f"AutoModelFor{HEADS.get(name, 'CausalLM')}")
    made: nn.Module = head.from_config(config, **how)
    if name in NEWER:  # some weights are drawn by nobody
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(0.05 * torch.randn_like(parameter) + (parameter.ndim == 1))
    return made


def model_of(name: str) -> nn.Module:
    """Return a new model, the same each time."""
    return copy.deepcopy(_model(name)).train()


def batch_of(name: str, seed: int = 0, size: int = 4, seq: int = 32) -> dict[str, Tensor]:
    """Return inputs whose labels can be learned."""
    generator = torch.Generator().manual_seed(seed)
    if name in TIMM or name == "vit":
        labels = torch.randint(2, (size,), generator=generator)
        images = torch.randn(size, 3, 32, 32, generator=generator) + labels[:, None, None, None]
        return {"x": images} if name in TIMM else {"pixel_values": images, "labels": labels}
    ids = torch.randint(2, 12, (size, seq), generator=generator).sort(1).values  # a word says much of the next
    return {"input_ids": ids, "labels": ids}


def logits(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    output = model(**inputs)
    return output if isinstance(output, Tensor) else output.logits


def made(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    name, lora, kind = name.partition(" lora")
    model = model_of(name).to(dtype)
    if lora:
        peft = imported("peft")
        p, wide = ADAPTERS[f"lora{kind}"]
        config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=p, init_lora_weights=False)
        torch.manual_seed(0)  # the first model draws weights, later ones are copies
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.get_peft_model(model, config, autocast_adapter_dtype=wide)
    return model.train()


def inputs_of(name: str, dtype: torch.dtype, **sizes: int) -> dict[str, Tensor]:
    batch = batch_of(name.partition(" ")[0], **sizes)
    return {key: each.to(dtype) if each.is_floating_point() else each for key, each in batch.items()}


def step(
    model: nn.Module, inputs: dict[str, Tensor], autocast: torch.dtype | None = None, seed: int = 1
) -> Tensor:
    torch.manual_seed(seed)
    with cast(autocast):
        output = model(**inputs)
        loss: Tensor = output.float().square().mean() if isinstance(output, Tensor) else output.loss
    loss.backward()
    return loss.detach()


def with_values(
    source: Source, training: Training | None = None, *, batch: int, seq: int, dtype: torch.dtype
) -> Subject:
    """Return a model as `prepare` does, but with values."""
    model, inputs = source.build(batch, seq)
    (training or Training()).apply(model.train())
    call = inputs.mapped(lambda x: x.to(dtype) if x.is_floating_point() else x)
    return Subject(source.name, model.to(dtype), call, None)
