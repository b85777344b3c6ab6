"""Modules that run in a context: their class, own forwards, copies, other modules of it, and turning back."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fitact
from fitact.runtime.saving.context import baseline
from fitact.runtime.saving.modules import attach, attaching, detach
from tests.support.blocks import MLP, MODELS
from tests.support.saving import X, differences, observed, saved_bytes, train

WIDE = torch.randn(64, 16, 16)


class Locked(MLP):
    """It cannot be copied but by what it says of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: one for name, one in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.lock = threading.Lock()


class Registered(MLP):
    """It keeps a list of its subclasses, which have to give their names."""

    known: ClassVar[list[str]] = []

    def __init_subclass__(cls, name: str) -> None:
        Registered.known.append(name)


class Own(Registered, name="own"):
    pass


def _saved(model: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": _saved,
}


@pytest.mark.parametrize("given", [{}, {"error": "rounding", "exclude": "fc1"}], ids=str)
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", [MLP, Locked, Own])
def test_copies(kind: type[nn.Module], way: str, given: dict[str, Any]) -> None:
    """The class is a subclass of the same name. Copies save as little as the model, and are independent of it."""
    model, doubled = kind(), kind()
    text, keys, modules, before = (
        repr(model),
        [*model.state_dict()],
        dict(model.named_modules()),
        saved_bytes(model, WIDE),
    )
    for _ in range(2):
        fitact.convert(model, **given)
    assert isinstance(model, kind) and type(model) is not kind and type(model).__name__ == kind.__name__
    assert (repr(model), [*model.state_dict()], dict(model.named_modules())) == (text, keys, modules)
    twin = COPIES[way](model)
    assert type(twin) is type(model) and saved_bytes(twin, WIDE) == saved_bytes(model, WIDE) < before
    expected = observed(model, train, X)
    doubled.load_state_dict(model.state_dict())
    fitact.convert(doubled, **given)
    with torch.no_grad():
        for own in (*twin.parameters(), *doubled.parameters()):
            own.mul_(2)
    assert not differences(observed(doubled, train, X), observed(twin, train, X))
    model.zero_grad()
    assert not differences(expected, observed(model, train, X))
    assert (
        fitact.revert(twin) and type(twin) is kind and saved_bytes(model, WIDE) < saved_bytes(twin, WIDE) == before
    )


@pytest.mark.parametrize("kind", [MLP, Locked, Own])
def test_turning_back(kind: type[nn.Module]) -> None:
    model = kind()
    fitact.convert(model)
    assert Registered.known == ["own"]
    fresh = type(model)()
    assert saved_bytes(model, WIDE) < saved_bytes(fresh, WIDE)
    assert not fitact.revert(fresh) and type(fresh) is kind
    assert detach(model) and not detach(model)
    assert type(model) is kind and vars(model).keys() == vars(kind()).keys()


def _twice(model: MLP, x: Tensor) -> Tensor:
    return 2 * MLP.forward(model, x)


def test_a_forward_of_the_module_s_own() -> None:
    """accelerate sets one, for example for autocast or to move the weights of parts."""
    model = MLP()
    forward = model.forward = partial(_twice, model)
    expected, before = observed(copy.deepcopy(model), train, X), saved_bytes(model, WIDE)
    fitact.convert(model)
    assert saved_bytes(model, WIDE) < before
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        one.zero_grad()
        assert not differences(expected, observed(one, train, X))
    fitact.revert(model)
    assert vars(model)["forward"] is forward and saved_bytes(model, WIDE) == before


def test_parts() -> None:
    """A part can save as it is, and contexts that are tried leave the module as it was."""
    model = MODELS["block"]()
    before = saved_bytes(model, WIDE)
    fitact.convert(model)
    all_of_it = saved_bytes(model, WIDE)
    fitact.revert(model)
    attach(model[0], partial(fitact.saving, "exact"))
    first = saved_bytes(model, WIDE)
    attach(model, partial(fitact.saving, "exact"))
    attach(model[0], baseline)
    others = saved_bytes(model, WIDE)
    assert all_of_it < min(first, others) and max(first, others) < before
    with attaching(model, {"": baseline}):
        assert saved_bytes(model, WIDE) == before
    assert saved_bytes(model, WIDE) == others
