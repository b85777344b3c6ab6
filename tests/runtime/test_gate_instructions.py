"""The compiled kernels of gates keep all in registers, and write in wide vectors, also those of views."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is for Linux only")

from fitact.runtime.ops import gate_ops
from tests.support.gates import coded, rebuilt
from tests.support.generated import load
from tests.support.instructions import DTYPES, TARGETS, GateKernel, amd, machine_codes, nvidia

FITS = {
    "rebuild": rebuilt("geglu", "own_rebuild"),
    "coded8": coded("swiglu", "own_coded8", 8),
    "coded8_8": coded("swiglu", "own_coded8_8", 8, 8),
}
PASSES = ("forward", "backward", "again")
# The kernels of a gate for a dtype and a target are disassembled at once: those of the quick part, and the others.
QUICK = dict.fromkeys(((name, "bf16", "sm_90") for name in ("rebuild", "coded8")), ("forward",))
CASES = [
    pytest.param(*case, passes, id="-".join((*case, *passes)), marks=[] if passes == quick else pytest.mark.full)
    for case in product(FITS, DTYPES, TARGETS)
    for quick in [QUICK.get(case)]
    for passes in ([quick, tuple(one for one in PASSES if one not in quick)] if quick else [PASSES])
]


@pytest.mark.parametrize(("name", "dtype", "target", "passes"), CASES)
def test_nothing_spills(name: str, dtype: str, target: str, passes: tuple[str, ...]) -> None:
    """Nor of views; and a thread writes 16 bytes at once."""
    gate: Any = gate_ops.find(load(FITS[name])._KEY)
    kernels = [GateKernel(name, pass_, gate, view) for pass_ in passes for view in (False, True)]
    codes = machine_codes([kernel.compile(dtype, target).asm for kernel in kernels], target)
    for code in codes:
        assert code.spills == 0
        widest = max(one.store for one in (amd if target == "gfx942" else nvidia)(code.text).instructions)
        assert widest == 16
