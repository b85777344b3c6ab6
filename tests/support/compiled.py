"""Kernels compiled ahead of time, without a GPU: registers, spills, and the widths of accesses to memory."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fitact.runtime.kernels import tiles
from fitact.runtime.kernels.launch import threads_of
from fitact.runtime.kernels.norms import plan
from fitact.runtime.saving import blocks

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
FLOATS = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# Triton 3.5 keeps some scalars of forward kernels for half precision in vector registers; none goes to memory.
SCALARS = () if triton.__version__.startswith("3.5.") else ("sgpr_spill_count",)
SPILLED = ("vgpr_spill_count", *SCALARS, "private_segment_fixed_size")
# Loads from global memory and stores to it, in PTX and in AMD's assembler.
_PTX = re.compile(r"\b(ld|st)\.global[.\w:]*?(?:\.v(\d))?\.[bfsu](\d+)\b")
_AMD = re.compile(r"\b(?:global|buffer|flat)_(load|store)_(\w+)")
_AMD_BYTES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
# How the channels of learned numbers lie: one alone, beside each other, in images.
PLACES = {"one": (False, False), "last": (True, False), "image": (True, True)}


class Code(NamedTuple):
    """What a kernel takes: a thread's registers; spills and scratch; the widest accesses; shared bytes."""

    registers: int
    spills: int
    load: int
    store: int
    shared: int


def code(asm: Mapping[str, Any]) -> Code:
    if "cubin" in asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(asm["cubin"])
            file.flush()
            done = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True)
        registers, stack, local, shared = (
            _field(rf"\b{what}:(\d+)", done.stdout) for what in ("REG", "STACK", "LOCAL", "SHARED")
        )
        widths = [(kind, int(count or 1) * int(bits) // 8) for kind, count, bits in _PTX.findall(asm["ptx"])]
        return Code(registers, stack + local, _widest(widths, "ld"), _widest(widths, "st"), shared)
    text = asm["amdgcn"]
    spills = sum(_field(rf"\.{what}:\s+(\d+)", text) for what in SPILLED)
    widths = [(kind, _AMD_BYTES.get(name, 1 if "byte" in name else 2)) for kind, name in _AMD.findall(text)]
    sizes = _widest(widths, "load"), _widest(widths, "store")
    shared = _field(r"\.group_segment_fixed_size:\s+(\d+)", text)
    return Code(_field(r"\.vgpr_count:\s+(\d+)", text), spills + text.count("scratch_"), *sizes, shared)


def _widest(widths: list[tuple[str, int]], kind: str) -> int:
    return max(width for other, width in widths if other == kind)


def _field(pattern: str, text: str) -> int:
    (value,) = re.findall(pattern, text)
    return int(value)


def compiled(function, kinds, dtype, target, threads, constants=MappingProxyType({}), multiples=(), **options):
    """Compile a kernel as the runtime's launch would.

    `kinds` are the types of arguments, others point to numbers of `dtype`; `multiples` are those of 16.
    """
    names = function.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in constants else kinds.get(name, f"*{dtype}") for name in names}
    aligned = [i for i, (name, kind) in enumerate(signature.items()) if kind[0] == "*" or name in multiples]
    return triton.compile(
        ASTSource(
            fn=function,
            signature=signature,
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
        ),
        target=TARGETS[target],
        options={"enable_fp_fusion": True, **options, "num_warps": threads // TARGETS[target].warp_size},
    )


@dataclass(frozen=True)
class OfModule:
    """A kernel of a module: its pass, and the activation, gate or formula that it belongs to."""

    pass_: str
    registered: Any


@dataclass(frozen=True)
class Kernel(OfModule):
    """A kernel of an activation; its arguments are some of x, y, codes, n, or of dy, x, y, codes, dx, n."""

    def threads(self, *dtypes: str) -> int:
        return self.registered.threads(*(torch.empty(0, dtype=FLOATS[dtype]) for dtype in dtypes))

    def compile(self, dtype: str, target: str, output: str | None = None) -> Any:
        kinds = {"codes": "*u8", "n": "i64", "y": f"*{output or dtype}", "dy": f"*{output or dtype}"}
        return compiled(
            getattr(self.registered, self.pass_), kinds, dtype, target, self.threads(dtype, output or dtype)
        )


@dataclass(frozen=True)
class GateKernel(OfModule):
    """A kernel of a gate; `view`: whether g and u are rows of longer ones, where they are read as they are."""

    view: bool = False

    def compile(self, dtype: str, target: str) -> Any:
        function = getattr(self.registered, self.pass_)
        rows = [name for name in function.arg_names if name.startswith(("width", "stride"))]
        kinds = {"n": "i64"} | dict.fromkeys(rows, "i32")
        constants, multiples = ({}, rows) if self.view else (dict.fromkeys(rows), ())
        return compiled(function, kinds, dtype, target, threads_of(FLOATS[dtype]), constants, multiples)


@dataclass(frozen=True)
class BlockKernel:
    """A kernel of block codes, for a tensor of many rows; `rest`: for the elements that are left over."""

    bits: int
    pass_: str
    rest: bool = False

    def compile(self, dtype: str, target: str) -> Any:
        function = getattr(tiles, f"{self.pass_}_tile")
        kinds = {"x": f"*{dtype}", "codes": "*i64", "scales": "*bf16", "shifts": "*i64"}
        kinds |= dict.fromkeys(("rows", "across", "n"), "i32")
        constants = blocks.constants(self.pass_, self.bits, FLOATS[dtype], signs=False) | {"rest": self.rest}
        options = blocks.launching(torch.device("cpu"))
        return compiled(function, kinds, dtype, target, blocks.THREADS, constants, **options)


@dataclass(frozen=True)
class LearnedKernel(OfModule):
    """A kernel of a formula with learned parameters; `place`: how the channels lie, of `PLACES`."""

    place: str = "one"

    def compile(self, dtype: str, target: str) -> Any:
        channels, inner = PLACES[self.place]
        kinds = {"numbers": "*fp32", "sums": "*fp32", "channels": "i32", "inner": "i32", "rows": "i64", "n": "i64"}
        constants = {name: None for name, given in (("channels", channels), ("inner", inner)) if not given}
        # a program has a block of rows and channels, or a tile
        block = self.pass_ == "backward" or self.place == "last"
        threads = 256 if dtype == "fp32" or block else 128
        kernel = getattr(self.registered, self.pass_)
        return compiled(kernel, kinds, dtype, target, threads, constants, ("channels",) if channels else ())


@dataclass(frozen=True)
class NormKernel:
    """A kernel of a memory-sharing norm of many rows, layer or rms."""

    kind: str
    pass_: str
    columns: int

    def compile(self, dtype: str, target: str, output: str | None = None) -> Any:
        x, z, tiling = dtype, output or dtype, plan(100_000, self.columns)
        tensors = (x, z, "fp32") if self.pass_ == "forward" else (z, z, "fp32", x)
        kernel = getattr(tiles, f"ms_norm_{self.pass_}")
        kinds = [f"*{each}" for each in tensors] + ["i32", "i32"] + (["fp32"] if self.pass_ == "forward" else [])
        constants = {"centred": self.kind == "layer", "height": tiling.height}
        constants |= {"width": tiling.width, "whole": tiling.whole}
        names = kernel.arg_names
        multiples = names[len(tensors) : len(tensors) + 1 + (self.columns % 16 == 0)]
        signature = dict(zip(names, kinds, strict=False))
        return compiled(kernel, signature, dtype, target, tiling.threads, constants, multiples)
