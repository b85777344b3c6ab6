"""The compiled kernels of gates keep all in registers, and write in wide vectors, also those of views."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is for Linux only")

from fitact.runtime.kernels.registry import find
from tests.support.gates import rebuilt
from tests.support.generated import load
from tests.support.instructions import DTYPES, TARGETS, GateKernel, amd, machine_codes, nvidia

# The kernels of a gate for a dtype and a target are disassembled at once: those of the quick part, and the others.
CASES = [
    pytest.param(*case, passes, id="-".join((*case, *passes)), marks=marks)
    for case in product(DTYPES, TARGETS)
    for passes, marks in (
        [(("forward",), []), (("backward",), pytest.mark.full)]
        if case == ("bf16", "sm_90")
        else [(("forward", "backward"), pytest.mark.full)]
    )
]


@pytest.mark.parametrize(("dtype", "target", "passes"), CASES)
def test_nothing_spills(dtype: str, target: str, passes: tuple[str, ...]) -> None:
    """Nor of views; and a thread writes 16 bytes at once."""
    gate: Any = find(load(rebuilt("geglu", "own_rebuild"))._KEY)
    kernels = [GateKernel("own_rebuild", pass_, gate, view) for pass_ in passes for view in (False, True)]
    codes = machine_codes([kernel.compile(dtype, target).asm for kernel in kernels], target)
    for code in codes:
        assert code.spills == 0
        widest = max(one.store for one in (amd if target == "gfx942" else nvidia)(code.text).instructions)
        assert widest == 16
