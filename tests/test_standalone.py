"""Standalone files: what is in them; that they run where fitact cannot be imported, and several side by side."""

from __future__ import annotations

import ast
import builtins
import copy
import gc
import hashlib
import importlib
import os
import pickle
import re
import subprocess
import symtable
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fitact.codegen import standalone
from fitact.codegen.generate import generate, plan, render, render_standalone
from fitact.errors import UsageError
from fitact.fitter.fit import AnyFit, read

from .conftest import ROOT
from .test_cli import put, record
from .test_codegen import fit as made_up

SHIPPED = sorted(path.stem for path in (ROOT / "generated" / "fits").glob("*.json"))
NAMES = [
    "gelu_fewbit3",
    "gelu_inverted1",
    "gelu_relumix2",
    "hardswish_inverted2",
    "quick_gelu_fewbit3",
    "silu_inverted_published",
    "softplus_exact",
    "tanh_fewbit3",
]
FORMULA = "x*isru(x) + squareplus(x)*relu(x) - logcosh(x)*sech2(x) + tsech2(x) + hypot1(x) + asinh(x)*exp(-x**2)"
# Its class is called like one of the runtime.
LAUNCH = made_up(FORMULA, "launch", bits=2)


def shipped(name: str) -> AnyFit:
    return read(ROOT / "generated" / "fits" / f"{name}.json")


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _modules() -> Iterator[None]:
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if name.startswith("standalone_"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the standalone files of `NAMES` and LAUNCH, and below it `package/launch.py`."""
    folder = tmp_path_factory.mktemp("files")
    fits = [*map(shipped, NAMES), LAUNCH]
    generate(plan(fits, alone=True), folder, prune=False, alone=True)
    generate(plan([LAUNCH]), folder / "package", prune=False)
    return folder


EACH = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in NAMES else pytest.mark.full) for name in SHIPPED],
)


# ---------------------------------------------------------------------------------------------------- the text


def runtime_part(text: str) -> str:
    """The sections of the runtime."""
    start = text.index("# ------")
    return text[start : text.index("# ------", text.index("\nif not hasattr(torch.ops."))]


@EACH
def test_the_text_is_that_of_the_runtime(name: str) -> None:
    """Line for line, but for the names that had to change and the namespace of the ops."""
    text = render_standalone(shipped(name))
    sources = standalone.runtime() | {standalone.OWN: standalone.Source.of(standalone.OWN, render(shipped(name)))}
    names = {new: old.name for old, new in standalone._names(sources).items()}
    modules = "|".join(standalone.runtime())
    known = {
        re.sub(rf"(?<![\w.])({modules})\.(?=\w)", "", line)
        for module in standalone.runtime()
        for line in (ROOT / "runtime" / f"{module}.py").read_text(encoding="utf-8").splitlines()
    }
    found, _, library = runtime_part(text).partition("\nif not hasattr(")
    assert len(library.splitlines()) < 5
    for line in found.splitlines():
        plain = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), line)
        plain = re.sub(r"fitact_[0-9a-f]{8}", "fitact", plain)
        assert plain in known or plain.startswith("#"), line


@EACH
def test_what_the_module_adds_is_that_of_the_package(name: str) -> None:
    own = render(shipped(name)).partition("\n__all__ = ")[2].partition("\n")[2].strip()
    own = own.replace("composed.in_float32", "in_float32").replace("composed.", "composed_")
    assert render_standalone(shipped(name)).endswith(f"\n\n\n{own}\n")


@EACH
def test_only_what_is_used(name: str) -> None:
    text = render_standalone(shipped(name))
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef) and name not in statement.name:
            assert len(re.findall(rf"\b{statement.name}\b", text)) > 1, statement.name
    assert not re.search(r"^\s*(from|import) (fitact|\.)", text, re.MULTILINE)


def test_kinds_that_are_not_used_are_not_there() -> None:
    text = render_standalone(shipped("gelu_fewbit3"))
    for absent in ("Exact", "Inverted", "Tabulated", "quotient", "sinh", "in_float32", "import math"):
        assert absent not in text
    assert "class Exact(" in render_standalone(shipped("softplus_exact"))


@EACH
def test_every_name_is_bound_once(name: str) -> None:
    check_names(render_standalone(shipped(name)))


def check_names(text: str) -> None:
    bound: list[str] = []
    for statement in ast.parse(text).body:
        match statement:
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases) if statement.col_offset == 0:
                bound += [alias.asname or alias.name for alias in aliases]
            case ast.FunctionDef(name=own) | ast.ClassDef(name=own) | ast.Assign(targets=[ast.Name(id=own)]):
                bound.append(own)
            case ast.AnnAssign(target=ast.Name(id=own)):
                bound.append(own)
            case ast.Try():
                bound += ["tl", "jit", "constexpr", "HAS_TRITON", "_Language"]
    assert len(set(bound)) == len(bound)
    assert not {*bound} & {*dir(builtins)}

    def used(table: symtable.SymbolTable) -> set[str]:
        names = {one.get_name() for one in table.get_symbols() if one.is_global() or table.get_type() == "module"}
        return names.union(*map(used, table.get_children()))

    assert used(symtable.symtable(text, "file", "exec")) <= {*bound, *dir(builtins)}


@pytest.mark.parametrize("names", [NAMES[:2], pytest.param(SHIPPED, marks=pytest.mark.full)], ids=["some", "all"])
def test_lint_and_format(names: list[str], tmp_path: Path) -> None:
    """As the runtime and generated modules; if a new name makes a line of the runtime too long, break it there."""
    generate(plan([*map(shipped, names), LAUNCH], alone=True), tmp_path, prune=False, alone=True)
    config = ["--config", ROOT / "pyproject.toml"]
    for command in (["check", *config, "--extend-ignore=A001,D,RET505"], ["format", "--diff", *config]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", tmp_path],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(names) + 1} files already formatted" in done.stderr


@EACH
def test_header(name: str) -> None:
    fit = shipped(name)
    text = render_standalone(fit)
    assert text.startswith(f"# Generated by `fitact codegen --standalone` from the fit {name}.\n")
    head, _, rest = text.partition('"""')
    assert f"# fit    sha256 {fit.digest()}\n" in head
    assert (ROOT / "LICENSE").read_text().splitlines()[2] in head
    assert rest.partition('"""')[0] == render(fit).split('"""')[1]


def test_the_namespace_is_a_hash_of_the_text() -> None:
    spaces = set()
    for name in NAMES:
        text = render_standalone(shipped(name))
        assert text == render_standalone(shipped(name))
        (space,) = set(re.findall(r"fitact_[0-9a-f]{8}", text))
        assert not re.search(r"fitact::|ops\.fitact\b|\"fitact\"", text)
        draft = text.replace(space, standalone.PLACEHOLDER)
        assert space == f"fitact_{hashlib.sha256(draft.encode()).hexdigest()[:8]}"
        spaces.add(space)
    assert len(spaces) == len(NAMES)


def test_what_the_runtime_does_when_it_is_imported() -> None:
    """Beside what is followed, it makes its ops, for which the template has words of its own."""
    sources = standalone.runtime()
    ops = sources["ops"]
    needed, _, _ = standalone._needed(
        {**sources, standalone.OWN: standalone.Source.of(standalone.OWN, render(shipped("gelu_fewbit3")))}
    )
    (left,) = (statement for i, statement in enumerate(ops.statements) if i not in needed["ops"])
    assert ast.unparse(left) == "_library = _define()"
    for source in sources.values():
        kinds = (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.Try)
        assert all(isinstance(statement, kinds) for statement in source.statements), source.module


def test_modules_come_after_those_they_use() -> None:
    sources = standalone.runtime()
    assert {"language", "functions", "kernels", "eager", "composed", "registry", "ops"} <= sources.keys()
    assert "memory" not in sources
    before: set[str] = set()
    for module, source in sources.items():
        assert {*source.uses} <= before
        before.add(module)
    assert [*sources][:3] == ["language", "functions", "kernels"]
    assert [*sources][-1] == "ops"


SCOPES = {
    "a": {"a"},
    "a.b.c": {"a"},
    "def f(b=a) -> c:\n    d = b\n    return d + e": {"a", "c", "e"},
    "def f():\n    global a\n    a = b": {"a", "b"},
    "def f(a):\n    def g(b):\n        return a, b, c\n    return g": {"c"},
    "class A(b):\n    c = d\n    e: c\n    def f(self, g=c):\n        return c, self": {"b", "d", "c"},
    "@a\nclass B:\n    @c\n    def d(self): pass\n    @d.setter\n    def e(self): pass": {"a", "c"},
    "x = [a for a in b if a > c]": {"x", "b", "c"},
    "x = [a for a in a]": {"x", "a"},
    "x = {a: b for a, b in c for d in b}": {"x", "c"},
    "x = lambda a, *b, c=d: (a, b, c, e)": {"x", "d", "e"},
    "def f():\n    try:\n        pass\n    except A as b:\n        raise b": {"A"},
    "def f(a):\n    match a:\n        case {'x': [b, *c], **d}:\n            return b, c": set(),
    "def f():\n    with a as b, c:\n        for d, e in b:\n            del d": {"a", "c"},
    "def f():\n    import a.b as c\n    from d import e\n    return a, c, e": {"a"},
    "def f():\n    import a.b\n    return a": set(),
}


@pytest.mark.parametrize("text", SCOPES)
def test_scopes(text: str) -> None:
    (statement,) = ast.parse(text).body
    found = {
        node.id if isinstance(node, ast.Name) else ast.unparse(node.value)
        for node, _ in standalone._globals(statement)
    }
    assert found == SCOPES[text]


# ---------------------------------------------------------------------------------------------- names of fits


@pytest.mark.parametrize(
    "name", ["find", "launch", "TILE", "tiles_of", "in_float32", "library", "chunks", "encoded"]
)
def test_a_fit_may_be_called_like_what_is_in_the_runtime(name: str, tmp_path: Path) -> None:
    files = plan([made_up("x*logcosh(x)", one, bits=2) for one in (name, "plain")], alone=True)
    generate(files, tmp_path, prune=False, alone=True)
    found = []
    for one in (name, "plain"):
        check_names(files[f"{one}.py"])
        module = load(tmp_path / f"{one}.py", f"standalone_{one}")
        x = torch.linspace(-3, 3, 99, requires_grad=True)
        y = getattr(module, one)(x)
        y.sum().backward()
        found.append((y, x.grad))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("os", "os"),
        ("cache", "cache"),
        ("range", "range"),
        ("hasattr", "hasattr"),
        ("any", "Any"),
        ("tensor", "Tensor"),
    ],
)
def test_names_that_would_hide_others_are_refused(name: str, taken: str) -> None:
    render(made_up("tanh", name))
    with pytest.raises(
        UsageError, match=f"^name: standalone modules use '{taken}' themselves; make '{name}' under"
    ):
        render_standalone(made_up("tanh", name))


