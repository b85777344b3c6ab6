"""A model of a GPU: which limit binds each compiled kernel. No GPU has run any of this; needs none.

A kernel takes as long as the slowest of what it does: moving its bytes through the device's memory, issuing its
instructions, and what each part of a processor (an SM, a CU) has to do. The instructions are those of the machine
code in a full tile (tests/support/instructions.py), by the part that they occupy (tests/support/pipes.py). The
bandwidth is the data sheet's in runtime/measure/devices.py, and the clock gives the float32 FLOPs there. Beside
the kernels stand plain ones: a copy, and the exact GELU and SiLU, whose backward saves the input.

    python -m benchmarks.kernels.roofline

Run by `make bench`; writes results/roofline.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click
import triton

from fitact.runtime.kernels import constexpr, jit, tl
from fitact.runtime.measure.devices import DEVICES, REACHED
from tests.support.instructions import (
    DTYPES,
    GateKernel,
    Kernel,
    amd,
    full_tile,
    machine_code,
    nvidia,
)
from tests.support.more_kernels import PLAIN, LearnedKernel, NormKernel, PlainKernel
from tests.support.pipes import masked, pipes, whole

RESULTS = Path(__file__).parents[1] / "results" / "roofline.json"
NOTE = "A model from data sheets and machine code. No time here is measured."
LEFT_OUT = (
    "latency, and whether enough threads are there to hide it (occupancy)",
    "the launch, and tensors too small to fill the device",
    "caches: all tensors come from the device's memory",
    "the width of an access: first caches carry several times what the device's memory does",
    "power, and clocks below the data sheet's; a copy itself reaches about nine tenths of the bandwidth printed",
    "instructions that wait for each other, registers' banks, rare branches",
)
MODULES = (
    *(f"{name}_fewbit{bits}" for name in ("gelu", "silu") for bits in (1, 2, 3, 4)),
    *(f"{name}_inverted{bits}" for name in ("gelu", "silu") for bits in (1, 2)),
    "softplus_output",
    "relu2_output",
)
GATES = ("swiglu_recompute", "geglu_recompute")
LEARNED = (("xielu_recompute", "one"), ("dyt_recompute", "last"))
WIDTH = 4096  # elements of the norms' rows


# ---------------------------------------------------------------------------------------------------- the devices

PROGRAMMING = "CUDA C++ Best Practices Guide, Throughput of Native Arithmetic Instructions"
PROFILING = "Nsight Compute, Kernel Profiling Guide, Pipelines"
FORUM = "https://forums.developer.nvidia.com/t/separate-cuda-core-pipeline-for-fp16-and-fp32/302018"
PROFILER = "ROCm Compute Profiler, Pipeline descriptions, https://rocm.docs.amd.com/projects/rocprofiler-compute"


@dataclass(frozen=True)
class Part:
    """A limit of a processor: instructions of some pipes, and how many of one thread each it does in a clock.

    Attributes:
        rate: threads' instructions a clock.
        pipes: how many such slots an instruction of each pipe takes; "*" stands for each instruction.
        source: where the rate is from.

    """

    rate: float
    pipes: dict[str, float]
    source: str


@dataclass(frozen=True)
class Chip:
    """What the data sheet of a device says of its processors.

    Attributes:
        target: whose machine code it runs.
        processors: SMs or CUs.
        lanes: float32 FMAs of a processor in a clock, of which the data sheet's FLOPs are made.
        source: where these are from.
        parts: the limits by name.

    """

    target: str
    processors: int
    lanes: int
    source: str
    parts: dict[str, Part]


def _sm(fma: int, half: dict[str, float], /, **others: Part) -> dict[str, Part]:
    """Return the limits of an SM with `fma` lanes, which also do half precision where `half` says so."""
    return {
        "issue": Part(128, {"*": 1}, "4 schedulers of a warp each; whitepapers of A100 and H100, SM architecture"),
        "fma": Part(
            fma, {"fma": 1, "fma2": 2, "imad": 1} | half, f"{PROGRAMMING}: 32-bit add, multiply, multiply-add"
        ),
        "imad": Part(64, {"imad": 1}, f"{PROGRAMMING}: 32-bit integer multiply; {FORUM}"),
        "alu": Part(64, {"alu": 1}, f"{PROGRAMMING}: shift, compare, bitwise; {PROFILING}: alu"),
        "convert": Part(16, {"convert": 2}, f"{PROGRAMMING}: float32 to half precision, both halves counted"),
        "special": Part(16, {"special": 1}, f"{PROGRAMMING}: reciprocal, exp2; {PROFILING}: xu"),
        "lsu": Part(32, {"lsu": 1}, f"{PROGRAMMING}: warp shuffle; whitepapers: 32 LD/ST units an SM"),
    } | others


_CU = {
    "vector": Part(64, {"vector": 1, "quarter": 4}, f"four SIMDs of 16 lanes; {PROFILER}: VALU"),
    "scalar": Part(64, {"scalar": 1}, f"one of a wave of 64 in a clock; {PROFILER}: SALU, scheduler"),
    "control": Part(64, {"control": 1}, f"one of a wave of 64 in a clock; {PROFILER}: branch, scheduler"),
    "memory": Part(16, {"memory": 1}, "AMD CDNA 3 white paper: 64 bytes a clock from the vector cache of a CU"),
}
CHIPS = {
    "a100": Chip(
        "sm_80", 108, 64, "NVIDIA A100 Tensor Core GPU Architecture whitepaper, table 1",
        _sm(64, {}, half=Part(64, {"half": 1}, f"{PROGRAMMING}: 16-bit, bfloat16, two at once; {FORUM}")),
    ),
    "h100": Chip(
        "sm_90", 132, 128, "NVIDIA H100 Tensor Core GPU Architecture whitepaper, table 3", _sm(128, {"half": 1})
    ),
    "b200": Chip(
        "sm_100", 148, 128, "74 SMs on each of two dies, https://chipsandcheese.com: Nvidia's B200",
        _sm(128, {"half": 1}),
    ),
    "mi300x": Chip("gfx942", 304, 128, "AMD CDNA 3 white paper: 304 CUs, 256 float32 FLOPs a clock each", _CU),
}  # fmt: skip


def bandwidth(chip: str) -> float:
    """Return the bytes a second that the data sheet of a device says."""
    return float(round(DEVICES[chip].bandwidth / REACHED))


def clock(chip: str) -> float:
    """Return the clock at which a device has the float32 FLOPs of its data sheet, in Hz."""
    return DEVICES[chip].rest / (2 * CHIPS[chip].processors * CHIPS[chip].lanes)


def times(chip: str, moved: float, counts: dict[str, float]) -> dict[str, float]:
    """Return what each limit of a device takes for an element, in picoseconds.

    Args:
        chip: of `CHIPS`.
        moved: bytes read and written.
        counts: instructions by pipe.

    """
    here = CHIPS[chip]
    found = {"bandwidth": moved / bandwidth(chip)}
    for name, part in here.parts.items():
        slots = sum(number * part.pipes.get(pipe, part.pipes.get("*", 0)) for pipe, number in counts.items())
        found[name] = slots / part.rate / (here.processors * clock(chip))
    return {name: 1e12 * seconds for name, seconds in found.items()}


# ---------------------------------------------------------------------------------------------------- the kernels


BLOCK = constexpr(PLAIN)


@jit
def copy_forward(x, y, n):
    """Write y = x."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


