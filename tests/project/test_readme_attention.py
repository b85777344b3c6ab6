"""The README: what attention keeps that is not fused."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch

import fitact
from fitact.runtime.compare.baselines import checkpointed
from fitact.runtime.models.prepare import imported
from tests.rebuild.test_attention import BLOCKS, kept

from .test_readme import flat

WIDE: dict[str, dict[str, Any]] = {
    "T5": {"d_model": 256, "d_ff": 1024, "d_kv": 64, "num_heads": 4, "num_layers": 1},
    "GPT-2": {"n_embd": 256, "n_head": 4, "n_layer": 1, "bos_token_id": 0, "eos_token_id": 0},
    "BERT": {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 1024},
}


@pytest.mark.full
def test_eager_attention() -> None:
    """As shares of what stock keeps."""
    said = re.search(
        r"keeps (\d+) % in T5, (\d+) % in GPT-2, (\d+) % in BERT for four texts of 256 tokens, in bfloat16; "
        r"selective checkpointing leaves (\d+), (\d+) and (\d+) %",
        flat(),
    )
    assert said is not None
    transformers = imported("transformers")
    found: list[list[int]] = []
    for name, sizes in WIDE.items():
        config = transformers.AutoConfig.for_model(name.replace("-", "").lower(), vocab_size=61, **sizes)
        config.use_cache = False
        torch.manual_seed(0)
        stock = transformers.AutoModel.from_config(config, attn_implementation="eager").bfloat16().train()
        model, x = copy.deepcopy(stock), torch.randn(4, 256, 256).bfloat16()
        inputs = {"inputs_embeds": x.requires_grad_()}
        inputs |= {"decoder_inputs_embeds": x.detach().clone()} if name == "T5" else {}
        fitact.rebuild(model, example_inputs={key: one[:, :8] for key, one in inputs.items()})
        blocks = [one for one in stock.modules() if type(one).__name__ in BLOCKS]
        selective = partial(checkpointed, blocks, selective=True)
        bytes_kept = [kept(stock, inputs), kept(model, inputs), kept(stock, inputs, selective)]
        found.append([round(100 * one / bytes_kept[0]) for one in bytes_kept[1:]])
    assert [int(one) for one in said.groups()] == [one for shares in zip(*found, strict=True) for one in shares]
