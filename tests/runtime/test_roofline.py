"""The model of GPUs: its arithmetic, its counts against those of instructions.json, and docs/kernels.md."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any

import pytest

from tests.conftest import ROOT

triton = pytest.importorskip("triton", reason="Triton is for Linux only")

from benchmarks.kernels import roofline  # noqa: E402
from tests.support.instructions import DTYPES, amd, nvidia  # noqa: E402
from tests.support.pipes import masked, pipe, pipes, whole  # noqa: E402

RECORD: dict[str, Any] = json.loads(roofline.RESULTS.read_text())
ROWS: dict[str, Any] = RECORD["kernels"]
KERNELS = dict(roofline.kernels())


def test_table_is_complete_and_says_what_it_is() -> None:
    assert set(ROWS) == {f"{name} {dtype}" for name in KERNELS for dtype in DTYPES}
    assert "No time here is measured" in RECORD["note"]
    assert RECORD["left_out"] == list(roofline.LEFT_OUT)
    for name, chip in roofline.CHIPS.items():
        stated = {key: RECORD["devices"][name][key] for key in asdict(chip)}
        assert stated == asdict(chip), f"{name}: run `python -m benchmarks.kernels.roofline` again"


def test_arithmetic() -> None:
    """One row by hand, from the data sheets: 3.35 TB/s, 67 TFLOPS of 132 SMs with 128 lanes; 8 TB/s, 75 of 148."""
    found = ROWS["gelu_fewbit4 forward bf16"]
    assert (found["reads"], found["writes"]) == (2, 2.5)
    for device, target, bandwidth, flops, processors in (
        ("h100", "sm_90", 3.35e12, 67e12, 132),
        ("b200", "sm_100", 8e12, 75e12, 148),
    ):
        counts = found["counts"][target]
        hertz = flops / 2 / 128 / processors
        moving, issue, alu = (
            4.5 / bandwidth,
            sum(counts.values()) / 128 / processors / hertz,
            counts["alu"] / 64 / processors / hertz,
        )
        slowest = max(moving, issue, alu)  # the other pipes have less to do
        limit = {moving: "bandwidth", issue: "issue", alu: "alu"}[slowest]
        assert found["on"][device]["limit"] == limit
        assert found["on"][device]["share"] == pytest.approx(moving / slowest, abs=1e-4)
        assert found["on"][device]["picoseconds"] == pytest.approx(1e12 * slowest, rel=1e-3)


def test_clocks_are_those_of_the_data_sheets() -> None:
    for name, megahertz in {"a100": 1410, "h100": 1980, "b200": 1980, "mi300x": 2100}.items():
        assert roofline.clock(name) == pytest.approx(1e6 * megahertz, rel=0.003)


def test_rows_follow_from_their_counts() -> None:
    for name, found in ROWS.items():
        kernel, _, dtype = name.rpartition(" ")
        again = roofline.row(roofline.traffic(KERNELS[kernel], dtype), found["counts"])
        assert again["on"] == found["on"], name
        assert again["reads"] == found["reads"] and again["writes"] == found["writes"]


def test_counts_add_up_to_the_instructions() -> None:
    table = json.loads((ROOT / "benchmarks" / "results" / "instructions.json").read_text())
    assert table["triton"] == RECORD["triton"], "make both tables again with one version of Triton"
    both = 0
    for name, cost in table["kernels"].items():
        kernel, _, target = name.rpartition(" ")
        if kernel in ROWS and target in ROWS[kernel]["counts"]:
            both += 1
            assert sum(ROWS[kernel]["counts"][target].values()) == pytest.approx(cost["instructions"], abs=0.01), (
                name
            )
    assert both >= 100


def test_document() -> None:
    """Every row of the table in docs/kernels.md, and each number of the text around it."""
    text = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    section = text.split("## What a model of a GPU says")[1].split("\n## ")[0]
    assert "(gpu.md)" in section
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE)
    assert len(rows) >= 15
    for module, cells in rows:
        expected = []
        for pass_ in ("forward", "backward"):
            found = ROWS.get(f"{module} {pass_} bf16")
            for device in roofline.CHIPS:
                on = None if found is None else found["on"][device]
                share = "" if on is None else f"{100 * on['share']:.0f}"
                expected.append(share if on is None or on["limit"] == "bandwidth" else f"{share} {on['limit']}")
        assert cells.split(" | ") == expected, module


def test_unknown_instructions_are_refused() -> None:
    assert (pipe("F2FP.BF16.F32.PACK_AB"), pipe("v_exp_f32_e32"), pipe("v_pk_fma_f32")) == (
        "convert",
        "quarter",
        "vector",
    )
    for name in ("HMMA.16816.F32", "x_mov_b32"):
        with pytest.raises(ValueError, match=re.escape(f"{name}: expected")):
            pipe(name)


LOOP = """
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_0:
        /*0010*/               @P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   FMUL R4, R4, R1 ;
        /*0030*/               @P0 STG.E.128 desc[UR4][R2.64], R4 ;
        /*0040*/               @P1 EXIT ;
        /*0050*/                   BRA `(.L_x_0) ;
.L_x_1:
        /*0060*/                   BRA `(.L_x_1);
