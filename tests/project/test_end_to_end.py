"""A user's way, in an empty folder, from a formula to a model that trains; and the demo."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Command

NOBODY = "where(x > 0, p*x + log1p(q**2*x), sin(p*x)/(1 + q**2))"
LEARNED = "--learn p=0.7 --learn q:channel=1.1 --method recompute --name nobody"
COMMANDS = [
    ["fit", "--fn", "gelu", "--bits", "3"],
    ["fit", "--fn", "x*tanh(softplus(x)) + 0.1*sin_like", "--bits", "2", "--name", "refused"],
    ["fit", "--fn", "x*exp(-x**2/8)/(1 + abs(x))", "--bits", "2", "--name", "ripple"],
    ["fit", "--fn", NOBODY, *LEARNED.split()],
    ["codegen"],
    ["plot"],
]

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

gradients = []
for function in (gelu_fewbit3, shipped.gelu_fewbit3):
    leaf = x.clone().requires_grad_()
    function(leaf).sum().backward()
    gradients.append(leaf.grad)
assert torch.equal(*gradients)
"""


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def test_from_an_empty_folder_to_a_trained_model(tmp_path: Path, command: Command) -> None:
    """The first command and the training run in processes of their own."""
    first, *others = COMMANDS
    assert run(["-m", "fitact", *first], tmp_path).returncode == 0
    assert [command("", *arguments)[0] for arguments in others] == [2, 0, 0, 0, 0]
    modules = {path.stem for path in (tmp_path / "generated").glob("*.py")}
    assert modules == {"__init__", "gelu_fewbit3", "nobody", "ripple"}
    for file in ("fits/gelu_fewbit3.json", "gelu_fewbit3.py"):  # the same bytes, where they ship
        made = (tmp_path / "generated" / file).read_bytes()
        assert made == (ROOT / "generated" / file).read_bytes()
    assert (tmp_path / "fits.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "train.py").write_text(TRAIN)
    done = run(["train.py", str(tmp_path)], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
@pytest.mark.long
def test_demo(tmp_path: Path) -> None:
    (tmp_path / "generated").mkdir()
    shutil.copy(ROOT / "generated" / "gelu_fewbit3.py", tmp_path / "generated")  # what the first commands make
    done = run([str(ROOT / "benchmarks" / "demo.py"), "--steps", "24"], tmp_path)
    assert done.returncode == 0, done.stderr
    exact, fewbit = json.loads((tmp_path / "results.json").read_text())
    assert exact["activation_bytes"] == 4 * 16 * 128 * 512 * 4
    assert fewbit["activation_bytes"] == 4 * 16 * 128 * 512 * 3 // 8
    assert exact["saved_bytes"] - fewbit["saved_bytes"] == exact["activation_bytes"] - fewbit["activation_bytes"]
    assert exact["losses"][0] == fewbit["losses"][0]
    for result in (exact, fewbit):
        assert result["losses"][-1] < 0.8 * result["losses"][0]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "gelu_fewbit3" in done.stdout
