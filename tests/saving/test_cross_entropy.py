"""Cross entropy: logits are saved in half precision, and gradients are PyTorch's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fitact
from fitact import saving
from fitact.runtime.measure.fakes import fake_copy
from fitact.runtime.measure.prepare import imported
from fitact.runtime.measure.saved import count_saved
from fitact.runtime.measure.subjects import without_packing
from fitact.runtime.saving.loss import PIECE
from tests.support.peak import peak_memory

WIDTH = 8
PRECISIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bfloat16": nullcontext,
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
}


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


def inputs_of(model: Model, rows: int, precision: str) -> tuple[Tensor, Tensor]:
    """Return inputs of a model, which is cast."""
    torch.manual_seed(rows)
    x = torch.randn(2, rows // 2, WIDTH)
    target = torch.randint(model.head.out_features, (rows,))
    if precision != "autocast":
        model.bfloat16()
        x = x.bfloat16()
    return x.requires_grad_(), target


def trained(model: nn.Module, context: AbstractContextManager[Any], *inputs: Any) -> tuple[list[Any], int]:
    """Return the loss and all gradients, and the bytes that are saved."""
    with count_saved(model) as saved, context:
        loss = model(*inputs)
    leaves = [*model.parameters(), *(one for one in inputs if one.requires_grad)]
    weights = torch.linspace(1, 2, loss.numel()).view(loss.shape)
    gradients, again = (
        torch.autograd.grad(loss, leaves, weights, allow_unused=True, retain_graph=True) for _ in range(2)
    )
    assert all(map(same, gradients, again))
    return [loss.detach(), *gradients], saved.bytes


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": 3}, {"ignore_index": 0}],
    ids=["mean", "sum", "none", "ignored", "first ignored"],
)
@pytest.mark.parametrize(("classes", "rows"), [(5, 2), (50, 260), (50257, 100), (4096, 2 * PIECE // 4096 + 34)])
def test_gradients_and_bytes(classes: int, rows: int, options: dict[str, Any], precision: str) -> None:
    model = Model(classes, options, precision != "autocast", made=rows == 260)
    x, target = inputs_of(model, rows, precision)
    target[: rows // 3] = options.get("ignore_index", -100)
    with PRECISIONS[precision]():
        expected, before = trained(model, nullcontext(), x, target)
        found, after = trained(model, saving(), x, target)
    assert all(map(same, expected, found))
    assert before - after >= 2 * rows * classes


def test_none_counts() -> None:
    model = Model(7, {}, True)
    x, target = inputs_of(model, 6, "bfloat16")
    target.fill_(-100)
    (expected, _), (found, _) = (trained(model, context, x, target) for context in (nullcontext(), saving()))
    assert found[0].isnan() and all(map(same, expected, found))


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
    x, target = inputs_of(model, 6, "bfloat16")
    expected = model(x, given(target))
    with saving():
        loss = model(x, given(target))
    assert same(loss, expected)
    assert type(loss.grad_fn) is type(expected.grad_fn)


def test_a_second_derivative() -> None:
    model = Model(7, {}, True)
    x, target = inputs_of(model, 6, "bfloat16")
    found: list[Any] = []
    for context in (nullcontext(), saving()):
        with context:
            loss = model(x, target)
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), [x, model.head.weight]))
    assert all(map(same, *found))


def test_errors_are_pytorchs() -> None:
    """For a class that is not there, and for logits that were changed before backward."""
    model = Model(7, {}, True)
    x, target = inputs_of(model, 6, "bfloat16")
    with saving(), pytest.raises(IndexError, match="Target 9 is out of bounds"):
        model(x, target.new_full(target.shape, 9))
    logits: list[Tensor] = []
    model.head.register_forward_hook(lambda module, given, output: logits.append(output))
    with saving():
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
def test_what_others_read_is_not_overwritten(normed: bool) -> None:
    model, target = Trained(normed), torch.arange(6)
    before = model.logits.detach().clone()
    (expected, _), (found, _) = (trained(model, context, target) for context in (nullcontext(), saving()))
    assert all(map(same, expected, found))
    assert torch.equal(model.logits, before)


def language_model(**sizes: int) -> nn.Module:
    transformers = imported("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_hidden_layers=1, **sizes)
    model: nn.Module = transformers.LlamaForCausalLM(config).train()
    return model


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("held", [False, True], ids=["dropped", "held"])
def test_the_peak_of_a_language_model(precision: str, held: bool) -> None:
    """The loss takes the most memory of a step where there are many words; it takes less then."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = language_model(vocab_size=4000, hidden_size=16, intermediate_size=32, **heads)
    model = model if precision == "autocast" else model.bfloat16()
    ids = torch.randint(3, 4000, (2, 64))
    batch = {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(100)}

    def step() -> Tensor:
        model.zero_grad()
        with PRECISIONS[precision]():
            output = model(**batch)
        loss: Tensor = output.loss
        output = output if held else None
        loss.backward()
        return loss.detach()

    found = []
    for _ in range(2):
        found.append(([step(), *(one.grad for one in model.parameters())], peak_memory(step, model)["total"]))
        fitact.convert(model)
    (expected, before), (converted, after) = found
    assert all(map(same, expected, converted))
    assert after <= before - 4 * ids.numel() * 4000


@pytest.mark.full
def test_the_peak_with_many_words() -> None:
    """Of a LLaMA of one layer, with 32,000 words and 1024 tokens, it falls by 43 %."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = language_model(vocab_size=32000, hidden_size=64, intermediate_size=128, **heads).bfloat16()
    peaks = []
    for _ in range(2):
        twin, mode = fake_copy(model)
        with mode, without_packing():
            words = torch.empty(4, 256, dtype=torch.int64)
            step = partial(twin, input_ids=words, labels=words)
            peaks.append(peak_memory(lambda step=step: step().loss.backward(), twin)["total"])
        fitact.convert(model)
    assert round(100 * peaks[1] / peaks[0]) == 57
