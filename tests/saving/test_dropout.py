"""Dropout's masks: saved in a bit an element, in the layout of codes, and PyTorch's own values from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fitact.runtime.kernels import reference
from fitact.runtime.saving.bits import pack, unpack
from fitact.runtime.torch_internals import FakeTensorMode
from tests.support.blocks import MODELS
from tests.support.saving import agree, both_ways, train

SIZES = [0, 1, 7, 8, 9, 1023, 1024, 1025, 8191, 8192, 8193, 9216, 9217, 20000, 24576]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "turned": lambda x: x.transpose(0, 1),
    "columns": lambda x: x.transpose(1, 2),
    "channels last": lambda x: x[None].contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("size", SIZES)
def test_layout(size: int) -> None:
    """The bytes are those of codes of one bit, without the end of the last tile."""
    mask = torch.rand(size, generator=torch.Generator().manual_seed(size)) < 0.7
    bits = pack(mask)
    codes = reference.encode(mask, (0.5,), 1, False)
    assert torch.equal(bits, codes[: len(bits)]) and not codes[len(bits) :].any()
    assert len(bits) == size // 8192 * 1024 + min(size % 8192, 1024)
    assert torch.equal(unpack(bits, mask.shape, mask.stride()), mask)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    mask = LAYOUTS[layout](torch.rand(7, 11, 130, generator=torch.Generator().manual_seed(0)) < 0.7)
    found = unpack(pack(mask), mask.shape, mask.stride())
    assert torch.equal(found, mask) and found.stride() == mask.stride()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(mask)
        packed = pack(fake)
        again = unpack(packed, fake.shape, fake.stride())
    assert packed.shape == pack(mask).shape and (again.shape, again.stride()) == (mask.shape, mask.stride())


def test_bits_are_saved() -> None:
    """Of three readers, each after a dropout: the output's input, and three masks."""
    x, up = torch.randn(64, 16, 48), nn.Linear(48, 24)
    outs = [nn.Linear(24, 24) for _ in range(3)]

    def compute(x: Tensor, *_: Tensor) -> Tensor:
        y = F.gelu(up(x))
        return sum(out(F.dropout(y, 0.1)) for out in outs)

    rows, parameters = 64 * 16, [one for layer in (up, *outs) for one in layer.parameters()]
    _, after = both_ways(compute, x, *parameters)
    assert after == 4 * (x.numel() + rows * 24 + 3 * 24 * 24) + 3 * rows * 24 // 8


def test_training_and_evaluation() -> None:
    def step(model: Any, x: Tensor) -> Any:
        return [train(model.train(training), x) for training in (True, False, True)]

    agree(MODELS["dropout"], step)
