"""The command line: tables of (arguments, effect, error), each in an empty folder."""

import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from fitact.cli import cli, main
from fitact.fitter.expr.catalog import CATALOG
from fitact.fitter.records.fit import SCHEMA
from fitact.fitter.records.reading import read
from tests.conftest import Command
from tests.support.refusals import within

FITS = Path("generated/fits")


def record(name: str, activation: str = "tanh", **changes: object) -> str:
    """Return a small fit's JSON, made by hand."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "name": name,
            "method": "fewbit",
            "activation": {"name": activation, "expression": f"{activation}(x)"},
            "bits": 1,
            "domain": [-10.0, 10.0],
            "weight": "uniform",
            "even": False,
            "borders": [0.5],
            "levels": [0.25, 1.0],
            "error": {"max": 0.25, "objective": 0.1, "primitive_max": 0.0, "primitive_norm": 0.0, "rms": 0.05},
            "options": {"seed": 0},
            **changes,
        }
    )


def put(path: str | Path, text: str = "") -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


def tree() -> dict[str, bytes | None]:
    """Return every file and folder below the current one, files with their bytes."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(Path().rglob("*"))}


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """A command that takes for ever fails its test, and does not hold up the run."""
    with within(240):
        yield


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(command: Command) -> Command:
    """Run a command line; return its status and what it printed."""
    return command


@pytest.fixture
def fails(run) -> Callable[..., str]:
    """Run a command line that must fail, with one line of error, and leave no trace."""

    def call(status: int, *line: str) -> str:
        before = tree()
        found, out, err = run(*line)
        assert (found, out) == (status, "")
        assert err.startswith("fitact: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        assert len(err) < 600
        assert tree() == before
        return err

    return call


# ---------------------------------------------------------------------------------------------- what it does


def test_fit_codegen_plot(run):
    status, out, err = run("fit --fn gelu --bits 3")
    assert (status, err) == (0, "")
    assert "0.01189827" in out  # L of the published 3-bit GELU
    assert out.endswith("wrote generated/fits/gelu_fewbit3.json\n")
    fit = read(FITS / "gelu_fewbit3.json")
    assert (fit.name, fit.bits, fit.domain, fit.weight.text) == ("gelu_fewbit3", 3, (-10, 10), "uniform")
    assert fit.to_json() == (FITS / "gelu_fewbit3.json").read_text(encoding="utf-8")

    assert run("codegen") == (0, "wrote generated/__init__.py\nwrote generated/gelu_fewbit3.py\n", "")
    assert run("plot") == (0, "wrote gelu_fewbit3.png\n", "")
    assert [path for path, content in tree().items() if content is not None] == [
        "gelu_fewbit3.png",
        "generated/__init__.py",
        "generated/fits/gelu_fewbit3.json",
        "generated/gelu_fewbit3.py",
    ]

    before = tree()
    run("fit --fn gelu --bits 3")
    assert run("codegen") == (0, "generated: nothing to do, 1 modules are up to date\n", "")
    run("plot")
    assert tree() == before


def test_as_a_module():
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "fitact", *arguments], capture_output=True, text=True, check=False
        )

    good = call("fit", "--fn", "tanh", "--bits", "1")
    assert (good.returncode, good.stderr) == (0, "")
    assert list(tree()) == ["generated", "generated/fits", "generated/fits/tanh_fewbit1.json"]
    bad = call("fit", "--fn", "__import__('os')", "--bits", "1", "--name", "a")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("fitact: activation ")
    assert bad.stderr.count("\n") == 1


