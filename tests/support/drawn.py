"""What tests of codes drawn at random share: a record by hand, its module, and a plain oracle in whole numbers."""

from __future__ import annotations

import struct
from bisect import bisect_right
from dataclasses import replace
from functools import cache
from types import ModuleType

import numpy as np
import torch

from fitact.fitter.analysis.activation import Activation
from fitact.fitter.analysis.gate import Gate
from fitact.fitter.numerics.weight import Weight
from fitact.fitter.records.gate import KEPT, CodedGateFit, combined
from fitact.fitter.records.stochastic import StochasticFit
from tests.support.generated import load

TURN = {"silu": -1.28125, "gelu": -0.75}  # numbers of bfloat16 near the minimum


@cache
def record(bits: int, expression: str = "silu") -> StochasticFit:
    """A fit whose nodes are evenly spaced in asinh from −16 to 16, but for the one where the activation turns."""
    activation = Activation.of(expression)
    spaced = np.float32(np.sinh(np.linspace(-1, 1, 2**bits) * np.arcsinh(64)) / 4)
    nodes = (spaced.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)
    if expression in TURN:
        nodes[np.abs(nodes - TURN[expression]).argmin()] = TURN[expression]
    values, slopes = (function(nodes).astype(np.float32) for function in (activation.value, activation.derivative))
    return StochasticFit(
        name=f"{expression}_coded{bits}_stochastic",
        activation=activation,
        method="coded_stochastic",
        error=dict.fromkeys(StochasticFit.ERRORS, 0.0),
        bits=bits,
        domain=(-16.0, 16.0),
        weight=Weight("normal(0, 2)"),
        nodes=tuple(nodes.tolist()),
        values=tuple(map(float, values)),
        derivatives=tuple(map(float, slopes)),
    )


@cache
def module(bits: int, expression: str = "silu") -> ModuleType:
    """Its module."""
    return load(record(bits, expression))


@cache
def gate(bits: int, bits_u: int = KEPT) -> CodedGateFit:
    """A fit of a SwiGLU whose parts are such records."""
    name, whole = f"swiglu_coded{bits}_{bits_u}_stochastic", Gate.of("swiglu")
    of_g = replace(record(bits), name=name)
    of_u = None if bits_u == KEPT else replace(record(bits_u, "identity"), name=name, activation=whole.b)
    return CodedGateFit(
        name=name,
        method="gate_coded",
        activation=whole,
        code_g=of_g,
        code_u=of_u,
        error=combined(of_g, of_u),
    )


@cache
def gate_module(bits: int, bits_u: int = KEPT) -> ModuleType:
    """Its module."""
    return load(gate(bits, bits_u))


def philox(seed: int, counter: int) -> list[int]:
    """Philox 4x32-10 as its paper has it, in whole numbers without end."""
    words = [counter >> (32 * i) & 0xFFFFFFFF for i in range(4)]
    keys = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        left, right = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [
            right >> 32 ^ words[1] ^ keys[0],
            right & 0xFFFFFFFF,
            left >> 32 ^ words[3] ^ keys[1],
            left & 0xFFFFFFFF,
        ]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return words


def position(fit: StochasticFit, x: float) -> int:
    """The position of a float32, by its neighbours among the numbers of bfloat16."""
    if x != x:
        return 0

    def of(number: float) -> int:
        number = min(max(number, fit.nodes[0]), fit.nodes[-1])
        i = min(bisect_right(fit.nodes, number) - 1, len(fit.nodes) - 2)
        low, high = fit.values[i : i + 2]
        f = float(fit.activation.value(np.array([number]))[0])
        share = 0.0 if low == high else min(max((f - low) / (high - low), 0.0), 1.0)
        share = 1.0 if number == fit.nodes[-1] else share
        return 65536 * i + round(65536 * share)

    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    low, high = (
        struct.unpack("<f", struct.pack("<I", (bits & 0xFFFF0000) + step & 0xFFFFFFFF))[0] for step in (0, 65536)
    )
    first = of(low)
    return first + ((of(high) - first) * (bits >> 1 & 0x7FFF) >> 15) if high == high else first


def codes(fit: StochasticFit, x: torch.Tensor, seed: int, stream: int = 0) -> list[int]:
    """The codes of a flat tensor, one after the other."""
    found = []
    made: dict[int, list[int]] = {}
    for i, number in enumerate(x.float().tolist()):
        tile, row, column = i // 8192, i % 8192 // 1024, i % 1024
        counter = 1024 * tile + column
        if counter not in made:
            made[counter] = philox(seed, counter + (stream << 64))
        random = made[counter][row % 4] >> (16 * (row // 4)) & 0xFFFF
        found.append(position(fit, number) + random >> 16)
    return found
