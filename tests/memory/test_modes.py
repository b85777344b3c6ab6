"""The mode that sees operations sees every one, and answers itself where a fake tensor is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from fitact.runtime.modes import OperationMode

aten = torch.ops.aten


class Seen(OperationMode):
    """Notes operations."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.operations.append(func)
        return func(*args, **kwargs)


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_a_fake_tensor_is_where_it_was_made(device: str) -> None:
    """Also where there is no such device."""
    with FakeTensorMode(), Seen() as seen:
        x = torch.ones(8, device=device)
        y = F.gelu(x).sum()
        assert x.device.type == y.device.type == device
    assert seen.operations == [aten.ones.default, aten.gelu.default, aten.sum.default]


def test_a_backward_pass_of_fake_tensors() -> None:
    with FakeTensorMode():
        x = torch.ones(8, requires_grad=True)
        with Seen() as seen:
            F.gelu(x).sum().backward()
        assert x.grad.device.type == "cpu"
    assert {aten.gelu.default, aten.gelu_backward.default} < {*seen.operations}
    assert not [func for func in seen.operations if func.namespace == "prim"]


def test_real_tensors() -> None:
    with Seen() as seen:
        y = torch.ones(2) + 1
    assert y.tolist() == [2.0, 2.0]
    assert seen.operations == [aten.ones.default, aten.add.Tensor]