# arguments of fit, the files it makes below the current folder
MAKES = [
    ("--fn tanh --bits 1", ["generated/fits/tanh_fewbit1.json"]),
    ("--fn relu --bits 1 --domain -10 10 --weight uniform", ["generated/fits/relu_fewbit1.json"]),
    ("--fn relu --bits 1 --method fewbit --seed 7", ["generated/fits/relu_fewbit1.json"]),
    ("--fn tanh --bits 1 -o here.json", ["here.json"]),
    ("--fn tanh --bits 1 --output a/b/here.json", ["a/b/here.json"]),
    ("--fn tanh --bits 1 --name mine", ["generated/fits/mine.json"]),
    ("--fn tanh --bits 1 --name mine -o other.json", ["other.json"]),
    ("--fn x*sigmoid(2*x) --bits 1 --name mine", ["generated/fits/mine.json"]),
    ("--fn tanh --bits 1 --domain -1 2.5 --weight normal --name mine", ["generated/fits/mine.json"]),
    ("--fn tanh --bits 1 --weight 'normal(0, 2)' --name mine", ["generated/fits/mine.json"]),
    (
        "--fn tanh --fn relu --bits 1 --bits 2",
        [f"generated/fits/{name}_fewbit{bits}.json" for name in ("relu", "tanh") for bits in (1, 2)],
    ),
]


@pytest.mark.parametrize(("arguments", "files"), MAKES, ids=[arguments for arguments, _ in MAKES])
def test_fit_makes(arguments, files, run):
    status, out, _ = run(f"fit {arguments}")
    assert status == 0
    assert [path for path, content in tree().items() if content is not None] == files
    assert sorted(line for line in out.splitlines() if line.startswith("wrote")) == [
        f"wrote {file}" for file in files
    ]
    for file in files:
        assert read(Path(file)).to_json().encode() == Path(file).read_bytes()


def test_fit_keeps_what_it_was_told(run):
    run("fit --fn x*sigmoid(2*x) --bits 2 --domain -3 4.5 --weight normal --seed 7 --name mine")
    fit = read(FITS / "mine.json")
    assert fit.name == "mine"
    assert (fit.activation.name, fit.activation.expression) == (None, "x*sigmoid(2*x)")
    assert (fit.bits, fit.domain, fit.weight.text, fit.options["seed"]) == (2, (-3, 4.5), "normal", 7)


def test_force(run, fails):
    run("fit --fn tanh --bits 1 --name mine")
    assert run("fit --fn tanh --bits 1 --name mine")[0] == 0, "the same fit"
    assert "generated/fits/mine.json: another fit" in fails(2, "fit --fn tanh --bits 2 --name mine")
    assert run("fit --fn tanh --bits 2 --name mine --force")[0] == 0
    assert read(FITS / "mine.json").bits == 2


def test_force_replaces_even_what_is_no_fit(run, fails):
    put("mine.json", "not a fit")
    assert "--force" in fails(2, "fit --fn tanh --bits 1 -o mine.json")
    assert run("fit --fn tanh --bits 1 -o mine.json --force")[0] == 0
    assert read(Path("mine.json")).name == "tanh_fewbit1"


def test_one_obstacle_stops_the_batch(run):
    put(FITS / "tanh_fewbit2.json", record("tanh_fewbit2"))
    before = tree()
    status, out, err = run("fit --fn tanh --bits 1 --bits 2")
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith("fitact: generated/fits/tanh_fewbit2.json: another fit")
    assert tree() == before


def is_picture(path: str) -> None:
    data = Path(path).read_bytes()
    if path.lower().endswith(".png"):
        pixels = matplotlib.image.imread(path)
        assert min(pixels.shape[:2]) > 300
        assert 0.01 < np.mean(pixels[..., :3].min(axis=2) < 0.5) < 0.5, "lines on a light ground"
    elif path.endswith(".svg"):
        assert ET.fromstring(data).tag.endswith("svg")
        assert len(data) > 10_000
    else:
        assert data.startswith(b"%PDF-")
        assert data.rstrip().endswith(b"%%EOF")


