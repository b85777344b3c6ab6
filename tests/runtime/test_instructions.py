"""The compiled kernels cost no more than benchmarks/results/instructions.json says; and how that is counted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is for Linux only")

from benchmarks.kernels import instructions, resources  # noqa: E402
from tests.support.instructions import TARGETS, Kernel, Work, count, full_tile, measure, nvidia  # noqa: E402

TABLE: dict[str, Any] = json.loads(instructions.RESULTS.read_text())
QUICK = [
    f"{module} {pass_} bf16" for module in ("gelu_fewbit3", "gelu_inverted1") for pass_ in ("forward", "backward")
]
AT_ONCE = 24  # kernels that are disassembled together


def test_table_is_complete() -> None:
    assert set(TABLE["kernels"]) == {f"{name} {target}" for name in instructions.CASES for target in TARGETS}


def _groups() -> Iterator[Any]:
    """Yield kernels that are measured together, and the target that they are compiled for."""
    yield pytest.param(QUICK, "sm_90", id="quick")
    for target in TARGETS:
        names = [name for name in instructions.CASES if target != "sm_90" or name not in QUICK]
        for i in range(0, len(names), AT_ONCE):
            yield pytest.param(names[i : i + AT_ONCE], target, id=f"{target}-{i}", marks=pytest.mark.full)


@pytest.mark.parametrize(("names", "target"), list(_groups()))
def test_no_kernel_costs_more(names: Sequence[str], target: str) -> None:
    found = measure([instructions.CASES[name] for name in names], target)
    costs = {f"{name} {target}": cost.row() for name, cost in zip(names, found, strict=True)}
    assert not [name for name, now in costs.items() if now["spills"]]
    if TABLE["triton"] != triton.__version__:
        pytest.skip(f"the table is of Triton {TABLE['triton']}, this is {triton.__version__}")
    worse = [
        f"{name}: {what} {verb} from {was} to {now[what]}"
        for name, now in costs.items()
        for what, verb, sign in (
            ("registers", "grew", 1),
            ("instructions", "grew", 1),
            ("load_bytes", "shrank", -1),
            ("store_bytes", "shrank", -1),
        )
        if sign * now[what] > sign * (was := TABLE["kernels"][name][what])
    ]
    assert not worse, f"{'; '.join(worse)}; if that is intended, run `python -m benchmarks.kernels.instructions`"


def test_all_shipped_kernels_by_two_tritons() -> None:
    """The record has all; accesses are as wide by both, and nothing is spilled, as docs/kernels.md says."""
    rows = json.loads(resources.RESULTS.read_text())
    assert set(rows) == {f"{name} {target}" for name, _ in resources.kernels() for target in TARGETS}
    for name, row in rows.items():
        (_, *pinned), (_, *older) = row[TABLE["triton"]], row["3.6.0"]
        if name.startswith("blocks8"):  # a thread has 8 or 16 bytes of codes
            assert {*pinned[1:], *older[1:]} <= {8, 16}, name
        else:
            assert pinned[1:] == older[1:], name
        assert not pinned[0] and not older[0], name


def test_a_quotient_takes_fewer_instructions_than_powers_and_exponentials() -> None:
    modules = ("gelu_inverted1", "gelu_inverted_published")
    fitted, published = measure([(Kernel.of(module, "backward"), "bf16") for module in modules], "sm_90")
    assert fitted.instructions < published.instructions


# 32 elements of 4 bytes, 4 of them a trip, and 4 bytes of codes
WORK = Work(elements=32, reads=4, writes=4, reads_once=4)
START = """
.text.kernel:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   LDG.E R1, desc[UR4][R2.64] ;
        /*0020*/                   ISETP.GE.AND P0, PT, R0, R3, PT ;
        /*0030*/               @P0 BRA `(.L_x_2) ;
"""
ROW = """
        /*0040*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0050*/                   FMUL R4, R4, R1 ;
        /*0060*/              @!P1 FMUL R4, R4, R1 ;
        /*0070*/                   NOP ;
        /*0080*/                   CALL.REL.NOINC `($kernel$__internal_0_$__slowpath) ;
        /*0090*/                   STG.E.128 desc[UR4][R2.64], R4 ;
"""
LOOP = f"""
.L_x_1:
        {ROW}
        /*00a0*/              @!P2 EXIT ;
        /*00b0*/                   BRA `(.L_x_1) ;
"""
MASKED = """
.L_x_2:
        /*00c0*/                   MOV R8, RZ ;
.L_x_3:
        /*00d0*/              @!P0 LDG.E R4, desc[UR4][R2.64] ;
        /*00e0*/                   FMUL R4, R4, R1 ;
        /*00f0*/              @!P0 STG.E desc[UR4][R2.64], R4 ;
        /*0100*/               @P3 BRA `(.L_x_3) ;
        /*0110*/                   EXIT ;
"""
END = """
        .type           $kernel$__internal_0_$__slowpath,@function
$kernel$__internal_0_$__slowpath:
        /*0120*/                   MUFU.RSQ R4, R4 ;
        /*0130*/                   RET.REL.NODEC R20 `(kernel) ;
.L_x_4:
        /*0140*/                   BRA `(.L_x_4);
        /*0150*/                   NOP;
.L_x_5:
"""


def counted(text: str, work: Work = WORK) -> tuple[float, float]:
    """Instructions of a full tile, all and outside of the loop, not over the elements."""
    way, trips = full_tile(nvidia(text), work)
    every, outside = count(way, trips, work)
    return every * work.elements, outside * work.elements


def test_what_is_counted() -> None:
    """Eight trips through the loop and the four instructions before it; what does not do the work is refused."""
    assert counted(START + LOOP + MASKED + END) == (4 + 8 * 7, 4)
    with pytest.raises(ValueError, match=r"0 ways through the kernel do Work\(elements=32"):
        counted(START + MASKED + END)
