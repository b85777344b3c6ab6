"""The code of the guides and the examples runs as it stands; a way from a formula to a model that trains."""

import ast
import json
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fitact.runtime.choose import Conversion
from fitact.runtime.measure import imported
from tests.conftest import ROOT, Command
from tests.support.processes import python

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


@pytest.mark.full
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_finetune_lora(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converted it saves at least 40 % less, learns the same to the last bit, and leaves nothing behind."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    printed = []
    for arguments in (["--plain"], []):
        monkeypatch.setattr(sys, "argv", ["finetune_lora.py", "--steps", "4", *arguments])
        runpy.run_path(str(ROOT / "docs/examples/finetune_lora.py"), run_name="__main__")
        printed.append(capsys.readouterr().out)
    patterns = r"saved for backward: ([\d.]+) MiB", r"loss (\S+) over 4 steps"
    (saved, loss), (less, other) = ([float(re.findall(each, text)[0]) for each in patterns] for text in printed)
    plain, table = printed
    assert "runs in saving" not in plain
    assert 'runs in saving("exact")' in table and "the gradient equals the baseline's, bit for bit" in table
    assert less < 0.6 * saved and other == loss and not [*tmp_path.iterdir()]


NOBODY = "where(x > 0, p*x + log1p(q**2*x), sin(p*x)/(1 + q**2))"
COMMANDS = {
    "fit --fn gelu --bits 3": 0,
    "fit --fn 'x*tanh(softplus(x)) + 0.1*sin_like' --bits 2 --name refused": 2,
    "fit --fn 'x*exp(-x**2/8)/(1 + abs(x))' --bits 2 --name ripple": 0,
    f"fit --fn '{NOBODY}' --learn p=0.7 --learn q:channel=1.1 --method recompute --name nobody": 0,
    "codegen": 0,
    "plot": 0,
}

TRAIN = """
import sys
import torch
from torch import nn
from generated.gelu_fewbit3 import _KEY, GeluFewbit3, gelu_fewbit3
from generated.nobody import Nobody
from generated.ripple import Ripple
import fitact.generated.gelu_fewbit3 as shipped

assert sys.modules["generated.gelu_fewbit3"].__file__.startswith(sys.argv[1])
assert shipped._KEY == _KEY and shipped.GeluFewbit3 is not GeluFewbit3

torch.manual_seed(0)
x = torch.linspace(-3, 3, 200)[:, None]
acts = GeluFewbit3(), shipped.GeluFewbit3(), Ripple(), Nobody(32)
model = nn.Sequential(nn.Linear(1, 32), *(part for act in acts for part in (act, nn.Linear(32, 32))))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
losses = []
for _ in range(150):
    loss = (model(x) - x.sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 20, losses[::50]
p, q = acts[-1].p.item(), acts[-1].q.mean().item()
assert abs(p - 0.7) > 1e-4 and abs(q - 1.1) > 1e-4, "learned parameters are learned"

leaf = x.clone().requires_grad_()
gradients = [torch.autograd.grad(each(leaf).sum(), leaf)[0] for each in (gelu_fewbit3, shipped.gelu_fewbit3)]
assert torch.equal(*gradients)
"""


def test_from_an_empty_folder_to_a_trained_model(tmp_path: Path, command: Command) -> None:
    assert {line: command(line)[0] for line in COMMANDS} == COMMANDS
    modules = {path.stem for path in (tmp_path / "generated").glob("*.py")}
    assert modules == {"__init__", "gelu_fewbit3", "nobody", "ripple"} and (tmp_path / "fits.png").exists()
    python(TRAIN, tmp_path, folder=tmp_path)


@pytest.mark.full
@pytest.mark.long
def test_demo(tmp_path: Path) -> None:
    (tmp_path / "generated").mkdir()
    shutil.copy(ROOT / "generated" / "gelu_fewbit3.py", tmp_path / "generated")  # what the first commands make
    sizes = "demo.BATCH, demo.VALIDATION_BATCHES, demo.CHARACTERS = 4, 2, 10**5"
    short = f"from benchmarks import demo; {sizes}; demo.main()"
    assert "gelu_fewbit3" in python(
        short, "--steps", 20, folder=tmp_path, PYTHONPATH=os.pathsep.join(sys.path), TRITON_INTERPRET="0"
    )
    exact, fewbit = json.loads((tmp_path / "results.json").read_text())
    assert exact["activation_bytes"] == 4 * 4 * 128 * 512 * 4
    assert fewbit["activation_bytes"] == 4 * 4 * 128 * 512 * 3 // 8
    assert exact["saved_bytes"] - fewbit["saved_bytes"] == exact["activation_bytes"] - fewbit["activation_bytes"]
    assert exact["losses"][0] == fewbit["losses"][0]
    assert all(result["losses"][-1] < 0.8 * result["losses"][0] for result in (exact, fewbit))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
