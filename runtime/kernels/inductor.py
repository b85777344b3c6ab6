"""Coding and decoding on a CPU, compiled by PyTorch's inductor if FITACT_CPU=inductor.

`reference` makes several passes over each chunk; compiled, this is one loop in C++, with the same codes bit for
bit. It is compiled once for each activation and dtype, which takes seconds and needs a C++ compiler.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType

import torch
from torch import Tensor

from .internals import mark_dynamic

VARIABLE = "FITACT_CPU"
_count = itertools.count()


@cache
def asked_for() -> bool:
    """Return whether compiled code is requested.

    Raises:
        RuntimeError: the variable has an unknown value, or there is no C++ compiler.

    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "inductor"):
        raise RuntimeError(f"{VARIABLE}: expected inductor or nothing, got {value!r}")
    if value and not any(map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++", "cl"))):
        raise RuntimeError(
            f"{VARIABLE}=inductor needs a C++ compiler, g++ or clang++ or CXX: install one, or unset it"
        )
    return value == "inductor"


def pick(code: Tensor, table: Sequence[float]) -> Tensor:
    """Return table[code] as a tree of selects, which a compiler turns into vector code; 2^k numbers."""
    half = len(table) // 2
    upper, lower = (pick(code, part) if half > 1 else part[0] for part in (table[half:], table[:half]))
    return torch.where((code & half) != 0, upper, lower)


@cache
def encoder(
    borders: tuple[float, ...], bits: int, even: bool, dtype: torch.dtype
) -> Callable[[Tensor, Tensor], None]:
    """Return a function that writes planes of codes, uint8 (tiles, bits, columns), of x (tiles, rows, columns)."""

    def encode(x: Tensor, planes: Tensor) -> None:
        x = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        if even:
            x = x.abs()
        code = torch.zeros_like(x, dtype=torch.int32)
        for border in borders:
            code = code + (x > border).to(torch.int32)
        shifts = torch.arange(0, x.shape[1] * bits, bits, dtype=torch.int32)[:, None]
        word = (code << shifts).sum(1, dtype=torch.int32)
        planes.copy_(torch.stack([((word >> (8 * plane)) & 0xFF).to(torch.uint8) for plane in range(bits)], 1))

    return _compile(encode)


@cache
def multiplier(
    derivative: Callable[[Tensor, Tensor], Tensor], bits: int, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """Return a function of dy, y, planes and dx that writes dx = dy · derivative(y, code), in the dtype of dx.

    dy, y and dx are (tiles, rows, columns), planes as `encoder` writes them; tensors that are not saved are empty.
    """

    def multiply(dy: Tensor, y: Tensor, planes: Tensor, dx: Tensor) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        code = planes
        if bits:
            word = planes[:, 0].to(torch.int32)
            for plane in range(1, bits):
                word = word | (planes[:, plane].to(torch.int32) << (8 * plane))
            shifts = torch.arange(0, dy.shape[1] * bits, bits, dtype=torch.int32)[:, None]
            code = (word[:, None] >> shifts) & ((1 << bits) - 1)
        dx.copy_(dy.to(wide) * derivative(y.to(wide), code))

    return _compile(multiply)


def _compile(function: Callable[..., None]) -> Callable[..., None]:
    """Compile for any number of tiles.

    Each function gets its own code object and name. Dynamo counts recompilations by the code object. By the name
    it remembers numbers, and turns them into variables once they differ.
    """
    assert isinstance(function, FunctionType)
    name = f"{function.__name__}_{next(_count)}"
    code = function.__code__.replace(co_name=name)
    own = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    compiled = torch.compile(own, fullgraph=True)

    def run(*tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.numel():
                # nothing else varies; dynamic=True would turn the borders into variables, too
                mark_dynamic(tensor, 0)
        with torch.no_grad():
            compiled(*tensors)

    return run
