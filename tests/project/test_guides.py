"""The code of the guides and the examples runs as it stands."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fitact.runtime.choose import Conversion
from fitact.runtime.measure import imported
from tests.conftest import ROOT

SIZES = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}


def blocks(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text("utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


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
    tokens = [torch.randint(64, (16,), generator=torch.Generator().manual_seed(number)) for number in range(8)]
    data = [{"input_ids": each, "labels": each} for each in tokens]
    names: dict[str, Any] = {"checkpoint": str(tmp_path / "checkpoint"), "folder": str(tmp_path / "results")}
    names |= {"data": data, "batch": dict.fromkeys(("input_ids", "labels"), torch.stack(tokens))}
    for block in blocks("transformers.md"):
        exec(compile(block, "transformers.md", "exec"), names)
    report, printed = names["report"], capsys.readouterr().out
    assert isinstance(report, Conversion) and report.saved_after < 0.5 * report.saved_before
    bits = "the gradient equals the baseline's, bit for bit"
    for said in ('PeftModel, runs in saving("exact")', bits, "would save", "the gradient is off by"):
        assert said in printed
    adapters = [name for name, _ in names["loaded"].named_parameters() if "lora_B" in name]
    assert adapters and any(bool(names["loaded"].get_parameter(name).any()) for name in adapters)  # it has learned
    assert (tmp_path / "results" / "merged" / "config.json").exists()
    assert names["config"].hidden_act == "gelu_fewbit3"


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_python_parses(page: str) -> None:
    for block in blocks(page):
        if page != "api.md":  # signatures
            ast.parse(block)


def finetune(folder: Path, *arguments: str) -> tuple[str, float, float]:
    """Run some steps as a reader does, with the packages of the environment; return the print, MiB and loss."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(ROOT / "docs/examples/finetune_lora.py"), "--steps", "4", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    patterns = r"saved for backward: ([\d.]+) MiB", r"loss (\S+) over 4 steps"
    saved, loss = (float(re.findall(pattern, done.stdout)[0]) for pattern in patterns)
    return done.stdout, saved, loss


@pytest.mark.full
@pytest.mark.long
def test_finetune_lora(tmp_path: Path) -> None:
    """Converted it saves at least 40 % less, learns the same to the last bit, and leaves nothing behind."""
    plain, saved, loss = finetune(tmp_path, "--plain")
    assert "runs in saving" not in plain
    table, less, other = finetune(tmp_path)
    assert 'runs in saving("exact")' in table and "the gradient equals the baseline's, bit for bit" in table
    assert less < 0.6 * saved and other == loss and not [*tmp_path.iterdir()]
