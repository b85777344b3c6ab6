"""What every shipped kernel takes, compiled by several Tritons: registers, spills, widest accesses. Needs no GPU.

All kernels of generated/, of block codes and of norms, in bfloat16. This compiles them by the Triton that Python
finds, and puts the numbers beside those of other Tritons in benchmarks/results/resources.json. By
PYTHONPATH=build/triton that is the oldest supported one, which `make test-triton` installs there.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import triton

from fitact.runtime.kernels import find
from fitact.runtime.saving import BITS
from tests.support.compiled import TARGETS, BlockKernel, GateKernel, Kernel, LearnedKernel, NormKernel, code

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "resources.json"
NORMS = (768, 4096, 16384)  # elements of a row, for one that is cut into blocks of each kind


def kernels() -> Iterator[tuple[str, Any]]:
    """Yield the shipped kernels with their names."""
    for file in sorted((ROOT / "generated" / "fits").glob("*.json")):
        name, method = file.stem, json.loads(file.read_text())["method"]
        own = find(importlib.import_module(f"fitact.generated.{name}")._KEY)
        if method.startswith("learned"):
            wide = any(number.channel for number in own.numbers)
            for pass_, place in product(("forward", "backward"), ("last", "image") if wide else ("one",)):
                yield f"{name} {pass_} {place}", LearnedKernel(pass_, own, place)
        else:
            kind = GateKernel if method.startswith("gate") else Kernel
            for pass_ in ("forward", "backward"):
                yield f"{name} {pass_}", kind(pass_, own)
    for bits, pass_ in product(BITS, ("encode", "decode")):
        yield f"blocks{bits} {pass_}", BlockKernel(bits, pass_)
    for kind, columns, pass_ in product(("layer", "rms"), NORMS, ("forward", "backward")):
        yield f"{kind}_norm {pass_} {columns}", NormKernel(kind, pass_, columns)


def main() -> None:
    """Measure, and write the numbers."""
    rows: dict[str, dict[str, list[int]]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, kernel in kernels():
        for target in TARGETS:
            *numbers, _ = code(kernel.compile("bf16", target).asm)
            rows.setdefault(f"{name} {target}", {})[triton.__version__] = numbers
    write(rows)


def write(rows: dict[str, dict[str, list[int]]]) -> None:
    """Write a line for each kernel."""
    lines = (f"{json.dumps(name)}: {json.dumps(row, sort_keys=True)}" for name, row in sorted(rows.items()))
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