# arguments of plot, the picture
PICTURES = [
    ("", "fits.png"),
    ("generated/fits/a.json", "a.png"),
    ("generated/fits/a.json -o deep/er/a.svg", "deep/er/a.svg"),
    ("generated/fits/b.json generated/fits/a.json -o b.pdf", "b.pdf"),
    ("-o UP.PNG", "UP.PNG"),
]


@pytest.mark.parametrize(("arguments", "picture"), PICTURES)
def test_plot(arguments, picture, run):
    put(FITS / "a.json", record("a"))
    put(FITS / "b.json", record("b", "sigmoid", even=True))
    assert run(f"plot {arguments}") == (0, f"wrote {picture}\n", "")
    is_picture(picture)
    before = tree()
    run(f"plot {arguments}")
    assert tree() == before, "the same picture has the same bytes"


# ----------------------------------------------------------------------------------------------- what it refuses

FIT = "fit --fn tanh --bits 1"
# arguments, status, part of the message
WRONG = [
    ("nonsense", 2, "nonsense"),
    ("--nonsense", 2, "--nonsense"),
    ("fit --nonsense", 2, "--nonsense"),
    ("codegen --nonsense", 2, "--nonsense"),
    ("plot --nonsense", 2, "--nonsense"),
    ("fit", 2, "--fn"),
    ("fit --fn tanh", 2, "--bits"),
    ("fit --bits 3", 2, "--fn"),
    (f"{FIT} extra", 2, "extra"),
    # function
    ("fit --fn gelluu --bits 3", 2, "expected one of celu"),
    ("fit --fn '' --bits 3", 2, "empty"),
    ("fit --fn 'x +' --bits 3 --name a", 2, "not a formula"),
    ("""fit --fn "__import__('os')" --bits 3 --name a""", 2, "unexpected character"),
    ("fit --fn x*10**10**10 --bits 3 --name a", 2, "out of range"),
    ("fit --fn '1 + 1' --bits 3 --name a", 2, "does not depend on x"),
    ("fit --fn 'x\n' --bits 3 --name a", 2, "unexpected character"),
    ("fit --fn 'log(x)' --bits 3 --name a", 2, "at x = -10"),
    ("fit --fn 'exp(exp(x))' --bits 3 --name a", 2, "at x ="),
    ("fit --fn x/x**2 --bits 3 --name a", 2, "at x = 0"),
    # bits
    *((f"fit --fn tanh --bits {bits}", 2, "bits: expected 1, 2, 3 or 4") for bits in (0, -1, 5, 9, 10**30)),
    *((f"fit --fn tanh --bits {bits}", 2, "--bits") for bits in ("two", "1.5", "''", "nan")),
    # method, seed
    ("fit --fn tanh --bits 1 --method magic", 2, "--method"),
    ("fit --fn tanh --bits 1 --seed x", 2, "--seed"),
    # domain
    *(
        (f"{FIT} --name a --domain {domain}", 2, "domain")
        for domain in ("1 1", "2 1", "nan 1", "0 nan", "-inf 1", "0 inf")
    ),
    (f"{FIT} --name a --domain 1", 2, "--domain"),
    (f"{FIT} --name a --domain a b", 2, "--domain"),
    *((f"{FIT} --name a --domain {domain}", 2, "domain") for domain in ("1 1.0000000001", "1 1.0000000000000002")),
    *(
        (f"{FIT} --name a --domain {domain}", 2, "domain")
        for domain in ("-1e300 1e300", "-1e308 1e308", "-1e-320 1e-320")
    ),
    # weight
    (f"{FIT} --name a --weight gauss", 2, "weight"),
    (f"{FIT} --name a --weight ''", 2, "weight"),
    (f"{FIT} --name a --weight x", 2, "weight 'x' is -10 at x = -10: expected 0 to 1e+30"),
    (f"{FIT} --name a --weight 'normal(0, -1)'", 2, "deviation above 0"),
    (f"{FIT} --name a --weight 'normal(0, 1e308)'", 2, "weight"),
    (f"{FIT} --name a --weight 'x - x'", 2, "zero all over"),
    (f"{FIT} --name a --weight log(x)", 2, "weight"),
    # name
    ("fit --fn x*tanh(x) --bits 1", 2, "--name is required for an expression"),
    ("fit --fn tanh --fn x*tanh(x) --bits 1", 2, "--name is required for an expression"),
    (f"{FIT} --weight normal", 2, "--name is required for --weight"),
    (f"{FIT} --domain -5 5", 2, "--name is required for --domain"),
    ("fit --fn tanh --bits 1 --bits 2 --name a", 2, "for a single fit"),
    ("fit --fn tanh --bits 1 --bits 2 -o a.json", 2, "for a single fit"),
    *(
        (f"{FIT} --name {name}", 2, "--name: expected a Python identifier")
        for name in ("../a", "a/b", "1a", "''", "class", "_a", "a.b", "é")
    ),
    # places
    (f"{FIT} -o file/a.json", 1, "file/a.json: cannot be written: "),
    (f"{FIT} -o file/deeper/a.json", 1, "cannot be written"),
    (f"{FIT} -o folder", 2, "folder"),
    (f"{FIT} -o {'a' * 300}.json", 1, "file name too long"),
    (f"{FIT} -o {'a' * 251}.json", 1, "file name too long"),
    # codegen and plot
    *((f"{command}", 2, "generated/fits: no fits there") for command in ("codegen", "codegen --check", "plot")),
    *(
        (f"{command} missing.json", 2, "missing.json: cannot be read: no such file")
        for command in ("codegen", "plot")
    ),
    *((f"{command} folder", 2, "folder: cannot be read: is a directory") for command in ("codegen", "plot")),
    *((f"{command} file", 2, "file: not JSON") for command in ("codegen", "plot")),
    *((f"{command} future.json", 2, "future.json: schema: expected") for command in ("codegen", "plot")),
    *((f"{command} broken.json", 2, "broken.json: bits: expected") for command in ("codegen", "plot")),
    *((f"{command} hostile.json", 2, "hostile.json: activation") for command in ("codegen", "plot")),
    *((f"{command} good.json broken.json", 2, "broken.json: bits: expected") for command in ("codegen", "plot")),
    ("codegen good.json --check --out away", 1, ""),
    ("codegen good.json --out file", 1, "cannot be"),
    ("codegen good.json --out file/below", 1, "cannot be written"),
    *((f"codegen good.json --out {name}", 2, "--out': expected the name of a folder") for name in ("''", "-")),
    ("codegen good.json twin.json", 2, "two fits are called 'good'"),
    ("plot good.json -o a.txt", 2, "ends in .png, .svg or .pdf"),
    ("plot good.json -o png", 2, "ends in .png, .svg or .pdf"),
    ("plot good.json -o file/a.png", 1, "cannot be written"),
    ("plot good.json -o folder.png", 2, "expected the name of a file, and 'folder.png' is a folder"),
]


