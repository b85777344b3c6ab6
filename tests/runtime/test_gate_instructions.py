"""The compiled kernels of gates keep all in registers, and write in wide vectors, also those of views."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is for Linux only")

from fitact.runtime.ops import gate_ops
from tests.support import drawn
from tests.support.gates import coded, rebuilt
from tests.support.generated import load
from tests.support.instructions import DTYPES, TARGETS, GateKernel, measure

FITS = {
    "rebuild": rebuilt("geglu", "own_rebuild"),
    "coded8": coded("swiglu", "own_coded8", 8),
    "coded8_8": coded("swiglu", "own_coded8_8", 8, 8),
    "drawn8": drawn.gate(8),
    "drawn5_6": drawn.gate(5, 6),
}
PASSES = ("forward", "backward", "again")
CASES = {
    f"{name} {pass_} {dtype} {target}{' of a view' if view else ''}": (name, pass_, dtype, target, view)
    for name, pass_, dtype, target, view in product(FITS, PASSES, DTYPES, TARGETS, (False, True))
}
QUICK = {"coded8 forward bf16 sm_90", "drawn8 forward bf16 sm_90", "rebuild backward bf16 sm_90 of a view"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.full) for case in CASES]
)
def test_nothing_spills(case: str) -> None:
    name, pass_, dtype, target, view = CASES[case]
    gate: Any = gate_ops.find(load(FITS[name])._KEY)
    cost = measure(GateKernel(name, pass_, gate, view), dtype, target)
    assert cost.spills == 0
    if gate.drawn and pass_ == "forward":  # twice the threads, so half of it in half precision; one on an AMD GPU
        size = DTYPES[dtype].itemsize
        assert cost.store_bytes in ((size, 4, 4 * size) if target == "gfx942" else (4 * size,))
    else:
        assert cost.store_bytes == 16
