"""The code of the guides runs as it stands, on small models with random weights."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fitact.runtime.choose.records import Conversion
from fitact.runtime.measure.prepare import imported
from tests.conftest import ROOT

SIZES = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        tokens = torch.randint(64, (16,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}


def blocks(page: str) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs" / page).read_text("utf-8"), re.DOTALL | re.MULTILINE
    )


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block in turn; the reports that they print say what the page says of them."""
    transformers = imported("transformers")
    imported("peft")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # nothing is asked of the network
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=64, **SIZES)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "checkpoint")
    data = Texts()
    names: dict[str, Any] = {
        "checkpoint": str(tmp_path / "checkpoint"),
        "folder": str(tmp_path / "results"),
        "data": data,
        "batch": {name: torch.stack([data[i][name] for i in range(8)]) for name in ("input_ids", "labels")},
    }
    for block in blocks("transformers.md"):
        exec(compile(block, "transformers.md", "exec"), names)
    report = names["report"]
    assert isinstance(report, Conversion)
    assert report.saved_after is not None and report.saved_before is not None
    assert report.saved_after < 0.5 * report.saved_before
    printed = capsys.readouterr().out
    assert 'PeftModel, runs in saving("exact")' in printed
    assert "the gradient equals the baseline's, bit for bit" in printed
    assert "would save" in printed and "the gradient is off by" in printed
    adapters = [name for name, _ in names["loaded"].named_parameters() if "lora_B" in name]
    assert adapters and any(bool(names["loaded"].get_parameter(name).any()) for name in adapters)  # it has learned
    assert (tmp_path / "results" / "merged" / "config.json").exists()
    assert names["config"].hidden_act == "gelu_fewbit3"


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_python_parses(page: str) -> None:
    for block in blocks(page):
        if page != "api.md":  # signatures
            ast.parse(block)