@pytest.mark.parametrize(("arguments", "status", "part"), WRONG, ids=[arguments[:60] for arguments, *_ in WRONG])
def test_wrong_use(arguments, status, part, fails, run):
    put("file")
    Path("folder").mkdir()
    Path("folder.png").mkdir()
    put("good.json", record("good"))
    put("twin.json", record("good", "sigmoid"))
    put("torch.json", record("torch"))
    put("self.json", record("self"))
    put("future.json", record("future", schema="fitact.fit/2"))
    put("broken.json", record("broken", bits=7))
    put("hostile.json", record("hostile", activation={"name": None, "expression": "__import__('os')"}))
    if "--check" in arguments and "--out" in arguments:  # what differs goes to standard output
        before = tree()
        found, out, err = run(arguments)
        assert found == status
        assert "+__all__ = " in out
        assert err.startswith("fitact: away: differs")
        assert tree() == before
    else:
        assert part in fails(status, arguments)


def test_a_refused_batch_leaves_nothing(run):
    status, out, err = run("fit --fn tanh --bits 1 --bits 9")
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith("fitact: bits: expected")
    assert tree() == {}


# ------------------------------------------------------------------------------------------------------ codegen


@pytest.fixture
def package(run) -> Path:
    """A folder `generated` in step with its two fits."""
    put(FITS / "one.json", record("one"))
    put(FITS / "two.json", record("two", "sigmoid"))
    assert run("codegen")[0] == 0
    assert run("codegen --check") == (0, "generated: 2 modules are what their fits generate\n", "")
    return Path("generated")


