"""The compiled kernels cost no more than benchmarks/results/instructions.json says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is for Linux only")

from benchmarks.kernels import instructions, resources  # noqa: E402
from tests.support.instructions import TARGETS, Kernel, measure  # noqa: E402

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
