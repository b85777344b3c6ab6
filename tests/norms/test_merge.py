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
from tests.support.blocks import read_by

SIZE = 24


def llama(width: int) -> nn.Module:
    return imported("transformers.models.llama.modeling_llama").LlamaRMSNorm(width)


def gemma(width: int) -> nn.Module:
    return imported("transformers.models.gemma.modeling_gemma").GemmaRMSNorm(width)


NORMS = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm, "LLaMA's": llama, "Gemma's": gemma}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", NORMS)
def test_the_same_function_from_fewer_bytes(kind: str, bias: bool) -> None:
    torch.manual_seed(0)
    norm = NORMS[kind](SIZE)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    baseline = read_by(norm, *(nn.Linear(SIZE, 8, bias) for _ in range(2)))
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


NORM, SIZES = "norm: expected a LayerNorm or RMSNorm", f"layers: expected linear layers of {SIZE} inputs, got "
WRONG = {
    "another norm": (Other(SIZE), nn.Linear(SIZE, 2), rf"{NORM} .*, got Other"),
    "no weight": (nn.LayerNorm(SIZE, elementwise_affine=False), nn.Linear(SIZE, 2), NORM),
    "another size": (nn.LayerNorm(SIZE), nn.Linear(SIZE + 1, 2), f"{SIZES}Linear"),
    "no linear layer": (nn.LayerNorm(SIZE), nn.Bilinear(SIZE, 2, 2), f"{SIZES}Bili"),
}


@pytest.mark.parametrize(("norm", "layer", "message"), WRONG.values(), ids=WRONG)
def test_wrong_use(norm: nn.Module, layer: nn.Module, message: str) -> None:
    good = nn.Linear(SIZE, 2)
    state = copy.deepcopy(good.state_dict())
    with pytest.raises(UsageError, match=message):
        merge_norm(norm, [good, layer])  # type: ignore[list-item]
    torch.testing.assert_close(good.state_dict(), state, rtol=0, atol=0)
