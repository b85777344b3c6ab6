"""The kernels compiled ahead of time for NVIDIA and AMD, without a GPU: no spills, whole vectors."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from fitact.runtime import registry

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


def compiled(one: Shipped, pass_: str, dtype: str, target: GPUTarget) -> Any:
    float_, bytes_ = f"*{dtype}", "*u8"
    signature = {
        "forward": {"x": float_, "y": float_, "codes": bytes_, "n": "i64"},
        "backward": {"dy": float_, "codes": bytes_, "dx": float_, "n": "i64"},
    }[pass_]
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    kernel = getattr(one.module, f"{one.name}_{pass_}")
    threads = registry.find(one.module.KEY).threads(torch.empty(0, dtype=DTYPES[dtype]))
    return triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs={}, attrs=aligned),
        target=target,
        options={"num_warps": threads // target.warp_size, "enable_fp_fusion": True},
    )


def tool(name: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


def vector_bytes(one: Shipped, dtype: str) -> int:
    """A thread's share of a row: 16 bytes, but 8 of half precision at 4 bits, whose programs have more threads."""
    return 8 if one.fit["bits"] == 4 and dtype != "fp32" else 16


@each({f"gelu_fewbit{bits}" for bits in (1, 2, 3, 4)})
@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_nvidia(one: Shipped, pass_: str, dtype: str, target: str, tmp_path: Path) -> None:
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled(one, pass_, dtype, TARGETS[target]).asm["cubin"])
    usage = re.search(
        r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", tool("cuobjdump", "-res-usage", str(cubin))
    )
    assert usage is not None
    registers, stack, shared, local = map(int, usage.groups())
    assert registers < 255
    assert (stack, shared, local) == (0, 0, 0)
    code = tool("nvdisasm", "-c", str(cubin))
    assert not re.search(r"\b(LDL|STL|SHFL|BAR)\b", code)
    width = f".{8 * vector_bytes(one, dtype)}"
    assert re.search(rf"\bLDG\.E\S*\{width}\b", code)
    assert re.search(rf"\bSTG\.E\S*\{width}\b", code)


@each({f"gelu_fewbit{bits}" for bits in (1, 2, 3, 4)})
@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_amd(one: Shipped, pass_: str, dtype: str) -> None:
    code = compiled(one, pass_, dtype, TARGETS["gfx942"]).asm["amdgcn"]
    for what in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        assert re.findall(rf"\.{what}:\s+(\d+)", code) == ["0"], what
    assert "scratch_" not in code
    width = {16: "dwordx4", 8: "dwordx2"}[vector_bytes(one, dtype)]
    assert re.search(rf"(?:buffer|global)_load_{width}\b", code)
    assert re.search(rf"(?:buffer|global)_store_{width}\b", code)
