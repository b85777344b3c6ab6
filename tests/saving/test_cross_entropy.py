"""Cross entropy: logits are saved in half precision, and gradients are PyTorch's, bit for bit."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fitact
from fitact.runtime.measure.prepare import imported
from fitact.runtime.saving import loss as by_rows
from tests.support.around import AROUND
from tests.support.blocks import built
from tests.support.peak import peak_memory
from tests.support.rows import full
from tests.support.saving import HALF, agree, cast, differences, observed, off, pair, saving_less

WIDTH = 8
X = torch.randn(2, 3, WIDTH)


def model_of(
    classes: int = 7, rows: int = 6, widen: bool = True, made: bool = False, ignored: int = 0, **options: Any
) -> nn.Module:
    given = options.pop("given", lambda target: target)

    def call(m: Any, x: Tensor) -> Tensor:
        logits = m.head(x)
        logits = (logits.float() if widen else logits).flatten(0, -2)
        return (nn.CrossEntropyLoss(**options) if made else partial(F.cross_entropy, **options))(logits, m.target)

    target = torch.randint(classes, (rows,))
    target[:ignored] = options.get("ignore_index", -100)
    return built(call, head=nn.Linear(WIDTH, classes), target=nn.Buffer(given(target)))


OPTIONS = {}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": 3}, {"ignore_index": 0}
SIZES = (  # classes, rows, PIECE, how many pieces
    (5, 2, by_rows.PIECE, 1),
    (50, 260, by_rows.PIECE, 5),  # a quarter of the logits in each, in multiples of 8 rows
    (50, 260, 800, 17),  # logits in each
    (50, 2600, 800, 65),  # a 64th of them
)
# These take long.
LARGE = ((50257, 100, by_rows.PIECE, 5), {}, HALF), ((4096, 2082, by_rows.PIECE, 5), OPTIONS[2], None)
ROWS = full([*product(SIZES, OPTIONS, (None, HALF)), *LARGE], lambda row: row[0] in SIZES)


@pytest.mark.parametrize(("sizes", "options", "autocast"), ROWS)
def test_gradients_and_bytes(sizes: Any, options: Any, autocast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    classes, rows, piece, pieces = sizes
    monkeypatch.setattr(by_rows, "PIECE", piece)
    assert len([*by_rows._pieces(torch.empty(rows, classes))]) == pieces
    make = partial(model_of, classes, rows, autocast is None, rows == 260, ignored=rows // 3, **options)
    given = {"dtype": torch.float32 if autocast else HALF, "autocast": autocast, "step": AROUND["retained"]}
    before, after = saving_less(make, torch.randn(2, rows // 2, WIDTH), **given)
    assert before - after >= 2 * rows * classes


def test_none_counts() -> None:
    model, _ = agree(partial(model_of, ignored=6), x=X, dtype=HALF)
    assert model(X.to(HALF)).isnan()


LEFT: dict[str, dict[str, Any]] = {
    "weights": {"weight": torch.linspace(1, 2, 7)},
    "smoothing": {"label_smoothing": 0.1},
    "probabilities": {"given": lambda target: F.one_hot(target, 7).float()},
    "not widened": {"widen": False},
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_pytorch(name: str) -> None:
    dtype = torch.float32 if name == "probabilities" else HALF
    models = agree(partial(model_of, **LEFT[name]), x=X, dtype=dtype)
    assert len({type(model(X.to(dtype)).grad_fn) for model in models}) == 1


def twice(model: Any, x: Tensor) -> Any:
    (dx,) = torch.autograd.grad(model(x), x, create_graph=True)
    return torch.autograd.grad(dx.float().square().sum(), [x, model.head.weight])


def test_second_derivatives() -> None:
    """Backward runs several pieces anew as one, so sums are rounded otherwise."""
    agree(model_of, twice, X, HALF)
    models, x = pair(partial(model_of, rows=64), HALF), torch.randn(8, 8, WIDTH).to(HALF)
    assert type(models[1](x).grad_fn).__name__ == "_CrossEntropyBackward"
    expected, actual = (observed(model, twice, x)[0] for model in models)
    assert off(actual, expected) < 0.02


def test_errors_are_pytorchs() -> None:
    """For a class that is not there, and for logits that were changed before backward."""
    _, model = pair(model_of, HALF)
    model.target[0] = 9
    with pytest.raises(IndexError, match="Target 9 is out of bounds"):
        model(X.to(HALF))
    model.target[0] = 0
    logits: list[Tensor] = []
    model.head.register_forward_hook(lambda module, given, output: logits.append(output))
    loss = model(X.to(HALF))
    logits[-1].detach().zero_()
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


@pytest.mark.parametrize("normed", [False, True])
def test_what_others_read_is_not_overwritten(normed: bool) -> None:
    """Logits that are parameters, or that a norm reads too; to make them float32 returns them as they are."""

    def call(m: Any, _: Tensor) -> Tensor:
        logits, target = m.logits.view(6, 7), torch.arange(6)
        if not normed:
            return F.cross_entropy(logits.float(), target)
        logits = logits * 2
        return F.layer_norm(logits, (7,), m.scale).pow(2).sum() + F.cross_entropy(logits.float(), target)

    parts = {"logits": nn.Parameter(torch.randn(42)), "scale": nn.Parameter(torch.ones(7))}
    baseline, model = agree(lambda: built(call, **parts))
    assert torch.equal(baseline.logits, model.logits)


@pytest.mark.parametrize("autocast", [None, HALF], ids=["bfloat16", "autocast"])
@pytest.mark.parametrize("held", [False, True], ids=["dropped", "held"])
def test_the_peak_of_a_language_model(autocast: Any, held: bool) -> None:
    transformers = imported("transformers")
    sizes = {"vocab_size": 4000, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)
    model = transformers.LlamaForCausalLM(config).to(torch.float32 if autocast else HALF).train()
    ids = torch.randint(3, 4000, (2, 64))
    batch = {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(100)}

    def step() -> list[Tensor | None]:
        model.zero_grad()
        with cast(autocast):
            output = model(**batch)
        loss: Tensor = output.loss
        output = output if held else None
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]

    results = []
    for _ in range(2):
        results.append((step(), peak_memory(step, model)["total"]))
        fitact.convert(model)
    (expected, before), (converted, after) = results
    assert not differences(expected, converted)
    assert after <= before - 4 * ids.numel() * 4000
