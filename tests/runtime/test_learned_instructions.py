"""The kernels of formulas with learned numbers, compiled ahead of time: no spills, and no atomics."""

from __future__ import annotations

from itertools import product

import pytest

triton = pytest.importorskip("triton", reason="Triton is for Linux only")

from fitact.runtime.kernels.registry import find  # noqa: E402
from tests.support.generated import load  # noqa: E402
from tests.support.instructions import TARGETS, resources  # noqa: E402
from tests.support.learned import CASES  # noqa: E402
from tests.support.more_kernels import PLACES, LearnedKernel  # noqa: E402

ALL = [
    case
    for case in product(CASES, ("forward", "backward"), ("bf16", "fp32"), TARGETS, PLACES)
    if CASES[case[0]].wide == (case[4] != "one")
]
QUICK = {
    ("xielu", "backward", "bf16", "sm_90", "one"),
    ("dyt", "backward", "fp32", "sm_90", "last"),
    ("dyt", "forward", "bf16", "gfx942", "image"),
    ("dyt", "backward", "bf16", "sm_80", "image"),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id="-".join(case), marks=[] if case in QUICK else pytest.mark.full) for case in ALL],
)
def test_nothing_spills(case: tuple[str, str, str, str, str]) -> None:
    name, pass_, dtype, target, place = case
    formula = find(load(CASES[name].fit)._KEY)
    asm = LearnedKernel(name, pass_, formula, place).compile(dtype, target).asm
    assert "atomic" not in asm["ttir"]
    assert resources(asm).spills == 0
    assert "scratch_" not in asm.get("amdgcn", "")
