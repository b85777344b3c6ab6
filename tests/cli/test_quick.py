"""Typical mistakes are answered in one line, before what takes seconds to import."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.shell_completion import ShellComplete

from fitact.cli import cli, names, options
from fitact.fitter import syntax
from fitact.fitter.expr import CONSTANTS, FUNCTIONS
from fitact.runtime.measure import DEVICES, hugging_face
from tests.conftest import Command
from tests.support.commands import FITS, put, record
from tests.support.processes import python

SLOW = ("torch", "transformers", "timm", "sympy", "scipy", "numpy", "matplotlib", "jinja2")
# A command line, and a part of its one line of error.
MISTAKES = """
fit --nonsense -> No such option '--nonsense'
fit --fn gelluu --bits 3 -> unknown activation 'gelluu'
fit --fn gelu --bits 3 --method fewbits -> 'fewbits' is not one of
fit --fn gelu -> --bits is required
fit --fn swiglu --bits 3 -> takes no gates
fit --fn 'x*sigmoid(2*x)' --bits 3 -> --name is required for an expression
fit --fn 'x*sigmoid(2*x' --bits 3 --name own -> not a formula
fit --fn 'x*sigmod(2*x)' --bits 3 --name own -> column 3: unknown name 'sigmod'; did you mean sigmoid?
fit --fn 'silu(g)*x' --method recompute --name own -> unknown name 'x'; known are g, u
fit --fn 'x*sigmoid(c*x)' --learn b=1 --method recompute --name own -> unknown name 'c'; known are x, b
fit --fn gelu --bits 3 --weight nromal --name own -> weight 'nromal', column 1: unknown name
fit --fn tanh --method output --derivative '1 - x**2' --name own -> unknown name 'x'; known are y
fit --fn gelu --bits 3 --domain 2 1 --name own -> expected two numbers A < B
fit --fn gelu --bits 3 --weight none.json --name own -> none.json: cannot be read
fit --fn gelu --bits 3 --weight fit.json --name own -> this is not a file of fitact calibrate
fit --fn leaky_relu --param slope=0.2 --bits 1 --name own -> unknown parameter 'slope'
codegen -> generated/fits: no fits there; make one first
codegen --check -> generated/fits: no fits there
plot -> generated/fits: no fits there
codegen none.json -> none.json: cannot be read
codegen my_models.py -> my_models.py: not JSON
codegen fit.json --standalone --hub -> expected only one
plot -o a.txt -> ends in .png, .svg or .pdf
show gelluu -> unknown activation 'gelluu'
show 'x*sigmod(x)' -> unknown name 'sigmod'
memory -> memory takes one model
memory --hf llama --timm resnet18 -> memory takes one model
memory --hf lama -> no model type 'lama'; near it are llama
memory --hf meta-llama/Llama-3.1-8B -> that of a checkpoint is in its config.json
memory --hf bert-base-uncased -> that of a checkpoint is in its config.json
memory --hf llama --lora '' -> --lora: expected names of linear layers
memory my_models.py:tiny -> expected MODULE:CALLABLE
memory --hf llama --set num_layers=2 -> its configuration has no 'num_layers'; near it are num_hidden_layers
memory --hf llama --set 'hidden_size=[[[[' -> expected a word or a literal
memory --hf llama --lora q_porj,v_proj -> 'q_porj': llama has no linear layer of that name; near it are q_proj
memory --hf clip_text_model --lora q_porj -> 'q_porj': clip_text_model has no linear layer of that name
memory --timm resnet999 -> no model 'resnet999'; near it are resnet50
memory --timm resnet18.a9_in1k -> no weights 'a9_in1k'; near it are a3_in1k
memory my_models:tiny --set a=1 -> --set is for --hf
memory my_models:tinny -> it has no callable 'tinny'; near it are tiny
memory no_models:tiny -> No module named 'no_models'
calibrate my_models:tiny -o weights.txt -> ends in .json
"""
CASES = [line.split(" -> ") for line in MISTAKES.strip().splitlines()]
# Each line on its own in one process: the first that imports something slow is the one that fails.
EACH = f"""
import contextlib, io, json, shlex, sys
from fitact.cli import main
for line in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()) as out:
        status = main(shlex.split(line))
    slow = [name for name in {SLOW} if sys.modules.pop(name, None)]
    print(json.dumps([status, out.getvalue(), err.getvalue(), slow]))
