"""Kernels of formulas with learned parameters, norms, and plain ones to compare with, compiled ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fitact.runtime.kernels.learned_tiles import BLOCK, TRIPS
from fitact.runtime.kernels.norm_tiles import RowTiling, ms_norm_backward, ms_norm_forward, plan
from fitact.runtime.kernels.reference import TILE
from tests.support.instructions import OfModule, compiled

# How the channels lie: one alone, beside each other, in images.
PLACES = {"one": (False, False), "last": (True, False), "image": (True, True)}


@dataclass(frozen=True)
class LearnedKernel(OfModule):
    """A kernel of a formula with learned parameters; `place`: how the channels lie, of `PLACES`."""

    place: str = "one"

    def threads(self, dtype: str) -> int:
        """Return the threads of a program."""
        return 256 if dtype == "fp32" or self.block else 128

    @property
    def block(self) -> bool:
        """Whether a program has a block of rows and channels, and no tile."""
        return self.pass_ == "backward" or self.place == "last"

    def elements(self, dtype: str) -> int:
        """Return the elements that a thread has in a full tile, or in a block of backward."""
        return (int(BLOCK) * int(TRIPS) if self.block else TILE) // self.threads(dtype)

    def compile(self, dtype: str, target: str) -> Any:
        """Compile ahead of time, as the runtime's launch would."""
        channels, inner = PLACES[self.place]
        kinds = {"numbers": "*fp32", "sums": "*fp32", "channels": "i32", "inner": "i32", "rows": "i64", "n": "i64"}
        constants = {name: None for name, given in (("channels", channels), ("inner", inner)) if not given}
        kernel = getattr(self.registered, self.pass_)
        return compiled(
            kernel, kinds, dtype, target, self.threads(dtype), constants, ("channels",) if channels else ()
        )


@dataclass(frozen=True)
class NormKernel:
    """A kernel of a memory-sharing norm of many rows.

    Attributes:
        kind: layer or rms.
        pass_: forward or backward.
        columns: elements of a row.

    """

    kind: str
    pass_: str
    columns: int

    @property
    def plan(self) -> RowTiling:
        """How the rows are cut into blocks."""
        return plan(100_000, self.columns)

    def elements(self, dtype: str) -> int:
        """Return the elements that a thread has."""
        return self.plan.height * self.columns // self.plan.threads

    def compile(self, dtype: str, target: str, output: str | None = None) -> Any:
        """Compile ahead of time, as the ops launch it; `output` is the dtype of z, if another."""
        x, z = dtype, output or dtype
        tensors = (x, z, "fp32") if self.pass_ == "forward" else (z, z, "fp32", x)
        kernel = ms_norm_forward if self.pass_ == "forward" else ms_norm_backward
        kinds = [f"*{each}" for each in tensors] + ["i32", "i32"] + (["fp32"] if self.pass_ == "forward" else [])
        constants = {
            "centred": self.kind == "layer",
            "height": self.plan.height,
            "width": self.plan.width,
            "whole": self.plan.whole,
        }
        names = kernel.arg_names
        multiples = names[len(tensors) : len(tensors) + 1 + (self.columns % 16 == 0)]
        signature = dict(zip(names, kinds, strict=False))
        return compiled(kernel, signature, dtype, target, self.plan.threads, constants, multiples)
