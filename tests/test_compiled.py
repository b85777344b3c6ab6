"""The kernels compiled ahead of time for NVIDIA and AMD, without a GPU: no spills, whole vectors."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fitact.runtime import registry

from .inverses import SOME, Inverse, each_inverse, inverses
from .steps import Shipped, each

triton = pytest.importorskip("triton", reason="Triton is for Linux only")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def build(module: ModuleType, pass_: str, target: GPUTarget, **tensors: str) -> Any:
    """Compile a pass as the ops launch it; `tensors` are the dtypes of the kernel's arguments."""
    signature = {name: f"*{dtype}" for name, dtype in tensors.items()} | {"n": "i64"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(tensors))}
    return triton.compile(
        ASTSource(fn=kernel(module, pass_), signature=signature, constexprs={}, attrs=aligned),
        target=target,
        options={"num_warps": threads(module, tensors) // target.warp_size, "enable_fp_fusion": True},
    )


def kernel(module: ModuleType, pass_: str) -> Any:
    return getattr(module, f"{registry.find(module.KEY).name}_{pass_}")


def threads(module: ModuleType, tensors: dict[str, str]) -> int:
    kinds = [torch.empty(0, dtype=DTYPES[dtype]) for dtype in tensors.values() if dtype != "u8"]
    return registry.find(module.KEY).threads(*kinds)


def share(module: ModuleType, tensors: dict[str, str], name: str) -> int:
    """Bytes of a thread's share of a row of a tensor."""
    return 1024 // threads(module, tensors) * DTYPES[tensors[name]].itemsize


def tool(name: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


def check_nvidia(made: Any, folder: Path, load: int, store: int) -> None:
    """No spills, no stack, no shared memory; loads and stores of so many bytes."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])
    usage = re.search(
        r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", tool("cuobjdump", "-res-usage", str(cubin))
    )
    assert usage is not None
    registers, stack, shared, local = map(int, usage.groups())
    assert registers < 255
    assert (stack, shared, local) == (0, 0, 0)
    code = tool("nvdisasm", "-c", str(cubin))
    assert not re.search(r"\b(LDL|STL|SHFL|BAR)\b", code)
    assert re.search(rf"\bLDG\.E\S*\.{8 * load}\b", code)
    assert re.search(rf"\bSTG\.E\S*\.{8 * store}\b", code)


def check_amd(made: Any, load: int, store: int) -> None:
    code = made.asm["amdgcn"]
    for what in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size", "group_segment_fixed_size"):
        assert re.findall(rf"\.{what}:\s+(\d+)", code) == ["0"], what
    assert "scratch_" not in code
    width = {16: "dwordx4", 8: "dwordx2"}
    assert re.search(rf"(?:buffer|global)_load_{width[load]}\b", code)
    assert re.search(rf"(?:buffer|global)_store_{width[store]}\b", code)


def step_tensors(pass_: str, dtype: str) -> dict[str, str]:
    names = ("x", "y", "codes") if pass_ == "forward" else ("dy", "codes", "dx")
    return {name: "u8" if name == "codes" else dtype for name in names}


def vector_bytes(one: Shipped, dtype: str) -> int:
    """A thread's share of a row: 16 bytes, but 8 of half precision at 4 bits, whose programs have more threads."""
    return 8 if one.fit["bits"] == 4 and dtype != "fp32" else 16


@each({f"gelu_fewbit{bits}" for bits in (1, 2, 3, 4)})
@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_nvidia(one: Shipped, pass_: str, dtype: str, target: str, tmp_path: Path) -> None:
    made = build(one.module, pass_, TARGETS[target], **step_tensors(pass_, dtype))
    check_nvidia(made, tmp_path, vector_bytes(one, dtype), vector_bytes(one, dtype))


@each({f"gelu_fewbit{bits}" for bits in (1, 2, 3, 4)})
@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_amd(one: Shipped, pass_: str, dtype: str) -> None:
    made = build(one.module, pass_, TARGETS["gfx942"], **step_tensors(pass_, dtype))
    check_amd(made, vector_bytes(one, dtype), vector_bytes(one, dtype))


# The dtypes of x and y; autocast makes the last.
PAIRS = [("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("fp32", "bf16")]
QUICK = {("gelu_inverted1", "bf16", "bf16", "sm_90"), ("hardswish_inverted2", "fp32", "bf16", "sm_90")}
QUICK |= {("silu_inverted_published", "fp32", "fp32", "sm_90"), ("gelu_inverted1", "fp32", "bf16", "gfx942")}


@pytest.mark.parametrize(
    ("one", "x", "y", "target"),
    [
        pytest.param(
            one,
            x,
            y,
            target,
            id=f"{one.name}-{x}-{y}-{target}",
            marks=[] if (one.name, x, y, target) in QUICK else pytest.mark.full,
        )
        for one in inverses()
        for x, y in PAIRS
        for target in TARGETS
    ],
)
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_inverted(one: Inverse, pass_: str, x: str, y: str, target: str, tmp_path: Path) -> None:
    """Vectors of 16 bytes, but of 8 of the tensor in half precision where the other one is in float32."""
    tensors = {
        "forward": {"x": x, "y": y, "codes": "u8"},
        "backward": {"dy": y, "y": y, "codes": "u8", "dx": x},
    }[pass_]
    names = {"forward": ("x", "y"), "backward": ("y", "dx")}[pass_]
    load, store = (share(one.module, tensors, name) for name in names)
    assert {load, store} <= {8, 16} and max(load, store) == 16
    made = build(one.module, pass_, TARGETS[target], **tensors)
    if pass_ == "backward":
        assert not re.search(r"(max|min)numf|propagateNan = none", made.asm["ttir"]), "NaN would be lost"
    if target == "gfx942":
        check_amd(made, load, store)
    else:
        check_nvidia(made, tmp_path, load, store)


@each_inverse(SOME)
@pytest.mark.parametrize("y", ["bf16", pytest.param("fp16", marks=pytest.mark.full), "fp32"])
def test_inverted_kernels_load_nothing_but_their_arguments(one: Inverse, y: str) -> None:
    """A row is loaded and stored once, masked or not; the planes of codes once a tile."""
    for pass_, loads, stores in (("forward", 2, 2 + one.bits), ("backward", 4 + one.bits, 2)):
        tensors = {"x": "fp32", "y": y, "codes": "u8"} if pass_ == "forward" else {"dy": y, "y": y, "codes": "u8"}
        tensors |= {"dx": "fp32"} if pass_ == "backward" else {}
        code = build(one.module, pass_, TARGETS["sm_90"], **tensors).asm["ttir"]
        assert code.count("tt.load") == loads
        assert code.count("tt.store") == stores
