"""Cross entropy in a model's own forward: logits are kept in half precision, gradients are PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fitact
from fitact.runtime.memory.peak import peak_memory
from fitact.runtime.memory.saved import count_saved
from fitact.runtime.models.prepare import imported, without_packing
from fitact.runtime.models.twins import Twins
from fitact.runtime.rebuild.calls import Looking
from fitact.runtime.rebuild.functions import PIECE
from tests.conftest import ROOT

WIDTH = 8
HALF = partial(torch.autocast, "cpu", torch.bfloat16)
NONE = partial(torch.autocast, "cpu", enabled=False)


class Model(nn.Module):
    """Logits and their loss, as language models compute it."""

    def __init__(self, classes: int, options: Mapping[str, Any], widen: bool, made: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, classes)
        self.options, self.widen, self.made = options, widen, made

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.head(x)
        logits = (logits.float() if self.widen else logits).flatten(0, -2)
        if self.made:
            loss: Tensor = nn.CrossEntropyLoss(**self.options)(logits, target)
            return loss
        return F.cross_entropy(logits, target, **self.options)


def pair(model: Model, rows: int, precision: str) -> tuple[Tensor, Tensor]:
    """Return inputs of a model, which is cast."""
    torch.manual_seed(rows)
    x = torch.randn(2, rows // 2, WIDTH)
    target = torch.randint(model.head.out_features, (rows,))
    if precision != "autocast":
        model.bfloat16()
        x = x.bfloat16()
    return x.requires_grad_(), target


def trained(model: nn.Module, around: Callable[[], AbstractContextManager[Any]], *inputs: Any) -> tuple[Any, ...]:
    """Return the loss, all gradients, and the bytes that are kept."""
    with around(), count_saved(model) as saved:
        loss = model(*inputs)
    leaves = [*model.parameters(), *(one for one in inputs if one.requires_grad)]
    weights = torch.linspace(1, 2, loss.numel()).view(loss.shape)
    return loss.detach(), torch.autograd.grad(loss, leaves, weights, allow_unused=True), saved.bytes


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))


@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": 3}, {"ignore_index": 0}],
    ids=["mean", "sum", "none", "ignored", "first ignored"],
)
@pytest.mark.parametrize(("classes", "rows"), [(5, 2), (50, 260), (50257, 100), (4096, 2 * PIECE // 4096 + 34)])
def test_gradients_and_bytes(classes: int, rows: int, options: dict[str, Any], precision: str) -> None:
    model = Model(classes, options, precision != "autocast", made=rows == 260)
    x, target = pair(model, rows, precision)
    target[: rows // 3] = options.get("ignore_index", -100)
    around = HALF if precision == "autocast" else NONE
    loss, gradients, before = trained(model, around, x, target)
    with around():
        fitact.convert(model, error="exact", example_inputs=(x, target))
    found, others, after = trained(model, around, x, target)
    assert same(loss, found)
    assert all(map(same, gradients, others))
    assert before - after >= 2 * rows * classes


def test_none_counts() -> None:
    model = Model(7, {}, True)
    x, target = pair(model, 6, "bfloat16")
    target.fill_(-100)
    loss, gradients, _ = trained(model, NONE, x, target)
    fitact.convert(model, error="exact", example_inputs=(x, target))
    found, others, _ = trained(model, NONE, x, target)
    assert loss.isnan() and found.isnan()
    assert all(map(same, gradients, others))


@pytest.mark.parametrize(
    ("options", "widen", "given"),
    [
        ({"weight": torch.linspace(1, 2, 7)}, True, lambda target: target),
        ({"label_smoothing": 0.1}, True, lambda target: target),
        ({}, True, lambda target: F.one_hot(target, 7).float()),
        ({}, False, lambda target: target),
    ],
    ids=["weights", "smoothing", "probabilities", "not widened"],
)
def test_what_is_left_to_pytorch(options: dict[str, Any], widen: bool, given: Callable[[Tensor], Tensor]) -> None:
    model = Model(7, options, widen)
    x, target = pair(model, 6, "bfloat16")
    with Looking(module=model):
        loss = model(x, given(target))
    stock = model(x, given(target))
    assert same(loss, stock)
    assert type(loss.grad_fn) is type(stock.grad_fn)


def test_care() -> None:
    """Backward twice, an error for a second derivative, and for logits that have changed."""
    model = Model(7, {}, True)
    x, target = pair(model, 6, "bfloat16")
    fitact.convert(model, error="exact", example_inputs=(x, target))
    loss = model(x, target)
    once, again = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, again)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(model(x, target), x, create_graph=True)
    with pytest.raises(IndexError, match="Target 9 is out of bounds"):
        model(x, target.new_full(target.shape, 9))
    logits: list[Tensor] = []
    model.head.register_forward_hook(lambda module, given, output: logits.append(output))
    loss = model(x, target)
    with torch.no_grad():
        logits[-1].zero_()
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


class Trained(nn.Module):
    """Logits that are parameters, or that a norm reads too; to make them float32 returns them as they are."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.logits, self.scale = nn.Parameter(torch.randn(42)), nn.Parameter(torch.ones(7))
        self.normed = normed

    def forward(self, target: Tensor) -> Tensor:
        logits = self.logits.view(6, 7)
        if not self.normed:
            return F.cross_entropy(logits.float(), target)
        logits = logits * 2
        return F.layer_norm(logits, (7,), self.scale).pow(2).sum() + F.cross_entropy(logits.float(), target)


