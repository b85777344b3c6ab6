"""The examples of the documentation run as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
RUN = """
import runpy, sys
from fitact.runtime.models.prepare import imported
imported("peft")  # where torchvision cannot be loaded, transformers and peft can all the same
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def finetune(folder: Path, *arguments: str) -> tuple[str, float, float]:
    """Run the fine-tuning for some steps; return what it prints, the bytes kept in MiB and the loss."""
    command = [sys.executable, "-c", RUN, str(EXAMPLES / "finetune_lora.py"), "--steps", "12", *arguments]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    kept = re.search(r"kept for backward: ([\d.]+) MiB", done.stdout)
    loss = re.search(r"loss (\S+) over 12 steps", done.stdout)
    assert kept is not None and loss is not None
    return done.stdout, float(kept[1]), float(loss[1])


@pytest.mark.full
@pytest.mark.long
def test_finetune_lora(tmp_path: Path) -> None:
    """Converted it keeps at least 40 % less, learns the same to the last bit, and leaves nothing behind."""
    plain, kept, loss = finetune(tmp_path, "--plain")
    assert "site" not in plain
    table, less, other = finetune(tmp_path)
    assert re.search(r"\.mlp +×4  LlamaMLP +rebuilt", table)
    assert less < 0.6 * kept
    assert other == loss
    assert list(tmp_path.iterdir()) == []
