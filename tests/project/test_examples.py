"""The examples of the documentation run as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def run(name: str, folder: Path, *arguments: str) -> str:
    """Run an example as a reader does, with the environment's own packages; return what it prints."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def finetune(folder: Path, *arguments: str) -> tuple[str, float, float]:
    """Run the fine-tuning for some steps; return what it prints, the bytes saved in MiB and the loss."""
    printed = run("finetune_lora.py", folder, "--steps", "4", *arguments)
    saved = re.search(r"saved for backward: ([\d.]+) MiB", printed)
    loss = re.search(r"loss (\S+) over 4 steps", printed)
    assert saved is not None and loss is not None
    return printed, float(saved[1]), float(loss[1])


@pytest.mark.full
@pytest.mark.long
def test_finetune_lora(tmp_path: Path) -> None:
    """Converted it saves at least 40 % less, learns the same to the last bit, and leaves nothing behind."""
    plain, saved, loss = finetune(tmp_path, "--plain")
    assert "runs in saving" not in plain
    table, less, other = finetune(tmp_path)
    assert 'runs in saving("exact")' in table and "the gradient equals the baseline's, bit for bit" in table
    assert less < 0.6 * saved
    assert other == loss
    assert list(tmp_path.iterdir()) == []
