"""A user's way, in an empty folder, from a formula to a model that trains; and the demo."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Command

NOBODY = "where(x > 0, p*x + log1p(q**2*x), sin(p*x)/(1 + q**2))"
COMMANDS = {
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


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_from_an_empty_folder_to_a_trained_model(tmp_path: Path, command: Command) -> None:
    """The first command and the training run in processes of their own; test_cli.py has the bytes of files."""
    run(tmp_path, "-m", "fitact", "fit", "--fn", "gelu", "--bits", "3")
    assert {line: command(line)[0] for line in COMMANDS} == COMMANDS
    modules = {path.stem for path in (tmp_path / "generated").glob("*.py")}
    assert modules == {"__init__", "gelu_fewbit3", "nobody", "ripple"} and (tmp_path / "fits.png").exists()
    (tmp_path / "train.py").write_text(TRAIN)
    run(tmp_path, "train.py", str(tmp_path))


@pytest.mark.full
@pytest.mark.long
def test_demo(tmp_path: Path) -> None:
    (tmp_path / "generated").mkdir()
    shutil.copy(ROOT / "generated" / "gelu_fewbit3.py", tmp_path / "generated")  # what the first commands make
    assert "gelu_fewbit3" in run(tmp_path, str(ROOT / "benchmarks" / "demo.py"), "--steps", "24")
    exact, fewbit = json.loads((tmp_path / "results.json").read_text())
    assert exact["activation_bytes"] == 4 * 16 * 128 * 512 * 4
    assert fewbit["activation_bytes"] == 4 * 16 * 128 * 512 * 3 // 8
    assert exact["saved_bytes"] - fewbit["saved_bytes"] == exact["activation_bytes"] - fewbit["activation_bytes"]
    assert exact["losses"][0] == fewbit["losses"][0]
    assert all(result["losses"][-1] < 0.8 * result["losses"][0] for result in (exact, fewbit))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
