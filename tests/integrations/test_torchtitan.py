"""torchtitan's policy, on a model of torchtitan."""

from importlib import import_module
from typing import Any

import pytest
import torch

from fitact.runtime.measure import count_saved
from tests.support.refusals import refused
from tests.support.saving import differences

pytest.importorskip("torchtitan.distributed.activation_checkpoint", reason="torchtitan is not installed")
FitactAC: Any = import_module("fitact.integrations.torchtitan").FitactAC
pytestmark = pytest.mark.filterwarnings("ignore")


def trained(model: Any) -> tuple[Any, int]:
    """Return losses with parameters after three steps of AdamW, and the bytes that the first step saves."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, saved = [], []
    for step in range(3):
        tokens = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(step))
        with count_saved(model) as seen:
            logits = model(tokens)
        saved.append(seen.bytes)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return (losses, dict(model.named_parameters())), saved[0]


def test_policy() -> None:
    models = [small(), small()]
    models[1].load_state_dict(models[0].state_dict())
    FitactAC.Config(error="exact").build(dump_folder="").apply(models[1])
    (expected, before), (actual, after) = map(trained, models)
    assert not differences(expected, actual)
    assert after < 0.75 * before


def test_error() -> None:
    assert "expected exact, rounding, coarse" in refused(FitactAC.Config(error="none").build)


def small() -> Any:
    """Return torchtitan's LLaMA of two layers, with the attention of PyTorch: its others train on GPUs alone."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import _debugmodel

    config = _debugmodel("varlen")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_states()
    return model
