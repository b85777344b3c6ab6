"""Activations and gates that are rebuilt, made one by one: `fitact.activation(..., method="rebuild")`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fitact
from fitact.errors import UsageError
from fitact.generated.swiglu_rebuild import SwigluRebuild
from fitact.runtime.convert.probe import FUNCTIONS
from fitact.runtime.memory.saved import count_saved
from fitact.runtime.rebuild.modules import Rebuilding

from .test_rebuild import HALF, cast, differences, kept, loss_of, observed, train


def results(call: Callable[..., Tensor], *inputs: Tensor, reader: bool) -> list[Tensor]:
    """Return the output and the gradients; if there is a reader, others read the inputs before and after."""
    given = [one.clone().requires_grad_() for one in inputs]
    between = [one.clone() for one in given]
    extra = [one.sin() for one in between] if reader else []
    y = call(*between)
    extra += [one.cos() for one in between] if reader else []
    loss = loss_of(y) + sum(loss_of(one) for one in extra)
    loss.backward()
    return [y.detach(), *(one.grad for one in given if one.grad is not None)]


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_activation(name: str) -> None:
    """Values and gradients are PyTorch's bit for bit, and the inputs alone are kept."""
    alone, gate = fitact.activation(name, method="rebuild"), fitact.activation(name, gate=True)
    function = FUNCTIONS[name]
    for dtype in DTYPES:
        x, u = (2 * torch.randn(2, 9, 24)).to(dtype)
        for reader in (False, True):
            for autocast in (None, HALF) if dtype == torch.float32 else (None,):
                with cast(autocast):
                    cases = [(function, alone, [x]), (lambda g, u: function(g) * u, gate, [x, u])]
                    for stock, made, inputs in cases:
                        assert not differences(
                            results(stock, *inputs, reader=reader), results(made, *inputs, reader=reader)
                        )
        for module, count in ((alone, 1), (gate, 2)):
            inputs = [one.clone().requires_grad_().clone() for one in (x, u)[:count]]
            with count_saved() as saved:
                y = module(*inputs)
            assert saved.bytes == sum(one.nbytes for one in inputs)
            del y


def test_the_same_tensor_twice() -> None:
    gate = fitact.activation("silu", gate=True)
    x = torch.randn(50)
    for call in (lambda f, x: f(x, x), lambda f, x: x.exp() + f(x, x) * x.sin()):
        expected = results(lambda x, call=call: call(lambda g, u: nn.functional.silu(g) * u, x), x, reader=True)
        assert not differences(expected, results(lambda x, call=call: call(gate, x), x, reader=True))


class MLP(nn.Module):
    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.g, self.u, self.down, self.gate = nn.Linear(16, 48), nn.Linear(16, 48), nn.Linear(48, 16), gate

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.gate(self.g(x), self.u(x)))
        return y


class Plain(nn.Module):
    def forward(self, g: Tensor, u: Tensor) -> Tensor:
        return nn.functional.silu(g) * u


MODELS: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    "gate": lambda: (MLP(Plain()), MLP(fitact.activation("silu", gate=True))),
    "generated gate": lambda: (MLP(Plain()), MLP(SwigluRebuild())),
    "activation": lambda: tuple(
        nn.Sequential(nn.Linear(16, 48), act, nn.Dropout(0.2), nn.Linear(48, 16))
        for act in (nn.SiLU(), fitact.activation("silu", method="rebuild"))
    ),
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_layers_that_follow(name: str, given: bool) -> None:
    """`rebuild` prepares them, and `revert` takes that back."""
    stock, model = MODELS[name]()
    model.load_state_dict(stock.state_dict())
    x, wide = torch.randn(4, 16), torch.randn(256, 16)
    before = kept(model, wide)
    report = fitact.rebuild(model, example_inputs=x if given else None)
    assert [one.after for one in report] == ["rebuilt"]
    assert kept(model, wide) < before <= kept(stock, wide)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for dtype in (torch.float32, HALF):
            a, b = copy.deepcopy(stock).to(dtype), copy.deepcopy(one).to(dtype)
            assert not differences(observed(a, train, x.to(dtype)), observed(b, train, x.to(dtype)))
    fitact.revert(model)
    assert not any(isinstance(one, Rebuilding) for one in model.modules())
    assert kept(model, wide) == before


WRONG: dict[str, dict[str, Any]] = {
    "a gate has only the method 'rebuild', got 'fewbit'": {"name": "silu", "gate": True, "method": "fewbit"},
    "method='rebuild' keeps no bits: expected bits=None, got 3": {"name": "silu", "method": "rebuild", "bits": 3},
    "no activation 'swish' to rebuild: expected one of celu": {"name": "swish", "gate": True},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_use(message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fitact.activation(**WRONG[message])
