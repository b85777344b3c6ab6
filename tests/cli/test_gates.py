"""Gates on the command line: fitted, shown, drawn, generated; and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fitact
from fitact.calibration import calibrate
from fitact.fitter.analysis.gate import Gate
from fitact.fitter.methods import coded
from fitact.fitter.methods.table import again
from fitact.fitter.numerics.weight import Weight
from fitact.fitter.records.reading import read
from tests.support import gates
from tests.support.generated import load


def test_from_fit_to_module(command):
    status, out, _ = command("fit --fn swiglu --method rebuild")
    assert status == 0 and "silu(g)*u" in out
    status, out, _ = command("fit --fn swiglu --fn reglu --method coded --bits 3 --bits-u 6")
    assert status == 0
    names = ["reglu_coded3_6", "swiglu_coded3_6", "swiglu_rebuild"]
    paths = sorted(Path("generated/fits").iterdir())
    assert [path.stem for path in paths] == names
    for path in paths:
        fit = read(path)
        assert again(fit).to_json() == fit.to_json() == path.read_text()
    status, out, _ = command("show", *map(str, paths))
    assert status == 0 and all(name in out for name in names)
    status, _, _ = command("plot generated/fits/reglu_coded3_6.json generated/fits/swiglu_rebuild.json -o a.svg")
    assert status == 0 and "reglu_coded3_6" in Path("a.svg").read_text()
    status, _, _ = command("codegen")
    assert status == 0
    assert (
        "def swiglu_coded3_6(g: _torch.Tensor, u: _torch.Tensor)"
        in Path("generated/swiglu_coded3_6.py").read_text()
    )


def test_the_parts_are_those_of_the_factors():
    of = Gate.of("gelu(g)*tanh(u)")
    fit = coded.fit_gate(of, 4, "own", bits_u=6)
    assert fit.code_g == coded.fit(of.a, 4, "own")
    assert fit.code_u == coded.fit(of.b, 6, "own")
    assert json.loads(fit.to_json())["code_g"]["activation"]["name"] == "gelu"


def test_weights_of_both_factors(command):
    """From a calibration's site of f, and that of u beside it; or each given."""
    x = torch.randn(2000, 1)
    found = calibrate(Gated(), [x])
    Path("own.json").write_text(found.to_json())
    of_g, of_u = found.weight("act"), found.weight("act:u")
    assert of_g != of_u
    line = "fit --fn swiglu --method coded --bits 4 --weight own.json#act --name own"
    assert command(f"{line} --bits-u 6 -o both.json")[0] == 0
    both = read(Path("both.json"))
    assert (both.code_g.weight, both.code_u.weight) == (of_g, of_u)
    assert both.code_g == coded.fit(both.activation.a, 4, "own", weight=of_g)
    assert both.code_u == coded.fit(both.activation.b, 6, "own", weight=of_u)
    assert again(both).to_json() == both.to_json()
    (site,) = fitact.convert(Gated(), "coded", replace={torch.nn.SiLU: load(both).Own}, example_inputs=x)
    assert (site.name, site.after) == ("", "own")
    assert command(f"{line} -o g.json")[0] == 0
    assert read(Path("g.json")).code_u is None
    assert command(f'{line} --bits-u 6 --weight-u "normal(0, 2)" -o given.json')[0] == 0
    assert read(Path("given.json")).code_u.weight == Weight("normal(0, 2)")
    status, _, error = command(f"{line.replace('#act', '#act:u')} --bits-u 6")
    assert status == 2 and "own.json: it has no site 'act:u:u'" in error and "--weight-u" in error


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.act, self.down = torch.nn.SiLU(), torch.nn.Linear(16, 1)
        self.gate, self.up = torch.nn.Linear(1, 16), torch.nn.Linear(1, 16)

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


def test_show_tells_of_both_factors(command):
    status, out, _ = command("show", "silu(g)*(u + 1)")
    assert status == 0
    assert "a(g), with x for g:" in out and "b(u), with x for u:" in out
    assert "x*sigmoid(x)" in out and "x + 1" in out
    assert command("show")[1].count("silu(g)*u") == 1


REFUSED = [
    (
        "--fn swiglu --bits 3",
        "--method fewbit takes no gates, got 'swiglu': the methods of gates are rebuild and coded",
    ),
    ("--fn silu --method rebuild", "--method rebuild is for gates such as swiglu or silu(g)*u, got 'silu'"),
    ("--fn swiglu --fn silu --method coded --bits 8", "expected functions of one kind, got 'swiglu' and 'silu'"),
    ("--fn swiglu --method coded", "--bits is required for --method coded: 3 to 8"),
    ("--fn swiglu --method coded --bits 8 --bits-u 7", "--bits-u: expected 6, 8, or 16 to keep u as it is, got 7"),
    ("--fn swiglu --method coded --bits 9", "bits: expected 3, 4, 5, 6, 7 or 8, got 9"),
    (
        "--fn swiglu --method rebuild --weight normal",
        "--method rebuild has no --weight: nothing is fitted",
    ),
    ("--fn swiglu --method coded --bits 8 --weight normal", "--name is required for --weight"),
    (
        "--fn swiglu --method coded --bits 8 --weight-u normal --name a",
        "--weight-u is for a code of u: give --bits-u 6 or 8 with it",
    ),
    ("--fn silu --method coded --bits 8 --weight-u normal", "--method coded has no --weight-u"),
    ("--fn silu --method relumix --bits 2 --weight own.json", "--method relumix has no --weight"),
    ("--fn silu --method inverted --weight own.json", "--method inverted has no --weight"),
    ("--fn tanh --method exact --weight own.json", "--method exact has no --weight"),
    ("--fn silu --method coded --bits 8 --bits-u 8", "--method coded has no --bits-u"),
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
from swiglu_coded3_6 import swiglu_coded3_6
g, u = (torch.randn(5, 70, requires_grad=True) for _ in range(2))
h = swiglu_coded3_6(g, u)
assert h.equal(torch.nn.functional.silu(g) * u)
h.sum().backward()
assert g.grad is not None and u.grad is not None
"""


def test_a_standalone_folder_of_a_gate_runs_and_a_kernel_is_refused(command):
    text = gates.coded("swiglu", "swiglu_coded3_6", 3, 6).to_json()
    Path("a.json").write_text(text)
    status, _, error = command("codegen a.json --hub --out out")
    assert status == 2 and "'swiglu_coded3_6' is a gate: the Hub's layers take one input" in error
    assert not Path("out").exists()
    assert command("codegen a.json --standalone --out out")[0] == 0
    subprocess.run([sys.executable, "-W", "error", "-c", STANDALONE], check=True, timeout=300)
