"""The kernels compiled ahead of time for NVIDIA and AMD, without a GPU: no spills, whole vectors."""

from __future__ import annotations

import re

import pytest

from tests.support.generated import Generated
from tests.support.kinds import each, every

pytest.importorskip("triton", reason="Triton is for Linux only")

from tests.support.instructions import FLOATS, TARGETS, Kernel, machine_code

# The dtypes of x and y; where backward needs the output, autocast makes the last.
PAIRS = [("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("fp32", "bf16")]
SOME = {"gelu_inverted1", "hardswish_inverted2", "silu_inverted_published", "tanh_exact", "relu2_exact"}
QUICK = {(f"gelu_fewbit{bits}", x, x, "sm_90") for bits in (1, 2, 3, 4) for x in ("bf16", "fp32")}
QUICK |= {("gelu_fewbit3", "fp16", "fp16", "sm_90"), ("gelu_fewbit4", "fp16", "fp16", "sm_90")}
QUICK |= {(f"gelu_fewbit{bits}", "bf16", "bf16", target) for bits in (3, 4) for target in ("sm_80", "gfx942")}
QUICK |= {("gelu_inverted1", "bf16", "bf16", "sm_90"), ("hardswish_inverted2", "fp32", "bf16", "sm_90")}
QUICK |= {("silu_inverted_published", "fp32", "fp32", "sm_90"), ("gelu_inverted1", "fp32", "bf16", "gfx942")}
QUICK |= {(name, *pair, "sm_90") for name in ("tanh_exact", "relu2_exact") for pair in (PAIRS[0], PAIRS[3])}
CASES = [
    pytest.param(*case, id="-".join([one.name, *case[1:]]), marks=[] if (one.name, *case[1:]) in QUICK else full)
    for full in (pytest.mark.full,)
    for one in every()
    for x, y in (PAIRS if one.keeps_output else PAIRS[:3])
    for target in TARGETS
    for case in [(one, x, y, target)]
]


def share(kernel: Kernel, dtype: str, *others: str) -> int:
    """Bytes of a thread's share of a row of a tensor of a dtype."""
    return 1024 // kernel.threads(dtype, *others) * FLOATS[dtype].itemsize


@pytest.mark.parametrize(("one", "x", "y", "target"), CASES)
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_compiled_ahead_of_time(one: Generated, pass_: str, x: str, y: str, target: str) -> None:
    """Neither spills nor shared memory; vectors of 16 bytes, but of 8 where a thread's share of a row is no more.

    That is so of half precision beside float32, and at 4 bits, whose programs have more threads.
    """
    kernel = Kernel.of(one.name, pass_)
    load, store = (share(kernel, *pair) for pair in (((x, y), (y, x)) if pass_ == "forward" else ((y, x), (x, y))))
    assert {load, store} <= {8, 16} and (max(load, store) == 16 or one.bits == 4)
    made = kernel.compile(x, target, y)
    if pass_ == "backward" and one.fit["method"] == "inverted":
        assert not re.search(r"(max|min)numf|propagateNan = none", made.asm["ttir"]), "NaN would be lost"
    code = machine_code(made.asm)
    assert code.registers < 255
    assert (code.spills, code.shared) == (0, 0)
    if target == "gfx942":
        assert "scratch_" not in code.text
        width = {16: "dwordx4", 8: "dwordx2"}
        assert re.search(rf"(?:buffer|global)_load_{width[load]}\b", code.text)
        assert re.search(rf"(?:buffer|global)_store_{width[store]}\b", code.text)
    else:
        assert not re.search(r"\b(LDL|STL|SHFL|BAR)\b", code.text)
        assert re.search(rf"\bLDG\.E\S*\.{8 * load}\b", code.text)
        assert re.search(rf"\bSTG\.E\S*\.{8 * store}\b", code.text)


@each(SOME | {"gelu_fewbit3"})
@pytest.mark.parametrize("y", ["bf16", pytest.param("fp16", marks=pytest.mark.full), "fp32"])
def test_kernels_load_nothing_but_their_arguments(one: Generated, y: str) -> None:
    """A row is loaded and stored once, masked or not; the planes of codes once a tile."""
    x = "fp32" if one.keeps_output else y
    rows = 1 + one.keeps_output
    for pass_, loads, stores in (("forward", 2, 2 + one.bits), ("backward", 2 * rows + one.bits, 2)):
        code = Kernel.of(one.name, pass_).compile(x, "sm_90", y).asm["ttir"]
        assert code.count("tt.load") == loads
        assert code.count("tt.store") == stores
