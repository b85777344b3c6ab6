"""Memory-sharing norms, which save their output and 1/σ of each row; `norms.modules` says what they compute.

On CUDA (and ROCm) the kernels of `tiles.norms` run; on all other devices and for float64, PyTorch's operators.
Statistics are in float32, for float64 in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .inputs import DTYPES
from .launch import launch
from .reference import TILE, arithmetic_dtype, chunk
from .registry import Backward, Forward, Kernel, Two, register

LONGEST = 16384  # the most elements of a row that stays in registers: 16 for each of 1024 threads
PART = 4096  # elements of a block of short rows, and of a part of a long one
SHARE = 16  # elements of a block for each thread


class RowTiling(NamedTuple):
    """How rows are cut into blocks of height × width, powers of 2, one a program; and whether of whole rows."""

    height: int
    width: int
    whole: bool
    threads: int


def plan(rows: int, columns: int) -> RowTiling:
    """Return how to cut `rows` rows of `columns` elements, both at least 1."""
    if columns > LONGEST:
        return RowTiling(1, PART, False, PART // SHARE)
    width = max(16, _power(columns))
    height = max(1, min(PART // width, _power(rows)))
    return RowTiling(height, width, True, max(128, height * width // SHARE))


def _power(n: int) -> int:
    """Return the least power of 2 that is at least n."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True, kw_only=True)
class Norm(Kernel):
    """A norm.

    Attributes:
        centred: whether the mean is subtracted.

    """

    name: str = "memory-sharing norm"
    forward: Any = "ms_norm_forward"  # by name: `tiles` is imported when a kernel first runs
    backward: Any = "ms_norm_backward"
    saves_input: ClassVar[bool] = False
    saves_output: ClassVar[bool] = True

    centred: bool

    @property
    def saves_codes(self) -> bool:
        return True

    def codes(self, given: Forward) -> Tensor:
        return given.x.new_empty(given.x.numel() // given.inner, dtype=arithmetic_dtype(given.x))

    def compute(self, given: Forward) -> tuple[Tensor, Tensor]:
        z, scale = given.x.new_empty(given.x.shape, dtype=DTYPES[given.dtype]), self.codes(given)
        rows, normalised, inverses = given.x.view(-1, given.inner), z.view(-1, given.inner), scale.view(-1, 1)
        for part in _chunks(rows):
            value, result, inverse = rows[part].to(scale.dtype), normalised[part], inverses[part]
            if self.centred:
                layer_norm = torch.native_layer_norm(value, value.shape[1:], None, None, given.eps)
                result.copy_(layer_norm[0])
                inverse.copy_(layer_norm[2])
            else:
                inverse.copy_(value.square().mean(1, keepdim=True).add_(given.eps).rsqrt_())
                torch.mul(value, inverse, out=result)
        return z, scale

    def gradients(self, given: Backward) -> Two:
        z, scale = given.saved, given.codes
        dx = torch.empty_like(given.dy, dtype=DTYPES[given.dtype])
        gradients, normalised, results = (tensor.view(-1, given.inner) for tensor in (given.dy, z, dx))
        inverses = scale.view(-1, 1)
        for part in _chunks(gradients):
            gradient, value = (rows[part].to(scale.dtype) for rows in (gradients, normalised))
            if self.centred:  # PyTorch's own backward for normalised rows, with mean 0 and σ 1
                zero, ones = torch.zeros_like(inverses[part]), torch.ones_like(inverses[part])
                dx_part, *_ = torch.ops.aten.native_layer_norm_backward(
                    gradient, value, value.shape[1:], zero, ones, None, None, [True, False, False]
                )
            else:
                dx_part = torch.addcmul(gradient, value, (gradient * value).mean(1, keepdim=True), value=-1)
            torch.mul(dx_part, inverses[part], out=results[part])
        return dx, None

    def launch(self, given: Forward, y: Tensor, codes: Tensor) -> None:
        self._launch(self.forward, given.inner, given.x, y, codes, eps=[given.eps])

    def launch_backward(self, given: Backward, dx: Tensor | None, d_other: Tensor | None) -> None:
        self._launch(self.backward, given.inner, given.dy, given.saved, given.codes, dx)

    def _launch(self, kernel: str, inner: int, x: Tensor, *tensors: Tensor | None, eps: Any = ()) -> None:
        """Run `kernel(x, *tensors, rows, columns, *eps, ...)`."""
        from . import tiles

        rows, cut = x.numel() // inner, plan(x.numel() // inner, inner)
        arguments = x, *tensors, rows, inner, *eps, self.centred, *cut[:3]
        launch(getattr(tiles, kernel), -(-rows // cut.height), cut.threads, *arguments)


def _chunks(rows: Tensor) -> Iterator[slice]:
    """Yield slices of rows: on a CPU about a chunk of `reference`, else all of them."""
    size = max(1, chunk() * TILE // rows.shape[1]) if rows.device.type == "cpu" else max(1, len(rows))
    for first in range(0, len(rows), size):
        yield slice(first, first + size)


LAYER, RMS = (register(Norm(key=f"ms_{kind}_norm", centred=kind == "layer")) for kind in ("layer", "rms"))
