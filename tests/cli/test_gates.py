"""Gates on the command line: fitted, shown, drawn, generated; and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from fitact.fitter.methods.table import again
from fitact.fitter.records.reading import read
from tests.support import gates


def test_from_fit_to_module(command):
    status, out, _ = command("fit --fn swiglu --fn reglu --method rebuild")
    assert status == 0 and "silu(g)*u" in out
    names = ["reglu_rebuild", "swiglu_rebuild"]
    paths = sorted(Path("generated/fits").iterdir())
    assert [path.stem for path in paths] == names
    for path in paths:
        fit = read(path)
        assert again(fit).to_json() == fit.to_json() == path.read_text()
    status, out, _ = command("show", *map(str, paths))
    assert status == 0 and all(name in out for name in names)
    status, _, _ = command("plot", *map(str, paths), "-o", "a.svg")
    assert status == 0 and "reglu_rebuild" in Path("a.svg").read_text()
    status, _, _ = command("codegen")
    assert status == 0
    assert (
        "def reglu_rebuild(g: _torch.Tensor, u: _torch.Tensor)" in Path("generated/reglu_rebuild.py").read_text()
    )


def test_show_tells_of_both_factors(command):
    status, out, _ = command("show", "silu(g)*(u + 1)")
    assert status == 0
    assert "a(g), with x for g:" in out and "b(u), with x for u:" in out
    assert "x*sigmoid(x)" in out and "x + 1" in out
    assert command("show")[1].count("silu(g)*u") == 1


REFUSED = [
    ("--fn swiglu --bits 3", "--method fewbit takes no gates, got 'swiglu': that of gates is rebuild"),
    ("--fn silu --method rebuild", "--method rebuild is for gates such as swiglu or silu(g)*u, got 'silu'"),
    ("--fn swiglu --fn silu --method rebuild", "expected functions of one kind, got 'swiglu' and 'silu'"),
    ("--fn swiglu --method coded --bits 8", "Invalid value for '--method': 'coded' is not one of"),
    ("--fn swiglu --method rebuild --weight normal", "--method rebuild has no --weight: nothing is fitted"),
    ("--fn silu --method relumix --bits 2 --weight own.json", "--method relumix has no --weight"),
    ("--fn silu --method inverted --weight own.json", "--method inverted has no --weight"),
    ("--fn tanh --method exact --weight own.json", "--method exact has no --weight"),
    ("--fn swiglu --method rebuild --bits 8", "--method rebuild has no --bits: nothing is fitted"),
    ("--fn 'silu(g)*u' --method rebuild", "--name is required for an expression"),
    ("--fn swiglu --method rebuild --param a=1", "a gate has no --param"),
    ("--fn 'silu(g + u)*u' --method rebuild --name a", "which mixes g and u"),
    ("--fn 'silu(g)' --method rebuild --name a", "got no factor of u"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_refused(refuses, line, message):
    assert message in refuses(f"fit {line}")


STANDALONE = """
import sys
sys.modules["fitact"] = None  # cannot be imported
sys.path.insert(0, "out")
import torch
from swiglu_rebuild import swiglu_rebuild
g, u = (torch.randn(5, 70, requires_grad=True) for _ in range(2))
h = swiglu_rebuild(g, u)
assert h.equal(torch.nn.functional.silu(g) * u)
h.sum().backward()
assert g.grad is not None and u.grad is not None
"""


def test_a_standalone_folder_of_a_gate_runs_and_a_kernel_is_refused(command):
    text = gates.rebuilt("swiglu", "swiglu_rebuild").to_json()
    Path("a.json").write_text(text)
    status, _, error = command("codegen a.json --hub --out out")
    assert status == 2 and "'swiglu_rebuild' is a gate: the Hub's layers take one input" in error
    assert not Path("out").exists()
    assert command("codegen a.json --standalone --out out")[0] == 0
    subprocess.run([sys.executable, "-W", "error", "-c", STANDALONE], check=True, timeout=300)
