"""The compiled kernels of gates keep all in registers, and write in wide vectors."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is for Linux only")

from triton.compiler import ASTSource  # noqa: E402

from fitact.runtime.ops import gate_ops  # noqa: E402
from tests.support.gates import coded, rebuilt  # noqa: E402
from tests.support.generated import load  # noqa: E402
from tests.support.instructions import TARGETS, Code, amd, machine_code, nvidia  # noqa: E402

FITS = {
    "rebuild": rebuilt("geglu", "own_rebuild"),
    "coded8": coded("swiglu", "own_coded8", 8),
    "coded8_8": coded("swiglu", "own_coded8_8", 8, 8),
}
PASSES = ("forward", "backward", "again")
CASES = {
    f"{name} {pass_} {dtype} {target}{' of a view' if view else ''}": (name, pass_, dtype, target, view)
    for name, pass_, dtype, target, view in product(FITS, PASSES, ("bf16", "fp32"), TARGETS, (False, True))
}
SPILLED = {"rebuild backward bf16 sm_90 of a view": 8}  # bytes: ptxas takes 72 registers and no more
QUICK = {"coded8 forward bf16 sm_90", "coded8 backward bf16 sm_90 of a view"}


def compiled(name: str, pass_: str, dtype: str, target: str, view: bool) -> Any:
    """Compile a kernel ahead of time, as the runtime's launch would."""
    gate = gate_ops.find(load(FITS[name])._KEY)
    bits = {"g": gate.a.bits, "u": gate.b.bits}
    kernel = getattr(gate, pass_)
    signature: dict[str, str] = {}
    for argument in kernel.arg_names:
        what, _, of = argument.rpartition("_")
        if what in ("width", "stride"):
            signature[argument] = "i32" if view and (pass_ == "forward" or not bits[of]) else "constexpr"
        elif what:
            kind = "*u8" if what in ("codes", "first") else "*fp32"
            signature[argument] = kind if bits[of] else "constexpr"
        else:
            kept_as_codes = pass_ != "forward" and bits.get(of, 0)
            signature[argument] = "i64" if of == "n" else "*u8" if kept_as_codes else f"*{dtype}"
    kinds = list(enumerate(signature.values()))
    return triton.compile(
        ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={(i,): None for i, kind in kinds if kind == "constexpr"},
            attrs={(i,): [["tt.divisibility", 16]] for i, kind in kinds if kind[0] == "*" or kind == "i32"},
        ),
        target=TARGETS[target],
        options={"num_warps": (256 if dtype == "fp32" else 128) // TARGETS[target].warp_size},
    )


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.full) for case in CASES]
)
def test_nothing_spills(case: str) -> None:
    name, pass_, dtype, target, view = CASES[case]
    asm = compiled(name, pass_, dtype, target, view).asm
    code: Code = machine_code(asm)
    assert code.spills == SPILLED.get(case, 0)
    program = nvidia(code.text) if "cubin" in asm else amd(code.text)
    assert max(one.store for one in program.instructions) == 16
