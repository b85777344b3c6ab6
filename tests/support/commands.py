"""What tests of the command line share: a model, small fits made by hand, files, and what lies in a folder."""

import json
from pathlib import Path

from fitact.fitter.files import FIT

FITS = Path("generated/fits")
MODEL = """
from collections import OrderedDict
import torch
from torch import nn

def tiny(batch=1, seq=8):
    layers = {"up": nn.Linear(8, 8), "act": nn.GELU(), "down": nn.Linear(8, 8)}
    return nn.Sequential(OrderedDict(layers)), torch.randn(batch, seq, 8)
"""


def record(name: str, activation: str = "tanh", **changes: object) -> str:
    """Return a small fit's JSON, made by hand."""
    return json.dumps(
        {
            "schema": FIT.schema,
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
    """Write a file, and the folders that it is in."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


def tree(folder: Path = Path()) -> dict[str, bytes | None]:
    """Return every file and folder below a folder, files with their bytes; without caches."""
    paths = [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def files() -> list[str]:
    """Return the names of the files below the current folder."""
    return [path for path, content in tree().items() if content is not None]