"""
# The loop is entered in its middle; half of a wave's threads run a block that stands behind.
BLOCKS = """
	s_load_dwordx2 s[2:3], s[0:1], 0x0
	s_branch .LBB0_2
.LBB0_1:
	s_add_i32 s4, s4, 1
	s_cbranch_scc0 .LBB0_5
.LBB0_2:
	buffer_load_dword v4, v1, s[4:7], 0 offen
	s_cbranch_execnz .LBB0_4
.LBB0_3:
	s_branch .LBB0_1
.LBB0_4:
	v_exp_f32_e32 v4, v4
	buffer_store_dword v4, v1, s[4:7], 0 offen
	s_cbranch_execz .LBB0_1
	s_branch .LBB0_1
.LBB0_5:
	s_endpgm
"""


def test_masked_kernels() -> None:
    way, trips = masked(nvidia(LOOP), 64)
    assert trips == 4
    counts = pipes(way, trips, 16)
    assert {name: 16 * number for name, number in counts.items()} == {"control": 8, "fma": 4, "lsu": 1 + 8}
    way, trips = masked(amd(BLOCKS), 8)
    assert trips == 2
    counts = pipes(way, trips, 2)
    assert counts == {"control": (1 + 1 + 2 * 4) / 2, "memory": 2, "quarter": 1, "scalar": (1 + 2) / 2}
    with pytest.raises(ValueError, match="expected 70 stored"):
        masked(nvidia(LOOP), 70)


# A loop without masks, of which the first trip was peeled off, one with masks, and a sum that one of many threads
# writes.
SUMS = """
        /*0000*/               @P0 BRA `(.L_x_2) ;
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   STG.E.128 desc[UR4][R2.64], R4 ;
.L_x_1:
        /*0030*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0040*/                   FMUL R4, R4, R1 ;
        /*0050*/                   FADD R5, R4, R5 ;
        /*0060*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*0070*/               @P1 BRA `(.L_x_1) ;
        /*0080*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*0090*/              @!P2 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*00a0*/                   FMUL R4, R4, R1 ;
        /*00b0*/              @!P2 STG.E.128 desc[UR4][R2.64], R4 ;
        /*00c0*/               @P1 BRA `(.L_x_2) ;
.L_x_3:
        /*00d0*/                   SHFL.BFLY PT, R6, R5, 0x1, 0x1f ;
        /*00e0*/               @P3 STG.E desc[UR4][R8.64], R5 ;
        /*00f0*/                   EXIT ;
"""


def test_kernels_with_sums() -> None:
    way, trips = whole(nvidia(SUMS), 64, sums=True)
    counts = pipes(way, trips, 16)
    assert trips == 3
    assert {name: 16 * number for name, number in counts.items()} == {
        "control": 1 + 3 + 1 + 1,
        "fma": 3 * 2,
        "lsu": 2 + 3 * 2 + 2,
    }
    with pytest.raises(ValueError, match="no way stores 64 bytes"):
        whole(nvidia(SUMS), 64)


@pytest.mark.full
@pytest.mark.parametrize("target", sorted({chip.target for chip in roofline.CHIPS.values()}))
@pytest.mark.parametrize("name", ["gelu_fewbit3 backward", "xielu_recompute forward", "ms_rms_norm forward"])
def test_counts_are_those_of_the_code(name: str, target: str) -> None:
    if RECORD["triton"] != triton.__version__:
        pytest.skip(f"the table is of Triton {RECORD['triton']}, this is {triton.__version__}")
    found = roofline.counted(KERNELS[name], "bf16", target)
    assert found == pytest.approx(ROWS[f"{name} bf16"]["counts"][target], abs=1e-4)