def edit(path: str, old: bytes, new: bytes) -> None:
    data = Path(path).read_bytes()
    assert old in data
    Path(path).write_bytes(data.replace(old, new))


# what was done, the file that the difference shows, whether codegen puts it right
DRIFTS = {
    "edited": (lambda: edit("generated/one.py", b"0.25", b"0.5"), "one.py", True),
    "line added": (
        lambda: edit("generated/one.py", b"import torch as _torch\n", b"import torch as _torch\nimport os\n"),
        "one.py",
        True,
    ),
    "last line": (
        lambda: put("generated/one.py", Path("generated/one.py").read_text() + "#\n"),
        "one.py",
        True,
    ),
    "last newline": (
        lambda: put("generated/one.py", Path("generated/one.py").read_text()[:-1]),
        "one.py",
        True,
    ),
    "line ends": (lambda: edit("generated/one.py", b"\n", b"\r\n"), "one.py", True),
    "emptied": (lambda: put("generated/one.py"), "one.py", True),
    "removed": (lambda: Path("generated/two.py").unlink(), "two.py", True),
    "package edited": (lambda: put("generated/__init__.py"), "__init__.py", True),
    "package removed": (lambda: Path("generated/__init__.py").unlink(), "__init__.py", True),
    "orphan": (lambda: shutil.copy("generated/one.py", "generated/three.py"), "three.py", True),
    "foreign": (lambda: put("generated/three.py", "import os\n"), "three.py", False),
    "empty": (lambda: put("generated/three.py"), "three.py", False),
    "fit edited": (lambda: edit("generated/fits/one.json", b"0.25", b"0.125"), "one.py", True),
    "fit added": (lambda: put(FITS / "three.json", record("three")), "three.py", True),
    "fit removed": (lambda: (FITS / "two.json").unlink(), "two.py", True),
    "fit renamed": (lambda: edit("generated/fits/two.json", b'"two"', b'"three"'), "three.py", True),
}


@pytest.mark.parametrize("what", DRIFTS)
def test_check(what, package, run):
    act, file, mends = DRIFTS[what]
    act()
    before = tree()
    status, out, err = run("codegen --check")
    assert status == 1
    assert err == "fitact: generated: differs from what its fits generate; run fitact codegen\n"
    assert f"{package / file}" in out
    assert tree() == before, "--check writes nothing"
    if mends:
        assert run("codegen")[0] == 0
        assert run("codegen --check")[0] == 0


def test_check_of_a_package_that_is_not_there(run):
    put("one.json", record("one"))
    status, out, _ = run("codegen one.json --check --out away")
    assert status == 1
    assert "away/one.py" in out
    assert "away/__init__.py" in out
    assert not Path("away").exists()


def test_check_shows_the_difference(package, run):
    edit("generated/one.py", b"        0.25,\n", b"        0.375,\n")
    out = run("codegen --check")[1]
    assert {"-        0.375,", "+        0.25,"} <= set(out.splitlines())


@pytest.mark.parametrize(
    "content", [b"print('mine')\n", b"# -*- coding: latin-1 -*-\n# caf\xe9\n", b"#" * (5 << 20)]
)
def test_orphans_go_and_others_stay(content, package, run):
    (FITS / "two.json").unlink()
    foreign = package / "mine.py"
    foreign.write_bytes(content)
    assert run("codegen") == (0, "removed generated/two.py\n", "")
    assert not (package / "two.py").exists()
    assert foreign.read_bytes() == content


