"""Imports of the installed package run downwards, without circles; and no folder outgrows its room."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.package import modules

ROOT = Path(__file__).parents[2]
# The rooms from the bottom up: a module imports from its own room and from those before it.
FRONT = ("errors", "arguments", "text", "interrupts", "files", "pictures", "operators")
RUNTIME = ("torch_internals", "shipped")
MODELS = ("restore", "modes", "norms", "saving.blocks", "measure", "saving", "compile", "wrappers")
CODEGEN = ("dialects", "printers", "contexts", "safety", "generate", "bundle")
FITTER = ("expr", "analysis", "numerics", "records", "methods", "plot")
ORDER = [
    "fitact.runtime.kernels",  # imports nothing else of the package: standalone folders have copies of it
    *(f"fitact.{name}" for name in FRONT),
    *(f"fitact.fitter.{name}" for name in FITTER),
    *(f"fitact.codegen.{name}" for name in CODEGEN),
    *(f"fitact.runtime.{name}" for name in RUNTIME),
    "fitact.runtime",  # the façade: what generated modules import
    "fitact.generated",
    *(f"fitact.runtime.{name}" for name in MODELS),
    "fitact.api",
    "fitact.runtime.choose",
    "fitact.calibration",
    "fitact.planning",
    "fitact",
    "fitact.cli",
    "fitact.__main__",
]
# Packages whose own file is a room, apart from the modules in them.
PACKAGES = ("fitact", "fitact.fitter", "fitact.codegen", "fitact.runtime")


def room(module: str) -> str:
    """Return the room of a module: the longest name in ORDER that it is in, a package itself being a room."""
    if module in PACKAGES:
        return module
    return max((name for name in ORDER if f"{module}.".startswith(f"{name}.")), key=len)


MODULES = {name: path for name, path in modules().items() if not name.startswith("fitact.generated.")}


def imported(module: str, *, at_import: bool) -> Iterator[str]:
    """Yield the modules of the package that one imports; those for type checkers alone count too."""
    path = MODULES[module]
    parts = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    outside = {
        node for function in ast.walk(tree) if isinstance(function, ast.FunctionDef) for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or (at_import and node in outside):
            continue
        base = parts[: len(parts) - node.level + 1] if node.level else []
        name = ".".join([*base, *filter(None, [node.module])])
        for alias in node.names:
            whole = f"{name}.{alias.name}"
            found = whole if whole in MODULES else name
            if found in MODULES and found != module:
                yield found


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_downwards(module: str) -> None:
    """Also those in functions."""
    for other in imported(module, at_import=False):
        if ORDER.index(room(other)) > ORDER.index(room(module)):
            pytest.fail(f"{module} imports {other}, which stands above it")


def test_no_circles() -> None:
    graph = {module: set(imported(module, at_import=True)) for module in MODULES}
    while leaves := {module for module, others in graph.items() if not others & graph.keys() - {module}}:
        graph = {module: others for module, others in graph.items() if module not in leaves}
    assert not graph
