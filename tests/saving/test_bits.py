"""In every setting a converted model has the baseline's outputs and gradients, bit for bit, and saves less."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.around import AROUND
from tests.support.blocks import MLP, MODELS, SETTINGS, Own, Read, RMSNorm
from tests.support.saving import HALF, X, agree, cast, differences, kept, loss_of, observed, pair, train


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # PyTorch's own
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_bytes(name: str, setting: str) -> None:
    dtype, autocast = SETTINGS[setting]
    baseline, model = pair(MODELS[name], dtype)
    for seed in range(2):  # the second gradient is added to the first
        with cast(autocast):
            expected, found = (observed(one, train, X.to(dtype), seed) for one in (baseline, model))
        assert not isinstance(expected, str)
        assert not differences(expected, found)
    wide = torch.randn(64, 16, 16).to(dtype)
    with cast(autocast):
        assert kept(model, wide) < kept(baseline, wide)


_WIDE = torch.randn(6, 5, 4, 32, generator=torch.Generator().manual_seed(2))
SHAPES = {
    "1-D": _WIDE[0, 0, 0, :16],
    "2-D": _WIDE[0, 0, :, :16],
    "4-D": _WIDE[..., :16],
    "strided": _WIDE[0, ..., ::2],
    "turned": _WIDE[0, ..., :16].transpose(0, 1),
    "columns": _WIDE[0, :, 0, :16].t().contiguous().t(),
    "expanded": _WIDE[0, 0, 0, :16].expand(2, 3, 16),
    "one row": _WIDE[0, 0, :1, :16],
    "no rows": _WIDE[:0, 0, 0, :16],
    "no batch": _WIDE[:0, 0, :, :16],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str) -> None:
    for name in ("mlp", "no bias", "qkv", "gate last"):
        for dtype in (torch.float32, HALF):
            agree(MODELS[name], x=SHAPES[shape], dtype=dtype)
            agree(MODELS[name], lambda model, x: model(x).sum().backward(), SHAPES[shape], dtype)


READS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "slice": lambda model, x, y: model.fc2(y[:, 1:3]),
    "first": lambda model, x, y: model.fc2(y[:, 0]),
    "first, turned": lambda model, x, y: model.fc2(y[:, 0].t().contiguous().t()),
    "turned": lambda model, x, y: model.fc2(y.transpose(0, 1)),
    "turned slice": lambda model, x, y: model.fc2(y[1:].transpose(0, 1)),
    "flat": lambda model, x, y: model.fc2(y.flatten(0, 1)),
    "strided": lambda model, x, y: model.fc2(y[:, ::2]),
    "detached": lambda model, x, y: model.fc2(y.detach()) + y.sum(),
    "residual": lambda model, x, y: model.fc2(y) + (y * y).sum() + y.exp().mean(),
    "twice": lambda model, x, y: model.fc2(y).sin() * model.fc2(y).cos() + model.fc2(y),
    "keyword": lambda model, x, y: model.fc2(input=y),
    "again": lambda model, x, y: model.fc2(model.act(model.fc1(model.fc2(y)))),
    "in place before": lambda model, x, y: model.fc2(y.mul_(2)),
    "in place before, unseen": lambda model, x, y: model.fc2(_unseen(y)),
    "in place, a part before": lambda model, x, y: model.fc2(_part(y)),
    "result in place": lambda model, x, y: model.fc2(y).mul_(2).relu_(),
    "to float64": lambda model, x, y: model.fc2(y.double().to(y)),
}


def _unseen(y: Tensor) -> Tensor:
    with torch.no_grad():
        y.clamp_(min=0.1)
    return y


def _part(y: Tensor) -> Tensor:
    y[:, 1].zero_()
    return y


@pytest.mark.parametrize("dtype", [torch.float32, HALF, None])
@pytest.mark.parametrize("reads", READS)
def test_readers(reads: str, dtype: torch.dtype | None) -> None:
    """None is bfloat16 by autocast."""
    for act in (nn.GELU, Own):

        def step(model: Any, x: Tensor) -> Any:
            with cast(None if dtype else HALF):
                y = model(x)
            loss_of(y).backward()
            return y.detach()

        make = partial(Read, READS[reads], act=act)
        agree(make, step, dtype=dtype or torch.float32)


def test_the_first_of_each_text() -> None:
    """Of the others nothing is saved if only the first is read."""
    baseline, model = pair(partial(Read, READS["first"]))
    x = torch.randn(4, 50, 16)
    assert kept(baseline, x) - kept(model, x) == 3 * x.nbytes  # of the norm and of the activation


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("kind", [nn.GELU, Own, RMSNorm, nn.LayerNorm])
def test_order_of_sums(kind: Any, dtype: torch.dtype) -> None:
    """The input of what is recomputed is read by others too, whose gradients are added in the baseline's order."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(16, 16), nn.Linear(16, 16)
            self.act = kind(*([16] if kind is nn.LayerNorm else []))

        def forward(self, x: Tensor) -> Tensor:
            a = self.fc1(x)
            return a.exp() + self.fc2(self.act(a)) + self.act(a) * a.sin() + a.cos()

    agree(Sums, x=torch.randn(32, 16), dtype=dtype)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("names", ["fc2.weight", "fc2.bias", "norm.bias", "fc1.weight fc1.bias norm.weight"])
def test_frozen_parts(names: str, later: bool) -> None:
    """Before the conversion, or after it."""

    def freeze(model: nn.Module) -> nn.Module:
        for name in names.split():
            model.get_parameter(name).requires_grad_(False)
        return model

    def step(model: nn.Module, x: Tensor) -> Tensor:
        return train(freeze(model), x)

    agree(MLP if later else lambda: freeze(MLP()), step)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", ["dropout", "composed", "adapters", "gate", "block"])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_surroundings(name: str, around: str) -> None:
    agree(MODELS[name], AROUND[around])
