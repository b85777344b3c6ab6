"""The files of the package, also where they are installed live; and other files as modules."""

import importlib.util
import pkgutil
import sys
from functools import cache
from pathlib import Path
from typing import Any


def load(path: Path, name: str) -> Any:
    """Import a file, or the folder of a module, under a name, where compilers and pickles look for it."""
    spec = importlib.util.spec_from_file_location(name, path / "__init__.py" if path.is_dir() else path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOPS = ("fitact", "fitact.base", "fitact.codegen", "fitact.fitter", "fitact.generated", "fitact.runtime")


@cache
def modules() -> dict[str, Path]:
    """Return the file of each module; in a live install the packages in TOPS lie in different folders."""
    names = dict.fromkeys(TOPS)
    for top in TOPS:
        names |= dict.fromkeys(each.name for each in pkgutil.walk_packages(_spec(top)[1], f"{top}."))
    return {name: Path(_spec(name)[0]) for name in names}


def _spec(module: str) -> tuple[str, list[str]]:
    spec = importlib.util.find_spec(module)
    return spec.origin, list(spec.submodule_search_locations or ())
