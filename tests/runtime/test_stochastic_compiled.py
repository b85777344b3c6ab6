"""The kernels that draw codes at random, compiled ahead of time for NVIDIA and AMD, without a GPU."""

from __future__ import annotations

import re

import pytest

from fitact.runtime.ops import registry
from tests.support import drawn

pytest.importorskip("triton", reason="Triton is for Linux only")

from tests.support.instructions import TARGETS, Kernel, full_tile, machine_code, nvidia

CASES = [
    pytest.param(bits, dtype, target, marks=[] if (dtype, target) == ("bf16", "sm_90") else pytest.mark.full)
    for bits in (5, 8)
    for dtype in ("bf16", "fp16", "fp32")
    for target in TARGETS
]


@pytest.mark.parametrize(("bits", "dtype", "target"), CASES)
def test_neither_spills_nor_shared_memory(bits: int, dtype: str, target: str) -> None:
    """A thread has 4 elements of a row; random numbers are made where they are used, not moved between threads."""
    activation = registry.find(drawn.module(bits)._KEY)
    kernel = Kernel(drawn.record(bits).name, "forward", activation.forward, activation)
    compiled = kernel.compile(dtype, target)
    code = machine_code(compiled.asm)
    assert compiled.metadata.shared == 0
    assert "convert_layout" not in compiled.asm["ttgir"]
    assert (code.spills, code.shared) == (0, 0)
    assert code.registers <= 128
    if target == "gfx942":
        assert "scratch_" not in code.text
        return
    assert not re.search(r"\b(LDL|STL|SHFL|BAR)\b", code.text)
    width = 64 if dtype != "fp32" else 128
    assert re.search(rf"\bLDG\.E\S*\.{width}\b", code.text)
    assert re.search(rf"\bSTG\.E\S*\.{width}\b", code.text)
    if dtype == "bf16":
        full_tile(nvidia(code.text), kernel.work(dtype))  # reads and writes what it should, and nothing else
