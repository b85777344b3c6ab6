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
        self.num_warps = threads // warp_size(over.device)

    def __call__(self, kernel: Any, *arguments: Tensor | int | None) -> None:
        """Run `kernel(*arguments, n)`, one program per tile."""
        if self.over.numel():
            with torch.cuda.device_of(self.over):
                kernel[self.grid](*arguments, self.over.numel(), num_warps=self.num_warps)


@cache
def warp_size(device: torch.device) -> int:
    """Return the lanes of a warp, 64 on AMD's data-centre GPUs; the interpreter does not use it."""
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32