@jit
def gelu_forward(x, y, n):
    """Write y = GELU(x) as PyTorch computes it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n).to(tl.float32)
    value = 0.5 * value * (1.0 + tl.erf(0.7071067811865476 * value))
    tl.store(y + at, value.to(y.dtype.element_ty), mask=at < n)


@jit
def gelu_backward(dy, x, dx, n):
    """Write dx = dy · GELU′(x) as PyTorch computes it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(dy + at, mask=at < n).to(tl.float32)
    value = tl.load(x + at, mask=at < n).to(tl.float32)
    below = 0.5 * (1.0 + tl.erf(0.7071067811865476 * value))
    density = 0.3989422804014327 * tl.exp(-0.5 * value * value)
    tl.store(dx + at, (grad * (below + value * density)).to(dx.dtype.element_ty), mask=at < n)


@jit
def silu_forward(x, y, n):
    """Write y = SiLU(x) as PyTorch computes it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n).to(tl.float32)
    value = value / (1.0 + tl.exp(-value))
    tl.store(y + at, value.to(y.dtype.element_ty), mask=at < n)


@jit
def silu_backward(dy, x, dx, n):
    """Write dx = dy · SiLU′(x) as PyTorch computes it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(dy + at, mask=at < n).to(tl.float32)
    value = tl.load(x + at, mask=at < n).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-value))
    grad = grad * sigmoid * (1.0 + value * (1.0 - sigmoid))
    tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=at < n)


AnyKernel = PlainKernel | Kernel | GateKernel | LearnedKernel | NormKernel


@dataclass(frozen=True)
class Traffic:
    """What a kernel moves for an element.

    Attributes:
        reads, writes: bytes of the device's memory; learned parameters are in a cache.

    """

    reads: float
    writes: float