@pytest.mark.parametrize("file", ["__init__.py", "two.py"])
@pytest.mark.parametrize("text", ["import os\n", '"""Mine."""\n', " # Generated by `fitact codegen`\n"])
def test_foreign_files_are_not_written_over(file, text, fails):
    put(FITS / "one.json", record("one"))
    put(FITS / "two.json", record("two"))
    put(f"generated/{file}", text)
    assert f"generated/{file}: fitact codegen did not generate this file" in fails(2, "codegen")


def test_a_fit_goes_by_its_own_name(run):
    put(FITS / "some.json", record("other"))
    assert run("codegen") == (0, "wrote generated/__init__.py\nwrote generated/other.py\n", "")


def test_out(run):
    put(FITS / "one.json", record("one"))
    assert run("codegen --out deep/package") == (
        0,
        "wrote deep/package/__init__.py\nwrote deep/package/one.py\n",
        "",
    )
    assert [path.name for path in Path("generated").iterdir()] == ["fits"]


def test_named_fits_remove_no_others(package, run):
    put("three.json", record("three"))
    assert run("codegen three.json") == (0, "wrote generated/three.py\n", "")
    assert sorted(path.name for path in package.glob("*.py")) == [
        "__init__.py",
        "one.py",
        "three.py",
        "two.py",
    ]
    assert run("codegen three.json --check")[0] == 0
    assert run("codegen generated/fits/one.json --check")[0] == 0


# -------------------------------------------------------------------------------------------------------- help

COMMANDS = [(), *((name,) for name in cli.commands)]


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help(words, flag, run):
    status, out, err = run(" ".join([*words, flag]))
    assert (status, err) == (0, "")
    assert out.startswith(f"Usage: {' '.join(['fitact', *words])} ")
    assert f"\n    fitact {words[0]} " in out if words else "Start with:  fitact fit " in out
    assert tree() == {}


MODEL = """
import torch

def tiny(batch):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model.add_module("act", torch.nn.GELU())
    return model, torch.randn(batch, 8)
"""


def examples_of(command):
    return [line.strip() for line in cli.commands[command].help.splitlines() if line.strip().startswith("fitact ")]


# Layers repeat, so that two show what 24 or 32 do.
SHALLOW = {"num_hidden_layers=24": "num_hidden_layers=2", "--hf llama": "--hf llama --set num_hidden_layers=2"}
SHALLOW["plan --hf bert"] = "plan --hf bert --set num_hidden_layers=2"
MEASURING = ("memory", "plan")


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize("example", [example for name in MEASURING for example in examples_of(name)])
def test_examples_of_memory_and_plan_run(run, example):
    put("my_models.py", MODEL)
    for deep, shallow in SHALLOW.items():
        example = example.replace(deep, shallow)
    status, out, err = run(example.removeprefix("fitact "))
    assert status == 0, err
    assert "baseline" in out


@pytest.mark.parametrize("name", [one for one in cli.commands if one not in MEASURING])
def test_examples_of_the_help_run(run, name):
    put("my_fit.json", record("mine"))
    put("my_models.py", MODEL)
    examples = [line.strip() for line in run(f"{name} --help")[1].splitlines() if line.startswith("    fitact ")]
    assert examples
    if name == "fit":
        assert main(["calibrate", "my_models:tiny"]) == 0
    for example in sorted(examples) if name == "codegen" else examples:
        if name != "fit":
            main(["fit", "--fn", "gelu", "--bits", "2", "--bits", "3"])
        status, _, err = run(example.removeprefix("fitact "))
        assert status == 0, f"{example}: {err}"


def test_no_arguments_show_the_help(run):
    _, out, err = run("")
    assert "\n  codegen " in out + err
    assert "\n  fit " in out + err


