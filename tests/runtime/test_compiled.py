"""The kernels compiled ahead of time for NVIDIA and AMD, without a GPU: no spills, whole vectors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from tests.support.generated import Generated
from tests.support.kinds import each as each_activation
from tests.support.kinds import every

pytest.importorskip("triton", reason="Triton is for Linux only")

from fitact.runtime.kernels.registry import find
from fitact.runtime.saving.blocks import BITS
from tests.support.gates import recomputed
from tests.support.generated import load
from tests.support.instructions import (
    FLOATS,
    TARGETS,
    BlockKernel,
    Code,
    GateKernel,
    Kernel,
    amd,
    machine_code,
    machine_codes,
    nvidia,
    resources,
)
from tests.support.learned import CASES, learned_module
from tests.support.more_kernels import PLACES, LearnedKernel

# The dtypes of x and y; where backward needs the output, autocast makes the last.
PAIRS = [("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("fp32", "bf16")]
SOME = {"gelu_inverted1", "hardswish_inverted2", "silu_inverted_published", "tanh_output", "relu2_output"}
QUICK = {(f"gelu_fewbit{bits}", x, x, "sm_90") for bits in (1, 2, 3, 4) for x in ("bf16", "fp32")}
QUICK |= {("gelu_fewbit3", "fp16", "fp16", "sm_90"), ("gelu_fewbit4", "fp16", "fp16", "sm_90")}
QUICK |= {(f"gelu_fewbit{bits}", "bf16", "bf16", target) for bits in (3, 4) for target in ("sm_80", "gfx942")}
QUICK |= {("gelu_inverted1", "bf16", "bf16", "sm_90"), ("hardswish_inverted2", "fp32", "bf16", "sm_90")}
QUICK |= {("silu_inverted_published", "fp32", "fp32", "sm_90"), ("gelu_inverted1", "fp32", "bf16", "gfx942")}
QUICK |= {(name, *pair, "sm_90") for name in ("tanh_output", "relu2_output") for pair in (PAIRS[0], PAIRS[3])}
FULL = pytest.mark.full
AT_ONCE = 8  # modules whose kernels are disassembled together


def cases(*, quick: bool) -> Iterator[Any]:
    """Yield modules with the pairs of dtypes that are tried, by target: those of the quick part, or the others."""
    for target in TARGETS:
        found = []
        for one in every():
            pairs = PAIRS if one.saves_output else PAIRS[:3]
            chosen = [pair for pair in pairs if ((one.name, *pair, target) in QUICK) == quick]
            found += [(one, chosen)] if chosen else []
        for i in range(0, len(found), AT_ONCE):
            some = found[i : i + AT_ONCE]
            name = f"{target}-{some[0][0].name}-to-{some[-1][0].name}{'-quick' * quick}"
            yield pytest.param(some, target, id=name, marks=[] if quick else pytest.mark.full)


def share(kernel: Kernel, dtype: str, *others: str) -> int:
    """Bytes of a thread's share of a row of a tensor of a dtype."""
    return 1024 // kernel.threads(dtype, *others) * FLOATS[dtype].itemsize


@pytest.mark.parametrize(("modules", "target"), [*cases(quick=True), *cases(quick=False)])
def test_compiled_ahead_of_time(modules: list[tuple[Generated, list[tuple[str, str]]]], target: str) -> None:
    """Neither spills nor shared memory; vectors of 16 bytes, but of 8 where a thread's share of a row is no more.

    That is so of half precision beside float32, and at 4 bits, whose programs have more threads.
    """
    kernels = [
        (one, Kernel.of(one.name, pass_), *pair)
        for one, pairs in modules
        for pair in pairs
        for pass_ in ("forward", "backward")
    ]
    made = [kernel.compile(x, target, y) for _, kernel, x, y in kernels]
    codes = machine_codes([compiled.asm for compiled in made], target)
    for (one, kernel, x, y), compiled, code in zip(kernels, made, codes, strict=True):
        try:
            check(one, kernel, x, y, target, compiled.asm["ttir"], code)
        except AssertionError as error:
            error.add_note(f"{one.name} {kernel.pass_}, x {x}, y {y}, {target}")
            raise


def check(one: Generated, kernel: Kernel, x: str, y: str, target: str, ttir: str, code: Code) -> None:
    """Check one kernel."""
    forward = kernel.pass_ == "forward"
    load, store = (share(kernel, *pair) for pair in (((x, y), (y, x)) if forward else ((y, x), (x, y))))
    assert {load, store} <= {8, 16} and (max(load, store) == 16 or one.bits == 4)
    if not forward and one.fit["method"] == "inverted":
        assert not re.search(r"(max|min)numf|propagateNan = none", ttir), "NaN would be lost"
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


