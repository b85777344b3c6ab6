"""Finds shipped activations by their keys, so that a loaded program need not import them itself."""

from __future__ import annotations

from importlib import import_module
from importlib.resources import files

from .kernels.registry import sources


def import_shipped(key: str) -> None:
    """Import the shipped module that a key belongs to, if there is one.

    Raises:
        RuntimeError: the module has another key.

    """
    name = key.rpartition("-")[0]
    if not name.isidentifier() or not files("fitact.generated").joinpath("fits", f"{name}.json").is_file():
        return
    module = import_module(f"fitact.generated.{name}")
    if key != module._KEY:
        raise RuntimeError(
            f"expected the shipped {name} to have the key {key!r}, but it has {module._KEY!r}: use the fitact "
            "that the program was made with, or export the model again"
        )


sources.append(import_shipped)
