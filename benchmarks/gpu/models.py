"""The models: a few blocks of their published widths, or all of them; and what to run them with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fitact.runtime.measure import imported

Inputs = dict[str, Tensor]
Forward = Callable[[Inputs], Tensor]  # from inputs to the loss


@dataclass(frozen=True)
class Size:
    """How large a model is.

    Attributes:
        kind: a type of transformers' models, or `"vit"` of timm.
        options: of its configuration.
        blocks: the configuration's name for their number.
        few, all: numbers of blocks.
        batch, tokens: of a step with few blocks.
        lora: whether it is trained by adapters of rank 8 on all linear layers.

    """

    kind: str
    options: dict[str, Any]
    blocks: str
    few: int
    all: int
    batch: int
    tokens: int
    lora: bool = False


LLAMA = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
BERT = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
SIZES = {
    "LLaMA-7B": Size("llama", LLAMA, "num_hidden_layers", 2, 32, 8, 2048),
    "LLaMA-7B, LoRA": Size("llama", LLAMA, "num_hidden_layers", 2, 32, 8, 2048, lora=True),
    "GPT-2 XL": Size("gpt2", {"n_embd": 1600, "n_head": 25}, "n_layer", 4, 48, 8, 1024),
    "BERT-large": Size("bert", BERT, "num_hidden_layers", 4, 24, 32, 512),
    "ViT-L": Size("vit", {"embed_dim": 1024, "num_heads": 16}, "depth", 4, 24, 64, 197),
}
TINY = {  # of the rehearsal
    "LLaMA-7B, LoRA": Size(
        "llama",
        {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256},
        *("num_hidden_layers", 2, 3, 2, 32),
        lora=True,
    ),
    "ViT-L": Size("vit", {"embed_dim": 64, "num_heads": 4}, "depth", 1, 3, 2, 197),
}


def names(tiny: bool) -> list[str]:
    """Return the names of the models that are measured."""
    return [*(TINY if tiny else SIZES)]


@dataclass
class Loaded:
    """A model that is measured.

    Attributes:
        size: how large it is.
        model: in training mode.
        device: where it is.

    """

    size: Size
    model: Any  # of transformers, peft or timm
    device: str

    def inputs(self, batch: int = 0, tokens: int = 0) -> Inputs:
        """Return random inputs with targets, the same at each call; by default of the size's batch and tokens."""
        shape = batch or self.size.batch, tokens or self.size.tokens
        torch.manual_seed(1)
        if self.size.kind == "vit":
            images = torch.randn(shape[0], 3, 224, 224, device=self.device)
            return {"x": images.to(next(self.model.parameters()).dtype)}
        ids = torch.randint(self.model.config.vocab_size, shape, device=self.device)
        return {"input_ids": ids, "labels": ids}

    def blocks(self) -> list[nn.Module]:
        """Return the repeated blocks: the children of the list that has the most parameters."""
        lists = [module for module in self.model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
        largest = max(lists, key=lambda module: sum(each.numel() for each in module.parameters()))
        return [*largest.children()]


def loss_of(output: Any) -> Tensor:
    """Return the loss of an output: its own, or that of class 0."""
    if isinstance(output, Tensor):
        return F.cross_entropy(output.float(), output.new_zeros(len(output), dtype=torch.long))
    loss: Tensor = output.loss
    return loss


def make(
    name: str, device: str, *, tiny: bool, whole: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Loaded:
    """Return a model with random weights, the same at each call.

    Args:
        name: a key of `SIZES`.
        device: where it is made.
        tiny: whether to take the rehearsal's sizes.
        whole: whether it has all blocks of the published model.
        dtype: of its parameters.

    """
    size = (TINY if tiny else SIZES)[name]
    options = size.options | {size.blocks: size.all if whole else size.few}
    torch.manual_seed(0)
    with torch.device(device):
        if size.kind == "vit":
            model = imported("timm").models.VisionTransformer(img_size=224, patch_size=16, **options)
        else:
            model = _language_model(size, options, dtype)
    return Loaded(size, model.to(device, dtype).train(), device)


def _language_model(size: Size, options: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    transformers = imported("transformers")
    config = transformers.AutoConfig.for_model(size.kind, **options)
    config.use_cache = False
    auto = transformers.AutoModelForMaskedLM if size.kind == "bert" else transformers.AutoModelForCausalLM
    model: nn.Module = auto.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if size.lora:
        peft = imported("peft")
        # random adapters: with B = 0, as usual, all gradients of A would be 0 and tell nothing
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
        )
    return model
