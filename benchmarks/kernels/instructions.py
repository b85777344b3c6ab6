"""What the compiled kernels cost: registers, spills, widths of accesses, instructions an element. Needs no GPU.

One module of each method and width; a gate; block codes; and, to compare gradients from the output with, two
kernels that evaluate f′ from the input. Run by `make bench`; writes benchmarks/results/instructions.json, which
the tests compare with. What is counted, and how: tests/support/instructions.py.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import triton

from fitact.runtime.kernels import backward_tile, erfc, jit, tl
from fitact.runtime.saving import BITS
from tests.support.instructions import DTYPES, TARGETS, BlockKernel, GateKernel, Kernel, measure

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "instructions.json"
MODULES = (
    "gelu_fewbit1",
    "gelu_fewbit2",
    "gelu_fewbit3",
    "gelu_fewbit4",
    "tanh_fewbit3",  # even
    "quick_gelu_fewbit3",  # a formula
    "silu_fewbit3",
    "gelu_relumix2",
    "softplus_output",
    "relu2_output",
    "gelu_inverted1",
    "gelu_inverted2",
    "silu_inverted1",
    "silu_inverted2",
    "hardswish_inverted2",
    "gelu_inverted_published",
    "silu_inverted_published",
)


@jit
def gelu_derivative(x, code):
    """Return GELU's derivative."""
    return 0.5 * erfc(-0.7071067811865476 * x) + 0.3989422804014327 * x * tl.exp(-0.5 * x * x)


@jit
def silu_derivative(x, code):
    """Return SiLU's derivative."""
    s = tl.sigmoid(x)
    return s + x * s * (1.0 - s)


@jit
def gelu_from_input_backward(dy, x, dx, n):
    """Write dx = dy · f′(x) of GELU."""
    backward_tile(dy, x, None, dx, n, gelu_derivative, bits=0)


@jit
def silu_from_input_backward(dy, x, dx, n):
    """Write dx = dy · f′(x) of SiLU."""
    backward_tile(dy, x, None, dx, n, silu_derivative, bits=0)


_WITHOUT_CODES = Kernel.of("relu2_output", "backward").registered  # the references are launched as its kernels are
KERNELS: tuple[Kernel | GateKernel | BlockKernel, ...] = (
    *(Kernel.of(module, pass_) for module in MODULES for pass_ in ("forward", "backward")),
    *(GateKernel.of("geglu_recompute", pass_) for pass_ in ("forward", "backward")),
    *(BlockKernel(bits, pass_) for bits in BITS for pass_ in ("encode", "decode")),
    Kernel("gelu_from_input", "backward", _WITHOUT_CODES, gelu_from_input_backward),
    Kernel("silu_from_input", "backward", _WITHOUT_CODES, silu_from_input_backward),
)
CASES = {f"{kernel.module} {kernel.pass_} {dtype}": (kernel, dtype) for kernel, dtype in product(KERNELS, DTYPES)}


def main() -> None:
    """Measure, print a table, write the numbers."""
    rows = {
        f"{name} {target}": cost.row()
        for target in TARGETS
        for name, cost in zip(CASES, measure(list(CASES.values()), target), strict=True)
    }
    columns = list(next(iter(rows.values())))
    print(f"{'':50}", *(f"{column:>12}" for column in columns))
    for name, row in rows.items():
        print(f"{name:50}", *(f"{row[column]:12g}" for column in columns))
    record = {"triton": triton.__version__, "kernels": rows}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
