"""Launching Triton kernels."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, programs: int, threads: int, tensor: Tensor, *arguments: Any) -> None:
    """Run programs of a kernel, whose first argument is a tensor, on the device of this."""
    kernel[(programs,)](tensor, *arguments, **options(threads, tensor.device))


def threads_of(dtype: torch.dtype) -> int:
    """Return the threads of a program; each has 16 bytes of a row."""
    return 256 if dtype == torch.float32 else 128


def options(threads: int, device: torch.device) -> dict[str, Any]:
    """Return Triton's options for a program of `threads` threads.

    Products and sums are fused whatever the version's own default is, so that every version computes the same.
    """
    return {"num_warps": max(1, threads // warp_size(device)), "enable_fp_fusion": True}


@cache
def warp_size(device: torch.device) -> int:
    """Return the lanes of a warp, 64 on AMD's data-centre GPUs; the interpreter does not use it."""
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32
