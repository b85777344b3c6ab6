"""The command line: what each command makes, in an empty folder, also of fits that are readable and odd."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from fitact.base import blank, literal, save
from fitact.cli import cli
from fitact.fitter.analysis import Activation, Learned
from fitact.fitter.catalog import CATALOG
from fitact.fitter.methods import again, fewbit
from fitact.fitter.numerics import Weight
from fitact.fitter.plot import _view, draw
from fitact.fitter.records import from_json, read
from tests.conftest import ROOT, Command
from tests.support.commands import FITS, MODEL, files, put, record, tree
from tests.support.generated import fits
from tests.support.refusals import refused
from tests.support.rows import full

STEPS = ["bits", "objective", "||f'-q||", "max|f'-q|", "rms", "||h-h~||", "max|h-h~|"]
DTYPES = ["bfloat16", "float16", "float32"]
FLOORS = [f"floor {dtype}" for dtype in DTYPES]
# name → the options, the table's head, and its row or the beginning of it
SHIPPED = {
    "gelu_fewbit3": ("--fn gelu --bits 3", STEPS, ["3", "0.01189827", "0.1090792"]),  # L of the published one
    "gelu_relumix2": ("--fn gelu --bits 2 --method relumix", STEPS, ["2", "0.009506935"]),
    "hardswish_inverted2": ("--fn hardswish --method inverted", ["bits", *DTYPES, *FLOORS], ["2"]),
    "tanh_output": (
        "--fn tanh --method output",
        [*DTYPES, "f'(x) as a function of y"],
        ["0.003875", "0.0004868", "8.839e-08", "1 - y**2"],
    ),
    "swiglu_recompute": ("--fn swiglu --method recompute", None, ["silu(g)*u"]),
    "dyt_recompute": ("--fn dyt --method recompute", None, []),
}


@pytest.mark.parametrize("name", full(SHIPPED, lambda name: name != "hardswish_inverted2"))
def test_as_it_ships(name: str, command: Command) -> None:
    """Every method from the command line: its fit, module, picture and table; again, they have the same bytes."""
    options, head, row = SHIPPED[name]
    fit, module = FITS / f"{name}.json", Path(f"generated/{name}.py")
    status, out, err = command(f"fit {options}")
    assert (status, err) == (0, "")
    *table, last = out.splitlines()
    cells = [re.split(r"\s{2,}", line.strip()) for line in table]
    assert head in (None, cells[0]) and {name, *row} <= {*cells[1]}
    assert last == f"wrote {fit}" and files() == [str(fit)]
    assert fit.read_bytes() == (ROOT / fit).read_bytes() == read(fit).to_json().encode()
    assert command("codegen") == (0, f"wrote generated/__init__.py\nwrote {module}\n", "")
    assert module.read_bytes() == (ROOT / module).read_bytes()
    assert command("plot") == (0, f"wrote {name}.png\n", "")
    shutil.copy(fit, "again.json")
    assert command(f"show {fit} again.json") == (0, "\n".join([*table, table[1]]) + "\n", "")
    before = tree()
    assert command(f"fit {options}")[0] == command("codegen --check")[0] == command("plot")[0] == 0
    assert command("codegen") == (0, "generated: nothing to do, 1 modules are up to date\n", "")
    assert tree() == before
    is_picture(f"{name}.png")


# arguments of fit, with fields of the fit that it makes, or the files
MAKES: dict[str, dict[str, Any] | list[str]] = {
    "--fn relu --bits 1 --domain -10 10 --weight uniform": {"name": "relu_fewbit1"},
    "--fn relu --bits 1 --method fewbit --seed 7": {"name": "relu_fewbit1", "options": {"cells": 4000, "seed": 7}},
    "--fn tanh --bits 1 --name mine --output a/b/here.json": ["a/b/here.json"],
    "--fn x*sigmoid(2*x) --bits 2 --domain -3 4.5 --weight 'normal(0, 2)' --name mine": {
        "domain": (-3, 4.5),
        "weight": Weight("normal(0, 2)"),
        "activation": Activation.of("x*sigmoid(2*x)"),
    },
    "--fn tanh --fn tanh --bits 1 --bits 1": {"name": "tanh_fewbit1"},
    "--fn tanh --fn relu --bits 1 --bits 2": [
        f"generated/fits/{name}_fewbit{bits}.json" for name in ("relu", "tanh") for bits in (1, 2)
    ],
    "--fn leaky_relu --param 'negative_slope = 0.2' --bits 1 --name leaky": {"levels": (0.20000000298023224, 1.0)},
    "--method inverted --fn 'exp(x)' --name same": {"name": "same", "bits": 0, "domain": None},
    "--method inverted --fn 'x**2 + x' --domain -2 2 --name square --tol 1e-3": {
        "domain": (-2.0, 2.0),
        "options": {"family": "rational", "tol": 1e-3},
    },
    "--method relumix --fn tanh --bits 2 --objective derivative --restarts 2 --seed 7 --name mine": {
        "options": {"objective": "derivative", "restarts": 2, "seed": 7}
    },
    "--method inverted --fn silu --family published": {"name": "silu_inverted_published", "bits": 1},
    "--method output --fn 'asinh(x)' --derivative '1/cosh(y)' --name own": {"derivative": "1/cosh(y)"},
    "--method recompute --fn a*x --learn 'a : channel = 0.5' --name own": {
        "activation": Learned.of("a*x", {"a": (0.5, True)})
    },
}


@pytest.mark.parametrize("arguments", MAKES)
def test_fit_makes(arguments: str, command: Command) -> None:
    status, out, _ = command(f"fit {arguments}")
    assert status == 0
    assert sorted(line for line in out.splitlines() if line.startswith("wrote")) == [f"wrote {f}" for f in files()]
    expected = MAKES[arguments]
    assert files() == expected or (isinstance(expected, dict) and len(files()) == 1)
    for file in files():
        fit = read(Path(file))
        assert again(fit).to_json() == fit.to_json() == Path(file).read_text("utf-8")
        assert isinstance(expected, list) or {key: getattr(fit, key) for key in expected} == expected


def test_force(command: Command) -> None:
    """Another fit is replaced if that is asked for, and so is what is no fit; the same one needs no force."""
    for old in (record("mine"), "not a fit"):
        put("mine.json", old)
        for force, status in (("", 2), ("--force", 0), ("", 0)):
            assert command(f"fit --fn tanh --bits 1 -o mine.json {force}")[0] == status
        assert read(Path("mine.json")).name == "tanh_fewbit1"


def test_warnings_are_one_line_each_and_no_failure(command: Command) -> None:
    status, _, err = command("fit --fn relu6 --fn relu2 --bits 1")
    first, second = err.splitlines()
    assert status == 0
    assert first.startswith("fitact: warning: the derivative of relu6 is a step function")
    assert second.startswith("fitact: warning: beyond the domain -10 10 the derivative of relu2")


def is_picture(path: str, ink: float = 0.01) -> None:
    data = Path(path).read_bytes()
    if path.endswith(".png"):
        pixels = matplotlib.image.imread(path)
        assert min(pixels.shape[:2]) > 300
        assert ink < np.mean(pixels[..., :3].min(axis=2) < 0.5) < 0.5, "lines on a light ground"
    else:
        assert data.startswith((b"<?xml", b"%PDF-")) and data.rstrip().endswith((b"</svg>", b"%%EOF"))
        assert len(data) > 10_000


# arguments of plot, the picture
PICTURES = {
    "": "fits.png",
    "generated/fits/a.json generated/fits/a.json": "a.png",
    "generated/fits/a.json -o deep/er/a.svg": "deep/er/a.svg",
    "generated/fits/b.json generated/fits/a.json -o b.pdf": "b.pdf",
}


@pytest.mark.parametrize("arguments", PICTURES)
def test_plot(arguments: str, command: Command) -> None:
    put(FITS / "a.json", record("a"))
    put(FITS / "b.json", record("b", "sigmoid", even=True))
    picture = PICTURES[arguments]
    for _ in range(2):
        assert command(f"plot {arguments}") == (0, f"wrote {picture}\n", "")
        is_picture(picture)
        first = Path(picture).read_bytes()
    assert Path(picture).read_bytes() == first


@pytest.fixture
def package(command: Command) -> Path:
    """A folder `generated` in step with its two fits."""
    put(FITS / "one.json", record("one"))
    put(FITS / "two.json", record("two", "sigmoid"))
    assert command("codegen")[0] == 0
    assert command("codegen --check") == (0, "generated: 2 modules are what their fits generate\n", "")
    return Path("generated")


def edit(path: str, old: bytes, new: bytes) -> None:
    data = Path(path).read_bytes()
    Path(path).write_bytes(data.replace(old, new))


ONE = "generated/one.py"
# what was done, the file that the difference shows, a line of it
DRIFTS: dict[str, tuple[Callable[[], object], str, str]] = {
    "edited": (lambda: edit(ONE, b"    0.25,\n", b"    0.375,\n"), "one.py", "+        0.25,"),
    "line ends": (lambda: edit(ONE, b"\n", b"\r\n"), "one.py", ""),
    "removed": (lambda: Path("generated/two.py").unlink(), "two.py", ""),
    "package edited": (lambda: put("generated/__init__.py"), "__init__.py", ""),
    "orphan": (lambda: shutil.copy(ONE, "generated/three.py"), "three.py", ""),
    "fit edited": (lambda: edit("generated/fits/one.json", b"0.25", b"0.125"), "one.py", "+        0.125,"),
    "fit renamed": (lambda: edit("generated/fits/two.json", b'"two"', b'"three"'), "three.py", ""),
}


@pytest.mark.parametrize("what", DRIFTS)
def test_check(what: str, package: Path, command: Command) -> None:
    """It writes nothing, and says what to run, which puts it right."""
    act, file, line = DRIFTS[what]
    act()
    before = tree()
    status, out, err = command("codegen --check")
    assert (status, err) == (1, "fitact: generated: differs from what its fits generate; run fitact codegen\n")
    assert f"{package / file}" in out and (not line or line in out.splitlines())
    assert tree() == before
    assert command("codegen")[0] == command("codegen --check")[0] == 0


def test_another_folder(command: Command) -> None:
    """A fit goes by its own name, and one that is named twice is taken once."""
    put("some.json", record("one"))
    made = "wrote deep/package/__init__.py\nwrote deep/package/one.py\n"
    line = f"codegen some.json ./some.json {Path('some.json').absolute()} --out deep/package"
    assert command(line) == (0, made, "")
    assert not Path("generated").exists()


@pytest.mark.parametrize(
    "content", [b"print('mine')\n", b"# -*- coding: latin-1 -*-\n# caf\xe9\n", b"#" * (5 << 20)]
)
def test_orphans_go_and_others_stay(content: bytes, package: Path, command: Command) -> None:
    (FITS / "two.json").unlink()
    (package / "mine.py").write_bytes(content)
    assert command("codegen") == (0, "removed generated/two.py\n", "")
    assert not (package / "two.py").exists() and (package / "mine.py").read_bytes() == content


@pytest.mark.parametrize("file", ["__init__.py", "two.py"])
@pytest.mark.parametrize("text", ["import os\n", '"""Mine."""\n', " # Generated by `fitact codegen`\n"])
def test_foreign_files_are_not_written_over(file: str, text: str, command: Command) -> None:
    put(FITS / "one.json", record("one"))
    put(FITS / "two.json", record("two"))
    put(f"generated/{file}", text)
    before, (status, out, err) = tree(), command("codegen")
    assert (status, out, tree()) == (2, "", before)
    assert f"generated/{file}: fitact codegen did not generate this file" in err


@pytest.mark.parametrize("name", ["", *cli.commands])
def test_help(name: str, command: Command) -> None:
    """What it says is in the documents, as test_site.py compares them."""
    status, out, err = command(f"{name} --help")
    assert (status, out, err) == command(f"{name} -h") and (status, err) == (0, "")
    assert out.startswith(f"Usage: fitact {name}".rstrip())
    assert name or "\n  codegen " in "".join(command("")[1:])
    assert command("--version")[1].startswith("fitact 0.") and tree() == {}


# Layers repeat, so that two show what 24 or 32 do; the compiler takes longest, and is in the others' examples.
SHALLOW = {"--hf llama": "--hf llama --set num_hidden_layers=2"}
SHALLOW |= {"plan --hf bert": "plan --hf bert --set num_hidden_layers=2"}
SHALLOW |= {"--hf gpt2 --gib 12": "--hf gpt2 --set n_layer=2 --set vocab_size=1000 --gib 1"}
SHALLOW |= {"--timm convnext_atto": "--timm convnext_atto --no-compiler"}
SHALLOW |= {"layers=24 --batch 32": "layers=2 --batch 32 --no-compiler"}
SHALLOW |= {"--seq 2048 --lora q": "--no-compiler --lora q"}


@pytest.mark.parametrize("name", full(cli.commands, lambda name: name not in ("memory", "plan")))
def test_examples_of_the_help_run(name: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    monkeypatch.setattr("fitact.runtime.measure.devices.SECONDS", 0.05)
    put("my_fit.json", record("mine"))
    put("my_models.py", MODEL)
    for bits in (2, 3):
        shutil.copy(ROOT / FITS / f"gelu_fewbit{bits}.json", put(FITS / f"gelu_fewbit{bits}.json"))
    if name == "fit":
        shutil.rmtree("generated")
        assert command("calibrate my_models:tiny")[0] == 0
    examples = re.findall("^ *fitact (.*)$", cli.commands[name].help or "", re.MULTILINE)
    assert examples
    for example in sorted(examples) if name == "codegen" else examples:
        for deep, shallow in SHALLOW.items():
            example = example.replace(deep, shallow)
        status, _, err = command(example)
        assert status == 0, f"{example}: {err}"


def test_show_catalog(command: Command) -> None:
    _, out, _ = command("show")
    for name in CATALOG:
        assert re.search(rf"^{name} ", out, re.MULTILINE)
    assert "F.leaky_relu(x, 0.01)" in out and out.count("silu(g)*u") == 1


# what is shown, and words of lines of it: "head: words"
SHOWN = {
    "hardswish": "inverted: yes: 2 bits or more beside the output",
    "tanh": "inverted: yes: the output alone, 0 bits",
    "hardtanh": "breakpoints: -1 (corner of|derivative is: even|pieces: rises from -1 to 1|pieces: 2 bits tell|"
    "toward -inf: the limit -1|fewbit: yes: exact at 1 bit|output: yes: f'(x) = where(y >= 1, 0, where(",
    "relu6": "derivative is: neither even nor odd|fewbit: yes: exact at 2 bits",
    "gelu": "PyTorch: F.gelu(x)|computed as: x*erfc(-sqrt(2)*x/2)/2|breakpoints: none|toward +inf: the line x|"
    "pieces: falls to -0.7517915247|roots of f': -0.7517915247 (order 1)|range of f': -0.1289041452 to 1.12890414|"
    "fewbit: yes: 1 to 4 bits|output: no|"
    "inverted: yes: 1 bit or more beside the output, if its 2 smooth pieces can be fitted",
    "x*exp(-x)": "PyTorch: none|fewbit: beyond the domain -10 10 an unbounded derivative is cut off",
    "clamp(x, -20, 20)": "fewbit: yes: exact at 1 bit, as the derivative is a step function from -10 to 10",
    "sin(x)*sqrt(1 + abs(x))": "range of f': at least -9.919653967 to inf",
    "tan(x)": "fewbit: no: an unbounded derivative in the domain -10 10",
    "x + 2*sin(x)": ": the roots of f' are not known|inverted: no: its monotone pieces over the reals are too|"
    "toward +inf: +infinity, along no",
    "x*(atan(x)/pi + 1/2)": "arithmetic: in float32 it is|: 'atan(x)/pi + 1/2' cancels; write",
    "log(x)": "toward -inf: undefined|fewbit: no: activation 'log(x)' is nan at x = -10",
    "silu(g)*(u + 1)": "a(g), with x for g:|b(u), with x for u:|: x*sigmoid(x)|: x + 1",
    "dyt": ": alpha=0.5, gamma:channel=1, beta:channel=0|by alpha: gamma*x*sech2(alpha*x)",
}


@pytest.mark.parametrize("thing", SHOWN)
def test_show(thing: str, command: Command) -> None:
    status, out, _ = command("show", thing)
    assert status == 0
    for shown in SHOWN[thing].split("|"):
        head, _, words = shown.partition(": ")
        lines = (line for line in out.splitlines() if line.strip().startswith(head))
        assert shown in out or any(words in line for line in lines), shown


SINGLE = float(np.float32(3e38))


def odd(shipped: str, **changes: Any) -> dict[str, Any]:
    return fits()[shipped] | {"name": "odd", **changes}


def own(expression: str) -> dict[str, Any]:
    return {"name": None, "expression": expression}


step = partial(odd, "tanh_fewbit3", bits=1, even=False, borders=[0.5], levels=[0.25, 1.0])
inverted = partial(odd, "gelu_inverted1")
ODD: dict[str, dict[str, Any]] = {
    "objective": step(method="relumix", options={"objective": "derivative"}),
    "as wide as may be": step(domain=[-1e30, 1e30]),
    "narrow": step(domain=[0.0, 1e-300]),
    "border outside": step(borders=[SINGLE]),
    "levels": step(levels=[-SINGLE, SINGLE]),
    "errors": step(error=dict.fromkeys(("max", "objective", "primitive_max", "primitive_norm", "rms"), 1e308)),
    "weight of a point": step(weight="normal(0.1, 1e-9)"),
    "tiny weight": step(weight="1e-35"),
    "exact, huge": odd("tanh_output", activation=own("exp(exp(x**2))"), derivative="1e300*y"),
    "exact, nowhere": odd("tanh_output", activation=own("log(x - 100)"), derivative="y"),
}
for formula in ("log(x)", "exp(exp(exp(x)))", "1e30*x"):
    ODD[f"inverted, {formula}"] = inverted(activation=own(formula))
for domain in ([1e6, 2e6], [-2e6, -1e6], [50.0, 61.0], [-3e38, -1e37], [-1e-300, 1e-300], [0.0, 3e38]):
    ODD[f"inverted on {domain}"] = inverted(domain=domain)
for formula in ("log(x)", "x**300", "exp(exp(x))", "log(x - 100)"):
    ODD[f"fewbit of {formula}"] = step(activation=own(formula), options={})
for formula in ("1/x", "1e30*x**3", "exp(exp(x))", "log(x - 100)"):
    ODD[f"relumix of {formula}"] = step(method="relumix", activation=own(formula), options={})


@pytest.mark.parametrize("what", full(ODD, [*ODD][::2]))
def test_odd(what: str, command: Command) -> None:
    put("odd.json", json.dumps(ODD[what]))
    status, out, err = command("show odd.json")
    assert (status, err) == (0, "") and "\nodd " in out
    assert command("plot odd.json") == (0, "wrote odd.png\n", "")
    is_picture("odd.png", 0.002)


def drawn(text: str, **style: Any) -> bytes:
    figure = blank("png", (6, 1))
    figure.text(0.0, 0.5, text, **style)
    return save(figure, "png")


@pytest.mark.parametrize("text", ["$x^2$", "$\\frac$", "$", "a$b", "\\alpha", "$$", "x_1", "{}", "日本"])
def test_text_is_literal(text: str) -> None:
    """Drawn as matplotlib draws it without parsing."""
    assert drawn(literal(text)) == drawn(text, parse_math=False)


@pytest.mark.parametrize(("text", "shown"), [("a\nb", "a\\nb"), ("x" * 41, "x" * 37 + "..."), ("\0", "\\x00")])
def test_text_is_one_short_line(text: str, shown: str) -> None:
    assert literal(text) == shown


@pytest.mark.parametrize(("text", "shown"), [("gelu", (-3.25, 3.25)), ("x + 2*sin(x)**2", (-10.0, 10.0))])
def test_the_largest_error_is_drawn(text: str, shown: tuple[float, float]) -> None:
    assert _view(fewbit.fit(Activation.of(text), 3, "fitted")) == shown


def test_nothing_to_draw() -> None:
    assert "nothing to draw" in refused(draw, [])
    fit = from_json(json.dumps(step()))
    assert "format: expected png, svg or pdf, got 'jpeg'" in refused(draw, [fit], "jpeg")
