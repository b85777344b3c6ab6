"""Trial runs leave no trace in a model, whatever its first forward pass does to it."""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fitact

X = torch.randn(4, 16)


class Marked(nn.Module):
    """Changes itself in every forward pass, and more in the first."""

    def __init__(self, mark: Callable[[Any], None]) -> None:
        super().__init__()
        self.fc1, self.norm, self.act, self.fc2 = nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("ones", torch.ones(1).expand(16))
        self.mark = mark
        self.held = {"list": [1], "lock": threading.Lock() if mark is _attributes else None}  # which has no copy
        self.things = SimpleNamespace(numbers=[1], more=OrderedDict(a={1}), last=deque([1]))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "marked"):
            self.marked = True
            self.mark(self)
        if self.mark is _reads:
            x.mul_(1.5)
        x = nn.functional.dropout(x, 0.1)
        return self.fc2(self.act(self.norm(self.fc1(x)))) * torch.sigmoid(x) + self.seen


def _attributes(model: Any) -> None:
    model.new, model.held["new"] = [1], 1
    model.things.numbers.append(2)
    model.things.more["a"].add(2)
    model.things.last.append(2)
    model.things.new = 1


def _reads(model: Any) -> None:
    """No fake tensor has a value: then the trial is a real run."""
    model.seen.add_(float(model.fc1.weight.sum()) ** 0)


def _modules(model: Any) -> None:
    model.extra = nn.Linear(2, 2)
    model.act = nn.ReLU()
    model.fc1.register_buffer("extra", torch.ones(2))
    model.fc2.bias = nn.Parameter(torch.ones(16))


MARKS: dict[str, Callable[[Any], None]] = {
    "forward hook": lambda model: model.fc1.register_forward_hook(
        lambda *given: given[-1] * 2, with_kwargs=True, always_call=True
    ),
    "forward pre-hook": lambda model: model.fc2.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
    "backward hook": lambda model: model.act.register_full_backward_hook(lambda _, dx, dy: (dx[0] * 2,)),
    "backward pre-hook": lambda model: model.fc2.register_full_backward_pre_hook(lambda _, dy: (dy[0] * 2,)),
    "hook of a parameter": lambda model: model.fc1.weight.register_hook(lambda g: g * 2),
    "state dict hook": lambda model: model.register_state_dict_post_hook(lambda *_: None),
    "buffers": lambda model: model.seen.add_(1),
    "a value read": _reads,
    "attributes": _attributes,
    "modules": _modules,
    "frozen": lambda model: model.fc1.requires_grad_(False),
    "modes": lambda model: model.norm.eval(),
}
DRY: dict[str, Any] = {"example_inputs": X, "dry_run": True}
CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "exact": lambda model: fitact.convert(model, example_inputs=X),
    "coarse": lambda model: fitact.convert(model, error="coarse", example_inputs=X, gradients=True),
    "modules": lambda model: fitact.convert(model, include="fc1", exclude="norm", example_inputs=X),
    "fewbit": lambda model: fitact.convert(model, "fewbit", example_inputs=X),
    "dry run": lambda model: fitact.convert(model, **DRY),
    "dry run, fewbit": lambda model: fitact.convert(model, "fewbit", **DRY, gradients=True),
    "no inputs": fitact.convert,
    "calibration": lambda model: fitact.calibrate(model, [X, X]),
}


def looks(thing: Any, seen: frozenset[int] = frozenset()) -> Any:
    """Return all that something holds, as numbers and texts."""
    if id(thing) in seen:
        return "..."
    inside = seen | {id(thing)}
    match thing:
        case Tensor():
            hooks, grad = len(thing._backward_hooks or ()), thing.is_leaf and thing.grad is not None
            return thing.tolist(), thing.stride(), thing.requires_grad, hooks, grad
        case dict():
            return [(key, looks(value, inside)) for key, value in thing.items()]
        case list() | tuple() | set() | deque():
            return [looks(value, inside) for value in thing]
        case nn.Module() | SimpleNamespace():
            return type(thing).__name__, looks(vars(thing), inside)
    return str(thing)


@pytest.mark.parametrize("how", CONVERSIONS)
@pytest.mark.parametrize("mark", MARKS)
def test_no_trace(mark: str, how: str) -> None:
    """A model that has never run is restored; where the gradient is compared, the model then trains as before."""
    model = Marked(MARKS[mark])
    before = looks((model, X, torch.get_rng_state()))
    CONVERSIONS[how](model)
    assert "dry run" not in how or looks((model, X, torch.get_rng_state())) == before
    fitact.revert(model)
    assert looks((model, X, torch.get_rng_state())) == before