def test_version(run):
    status, out, _ = run("--version")
    assert status == 0
    assert out.startswith("fitact 0.")


# ---------------------------------------------------------------------------------------- show, param, warnings


def test_show_catalog(capsys):
    assert main(["show"]) == 0
    out = capsys.readouterr().out
    for name in CATALOG:
        assert re.search(rf"^{name} ", out, re.MULTILINE)
    assert "F.leaky_relu(x, 0.01)" in out


@pytest.mark.parametrize(
    ("thing", "lines"),
    [
        (
            "hardtanh",
            [
                "breakpoints    -1 (corner of the derivative), 1 (corner of the derivative)",
                "derivative is  even: steps code |x|",
                "pieces         is constant to -1, rises from -1 to 1, is constant from 1; 2 bits tell them apart",
                "toward -inf    the limit -1",
                "fewbit         yes: exact at 1 bit",
                "exact          yes: f'(x) = where(y >= 1, 0, where(y > -1, 1, 0))",
            ],
        ),
        ("relu6", ["derivative is  neither even nor odd", "fewbit         yes: exact at 2 bits"]),
        (
            "gelu",
            [
                "PyTorch        F.gelu(x)",
                "computed as    x*erfc(-sqrt(2)*x/2)/2",
                "breakpoints    none",
                "toward +inf    the line x",
                "pieces         falls to -0.7517915247, rises from -0.7517915247; 1 bit tells them apart",
                "roots of f'    -0.7517915247 (order 1)",
                "range of f'    -0.1289041452 to 1.128904145",
                "fewbit         yes: 1 to 4 bits",
                "exact          no: no closed form of its derivative in the output is known; state one",
            ],
        ),
        (
            "x*exp(-x)",
            [
                "PyTorch        none: computed by the formula",
                "fewbit         yes, but beyond the domain -10 10 an unbounded derivative is cut off",
            ],
        ),
        ("x + 2*sin(x)", ["beyond, f' has too many roots to be counted", "toward +inf    +infinity, along no"]),
        ("x*(atan(x)/pi + 1/2)", ["arithmetic     in float32 it is", "'atan(x)/pi + 1/2' cancels; write"]),
        ("log(x)", ["toward -inf    undefined", "fewbit         no: activation 'log(x)' is nan at x = -10"]),
    ],
)
def test_show_activation(thing, lines, capsys):
    assert main(["show", thing]) == 0
    out = capsys.readouterr().out
    for line in lines:
        assert line in out


def test_show_fits_side_by_side(capsys):
    assert main(["fit", "--fn", "tanh", "--bits", "1", "--bits", "2"]) == 0
    capsys.readouterr()
    assert main(["show", "generated/fits/tanh_fewbit1.json", "generated/fits/tanh_fewbit2.json"]) == 0
    header, one, two = capsys.readouterr().out.splitlines()
    assert header.split() == ["bits", "objective", "||f'-q||", "max|f'-q|", "rms", "||h-h~||", "max|h-h~|"]
    assert one.split()[:3] == ["tanh_fewbit1", "1", "0.1583998"]
    assert two.split()[:3] == ["tanh_fewbit2", "2", "0.0319104"]
    assert float(one.split()[3]) == pytest.approx(0.1583998**0.5, rel=1e-6)


def test_parameters(capsys):
    command = "fit --fn leaky_relu --param negative_slope=0.2 --bits 1"
    assert main([*command.split(), "--name", "leaky"]) == 0
    assert json.loads(Path("generated/fits/leaky.json").read_text())["levels"] == [0.20000000298023224, 1.0]
    assert main(["codegen"]) == 0
    assert "F.leaky_relu(x, 0.2)" in Path("generated/leaky.py").read_text()
    capsys.readouterr()
    assert main(command.split()) == 2
    assert "--name is required for --param" in capsys.readouterr().err
    assert main([*command.replace("0.2", "x").split(), "--name", "leaky"]) == 2
    assert "expected NAME=NUMBER" in capsys.readouterr().err


