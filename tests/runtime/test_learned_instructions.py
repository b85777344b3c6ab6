"""The kernels of formulas with learned numbers, compiled ahead of time: no spills, and no atomics."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is for Linux only")

from triton.compiler import ASTSource  # noqa: E402

from fitact.runtime.learned import ops  # noqa: E402
from tests.support.generated import load  # noqa: E402
from tests.support.instructions import TARGETS, machine_code  # noqa: E402
from tests.support.learned import CASES  # noqa: E402

# How the channels lie: one alone, beside each other, in images.
PLACES = {"one": (False, False), "last": (True, False), "image": (True, True)}
ALL = [
    case
    for case in product(CASES, ("forward", "backward", "again"), ("bf16", "fp32"), TARGETS, PLACES)
    if CASES[case[0]].wide == (case[4] != "one")
]
QUICK = {
    ("xielu", "backward", "bf16", "sm_90", "one"),
    ("dyt", "backward", "fp32", "sm_90", "last"),
    ("coded8", "forward", "bf16", "gfx942", "image"),
    ("coded5", "backward", "bf16", "sm_80", "image"),
}
# Scalars that AMD's compiler keeps in the lanes of a vector register; none goes to memory.
SCALARS = {("xielu", "backward", "gfx942"): 11}


def compiled(name: str, pass_: str, dtype: str, target: str, place: str) -> Any:
    """Compile a kernel ahead of time, as the runtime's launch would."""
    formula = ops.find(load(CASES[name].fit)._KEY)
    channels, inner = PLACES[place]
    coded = bool(formula.bits)
    kinds = {
        "codes": "*u8" if coded else "constexpr",
        "table": "*u8" if coded else "constexpr",
        "borders": "*fp32" if coded else "constexpr",
        "points": "*fp32" if coded else "constexpr",
        "kept": "*u8" if coded else f"*{dtype}",
        "numbers": "*fp32",
        "sums": "*fp32",
        "channels": "i32" if channels else "constexpr",
        "inner": "i32" if inner else "constexpr",
        "rows": "i64",
        "n": "i64",
    }
    kernel = getattr(formula, pass_)
    signature = {argument: kinds.get(argument, f"*{dtype}") for argument in kernel.arg_names}
    constexprs = {(i,): None for i, kind in enumerate(signature.values()) if kind == "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    threads = 256 if dtype == "fp32" or pass_ == "backward" else 128
    return triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=aligned),
        target=TARGETS[target],
        options={"num_warps": threads // TARGETS[target].warp_size},
    )


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id="-".join(case), marks=[] if case in QUICK else pytest.mark.full) for case in ALL],
)
def test_nothing_spills(case: tuple[str, str, str, str, str]) -> None:
    asm = compiled(*case).asm
    assert "atomic" not in asm["ttir"]
    code = machine_code(asm)
    assert code.spills == SCALARS.get((case[0], case[1], case[3]), 0)
    assert not re.search(r"scratch_", code.text)