def traffic(kernel: AnyKernel, dtype: str) -> Traffic:
    """Return what a kernel moves for an element."""
    size = DTYPES[dtype].itemsize
    forward = kernel.pass_ == "forward"
    if isinstance(kernel, NormKernel):
        scale = 4 / kernel.columns
        return Traffic(size, size + scale) if forward else Traffic(2 * size + scale, size)
    if isinstance(kernel, PlainKernel):
        return Traffic((1 if forward else 2) * size, size)
    if isinstance(kernel, LearnedKernel):
        return Traffic((2 if kernel.pass_ == "backward" else 1) * size, size)
    if isinstance(kernel, Kernel):
        codes = kernel.registered.bits / 8
        if forward:
            return Traffic(size, size + codes)
        rows = len({"dy", "x", "y"} & set(kernel.function.arg_names[:-2]))
        return Traffic(rows * size + codes, size)
    return Traffic(2 * size, size) if forward else Traffic(3 * size, 2 * size)


def kernels() -> Iterator[tuple[str, AnyKernel]]:
    """Yield the kernels by name and pass, the references first."""
    yield "copy forward", PlainKernel("copy", "forward", copy_forward)
    yield "gelu forward", PlainKernel("gelu", "forward", gelu_forward)
    yield "gelu backward", PlainKernel("gelu", "backward", gelu_backward)
    yield "silu forward", PlainKernel("silu", "forward", silu_forward)
    yield "silu backward", PlainKernel("silu", "backward", silu_backward)
    for module, pass_ in product(MODULES, ("forward", "backward")):
        yield f"{module} {pass_}", Kernel.of(module, pass_)
    for module, pass_ in product(GATES, ("forward", "backward")):
        yield f"{module} {pass_}", GateKernel.of(module, pass_)
    for (module, place), pass_ in product(LEARNED, ("forward", "backward")):
        yield f"{module} {pass_}", LearnedKernel.of(module, pass_, place)
    for kind, pass_ in product(("layer", "rms"), ("forward", "backward")):
        yield f"ms_{kind}_norm {pass_}", NormKernel(kind, pass_, WIDTH)


def counted(kernel: AnyKernel, dtype: str, target: str) -> dict[str, float]:
    """Compile a kernel and return its instructions an element by pipe."""
    asm = kernel.compile(dtype, target).asm
    text = machine_code(asm).text
    program = nvidia(text) if "cubin" in asm else amd(text)
    if isinstance(kernel, Kernel | GateKernel):
        work = kernel.work(dtype)
        return pipes(*full_tile(program, work), work.elements)
    stored = kernel.elements(dtype) * DTYPES[dtype].itemsize
    if isinstance(kernel, LearnedKernel):
        way, trips = whole(program, stored, sums=kernel.pass_ == "backward")
    else:
        way, trips = masked(program, stored)
    return pipes(way, trips, kernel.elements(dtype))


# ------------------------------------------------------------------------------------------------------ the result


def row(moves: Traffic, counts: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return a kernel's row of the table, from what it moves and its instructions by target and pipe."""
    on: dict[str, dict[str, Any]] = {}
    for name, chip in CHIPS.items():
        found = times(name, moves.reads + moves.writes, counts[chip.target])
        limit = max(found, key=lambda one: found[one])
        on[name] = {
            "limit": limit,
            "picoseconds": round(found[limit], 4),
            "share": round(found["bandwidth"] / found[limit], 4),
        }
    return asdict(moves) | {"counts": counts, "on": on}


def main() -> None:
    """Compile, count, compute; print a table and write the numbers."""
    print(NOTE, "It leaves out:", *(f"- {each}" for each in LEFT_OUT), sep="\n", end="\n\n")
    cases = [(f"{name} {dtype}", kernel, dtype) for name, kernel in kernels() for dtype in DTYPES]
    rows: dict[str, dict[str, Any]] = {}
    print(f"{'':36}{'bytes':>7}", *(f"{name + ', ' + chip.target:>24}" for name, chip in CHIPS.items()))
    for name, kernel, dtype in cases:
        found = {chip.target: counted(kernel, dtype, chip.target) for chip in CHIPS.values()}
        counts = {
            target: {pipe: round(number, 4) for pipe, number in by_pipe.items()}
            for target, by_pipe in found.items()
        }
        here = rows[name] = row(traffic(kernel, dtype), counts)
        cells = (
            f"{sum(counts[chip.target].values()):8.1f} {on['limit']:>9} {on['share']:5.0%}"
            for on, chip in zip(here["on"].values(), CHIPS.values(), strict=True)
        )
        print(f"{name:36}{here['reads'] + here['writes']:7.3f}", *cells, flush=True)
    record = {
        "note": NOTE,
        "left_out": LEFT_OUT,
        "triton": triton.__version__,
        "devices": {
            name: asdict(chip)
            | {"clock": round(clock(name)), "bandwidth": bandwidth(name), "sheet": DEVICES[name].source}
            for name, chip in CHIPS.items()
        },
    }
    text = json.dumps(record | {"kernels": {}}, indent=2)
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(each)}" for name, each in rows.items())  # a line each
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text.replace('"kernels": {}', f'"kernels": {{\n{lines}\n  }}') + "\n")


if __name__ == "__main__":
    click.command(help=(__doc__ or "").partition("\n")[0])(main)()