def test_warnings_are_one_line_each_and_no_failure(capsys):
    assert main(["fit", "--fn", "relu6", "--fn", "relu2", "--bits", "1"]) == 0
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("fitact: warning: the derivative of relu6 is a step function")
    assert second.startswith("fitact: warning: beyond the domain -10 10 the derivative of relu2")


# --------------------------------------------------------------------------------------------- odd command lines

TINY = "my_models:tiny --no-compiler"
# arguments of memory, part of the message
ODD_MEMORY = [
    *((f"{TINY} --gib {number}", "--gib") for number in ("nan", "-nan", "1e400", "inf", "-inf", "0", "1e300")),
    *((f"my_models:tiny --budget {number}", "--budget") for number in ("nan", "inf", "-1", "1.5")),
    (f"{TINY} -o a.png --json a.png", "expected two files"),
    (f"{TINY} -o a/", "expected the name of a file"),
    (f"{TINY} --json ''", "expected the name of a file"),
    ("--hf gpt2 --set n_layer=1 --set n_layer=2", "--set n_layer: given twice"),
    ("my_models:leaves", "my_models:leaves: it failed: SystemExit: 3"),
    ("leaves:tiny", "leaves: cannot be imported: SystemExit: 4"),
]


@pytest.mark.parametrize(("arguments", "part"), ODD_MEMORY, ids=[arguments for arguments, _ in ODD_MEMORY])
def test_odd_measurements(arguments, part, run, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("my_models", "leaves"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    put("my_models.py", f"{MODEL}\ndef leaves():\n    raise SystemExit(3)\n")
    put("leaves.py", "import sys\nsys.exit(4)\n")
    before = tree()
    status, out, err = run(f"memory {arguments}")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("fitact: ") and part in err
    assert tree() == before


def test_values_given_twice_are_measured_once(run, monkeypatch):
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    put("my_models.py", MODEL)
    status, out, _ = run(f"memory {TINY} --bits 2 --bits 2")
    assert status == 0
    assert len(re.findall(r"^fewbit, 2 bits ", out, re.MULTILINE)) == 1


def test_fits_asked_for_twice_are_made_once(run):
    status, out, _ = run("fit --fn tanh --fn tanh --bits 1 --bits 1")
    assert (status, out.count("wrote")) == (0, 1)


def test_a_fit_named_twice_is_taken_once(run):
    put("good.json", record("good"))
    status, out, err = run(f"codegen good.json ./good.json {Path('good.json').absolute()} --out away")
    assert (status, err) == (0, "")
    assert out.splitlines() == [f"wrote {Path('away', file)}" for file in ("__init__.py", "good.py")]
    assert run("plot good.json good.json")[0] == 0
    assert Path("good.png").exists() and not Path("fits.png").exists()


# arguments of fit, part of the message
ODD_FITS = [
    *((f"--domain {domain}", "expected a finite number") for domain in ("nan 1", "0 nan", "-inf 1", "0 1e400")),
    *((f"--method inverted --tol {tol}", "expected a finite number") for tol in ("nan", "inf", "1e999")),
    *((f"--seed {seed}", "--seed") for seed in (-1, 2**32, "1" + "0" * 400)),
    *((f"-o {name}", "expected the name of a file") for name in ("''", "-", "folder/")),
    *((f"--param slope={value}", "parameter") for value in ("nan", "inf", "1e400")),
    ("--param a=1 --param a=2", "--param a: given twice"),
]


@pytest.mark.parametrize(("arguments", "part"), ODD_FITS, ids=[arguments[:60] for arguments, _ in ODD_FITS])
def test_odd_fits(arguments, part, fails):
    assert part in fails(2, f"fit --fn tanh --name a {arguments}{'' if '--method' in arguments else ' --bits 1'}")
