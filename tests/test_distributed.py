"""Tensors spread over processes: two of them, over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fitact.generated.gelu_fewbit3 import gelu_fewbit3
from fitact.generated.silu_inverted1 import silu_inverted1

rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
whole, dy = torch.randn(7, 5000), torch.randn(7, 5000)
for function in (gelu_fewbit3, silu_inverted1):
    leaf = whole.clone().requires_grad_()
    expected = function(leaf)
    (gradient,) = torch.autograd.grad(expected, leaf, dy)
    for placement in (Replicate(), Shard(0), Shard(1)):
        x = distribute_tensor(whole, mesh, [placement]).requires_grad_()
        y = function(x)
        assert isinstance(y, DTensor) and y.placements == (placement,) and y.shape == whole.shape
        assert torch.equal(y.full_tensor(), expected)
        (dx,) = torch.autograd.grad(y, x, distribute_tensor(dy, mesh, [placement]))
        assert dx.placements == (placement,)
        assert torch.equal(dx.full_tensor(), gradient)
    half = DTensor.from_local(whole / 2, mesh, [Partial()], run_check=False)
    assert torch.equal(function(half).full_tensor(), expected)
dist.destroy_process_group()
"""


def test_dtensors(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", SCRIPT, str(rank), str(tmp_path / "store")],
            env=os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
