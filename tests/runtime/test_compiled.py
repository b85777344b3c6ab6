"""The kernels compiled ahead of time for NVIDIA and AMD, without a GPU: whole vectors, few registers."""

import json
import re
from itertools import cycle, product
from math import inf
from typing import Any

import pytest

from tests.support.kinds import every, kind

pytest.importorskip("triton", reason="Triton is for Linux only")

import triton

from benchmarks.kernels import resources
from fitact.runtime.kernels.registry import find
from fitact.runtime.saving.blocks import BITS
from tests.support.compiled import FLOATS, PLACES, TARGETS, BlockKernel, GateKernel, Kernel, LearnedKernel, code
from tests.support.gates import recomputed
from tests.support.generated import load
from tests.support.learned import CASES, learned_module
from tests.support.rows import full, turning

# The dtypes of x and y; where backward needs the output, autocast makes the last.
PAIRS = [("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("fp32", "bf16")]
QUICK = {(f"gelu_fewbit{bits}", x, x, "sm_90") for bits in (1, 2, 3, 4) for x in ("bf16", "fp32")}
QUICK |= {("gelu_fewbit3", "fp16", "fp16", "sm_90"), ("gelu_fewbit4", "fp16", "fp16", "sm_90")}
QUICK |= {(f"gelu_fewbit{bits}", "bf16", "bf16", target) for bits in (3, 4) for target in ("sm_80", "gfx942")}
QUICK |= {("gelu_inverted1", "bf16", "bf16", "sm_90"), ("hardswish_inverted2", "fp32", "bf16", "sm_90")}
QUICK |= {("silu_inverted_published", "fp32", "fp32", "sm_90"), ("gelu_inverted1", "fp32", "bf16", "gfx942")}
QUICK |= {(name, *pair, "sm_90") for name in ("tanh_output", "relu2_output") for pair in (PAIRS[0], PAIRS[3])}
WAYS = [  # of each kernel one, and another if it saves the output
    *zip(every(), cycle(product(PAIRS[:3], TARGETS)), strict=False),
    *zip([each for each in every() if each.saves_output], cycle(product(PAIRS[3:], TARGETS)), strict=False),
]
ROWS = full(sorted(QUICK | {(each.name, *pair, target) for each, (pair, target) in WAYS}), QUICK)


def share(kernel: Kernel, dtype: str, *others: str) -> int:
    """Bytes of a thread's share of a row of a tensor of a dtype."""
    return 1024 // kernel.threads(dtype, *others) * FLOATS[dtype].itemsize


@pytest.mark.parametrize(("name", "x", "y", "target"), ROWS)
def test_compiled_ahead_of_time(name: str, x: str, y: str, target: str) -> None:
    """No spills, no shared memory; vectors of 16 bytes, or of a thread's share of a row; each is accessed once."""
    case = kind(name)
    for pass_ in ("forward", "backward"):
        kernel, forward = Kernel(pass_, find(case.key)), pass_ == "forward"
        asm = kernel.compile(x, target, y).asm
        load, store = (share(kernel, *pair) for pair in (((x, y), (y, x)) if forward else ((y, x), (x, y))))
        assert {load, store} <= {8, 16} and (max(load, store) == 16 or case.bits == 4)
        counts = (2, 2 + case.bits) if forward else (2 + 2 * case.saves_output + case.bits, 2)
        assert (asm["ttir"].count("tt.load"), asm["ttir"].count("tt.store")) == counts
        if not forward and case.fit["method"] == "inverted":
            assert not re.search(r"(max|min)numf|propagateNan = none", asm["ttir"]), "NaN would be lost"
        taken = code(asm)
        assert taken.registers < 255
        assert (taken.spills, taken.load, taken.store, taken.shared) == (0, load, store, 0), pass_
        assert not re.search(r"\b(shfl|bar)\.", asm.get("ptx", ""))
        if x == y == "bf16":
            assert taken.registers <= registers(f"{case.name} {pass_} {target}")


RECORD: dict[str, Any] = json.loads(resources.RESULTS.read_text())


def registers(name: str) -> float:
    """Return the registers of a kernel on record; without end if the record is of other Tritons."""
    return RECORD[name].get(triton.__version__, [inf])[0]


def test_all_shipped_kernels_by_two_tritons() -> None:
    """The record has all; accesses are as wide by both, one spills by the older, as docs/kernels.md says."""
    assert set(RECORD) == {f"{name} {target}" for name, _ in resources.kernels() for target in TARGETS}
    for name, row in RECORD.items():
        (_, *pinned), (_, *older) = row["3.7.1"], row["3.6.0"]
        if name.startswith("blocks8"):  # a thread has 8 or 16 bytes of codes
            assert {*pinned[1:], *older[1:]} <= {8, 16}, name
        else:
            assert pinned[1:] == older[1:], name
        assert not pinned[0] and older[0] == 8 * (name == "blocks4 encode sm_80"), name


PASSES = ("forward", "backward")
OF_GATES = full(turning(TARGETS, ("fp32", "bf16"), PASSES), {("sm_90", "bf16", "forward")})


@pytest.mark.parametrize(("target", "dtype", "pass_"), OF_GATES)
def test_gates(target: str, dtype: str, pass_: str) -> None:
    gate: Any = find(load(recomputed("geglu", "own_recompute"))._KEY)
    for view in (False, True):
        actual = code(GateKernel(pass_, gate, view).compile(dtype, target).asm)
        assert (actual.spills, actual.store) == (0, 16)
        if dtype == "bf16" and not view:
            assert actual.registers <= registers(f"geglu_recompute {pass_} {target}")


QUICK_LEARNED = {
    ("xielu", "backward", "one", "bf16", "sm_90"),
    ("dyt", "backward", "last", "fp32", "sm_90"),
    ("dyt", "forward", "image", "bf16", "gfx942"),
    ("dyt", "backward", "image", "bf16", "sm_80"),
}
OF_LEARNED = turning(CASES, PASSES, PLACES, ("fp32", "bf16"))
OF_LEARNED = turning([row for row in OF_LEARNED if CASES[row[0]].wide == (row[2] != "one")], TARGETS)
OF_LEARNED = full(sorted(QUICK_LEARNED | {(*row, target) for row, target in OF_LEARNED}), QUICK_LEARNED)


@pytest.mark.parametrize(("name", "pass_", "place", "dtype", "target"), OF_LEARNED)
def test_learned_numbers(name: str, pass_: str, place: str, dtype: str, target: str) -> None:
    asm = LearnedKernel(pass_, find(learned_module(name)._KEY), place).compile(dtype, target).asm
    assert "atomic" not in asm["ttir"]
    assert code(asm).spills == 0


QUICK_BLOCKS = {("bf16", "sm_90", 8), ("bf16", "sm_90", 3), ("bf16", "gfx942", 3)}
OF_BLOCKS = full(sorted(QUICK_BLOCKS | {*turning(FLOATS, TARGETS, BITS)}), QUICK_BLOCKS)


@pytest.mark.parametrize(("dtype", "target", "bits"), OF_BLOCKS)
def test_block_codes(dtype: str, target: str, bits: int) -> None:
    """No spills, no atomics, 16 bytes at a time but of what is left over; each tensor is read and written once."""
    rests = (False, True) if bits in (3, 8) and dtype == "bf16" else (False,)
    for pass_, rest in product(("encode", "decode"), rests):
        asm = BlockKernel(bits, pass_, rest).compile(dtype, target).asm
        actual, name = code(asm), f"{pass_}, rest {rest}"
        assert "atomic" not in asm["ttir"], name
        assert actual.spills == 0 and actual.registers < 255, name
        if not rest:
            assert (actual.load if pass_ == "encode" else actual.store) == 16, name
            parts = {8: 1, 4: 1}.get(bits, 2) + 2
            counts = asm["ttir"].count("tt.load"), asm["ttir"].count("tt.store")
            assert counts == ((1, parts) if pass_ == "encode" else (parts, 1)), name
            if dtype == "bf16":
                assert actual.registers <= registers(f"blocks{bits} {pass_} {target}"), name