# ---------------------------------------------------------------------------------------------------- running

# Runs standalone files where fitact cannot be imported, then what the package has, and compares.
SCRIPT = '''
import contextlib, importlib, importlib.util, sys
from pathlib import Path
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

folder, mode, *names = sys.argv[1:]
if mode == "without triton":
    sys.modules["triton"] = None


class Blocked:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "fitact":
            raise ImportError(name)


sys.meta_path.insert(0, Blocked())
try:
    import fitact
except ImportError:
    pass
else:
    raise AssertionError("fitact can be imported")


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def observe(module, name):
    """Everything that can be told apart: values, gradients, dtypes, strides, and the bytes kept."""
    function, kind = getattr(module, name), getattr(module, module.__all__[0])
    quick = mode == "interpreted"
    generator = torch.Generator().manual_seed(0)
    size = (1 if quick else 2, 9001)
    x = 3 * torch.randn(size, generator=generator)
    x[0, :8] = torch.tensor([0.0, -0.0, 1e-30, 20.0, -20.0, torch.inf, -torch.inf, torch.nan])
    dy = torch.randn(size, generator=generator)
    found = {}

    def note(what, function, x, dy):
        kept = []
        leaf = x.detach().requires_grad_()
        with saved_tensors_hooks(lambda t: kept.append(t.untyped_storage().nbytes()) or t, lambda t: t):
            y = function(leaf)
        y.backward(dy.to(y.dtype))
        found[what] = (bits(y), bits(leaf.grad), y.dtype, leaf.grad.dtype, y.stride(), kept)

    def bits(t):
        return t.detach().contiguous().view(torch.uint8)

    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    for dtype in dtypes[:2] if quick else dtypes:
        note((dtype, "dense"), function, x.to(dtype), dy)
        if not quick:
            note((dtype, "small"), function, x[:, :10].to(dtype), dy[:, :10])
            note((dtype, "transposed"), function, x.to(dtype).t(), dy.t())
            note((dtype, "strided"), function, x.to(dtype)[:, ::2], dy[:, ::2])
    if not quick:
        with torch.autocast("cpu", torch.bfloat16):
            note("autocast", kind(), x, dy)
        for reentrant in (False, True):
            note(("checkpoint", reentrant), lambda x: checkpoint(kind(), x, use_reentrant=reentrant), x, dy)
        note("vmap", torch.vmap(function), x, dy)
        found["func.grad"] = [bits(torch.func.grad(lambda x: function(x).sum())(x))]
        try:
            leaf = x.detach().requires_grad_()
            (dx,) = torch.autograd.grad(function(leaf).sum(), leaf, create_graph=True)
            torch.autograd.grad(dx.sum(), leaf)
        except RuntimeError as error:
            found["twice"] = [str(error)]
    return found


alone = {name: load(Path(folder, f"{name}.py"), f"alone_{name}") for name in names}
launched = []
for name, module in alone.items():
    if mode == "interpreted":
        class Launch(vars(module).get("OpsLaunch", module.Launch)):
            def __call__(self, kernel, *tensors):
                launched.append(kernel)
                super().__call__(kernel, *tensors)
        setattr(module, "OpsLaunch" if hasattr(module, "OpsLaunch") else "Launch", Launch)
    assert module.HAS_TRITON == (mode != "without triton")
observed = {name: observe(module, name) for name, module in alone.items()}
assert "fitact" not in sys.modules
assert len(launched) == (4 * len(names) if mode == "interpreted" else 0), launched
del sys.meta_path[0]
for name in names:
    if name == "launch":
        packaged = load(Path(folder, "package", "launch.py"), "packaged_launch")
    else:
        packaged = importlib.import_module(f"fitact.generated.{name}")
    expected = observe(packaged, name)
    assert expected.keys() == observed[name].keys()
    for what, one in expected.items():
        for a, b in zip(one, observed[name][what], strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, (name, what)
print("compared", len(names))
'''


