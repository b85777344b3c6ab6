"""The kernels of block codes compiled ahead of time for NVIDIA and AMD: no spills, whole vectors, no atomics."""

from __future__ import annotations

import re
from itertools import product

import pytest

pytest.importorskip("triton", reason="Triton is for Linux only")

from fitact.runtime.saving.blocks import BITS
from tests.support.instructions import FLOATS, TARGETS, BlockKernel, amd, machine_codes, nvidia

QUICK = {("bf16", "sm_80"), ("bf16", "sm_90"), ("fp32", "sm_90"), ("bf16", "gfx942")}
CASES = [
    pytest.param(*case, id="-".join(case), marks=[] if case in QUICK else pytest.mark.full)
    for case in product(FLOATS, TARGETS)
]


@pytest.mark.parametrize(("dtype", "target"), CASES)
def test_compiled_ahead_of_time(dtype: str, target: str) -> None:
    """Elements are read and written 16 bytes at a time; also what is left over compiles."""
    kernels = [BlockKernel(bits, pass_) for bits in BITS for pass_ in ("encode", "decode")]
    rest = [BlockKernel(bits, pass_, rest=True) for bits in (3, 8) for pass_ in ("encode", "decode")]
    made = [kernel.compile(dtype, target).asm for kernel in (*kernels, *rest)]
    for kernel, asm, code in zip((*kernels, *rest), made, machine_codes(made, target), strict=True):
        name = f"{kernel}, {dtype}, {target}"
        assert "atomic" not in asm["ttir"], name
        assert code.spills == 0 and code.registers < 255, name
        assert not re.search(r"\b(LDL|STL)\b|scratch_", code.text), name
        program = (amd if target == "gfx942" else nvidia)(code.text).instructions
        widest = max(one.load if kernel.pass_ == "encode" else one.store for one in program)
        assert widest == 16 or kernel.rest, name


@pytest.mark.parametrize("bits", BITS)
def test_each_tensor_is_read_and_written_once(bits: int) -> None:
    parts = {8: 1, 4: 1}.get(bits, 2)
    for pass_, loads, stores in (("encode", 1, parts + 2), ("decode", parts + 2, 1)):
        code = BlockKernel(bits, pass_).compile("bf16", "sm_90").asm["ttir"]
        assert (code.count("tt.load"), code.count("tt.store")) == (loads, stores)
