"""Launching the kernels of an activation."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import reference


class Launch:
    """Launches kernels over the tiles of a tensor."""

    def __init__(self, over: Tensor, threads: int) -> None:
        self.over = over
        self.grid = (reference.tiles_of(over),)
        self.options = options(threads, over.device)

    def __call__(self, kernel: Any, *arguments: Tensor | int | None) -> None:
        """Run `kernel(*arguments, n)`, one program per tile."""
        if self.over.numel():
            with torch.cuda.device_of(self.over):
                kernel[self.grid](*arguments, self.over.numel(), **self.options)


def threads_of(dtype: torch.dtype) -> int:
    """Return the threads of a program; each has 16 bytes of a row."""
    return 256 if dtype == torch.float32 else 128


def options(threads: int, device: torch.device) -> dict[str, Any]:
    """Return Triton's options for a program of so many threads.

    Products and sums are fused whatever the version's own default is, so that every version computes the same.
    """
    return {"num_warps": max(1, threads // warp_size(device)), "enable_fp_fusion": True}


@cache
def warp_size(device: torch.device) -> int:
    """Return the lanes of a warp, 64 on AMD's data-centre GPUs; the interpreter does not use it."""
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32