def run_script(script: str, *arguments: str, folder: Path, **environment: str) -> str:
    """Run a script in a process that ignores the current folder and PYTHONPATH; return what it prints."""
    (folder / "elsewhere").mkdir(exist_ok=True)
    path = folder / "elsewhere" / "script.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error::UserWarning", path, folder, *arguments],
        cwd=folder / "elsewhere",
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("as it is", [*NAMES, "launch"]),
        ("without triton", ["gelu_inverted1", "launch"]),
        pytest.param("without triton", [*NAMES, "launch"], marks=pytest.mark.full),
    ],
)
def test_without_fitact(mode: str, names: list[str], folder: Path) -> None:
    assert run_script(SCRIPT, mode, *names, folder=folder) == f"compared {len(names)}\n"


@pytest.mark.parametrize(
    "names",
    [["gelu_fewbit3", "gelu_inverted1"], pytest.param([*NAMES, "launch"], marks=pytest.mark.full)],
    ids=["some", "all"],
)
def test_interpreted_without_fitact(names: list[str], folder: Path) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux only")
    found = run_script(SCRIPT, "interpreted", *names, folder=folder, TRITON_INTERPRET="1")
    assert found == f"compared {len(names)}\n"


COMPILED = """
import importlib.util, sys
from pathlib import Path
import torch

sys.modules["fitact"] = None  # cannot be imported
folder, backend, *names = sys.argv[1:]
for name in names:
    spec = importlib.util.spec_from_file_location(name, Path(folder, f"{name}.py"))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name)
    weight = torch.randn(5000, 4)

    def model(x):
        return function(2 * x) @ weight

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for size in (3, 2):
        x = torch.randn(size, 5000, requires_grad=True)
        expected, found = (one(x) for one in (model, compiled))
        torch.testing.assert_close(found, expected)
        a, b = (torch.autograd.grad(y.square().sum(), x)[0] for y in (expected, found))
        torch.testing.assert_close(a, b)
print("compiled", len(names))
"""


