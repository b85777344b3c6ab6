"""A folder of the package imports only folders below it, and of these only what their `__init__` exports.

Private parts of PyTorch are used in two files, and do there what their names say.
"""

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fitact.runtime import torch_internals
from fitact.runtime.kernels import autocast_dtype
from tests.support.package import modules

# From the bottom up. What is no folder is a file that lies beside folders.
ORDER = [
    "fitact.runtime.kernels.tiles",  # these two import nothing else of the package: standalone folders have copies
    "fitact.runtime.kernels",
    "fitact.runtime",  # what generated modules import
    "fitact.generated",
    "fitact.base",
    *(f"fitact.fitter.{name}" for name in ("catalog", "files", "syntax", "expr", "analysis")),
    *(f"fitact.fitter.{name}" for name in ("numerics", "records", "methods", "plot")),
    "fitact.fitter",
    "fitact.codegen",
    *(f"fitact.runtime.{name}" for name in ("torch_internals", "shipped", "restore", "norms")),
    *(f"fitact.runtime.{name}" for name in ("saving", "compile", "measure", "choose")),
    *(f"fitact.{name}" for name in ("calibration", "planning", "integrations", "operators", "cli", "__main__")),
    "fitact",
]
TOWERS = ("fitact.runtime.", ("fitact.fitter.", "fitact.codegen."))  # neither imports of the other
MODULES = {name: path for name, path in modules().items() if not name.startswith("fitact.generated.")}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def folder(module: str) -> str:
    """Return the longest name in ORDER that a module is in; a package that has folders is one by itself."""
    return max((name for name in ORDER if f"{module}.".startswith(f"{name}.")), key=len)


def imported(module: str) -> Iterator[tuple[str, str]]:
    """Yield the imports from other folders, also those in functions: the module named, and the name of it."""
    parts = module.split(".") if MODULES[module].name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("fitact") for alias in node.names)
        if not isinstance(node, ast.ImportFrom):
            continue
        base = parts[: len(parts) - node.level + 1] if node.level else []
        source = ".".join([*base, *filter(None, [node.module])])
        for alias in node.names:
            whole = f"{source}.{alias.name}"
            if source in MODULES and folder(whole if whole in ORDER else source) != folder(module):
                yield (source, alias.name)


def bound(tree: ast.Module) -> set[str]:
    """Names that a file gives to functions, classes and variables."""
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    defined = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef))
    return {node.id for node in stored} | {node.name for node in defined}


def exports(package: str) -> set[str]:
    """Return the names that a folder's `__init__` imports as themselves, and what it or a file defines."""
    imports = (node for node in ast.walk(TREES[package]) if isinstance(node, ast.ImportFrom))
    again = {alias.asname for node in imports for alias in node.names if alias.asname == alias.name}
    return {name for name in bound(TREES[package]) | again if not name.startswith("_")}


@pytest.mark.parametrize("module", MODULES)
def test_imports(module: str) -> None:
    for source, name in imported(module):
        whole = f"{source}.{name}"
        other = whole if whole in ORDER else source
        assert ORDER.index(folder(other)) < ORDER.index(folder(module)), f"{other} is above {module}"
        for tower, another in (TOWERS, TOWERS[::-1]):
            assert not (module.startswith(tower) and f"{other}.".startswith(another)), f"{module} imports {other}"
        assert other in ORDER, f"{module} imports from inside a folder: {source}"
        assert other == whole or name == "*" or name in exports(other), f"{whole} is not exported"


HOMES = {"fitact.runtime.torch_internals", "fitact.runtime.kernels.internals"}
WITHOUT_TORCH = ("fitact.fitter", "fitact.codegen")  # where private names may be SymPy's
OTHERS = "os._exit", "module._KEY"  # which Python documents; of generated modules
PRIVATE = re.compile(r"_(?!_)\w+")
OF_TORCH = (torch, torch.Tensor, torch.UntypedStorage, nn.Module(), torch.compile(nn.Identity()))


def private_parts(text: str) -> Iterator[str]:
    """Yield each place of a text that uses a private part of PyTorch, or of anything that may be PyTorch's."""
    tree = ast.parse(text)
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    stored = (node for node in attributes if isinstance(node.ctx, ast.Store))
    own = bound(tree) | {node.attr for node in stored if ast.unparse(node.value) == "self"}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                paths = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                paths = [f"{module}.{alias.name}" for alias in names]
            case ast.Constant(value=str(value)) if PRIVATE.fullmatch(value):
                paths = [f"torch.{value}"] if any(hasattr(each, value) for each in OF_TORCH) else []
            case ast.Constant(value=str(value)) if re.fullmatch(r"[\w.]+", value):
                paths = [value]
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=attr) if attr in own:
                continue
            case ast.Attribute() if ast.unparse(node) in OTHERS:
                continue
            case ast.Attribute(attr=attr):
                paths = [f"torch.{attr}"]
            case _:
                continue
        for path in paths:
            root, *parts = path.split(".")
            if root == "torch" and any(map(PRIVATE.fullmatch, parts)):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_private_parts_are_seen() -> None:
    lines = "import torch._dynamo", "x = tensor._version", "x = vars(module)['_forward_hooks']"
    assert [len([*private_parts(line)]) for line in lines] == [1, 1, 1]
    assert not [*private_parts("from .torch_internals import storage_id")]


@pytest.mark.parametrize("name", sorted(set(modules()) - HOMES))
def test_no_private_parts_elsewhere(name: str) -> None:
    assert set(modules()) > HOMES
    text = modules()[name].read_text(encoding="utf-8")
    if name.startswith(WITHOUT_TORCH):
        assert not re.search(r"^\s*(import|from) torch\b", text, re.MULTILINE)
    else:
        assert not [*private_parts(text)]


@pytest.mark.parametrize("mode", [nullcontext, torch_internals.FakeTensorMode])
def test_memory_that_nothing_else_refers_to(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    with mode():
        x = torch.randn(4, 4)
        assert torch_internals.is_alone(x)
        view = x[1:]
        assert not torch_internals.is_alone(x) and not torch_internals.is_alone(view)
        del view
        assert torch_internals.is_alone(x)


def test_plain_models_run_uncompiled_and_no_part_twice() -> None:
    class Counting(nn.Linear):
        runs = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Counting.runs += 1
            return super().forward(x)

    model = nn.Sequential(torch.compile(nn.ReLU()), checkpoint_wrapper(Counting(2, 2)), nn.ReLU())
    model[2].compile()
    model[2].gradient_checkpointing = True
    assert {*map(torch_internals.plain_path, dict(model.named_modules()))} == {"", "0", "1", "2"}
    model[1](torch.ones(2, 2)).sum().backward()
    assert Counting.runs == 2
    torch_internals.plain(model)
    assert not any(map(torch_internals.is_compiled, model.modules()))
    assert model[2].gradient_checkpointing is False
    model(torch.ones(2, 2)).sum().backward()
    assert Counting.runs == 3


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_dtype_of_autocast_is_traced(device: str, autocast: bool) -> None:
    """Before 2.13 the compiler cannot trace the question whether a device has autocast."""

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(autocast_dtype(x))

    x = torch.ones(4, device=device)
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = torch.compile(cast, fullgraph=True, backend="eager")(x)
    assert y.dtype == (torch.bfloat16 if autocast and device == "cpu" else torch.float32)
