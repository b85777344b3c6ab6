"""Scripts in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

# What each of two processes has before its script: its rank, a mesh of both, models and tensors spread over it.
START = """
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import fitact

rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))


def sharded(model, blocks, **options):
    for block in blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
"""
END = """
dist.barrier()  # neither leaves while the other still talks to it
dist.destroy_process_group()
os._exit(0)  # gloo's threads may outlive the interpreter, which then aborts
"""


def python(
    script: str, *arguments: object, folder: Path | None = None, warnings: str = "default", **environment: str
) -> str:
    """Run a script, which must succeed, in a process of its own; return what it prints."""
    command = [sys.executable, "-W", warnings, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run(script: str, folder: Path, *arguments: str, warnings: str = "error", seconds: int = 240) -> None:
    """Run a script in two processes, between START and END; `sys.argv[3:]` are the arguments."""
    command = [sys.executable, "-W", warnings, "-c", START + script + END]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "store"), *arguments],
            env=os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=seconds)[1] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(errors)
