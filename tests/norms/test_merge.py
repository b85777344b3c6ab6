"""A norm merged into the linear layers that read it: the same function, and fewer bytes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fitact.base import UsageError
from fitact.runtime.measure.prepare import imported
from fitact.runtime.measure.saved import count_saved
from fitact.runtime.norms import MSLayerNorm, MSRMSNorm
from fitact.runtime.norms.merge import merge_norm

SIZE = 24


def llama(width: int) -> nn.Module:
    return imported("transformers.models.llama.modeling_llama").LlamaRMSNorm(width)


def gemma(width: int) -> nn.Module:
    return imported("transformers.models.gemma.modeling_gemma").GemmaRMSNorm(width)


NORMS = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm, "LLaMA's": llama, "Gemma's": gemma}


class Model(nn.Module):
    def __init__(self, kind: str, bias: bool) -> None:
        super().__init__()
        self.norm = NORMS[kind](SIZE)
        for parameter in self.norm.parameters():
            nn.init.normal_(parameter)
        self.layers = nn.ModuleList(nn.Linear(SIZE, 8, bias) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        return torch.cat([layer(z) for layer in self.layers], -1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", NORMS)
def test_the_same_function_from_fewer_bytes(kind: str, bias: bool) -> None:
    torch.manual_seed(0)
    baseline = Model(kind, bias)
    model = copy.deepcopy(baseline)
    model.norm = merge_norm(model.norm, list(model.layers))
    assert type(model.norm) is (MSLayerNorm if kind == "LayerNorm" else MSRMSNorm)
    x = torch.randn(6, SIZE, requires_grad=True)
    found = []
    for one in (baseline, model):
        with count_saved(one) as saved:
            y = one(x)
        (gradient,) = torch.autograd.grad(F.softplus(y).sum(), x)
        found.append((y.detach(), gradient, saved.bytes))
    torch.testing.assert_close(found[1][:2], found[0][:2], rtol=1e-4, atol=1e-5)
    assert found[1][2] < found[0][2]


def test_half_precision() -> None:
    norm = llama(SIZE).bfloat16()
    nn.init.normal_(norm.weight)
    layer = nn.Linear(SIZE, 8, bias=False, dtype=torch.bfloat16)
    expected = layer.weight * norm.weight
    assert type(merge_norm(norm, [layer])) is MSRMSNorm
    assert torch.equal(layer.weight, expected)


class Other(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) ** 3


@pytest.mark.parametrize(
    ("norm", "layer", "message"),
    [
        (Other(SIZE), nn.Linear(SIZE, 2), r"norm: expected a LayerNorm or RMSNorm .*, got Other"),
        (
            nn.LayerNorm(SIZE, elementwise_affine=False),
            nn.Linear(SIZE, 2),
            "norm: expected a LayerNorm or RMSNorm",
        ),
        (
            nn.LayerNorm(SIZE),
            nn.Linear(SIZE + 1, 2),
            rf"layers: expected linear layers of {SIZE} inputs, got Linear",
        ),
        (
            nn.LayerNorm(SIZE),
            nn.Bilinear(SIZE, 2, 2),
            rf"layers: expected linear layers of {SIZE} inputs, got Bili",
        ),
    ],
    ids=["another norm", "no weight", "another size", "no linear layer"],
)
def test_wrong_use(norm: nn.Module, layer: nn.Module, message: str) -> None:
    good = nn.Linear(SIZE, 2)
    state = copy.deepcopy(good.state_dict())
    with pytest.raises(UsageError, match=message):
        merge_norm(norm, [good, layer])  # type: ignore[list-item]
    torch.testing.assert_close(good.state_dict(), state, rtol=0, atol=0)
