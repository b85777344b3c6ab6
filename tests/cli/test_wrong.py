"""Wrong command lines and numbers: each is refused in one line, before anything is done, and leaves no trace."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fitact
from fitact.fitter.analysis import Activation
from fitact.fitter.catalog import METHODS
from fitact.fitter.methods import fewbit, inverted, relumix
from fitact.runtime.choose import measure
from fitact.runtime.measure import Training, hugging_face, timm_model
from fitact.runtime.measure.reference import gelu_mlp
from tests.conftest import ROOT, Command
from tests.support.commands import put, record, tree
from tests.support.refusals import refused, within

MODELS = """
import torch
from torch import nn

def tiny(batch=1, seq=3):
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.SiLU()), torch.randn(batch, seq, 8)

def fails(error):
    raise error

leaves = lambda: fails(SystemExit(3))
failing = lambda: fails(OSError("no such file: weights.bin"))
wrong = lambda: 3
nothing = lambda: (tiny()[0], None)
odd = lambda: (tiny()[0], torch.ones(5))

class Calls(nn.Linear):
    def forward(self, x):
        return self.call(super().forward(x))

def calls(call, batch):
    model = Calls(8, 8)
    model.call = call
    return model, torch.randn(batch, 8)

no_gradient = lambda _: fails(NotImplementedError("no gradient"))
undifferentiated = lambda batch=1: calls(lambda x: x.register_hook(no_gradient) and x, batch)
reading = lambda batch=1: calls(lambda x: x if bool(x.sum() > 0) else -x, batch)
"""

GATE = (ROOT / "generated" / "fits" / "swiglu_recompute.json").read_text("utf-8")
GATE = GATE.replace('"silu(g)*u"', '"sigmoid(g)*u"').replace('"name": "swiglu"', '"name": "glu"')

# A command line, and a part of its one line of error; status 2.
REFUSED = """
fit -> --fn
fit --fn "__import__('os')" --bits 3 --name a -> unexpected character
fit --fn tanh --bits 1 --bits 9 -> is not in the range 0<=x<=4
fit --fn tanh --method inverted --name a --tol nan -> expected a finite number
fit --fn gelu --bits 1 --name a --weight weights.json -> it has 2 sites, choose one: '0', '1'
fit --fn gelu --bits 1 --name a --weight none#1 -> weight 'none#1'
fit --fn tanh --bits 1 --weight normal -> --name is required for --weight
fit --fn tanh --bits 1 --domain -5 5 -> --name is required for --domain
fit --fn leaky_relu --param negative_slope=0.2 --bits 1 -> --name is required for --param
fit --fn tanh --bits 1 --bits 2 --name a -> for a single fit
fit --fn tanh --bits 1 --name ../a -> --name: expected a Python identifier
fit --fn leaky_relu --param negative_slope=x --bits 1 --name a -> expected NAME=NUMBER
fit --fn tanh --bits 1 -o folder -> folder
fit --fn tanh --bits 2 -o good.json -> good.json: another fit
fit --fn tanh --bits 2 -o file.json -> --force
fit --fn tanh --bits 1 -o '' -> expected the name of a file
fit --fn tanh --bits 1 --bits 2 -> generated/fits/tanh_fewbit2.json: another fit
fit --fn silu --method recompute -> --method recompute is for gates such as swiglu or silu(g)*u, got 'silu'
fit --fn swiglu --fn silu --method recompute -> expected functions of one kind, got 'swiglu' and 'silu'
fit --fn swiglu --method recompute --param a=1 -> a gate has no --param
fit --fn gelu --method inverted --tol 0 --name a -> tol: expected 1e-6 to 0.01, got 0.0
fit --fn gelu --method inverted --tol 1e-3 -> --name is required for --tol
fit --fn gelu --method inverted --family published --bits 1 -> --family published takes no --name
fit --fn mish --method inverted --family published -> --family published: expected gelu or silu, got 'mish'
fit --fn tanh --method relumix --bits 2 --domain -5 5 --weight normal --name a -> has no --domain or --weight
fit --fn tanh --method relumix --bits 2 --objective derivative -> --name is required for
fit --fn 'asinh(x)' --method output --derivative '1/cosh(y)' -> --name is required for --derivative
fit --fn a*x --learn a=1 --name own --bits 3 -> that of formulas with learned parameters is recompute
LEARN x*tanh(x) --learn '=1' -> a name is a Python identifier of at most 40 characters of ASCII
LEARN x*tanh(x) --learn where=1 -> where is a function of formulas; choose another name
LEARN x*tanh(x) --learn pi=1 -> pi is a constant of formulas; choose another name
LEARN x*tanh(x) --learn x=1 -> x is an argument of formulas; choose another name
LEARN x*tanh(x) --learn lambda=1 -> the name is Python's own; choose another name
LEARN x*tanh(x) --learn forward=1 -> generated modules use that name themselves
LEARN x*tanh(x) --learn _tl=1 -> names that begin with an underscore belong to generated modules
LEARN x*tanh(x) --learn zz=1 -> the learned parameter zz is used nowhere
LEARN a*x --learn a -> expected NAME=START or NAME:channel=START
LEARN where(x>a,x,0.1*x) --learn a=0 -> the derivative in a is 0 at every x, so a would never change
LEARN log(a)*x --learn a=0 -> with its start a=0 the formula is inf at x = -10
LEARN x*sqrt(a) --learn a=0 -> the derivative in a of the formula is nan at x = -10
LEARN silu(g)*u --learn g=1 -> expected an expression in x, got the gate
LEARN 'elu(x, a)' --learn a=1 -> alpha of elu is a number, without x or a
codegen good.json broken.json -> broken.json: bits: expected
codegen good.json --out '' -> --out': expected the name of a folder
codegen good.json twin.json -> two fits are called 'good'
codegen gate.json --hub -> 'swiglu_recompute' is a gate that no MLP of transformers has
plot good.json -o folder.png -> expected the name of a file, and 'folder.png' is a folder
memory my_models:tiny --budget 1.5 -> --budget
memory my_models:tiny --no-compiler -o a.png --plot a.png -> expected two files
memory my_models:tiny -o a.png -> a.png: -o writes JSON, draw with --plot
memory my_models:tiny --json a.json -> --json is now -o
memory --hf gpt2 --set n_layer=1 --set n_layer=2 -> --set n_layer: given twice
memory my_models:leaves -> my_models:leaves: it failed: SystemExit: 3
memory my_models:failing -> my_models:failing: it failed: OSError: no such file: weights.bin
memory my_models:wrong -> my_models:wrong: expected a model and its inputs, got 3
memory my_models:odd -> my_models:odd: its forward pass failed: RuntimeError
memory my_models:reading -> its forward pass failed: it reads a tensor's value (aten._local_scalar_dense.default)
plan my_models:reading --gib 1 -> and has none here: give a model and inputs with values to fitact.plan
memory my_models:undifferentiated -> its backward pass failed: NotImplementedError: no gradient
memory my_models:tiny --image 32 -> --image is for --hf and --timm
memory my_models:tiny --freeze 'z*' -> 'z*': no parameter has such a name; there are *.weight, *.bias
memory my_models:tiny --freeze '*' -> every parameter is frozen
memory my_models:tiny --lora x_proj -> 'x_proj': no linear layer has that name; there are 0
memory --hf bert --set hidden_size=100 -> bert: cannot be built: ValueError: The hidden size (100)
memory --hf bert --seq 513 -> bert: seq 513 does not fit, the model has positions for 512
memory --hf wav2vec2 -> fitact does not know its inputs, input_values
memory leaves:tiny -> leaves: cannot be imported: SystemExit: 4
calibrate my_models:nothing -> expected a model and its inputs, or a model and several batches
"""
# The same of jobs that fail; status 1.
FAILED = f"""
fit --fn tanh --bits 1 -o file/a.json -> file/a.json: cannot be written:
fit --fn tanh --bits 1 -o {"a" * 300}.json -> file name too long
codegen good.json --out file -> cannot be
codegen good.json --out linked -> linked/good.py: cannot be changed: is a link out of the folder
"""
# Every option that a method does not have.
OPTIONS = {"bits": "2", "domain": "-5 5", "weight": "normal", "seed": "3", "objective": "primitive"}
OPTIONS |= {"restarts": "3", "tol": "1e-3", "family": "rational", "derivative": "y"}
REFUSED += "\n".join(
    f"fit --fn {function} --method {method} --{option} {value} -> --method {method} has no --{option}: "
    for kind, function in (("activations", "tanh"), ("gates", "swiglu"), ("formulas", "dyt"))
    for method, own in METHODS[kind].items()
    for option, value in OPTIONS.items()
    if option not in own
)
CASES = [
    (status, *line.replace("LEARN", "fit --method recompute --name own --fn").split(" -> "))
    for status, lines in ((2, REFUSED), (1, FAILED))
    for line in lines.splitlines()
    if line
]
WEIGHTS = fitact.calibrate(nn.Sequential(nn.GELU(), nn.SiLU()), [torch.ones(4, 8)]).to_json()


@pytest.mark.parametrize(("status", "line", "part"), CASES, ids=[line[:70] for _, line, _ in CASES])
def test_wrong(status: int, line: str, part: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("my_models", "leaves"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    put("file")
    put("file.json", "not a fit")
    Path("folder").mkdir()
    Path("folder.png").mkdir()
    put("good.json", record("good"))
    put("twin.json", record("good", "sigmoid"))
    put("broken.json", record("broken", bits=7))
    put("generated/fits/tanh_fewbit2.json", record("tanh_fewbit2"))
    put("gate.json", GATE)
    put("linked/other.txt")
    Path("linked/good.py").symlink_to("../file")
    put("weights.json", WEIGHTS)
    put("my_models.py", MODELS)
    put("leaves.py", "import sys\nsys.exit(4)\n")
    before = tree()
    with within(240):
        actual, out, err = command(line)
    assert (actual, out) == (status, ""), err
    assert err.startswith("fitact: ") and err.endswith("\n") and err.rstrip("\n").isprintable()
    assert len(err) < 600
    assert part in err
    assert tree() == before


NO_BITS = (3.0, True, False, "3", [3], (3,), math.nan, np.float64(3), np.True_, 0.5, -1)
NO_BUDGETS = (math.nan, math.inf, -0.5, 1.5, True, "1", None)
NO_IMAGES = (0, -1, 1.5, 2.0, True, "2", math.nan, math.inf, [2])
NO_SIZES = (*NO_IMAGES, None)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU())


GELU = Activation.of("gelu")
CALLS: dict[str, tuple[Callable[[Any], object], tuple[object, ...]]] = {
    "fewbit.fit(bits)": (lambda bits: fewbit.fit(GELU, bits, "a"), (*NO_BITS, 1.0, None)),
    "relumix.fit(bits)": (lambda bits: relumix.fit(GELU, bits, "a"), (*NO_BITS, 1.0, None)),
    "inverted.fit(bits)": (lambda bits: inverted.fit(GELU, "a", bits), (*NO_BITS, 1.0)),
    "activation(bits)": (lambda bits: fitact.activation("gelu", bits=bits), NO_BITS),
    "convert(bits)": (lambda bits: fitact.convert(model(), "fewbit", bits=bits), NO_BITS),
    "measure(bits)": (lambda bits: measure(gelu_mlp, bits=(bits,)), (*NO_BITS, 0, 5, None)),
    "measure(all bits)": (lambda bits: measure(gelu_mlp, bits=bits), (3, "3", None)),
    "measure(batch)": (lambda batch: measure(gelu_mlp, batch=batch), NO_SIZES),
    "measure(seq)": (lambda seq: measure(gelu_mlp, seq=seq), NO_SIZES),
    "measure(budgets)": (lambda budget: measure(gelu_mlp, budgets=(budget,)), NO_BUDGETS),
    "measure(all budgets)": (lambda budgets: measure(gelu_mlp, budgets=budgets), (0.5, "1", None)),
    "Training(rank)": (lambda rank: Training(rank=rank), NO_SIZES),
    "hugging_face(image)": (lambda image: hugging_face("vit", image=image), NO_IMAGES),
    "timm_model(image)": (lambda image: timm_model("resnet18", image=image), NO_IMAGES),
}
NUMBERS = [(name, value) for name, (_, values) in CALLS.items() for value in values]


@pytest.mark.parametrize(("name", "value"), NUMBERS, ids=[f"{name} {value!r}" for name, value in NUMBERS])
def test_wrong_numbers(name: str, value: object) -> None:
    refused(CALLS[name][0], value)


@pytest.mark.parametrize("bits", [3, np.int64(3), np.uint8(3)])
def test_integers_of_any_type(bits: Any) -> None:
    name = type(fitact.activation("gelu", bits=3)).__name__
    assert type(fitact.activation("gelu", bits=bits)).__name__ == name
    converted = model()
    fitact.convert(converted, "fewbit", bits=bits)
    assert type(converted[1]).__name__ == name
