"""A folder of the package imports only folders below it, and of these only what their `__init__` exports."""

import ast
from collections.abc import Iterator

import pytest

from tests.support.package import modules

# From the bottom up. What is no folder is a file that lies beside folders.
ORDER = [
    "fitact.runtime.kernels",  # imports nothing else of the package: standalone folders have copies of it
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


def exports(package: str) -> set[str]:
    """Return the names that a folder's `__init__` imports as themselves, and what it or a file defines."""
    names = set()
    for node in ast.walk(TREES[package]):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname for alias in node.names if alias.asname == alias.name}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return {name for name in names if not name.startswith("_")}


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
