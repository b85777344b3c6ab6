"""Dropout's masks: saved in a bit an element, in the layout of codes, and PyTorch's own values from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fitact import saving
from fitact.runtime.kernels import reference
from fitact.runtime.measure.saved import count_saved
from fitact.runtime.saving.bits import pack, unpack
from fitact.runtime.torch_internals import FakeTensorMode
from tests.support.saving import agree, train

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


class Dropped(nn.Module):
    """Layers that read one output, each after a dropout of its own, in some layout."""

    def __init__(self, p: float, layout: Callable[[Tensor], Tensor], readers: int = 1) -> None:
        super().__init__()
        self.fc, self.act, self.layout = nn.Linear(48, 24), nn.GELU(), layout
        self.drops = nn.ModuleList(nn.Dropout(p) for _ in range(readers))
        self.outs = nn.ModuleList(nn.LazyLinear(24) for _ in range(readers))

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.fc(x))
        return sum(out(drop(self.layout(y))) for drop, out in zip(self.drops, self.outs, strict=True))


READ: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda y: y,
    "turned": lambda y: y.transpose(0, 1),
    "slice": lambda y: y[:, 1:4],
    "every other": lambda y: y[..., ::2],
    "one, expanded": lambda y: y[:1].expand(3, -1, -1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("read", READ)
def test_gradients(read: str, dtype: torch.dtype) -> None:
    for p in (1e-9, 0.1, 1 - 1e-4):
        for shape in ((5, 7, 48), (1, 1, 48), (0, 4, 48)):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(0))

            def make(p: float = p, x: Tensor = x) -> nn.Module:
                model = Dropped(p, READ[read], readers=2)
                model(x[:1] if len(x) else x.new_ones(1, *x.shape[1:]))
                return model

            agree(make, x=x, dtype=dtype, raises="both")  # no text can be expanded


def test_bits_are_saved() -> None:
    """Of three readers, each after a dropout: the output's input, and three masks."""
    x = torch.randn(64, 16, 48)
    model = Dropped(0.1, READ["whole"], readers=3)
    model(x)
    with count_saved(model) as saved, saving():
        y = model(x)
    rows = x.numel() // 48
    assert saved.bytes == 4 * x.numel() + 4 * rows * 24 + 3 * rows * 24 // 8
    y.sum().backward()


def test_training_and_evaluation() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 700), nn.SiLU(), nn.Dropout(0.3), nn.Linear(700, 16))

    def step(model: Any, x: Tensor) -> Any:
        return [train(model.train(training), x) for training in (True, False, True)]

    agree(make, step, torch.randn(31, 16))