@pytest.mark.parametrize(
    ("backend", "names"),
    [
        ("aot_eager", ["gelu_fewbit3", "gelu_inverted1"]),
        pytest.param("aot_eager", [*NAMES, "launch"], marks=pytest.mark.full),
        pytest.param("inductor", ["gelu_fewbit3", "gelu_inverted1", "launch"], marks=pytest.mark.full),
    ],
)
def test_compiled_without_fitact(backend: str, names: list[str], folder: Path) -> None:
    assert run_script(COMPILED, backend, *names, folder=folder) == f"compiled {len(names)}\n"


def passes(module: ModuleType, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and gradients at some points."""
    x = torch.linspace(-5, 5, 9001, requires_grad=True)
    y = getattr(module, name)(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    return y.detach(), dx


def packaged(name: str) -> ModuleType:
    return importlib.import_module(f"fitact.generated.{name}")


def test_several_in_one_process(folder: Path) -> None:
    """The same file under two names, the package, and another file; and the first copy may go."""
    once, again, other = (
        load(folder / f"{name}.py", f"standalone_{i}")
        for i, name in enumerate(["gelu_fewbit3", "gelu_fewbit3", "softplus_exact"])
    )
    expected = passes(packaged("gelu_fewbit3"), "gelu_fewbit3")
    for module in (once, again):
        assert all(map(torch.equal, passes(module, "gelu_fewbit3"), expected))
    assert all(
        map(torch.equal, passes(other, "softplus_exact"), passes(packaged("softplus_exact"), "softplus_exact"))
    )
    assert once._registry is not again._registry
    assert once.KEY == again.KEY == packaged("gelu_fewbit3").KEY
    del sys.modules["standalone_0"], once, module
    gc.collect()
    assert all(map(torch.equal, passes(again, "gelu_fewbit3"), expected))
    again.__spec__.loader.exec_module(again)  # as importlib.reload does
    gc.collect()
    assert all(map(torch.equal, passes(again, "gelu_fewbit3"), expected))


@pytest.mark.parametrize("name", ["gelu_fewbit3", "gelu_inverted1", "launch"])
def test_modules_are_copied_and_pickled(name: str, folder: Path) -> None:
    module = load(folder / f"{name}.py", f"standalone_{name}")
    first = getattr(module, module.__all__[0])()
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), first)
    x = torch.randn(2, 3)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin[1]) is type(first)
        assert torch.equal(twin(x), model(x))
    assert not first.state_dict()
    assert module.__all__ == sorted([type(first).__name__, name])


# The instructions of a kernel, without the places in the source that they come from.
def instructions(module: ModuleType, kernel: str, dtype: str) -> list[str]:
    from triton import compile as build
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(module, kernel)
    signature = {name: {"codes": "*u8", "n": "i64"}.get(name, f"*{dtype}") for name in function.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = ASTSource(fn=function, signature=signature, constexprs={}, attrs=aligned)
    made = build(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert made.asm["cubin"]
    lines = made.asm["ptx"].partition("\n\t.section")[0].splitlines()
    return [line.partition("//")[0].rstrip() for line in lines if not re.match(r"\s*\.(loc|file)\b", line)]


QUICK = {("gelu_fewbit3", "bf16"), ("gelu_inverted1", "fp16"), ("softplus_exact", "fp32")}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[] if (name, dtype) in QUICK else pytest.mark.full)
        for name in [*NAMES, "launch"]
        for dtype in ("bf16", "fp16", "fp32")
    ],
)
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_kernels_compile_to_the_same(name: str, dtype: str, pass_: str, folder: Path) -> None:
    """Ahead of time for sm_90, to the instructions that the package's compile to."""
    pytest.importorskip("triton", reason="Triton is for Linux only")
    path = folder / "package" / "launch.py"
    package = load(path, "standalone_packaged") if name == "launch" else packaged(name)
    alone = load(folder / f"{name}.py", f"standalone_{name}")
    found = instructions(alone, f"{name}_{pass_}", dtype)
    assert len(found) > 100
    assert found == instructions(package, f"{name}_{pass_}", dtype)


# ------------------------------------------------------------------------------------------- the command line

Command = Callable[[str], tuple[int, str, str]]
FITS = Path("generated/fits")


@pytest.fixture
def two(command: Command) -> Command:
    """The command line in a folder with two fits."""
    put(FITS / "one.json", record("one"))
    put(FITS / "two.json", record("two", "sigmoid"))
    return command


def test_command(two: Command) -> None:
    assert two("codegen --standalone") == (0, "wrote standalone/one.py\nwrote standalone/two.py\n", "")
    assert two("codegen --standalone") == (0, "standalone: nothing to do, 2 modules are up to date\n", "")
    assert two("codegen --standalone --check") == (0, "standalone: 2 modules are what their fits generate\n", "")
    assert sorted(path.name for path in Path("standalone").iterdir()) == ["one.py", "two.py"]
    assert Path("standalone/one.py").read_text(encoding="utf-8") == render_standalone(read(FITS / "one.json"))
    assert not list(Path("generated").glob("*.py"))


def test_command_with_a_fit_and_a_folder(two: Command) -> None:
    put("model/one.py", "")
    put("model/train.py", "import one\n")
    assert two("codegen generated/fits/one.json --standalone --out model") == (0, "wrote model/one.py\n", "")
    put(FITS / "one.json", record("one", "sigmoid"))
    assert two("codegen generated/fits/two.json --standalone --out model") == (0, "wrote model/two.py\n", "")
    (FITS / "two.json").unlink()
    status, out, err = two("codegen --standalone --out model --check")
    assert (status, err) == (
        1,
        "fitact: model: differs from what its fits generate; run fitact codegen --standalone\n",
    )
    assert "-x = tanh" not in out
    assert "--- model/one.py\n+++ model/one.py (as its fit generates it)\n" in out
    assert "--- model/two.py (no fit generates it)\n" in out
    assert "train.py" not in out
    assert two("codegen --standalone --out model") == (0, "wrote model/one.py\nremoved model/two.py\n", "")
    assert Path("model/train.py").read_text() == "import one\n"
    assert two("codegen --standalone --out model --check")[0] == 0


def test_check_writes_nothing(two: Command) -> None:
    status, out, _ = two("codegen --standalone --check")
    assert status == 1
    assert "--- standalone/one.py (missing)\n" in out
    assert not Path("standalone").exists()


@pytest.mark.parametrize("text", ["import os\n", " # Generated by `fitact codegen --standalone`\n"])
def test_foreign_files_are_not_written_over(text: str, two: Command) -> None:
    put("standalone/two.py", text)
    status, out, err = two("codegen --standalone")
    assert (status, out) == (2, "")
    assert err.startswith(
        "fitact: standalone/two.py: fitact codegen --standalone did not generate this file; move"
    )
    assert not Path("standalone/one.py").exists()
    assert Path("standalone/two.py").read_text() == text


def test_the_two_kinds_leave_each_other_alone(two: Command) -> None:
    """Neither is written over the other, nor removed with it."""
    assert two("codegen")[0] == two("codegen --standalone")[0] == 0
    before = {path: path.read_bytes() for path in Path().rglob("*.py")}
    assert (
        "generated/one.py: fitact codegen --standalone did not" in two("codegen --standalone --out generated")[2]
    )
    assert "standalone/one.py: fitact did not generate" in two("codegen --out standalone")[2]
    put(FITS / "three.json", record("three"))
    (FITS / "one.json").unlink()
    (FITS / "two.json").unlink()
    assert two("codegen --standalone --out generated") == (0, "wrote generated/three.py\n", "")
    assert before == {path: path.read_bytes() for path in Path().rglob("*.py") if path.name != "three.py"}


def test_a_name_that_is_refused(command: Command) -> None:
    put("range.json", record("range"))
    status, out, err = command("codegen range.json --standalone")
    assert (status, out) == (2, "")
    assert err == "fitact: name: standalone modules use 'range' themselves; make 'range' under another --name\n"
    assert command("codegen range.json")[0] == 0
