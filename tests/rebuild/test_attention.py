"""Attention that is not fused, and dropout after what keeps its output: one tensor is kept for all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fitact
from fitact.runtime.compare.baselines import checkpointed
from fitact.runtime.memory.peak import peak_memory
from fitact.runtime.memory.saved import Saved, count_saved
from fitact.runtime.models.prepare import imported

from .test_rebuild import HALF, cast, differences, observed, train

SMALL = {"vocab_size": 61, "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
T5 = {"vocab_size": 61, "d_model": 48, "d_ff": 192, "d_kv": 12, "num_heads": 4, "num_layers": 2}
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", T5),
    "t5, gated": ("t5", T5 | {"feed_forward_proj": "gated-gelu"}),
    "gpt2": (
        "gpt2",
        {"vocab_size": 61, "n_embd": 48, "n_head": 4, "n_layer": 2, "bos_token_id": 0, "eos_token_id": 0},
    ),
    "bert": ("bert", SMALL | {"intermediate_size": 192}),
    "llama": ("llama", SMALL | {"intermediate_size": 128, "attention_dropout": 0.1}),
}
BLOCKS = ("T5Block", "GPT2Block", "BertLayer", "LlamaDecoderLayer")


def model_of(name: str, dtype: torch.dtype) -> nn.Module:
    """Return a model whose attention is eager, in training mode."""
    transformers = imported("transformers")
    kind, sizes = SIZES[name]
    config = transformers.AutoConfig.for_model(kind, **sizes)
    config.use_cache = False
    torch.manual_seed(0)
    made: nn.Module = transformers.AutoModel.from_config(config, attn_implementation="eager")
    return made.to(dtype).train()


def inputs_of(name: str, dtype: torch.dtype, rows: int = 2, length: int = 8) -> dict[str, Tensor]:
    x = torch.randn(rows, length, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    given = {"inputs_embeds": x.requires_grad_()}
    return given | ({"decoder_inputs_embeds": x.detach().flip(0)} if name.startswith("t5") else {})


def step(model: Any, inputs: dict[str, Tensor], autocast: torch.dtype | None = None) -> Tensor:
    torch.manual_seed(3)
    model.zero_grad()
    with cast(autocast):
        y: Tensor = model(**inputs).last_hidden_state
    y.float().square().sum().backward()
    return y.detach()


def kept(model: Any, inputs: dict[str, Tensor], around: Callable[[Saved], Any] | None = None) -> int:
    """Return the bytes kept, of masks of dropout those that a GPU would keep."""
    with count_saved(model) as saved:
        if around is None:
            y = model(**inputs)
        else:
            with around(saved):
                y = model(**inputs)
    del y
    return saved.bytes


SETTINGS = {
    "float32": (torch.float32, None),
    "bfloat16": (HALF, None),
    "float16": (torch.float16, None),
    "autocast": (torch.float32, HALF),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", SIZES)
def test_models(name: str, setting: str) -> None:
    """The same bits; less kept than by selective checkpointing."""
    dtype, autocast = SETTINGS[setting]
    stock = model_of(name, dtype)
    model, inputs = copy.deepcopy(stock), inputs_of(name, dtype)
    with cast(autocast):
        report = fitact.rebuild(model, example_inputs=inputs)
    assert any(site.kind == "calls" and site.after for site in report)
    found = []
    for one in (stock, model):
        given = inputs_of(name, dtype)
        y = step(one, given, autocast)
        found.append((y, given["inputs_embeds"].grad, {key: each.grad for key, each in one.named_parameters()}))
    assert not differences(*found)
    wide = inputs_of(name, dtype, 4, 64)
    blocks = [one for one in stock.modules() if type(one).__name__ in BLOCKS]
    with cast(autocast):
        rebuilt, selective = kept(model, wide), kept(stock, wide, partial(checkpointed, blocks, selective=True))
    assert rebuilt < selective


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("name", SIZES)
def test_peak(name: str, dtype: torch.dtype) -> None:
    stock = model_of(name, dtype)
    model, inputs = copy.deepcopy(stock), inputs_of(name, dtype, 4, 64)
    fitact.rebuild(model, example_inputs=inputs_of(name, dtype))
    peaks = [peak_memory(partial(step, one, inputs), one)["total"] for one in (stock, model)]
    assert peaks[1] < peaks[0]


class Attention(nn.Module):
    """One head; `weigh` makes weights of scores."""

    def __init__(self, weigh: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.weigh = weigh

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weigh(self.q(x) @ self.k(x).transpose(-1, -2) * 0.25)
        y: Tensor = self.o(weights.to(x.dtype) @ self.v(x))
        return y


def _changed_after(scores: Tensor) -> Tensor:
    y = F.softmax(scores, -1)
    z = F.dropout(y.exp(), 0.2)
    return z.mul_(2)


WEIGH: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda scores: F.softmax(scores, -1),
    "dropout": lambda scores: F.dropout(F.softmax(scores, -1), 0.2),
    "method": lambda scores: F.dropout(scores.softmax(-1), 0.2),
    "wide by dtype": lambda scores: F.dropout(F.softmax(scores, -1, dtype=torch.float32).to(scores.dtype), 0.2),
    "wide by cast": lambda scores: F.dropout(F.softmax(scores.float(), -1).type_as(scores), 0.2),
    "wide, by type": lambda scores: F.dropout(torch.softmax(scores.float(), -1).type(scores.dtype), 0.2),
    "dropped before the cast": lambda scores: F.dropout(F.softmax(scores.float(), -1), 0.2),
    "double": lambda scores: F.softmax(scores.double(), -1).to(scores.dtype),
    "masked in place": lambda scores: F.softmax(scores.masked_fill_(scores < -1, -1e4), -1),
    "cast in between changed": lambda scores: F.softmax(scores.float().mul_(0.7), -1),
    "sigmoid": lambda scores: F.dropout(scores.sigmoid(), 0.2),
    "relu": lambda scores: F.dropout(F.relu(scores), 0.2) * 2,
    "changed after": _changed_after,
    "read again": lambda scores: (lambda y: F.dropout(y, 0.2) + y * y)(F.softmax(scores.float(), -1)),
}


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("weigh", WEIGH)
def test_weights(weigh: str, precision: str) -> None:
    dtype = HALF if precision == "bfloat16" else torch.float32
    torch.manual_seed(0)
    stock = Attention(WEIGH[weigh]).to(dtype).train()
    model, x = copy.deepcopy(stock), torch.randn(3, 5, 16).to(dtype)
    with cast(HALF if precision == "autocast" else None):
        if "dropout" in weigh or "drop" in weigh:
            fitact.rebuild(model, example_inputs=x)
            before, after = (kept(one, {"x": torch.randn(2, 200, 16).to(dtype)}) for one in (stock, model))
            assert after < before
        else:
            assert_rebuilt_if_it_pays(model, x)
        expected, found = (observed(one, train, x) for one in (stock, model))
    assert not isinstance(expected, str)
    assert not differences(expected, found)


def assert_rebuilt_if_it_pays(model: nn.Module, x: Tensor) -> None:
    try:
        fitact.rebuild(model, example_inputs=x)
    except fitact.errors.UsageError as error:
        assert "nothing" in str(error)
