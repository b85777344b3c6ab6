"""transformers' Trainer with LoRA and dropout: one line more, the same losses to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fitact
from fitact.runtime.measure.prepare import imported
from fitact.runtime.measure.saved import gpu_kernels
from tests.support.models import batch_of, made
from tests.support.saving import HALF, cast, differences, kept_of

STEPS = 6


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {name: one[0] for name, one in batch_of("llama", seed=number).items()}


def trained(model: Any, folder: Path, autocast: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of all steps, and the adapters at the end."""
    transformers = imported("transformers")
    given: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
    }
    quiet: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    arguments = transformers.TrainingArguments(
        str(folder), use_cpu=True, bf16=autocast, learning_rate=1e-2, seed=3, **given, **quiet
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Texts())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: one.detach() for name, one in model.named_parameters() if one.requires_grad}


@pytest.mark.full
@pytest.mark.parametrize("autocast", [False, True])
def test_lora_with_dropout(autocast: bool, tmp_path: Path) -> None:
    dtype = torch.float32 if autocast else HALF
    baseline, model = made("llama lora, dropout", dtype), made("llama lora, dropout", dtype)
    fitact.convert(model)
    inputs = batch_of("llama", size=16)
    with cast(HALF if autocast else None), gpu_kernels():
        before, after = (kept_of(one, lambda one=one: one(**inputs)) for one in (baseline, model))
    assert after < 0.51 * before
    expected, found = (trained(one, tmp_path, autocast) for one in (baseline, model))
    assert len({*expected[0]}) == STEPS and not differences(expected, found)
