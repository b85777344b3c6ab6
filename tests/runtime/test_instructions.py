"""The compiled kernels cost no more than benchmarks/results/instructions.json says; and how that is counted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is for Linux only")

from benchmarks.kernels import instructions, resources  # noqa: E402
from tests.support.instructions import TARGETS, Kernel, Work, amd, count, full_tile, measure, nvidia  # noqa: E402

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


LONGER = MASKED.replace("MOV R8, RZ ;", "MOV R8, RZ ;\n        /*00c8*/    MOV R9, RZ ;")
UNMASKED = MASKED.replace("@!P0", "    ")  # narrow accesses that do the same work: what AMD's masks look like
TO_MASKED = START.replace("@P0", "@P4").replace(".L_x_2", ".L_x_1")
EXIT = "        /*00a0*/                   EXIT ;"
FAR = """
.L_x_6:
        /*0118*/                   MOV R0, RZ ;
        /*011c*/                   EXIT ;
"""
# a program, the instructions of a full tile, and those outside of the loop
COUNTED = {
    "a loop and the way to it": (START + LOOP + MASKED, 4 + 8 * 7, 4),
    "masked rows, more instructions": (START + LOOP + LONGER, 4 + 8 * 7, 4),
    "masked rows without predicates": (START + LOOP + UNMASKED, 4 + 8 * 7, 4),
    "another order in memory": (TO_MASKED + MASKED + LOOP, 4 + 8 * 7, 4),
    # six instructions without the two that close the loop
    "a peeled trip is one of the loop": (START + ROW + LOOP + MASKED, 4 + 5 + 7 * 7, 4 + 5 - 7),
    "rows written out": (START + 8 * ROW + EXIT + MASKED, 4 + 8 * 5 + 1, 4 + 8 * 5 + 1),
    "two rows a trip": (START + LOOP.replace(ROW, 2 * ROW) + MASKED, 4 + 4 * 12, 4),
    "a far jump as a call of a label": (
        START + LOOP.replace("EXIT ;", "CALL.REL.NOINC `(.L_x_6) ;") + MASKED + FAR,
        4 + 8 * 7 + 2,
        6,
    ),
}


@pytest.mark.parametrize("what", COUNTED)
def test_what_is_counted(what: str) -> None:
    """No access of the way that counts is masked."""
    text, every, outside = COUNTED[what]
    assert counted(text + END) == (every, outside)
    way, _ = full_tile(nvidia(text + END), WORK)
    assert not [one for one in way.loop + way.rest if one.guarded and (one.load or one.store)]


@pytest.mark.parametrize(
    "text",
    [
        START + MASKED + END,
        START + LOOP.replace("LDG.E.128", "LDG.E.64") + MASKED + END,
        START + LOOP.replace("    STG", "@P3 STG") + MASKED + END,
        START + 7 * ROW + MASKED + END,
        (START + LOOP + MASKED + END).replace("LDG.E R1", "MOV R1"),
    ],
    ids=["masked only", "loads half", "masked store", "a row is missing", "no codes"],
)
def test_what_does_not_do_the_work_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"0 ways through the kernel do Work\(elements=32"):
        counted(text)


AMD = """
kernel:                                 ; @kernel
.Lfunc_begin0:
; %bb.0:
	s_load_dwordx2 s[2:3], s[0:1], 0x0
	s_waitcnt lgkmcnt(0)
	buffer_load_dword v0, v1, s[4:7], 0 offen
	s_cbranch_vccnz .LBB0_3
	v_mov_b32_e32 v9, 0x3f80552f
.LBB0_2:                                ; =>This Inner Loop Header: Depth=1
.Ltmp2:
	.loc	2 108 23                        ; kernels.py:108:23
	buffer_load_dwordx4 v[4:7], v1, s[4:7], 0 offen
	s_nop 0
	s_waitcnt vmcnt(0)
	v_pk_mul_f32 v[4:5], v[4:5], v[8:9]
	global_store_dwordx4 v1, v[4:7], s[0:1] offset:1024
	s_cbranch_scc0 .LBB0_2
.LBB0_3:                                ; %Flow
	s_cbranch_vccz .LBB0_6
	s_mov_b32 s3, 0
.LBB0_5:                                ; =>This Inner Loop Header: Depth=1
	buffer_load_dword v4, v1, s[4:7], 0 offen
	buffer_store_dword v4, v1, s[4:7], 0 offen
	s_cbranch_scc0 .LBB0_5
.LBB0_6:
	s_endpgm
.Lfunc_end0:
	.section	.debug_str,"MS",@progbits,1
	s_endpgm
"""


def test_amd() -> None:
    way, trips = full_tile(amd(AMD), WORK)
    assert trips == 8
    assert [one.name for one in way.loop if one.counted] == [
        "buffer_load_dwordx4",
        "v_pk_mul_f32",
        "global_store_dwordx4",
        "s_cbranch_scc0",
    ]
    every, outside = count(way, trips, WORK)
    assert (every * 32, outside * 32) == (6 + 8 * 4, 6)


def test_amd_rows_written_out_before_a_jump_back() -> None:
    start, rest = AMD.split(".LBB0_2:", 1)
    row = rest[rest.index("\tbuffer_load") : rest.index("\ts_cbranch_scc0")]
    start = start.replace(
        "vccnz .LBB0_3", "vccz .LBB0_2\n\ts_cbranch_vccz .LBB0_3\n.LBB0_1:\n\ts_endpgm\n.LBB0_2:"
    )
    masked = ".LBB0_3:" + rest.split("\ts_cbranch_vccz .LBB0_6", 1)[1]
    text = f"{start}{8 * row}\ts_cbranch_execnz .LBB0_1\n{masked}"  # back to the end of the program: no loop
    way, trips = full_tile(amd(text), WORK)
    assert (trips, way.loop) == (0, [])
    assert count(way, trips, WORK) == ((3 + 1 + 8 * 3 + 1 + 1) / 32,) * 2
