"""The context itself: changes in place, compiled functions, nesting, errors, and what it leaves behind."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fitact import saving
from fitact.base import UsageError
from tests.support.blocks import MODELS
from tests.support.saving import HALF, X, differences, kept, kept_of, observed, pair, train


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
def test_compiled() -> None:
    """Compiled functions go inside; the context in one breaks its graph."""
    model = MODELS["mlp"]()
    compiled = torch.compile(model, backend="aot_eager")

    def inside(x: Tensor) -> Tensor:
        with saving():
            y: Tensor = compiled(x)
        return y

    def within(x: Tensor) -> Tensor:
        with saving():
            y: Tensor = model(x)
        return y

    steps = [inside, torch.compile(within, backend="aot_eager")]
    expected = observed(model, lambda model, x: train(model, x), X)
    for call in steps:
        model.zero_grad()
        assert not differences(
            expected, observed(model, lambda _, x, call=call: train(model, x, lambda _, x: call(x)), X)
        )
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="saving is for eager code"):
        torch.compile(within, backend="aot_eager", fullgraph=True)(X)


def test_compiled_alone() -> None:
    """The compiler leaves an activation of PyTorch as it is, and finds nothing else to compile around it."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    baseline, model = pair(MODELS["gate"])
    for one, context in (baseline, nullcontext()), (baseline, saving()), (model, nullcontext()):
        one.inner.zap.compile(backend=backend)
        with context:
            train(one, X.clone().requires_grad_())
    assert not graphs


def test_a_changed_tensor_raises_as_in_pytorch() -> None:
    """Of what is stored, and of what is recomputed."""
    layer = nn.Linear(16, 16)
    for change in ("input", "output"):
        x = torch.randn(4, 16, requires_grad=True)
        with saving():
            hidden = x * 2
            y = F.gelu(hidden)
            z = layer(y)
        with torch.no_grad():
            {"input": hidden, "output": y}[change].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def test_a_change_that_pytorch_allows() -> None:
    """Scores in half precision are stored in place of their softmax in float32, and then changed."""
    found = []
    for context in (nullcontext(), saving()):
        x = torch.linspace(-1, 1, 640).view(10, 64).to(HALF).requires_grad_()
        with context:
            scores = x * 3
            weights = F.softmax(scores, -1, dtype=torch.float32)
            scores.add_(1)
        weights.square().sum().backward()
        found.append(x.grad)
    assert not differences(*found)


def test_nothing_is_held_when_the_graph_is_gone() -> None:
    """An output that lives on holds nothing of what it could be recomputed from."""
    x = torch.randn(64, 16, requires_grad=True)
    with saving():
        hidden = x * 2
        y = F.gelu(hidden)
    gone = weakref.ref(hidden)
    loss = y.sum()
    del hidden
    loss.backward()
    del loss
    y = y.detach()
    assert gone() is None


def test_nested_and_as_a_decorator() -> None:
    model = MODELS["mlp"]()
    x = torch.randn(64, 16, 16)
    once = kept_of(model, lambda: saving()(model)(x))
    with saving():
        inside = kept_of(model, lambda: model(x))
        with saving():
            pass
    assert once < kept(model, x)
    assert inside >= once  # other hooks win inside


def test_an_exception_leaves_nothing_behind() -> None:
    model = MODELS["mlp"]()
    x = torch.randn(64, 16, 16)
    before = kept(model, x)
    with pytest.raises(ZeroDivisionError), saving():
        model(x).fill_(1 / 0)
    assert kept(model, x) == before


def test_unknown_error() -> None:
    with pytest.raises(UsageError, match="error: expected 'exact', 'rounding' or 'coarse', got 'none'"):
        saving("none")
