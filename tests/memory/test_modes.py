"""Modes see every operation, and answer where a fake tensor is; watching what is saved leaves nothing behind."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import fitact
from fitact.runtime.measure import count_saved
from fitact.runtime.measure.modes import OperationMode

aten = torch.ops.aten


class Seen(OperationMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.operations.append(func)
        return func(*args, **kwargs)


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta", None])
def test_a_fake_tensor_is_where_it_was_made(device: str | None) -> None:
    """Also where there is no such device; and a real tensor has its values."""
    with FakeTensorMode() if device else nullcontext(), Seen() as seen:
        x = torch.ones(8, device=device)
        y = F.gelu(x).sum()
        assert x.device.type == y.device.type == (device or "cpu")
    assert seen.operations == [aten.ones.default, aten.gelu.default, aten.sum.default]
    assert device or float(y) == pytest.approx(8 * 0.8413447)


def test_a_backward_pass_of_fake_tensors() -> None:
    with FakeTensorMode():
        x = torch.ones(8, requires_grad=True)
        with Seen() as seen:
            F.gelu(x).sum().backward()
        assert x.grad.device.type == "cpu"
    assert {aten.gelu.default, aten.gelu_backward.default} < {*seen.operations}
    assert not [func for func in seen.operations if func.namespace == "prim"]


COARSE = {"error": "coarse", "gradients": True}
MEASURING: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "count_saved": lambda model, x: count_saved(model, detail=True)(model)(x),
    "fewbit": lambda model, x: (fitact.convert(model, "fewbit", example_inputs=x), fitact.revert(model)),
    "coarse": lambda model, x: (fitact.convert(model, **COARSE, example_inputs=x), fitact.revert(model)),
    "plan": lambda model, x: fitact.plan(model, gib=1, example_inputs=x, front=False),
}


@pytest.mark.parametrize("name", MEASURING)
def test_measuring_leaves_no_tensor_behind(name: str) -> None:
    """An activation's output that is saved as it is would hold the graph that saves it for ever."""
    layers = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Tanh()
    model = nn.Sequential(*layers)
    x, alive = torch.randn(4, 16), list[int]()
    for _ in range(3):  # the first time makes what stays for good, such as tables of codes
        MEASURING[name](model, x)
        gc.collect()
        alive.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))
    assert alive[2] == alive[1]