@pytest.mark.parametrize("normed", [False, True])
def test_what_is_kept_is_not_overwritten(normed: bool) -> None:
    model, target = Trained(normed), torch.arange(6)
    before = model.logits.detach().clone()
    loss, gradients, _ = trained(model, NONE, target)
    with Looking(module=model):
        again = model(target)
    assert same(again, loss)
    found = torch.autograd.grad(again, [*model.parameters()], retain_graph=True, allow_unused=True)
    assert all(a is b or same(a, b) for a, b in zip(gradients, found, strict=True))
    assert torch.equal(model.logits, before)


@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
@pytest.mark.parametrize("held", [False, True], ids=["dropped", "held"])
def test_the_peak_of_a_language_model(precision: str, held: bool) -> None:
    """The loss takes the most memory of a step where there are many words; it takes less then."""
    transformers = imported("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=4000, num_hidden_layers=1, **sizes)
    ).train()
    model = model if precision == "autocast" else model.bfloat16()
    ids = torch.randint(3, 4000, (2, 64))
    batch = {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(100)}
    around = HALF if precision == "autocast" else NONE

    def step() -> Tensor:
        model.zero_grad()
        with around():
            output = model(**batch)
        loss: Tensor = output.loss
        output = output if held else None
        loss.backward()
        return loss.detach()

    stock = step(), [one.grad for one in model.parameters()], peak_memory(step, model)["total"]
    with around():
        fitact.convert(model, error="exact", example_inputs=batch)
    loss = step()
    assert torch.equal(loss, stock[0])
    assert all(torch.equal(a, b.grad) for a, b in zip(stock[1], model.parameters(), strict=True))
    logits = ids.numel() * 4000
    assert peak_memory(step, model)["total"] <= stock[2] - 4 * logits


@pytest.mark.full
def test_the_document_s_peak() -> None:
    """A LLaMA of one layer, with 32,000 words and 1024 tokens."""
    transformers = imported("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=32000, num_hidden_layers=1, **sizes)
    ).train()
    model, ids = model.bfloat16(), torch.randint(3, 32000, (4, 256))

    def peak() -> int:
        twin, mode = Twins().of(model)
        with mode, without_packing():
            words = torch.empty_like(ids)
            return peak_memory(lambda: twin(input_ids=words, labels=words).loss.backward(), twin)["total"]

    before, few = peak(), ids[:, :8]
    fitact.convert(model, error="exact", example_inputs={"input_ids": few, "labels": few})
    after = peak()
    document = " ".join((ROOT / "docs" / "rebuilding.md").read_text("utf-8").split())
    assert f"by {100 - 100 * after / before:.0f} % for a LLaMA of one layer" in document