"""


def answered(lines: Sequence[str], folder: Path) -> list[list[Any]]:
    """Return for each command line its status, what it prints, and what slow packages it imports."""
    printed = python(EACH, json.dumps(lines), folder=folder, PYTHONDONTWRITEBYTECODE="1")
    return [*map(json.loads, printed.splitlines())]


def test_answered_at_once(tmp_path: Path) -> None:
    put(tmp_path / "my_models.py", "def tiny():\n    import torch\n    return torch.nn.GELU(), torch.ones(2)\n")
    put(tmp_path / "fit.json", record("fit"))
    lines, parts = zip(*CASES, strict=True)
    for line, part, (status, out, err, slow) in zip(lines, parts, answered(lines, tmp_path), strict=True):
        assert (status, out, err.count("\n"), slow) == (2, "", 1, []), line
        assert err.startswith("fitact: ") and part in err, line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fit.json", "my_models.py"]


def test_model_types() -> None:
    """What is read from the source of transformers is what it says itself."""
    transformers = pytest.importorskip("transformers")
    actual = names.model_types().keys()
    assert set(transformers.CONFIG_MAPPING.keys()) <= actual
    for kind in ("llama", "gpt2", "gpt-sw3", "vit"):  # no size of theirs is refused, and no layer
        names.check_model(kind, transformers.AutoConfig.for_model(kind).to_dict())
        with torch.device("meta"):
            model, _ = hugging_face(kind).build(1, 8)
        layers = [name for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")]
        assert layers
        names.check_layers(kind, layers)


def test_timm_models() -> None:
    timm = pytest.importorskip("timm")
    assert set(names.timm_models()) == {name.partition(".")[0] for name in timm.list_models()}
    assert timm.is_model("tv_resnet34")  # a name of once
    for name in ("tv_resnet34", "resnet18", *timm.list_pretrained("resnet18.*"), *timm.list_pretrained("qwen3_*")):
        names.check_timm(name)


def test_names_of_formulas_and_of_devices() -> None:
    (device,) = (option.type for option in cli.commands["plan"].params if option.name == "device")
    assert [*CONSTANTS, "where", *FUNCTIONS] == syntax.NAMES and [*device.choices] == [*DEVICES]


@pytest.mark.parametrize("text", ["from torch import *", "globals()['tiny'] = print", "def tiny(): pass"])
def test_a_name_that_may_be_there(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    put("may_models.py", text)
    names.check_place("may_models:tiny")
    assert "may_models" not in sys.modules


def test_nothing_to_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    """It says so without SymPy; what is generated after changes is in test_cli.py."""
    put(FITS / "own.json", record("own"))
    nothing = (0, "generated: nothing to do, 1 modules are up to date\n", "")
    assert command("codegen")[1] == "wrote generated/__init__.py\nwrote generated/own.py\n"
    assert answered(["codegen"], tmp_path) == [[*nothing, []]]
    monkeypatch.setattr("fitact.cli.codegen.version", lambda name: "another")
    assert command("codegen") == nothing  # generated again, to the same text


COMPLETED = {
    "fit --fn gelu_": "gelu_tanh",
    "fit --method rel": "relumix",
    "show swi": "swiglu swiglu_clamped swish_beta",
    "memory --hf llama4": "llama4 llama4_text llama4_vision_model",
    "memory --timm resnet3": "resnet32ts resnet33ts resnet34 resnet34d",
    "plan --device h": "h100 h200",
}


@pytest.mark.parametrize("line", COMPLETED)
def test_completed_by_the_shell(line: str) -> None:
    *words, word = line.split()
    offered = ShellComplete(cli, {}, "fitact", "_FITACT_COMPLETE").get_completions(words, word)
    assert sorted(each.value for each in offered) == COMPLETED[line].split()


def test_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal, a line each time; nothing before the first, and nothing when the work has ended."""
    with options.progress(2, "fitting"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(options, "EVERY", 0.02)

    def is_printed(text: str) -> bool:
        return any(text in capsys.readouterr().err or time.sleep(0.01) for _ in range(2000))

    with options.progress(2, "fitting") as advance:
        assert is_printed("fitact: fitting, 0 s\n")
        advance(1.5)
        assert is_printed("fitact: fitting, 75 %, ")
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