def test_kernels_disassembled_at_once_are_those_disassembled_alone() -> None:
    """But for the names of labels; one of them divides, by a subroutine."""
    divides = LearnedKernel("prelu", "forward", find(learned_module("prelu")._KEY), "last")
    kernels = [Kernel.of("gelu_fewbit3", "forward"), divides, Kernel.of("gelu_inverted1", "backward")]
    asms = [kernel.compile("bf16", "sm_90").asm for kernel in kernels]
    codes = machine_codes(asms, "sm_90")
    for code, asm in zip(codes, asms, strict=True):
        by_itself = machine_code(asm)
        assert code[1:] == by_itself[1:]
        program, alone = nvidia(code.text), nvidia(by_itself.text)
        assert [one._replace(goal=None) for one in program.instructions] == [
            one._replace(goal=None) for one in alone.instructions
        ]
        assert all(program.next(at) == alone.next(at) for at in range(len(program.instructions)))
    assert any(one.name.startswith("CALL") for one in nvidia(codes[1].text).instructions)


@each_activation(SOME | {"gelu_fewbit3"})
@pytest.mark.parametrize("y", ["bf16", pytest.param("fp16", marks=pytest.mark.full), "fp32"])
def test_kernels_load_nothing_but_their_arguments(one: Generated, y: str) -> None:
    """A row is loaded and stored once, masked or not; the planes of codes once a tile."""
    x = "fp32" if one.saves_output else y
    rows = 1 + one.saves_output
    for pass_, loads, stores in (("forward", 2, 2 + one.bits), ("backward", 2 * rows + one.bits, 2)):
        code = Kernel.of(one.name, pass_).compile(x, "sm_90", y).asm["ttir"]
        assert code.count("tt.load") == loads
        assert code.count("tt.store") == stores


# ------------------------------------------------------------------------- gates, learned parameters, block codes


def each(quick: set[tuple[str, ...]], *parts: Any) -> pytest.MarkDecorator:
    """Parametrise `case` by a product; those that are not quick run in the full product alone."""
    cases = [pytest.param(one, id="-".join(one), marks=[] if one in quick else FULL) for one in product(*parts)]
    return pytest.mark.parametrize("case", cases)


def widest(code: Code, target: str, what: str) -> int:
    program = (amd if target == "gfx942" else nvidia)(code.text)
    return max(getattr(one, what) for one in program.instructions)


@each({("bf16", "sm_90", "forward")}, ("bf16", "fp32"), TARGETS, ("forward", "backward"))
def test_gates(case: tuple[str, str, str]) -> None:
    """No spills, nor of views; and a thread writes 16 bytes at once."""
    dtype, target, pass_ = case
    gate: Any = find(load(recomputed("geglu", "own_recompute"))._KEY)
    kernels = [GateKernel("own_recompute", pass_, gate, view) for view in (False, True)]
    for code in machine_codes([kernel.compile(dtype, target).asm for kernel in kernels], target):
        assert code.spills == 0
        assert widest(code, target, "store") == 16


QUICK_LEARNED = {
    ("xielu", "backward", "bf16", "sm_90", "one"),
    ("dyt", "backward", "fp32", "sm_90", "last"),
    ("dyt", "forward", "bf16", "gfx942", "image"),
    ("dyt", "backward", "bf16", "sm_80", "image"),
}


@each(QUICK_LEARNED, CASES, ("forward", "backward"), ("bf16", "fp32"), TARGETS, PLACES)
def test_learned_numbers(case: tuple[str, str, str, str, str]) -> None:
    """No spills, and no atomics."""
    name, pass_, dtype, target, place = case
    if CASES[name].wide != (place != "one"):
        pytest.skip("a formula with numbers of channels has these, another has none")
    formula = find(learned_module(name)._KEY)
    asm = LearnedKernel(name, pass_, formula, place).compile(dtype, target).asm
    assert "atomic" not in asm["ttir"]
    assert resources(asm).spills == 0
    assert "scratch_" not in asm.get("amdgcn", "")


QUICK_BLOCKS = {("bf16", "sm_90", "8"), ("bf16", "sm_90", "3"), ("bf16", "gfx942", "3")}


@each(QUICK_BLOCKS, FLOATS, TARGETS, map(str, BITS))
def test_block_codes(case: tuple[str, str, str]) -> None:
    """No spills, no atomics, 16 bytes at a time but of what is left over; each tensor is read and written once."""
    dtype, target, bits = case
    rests = (False, True) if bits in ("3", "8") else (False,)
    kernels = [BlockKernel(int(bits), pass_, rest) for pass_ in ("encode", "decode") for rest in rests]
    made = [kernel.compile(dtype, target).asm for kernel in kernels]
    for kernel, asm, code in zip(kernels, made, machine_codes(made, target), strict=True):
        name = f"{kernel}, {dtype}, {target}"
        assert "atomic" not in asm["ttir"], name
        assert code.spills == 0 and code.registers < 255, name
        assert not re.search(r"\b(LDL|STL)\b|scratch_", code.text), name
        if not kernel.rest:
            assert widest(code, target, "load" if kernel.pass_ == "encode" else "store") == 16, name
            parts = {8: 1, 4: 1}.get(kernel.bits, 2) + 2
            counts = asm["ttir"].count("tt.load"), asm["ttir"].count("tt.store")
            assert counts == ((1, parts) if kernel.pass_ == "encode" else (parts, 1)), name
