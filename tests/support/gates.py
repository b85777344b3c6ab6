"""Gates with codes of equal steps in asinh: not the best, and made in no time; and how near kernels have to be."""

from __future__ import annotations

import numpy as np
import torch

from fitact.fitter.analysis.activation import Activation
from fitact.fitter.analysis.gate import Gate
from fitact.fitter.numerics.weight import Weight
from fitact.fitter.records.coded import DEVIATIONS, CodedFit
from fitact.fitter.records.gate import CodedGateFit, GateFit, combined

EPS = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-6}


def part(activation: Activation, bits: int, name: str) -> CodedFit:
    """A code of x whose values and derivatives are those in the middle of each cell."""
    ends = np.sinh(np.linspace(-5.0, 5.0, 2**bits + 1))
    middles = (ends[:-1] + ends[1:]) / 2
    x = np.random.default_rng(0).normal(0, 1, 20_000)
    f, df = activation.value, activation.derivative

    def singles(numbers: np.ndarray) -> tuple[float, ...]:
        return tuple(float(np.float32(number)) for number in numbers)

    borders, values, derivatives = singles(ends[1:-1]), singles(f(middles)), singles(df(middles))
    error = {"objective": 0.0}
    for deviation in DEVIATIONS:
        at = np.searchsorted(borders, deviation * x)
        for name_of, exact, table in (("value", f, values), ("derivative", df, derivatives)):
            off = exact(deviation * x) - np.asarray(table)[at]
            relative = np.sqrt(np.mean(off**2) / np.mean(exact(deviation * x) ** 2))
            error[f"{name_of}_{deviation:g}"] = float(relative)
    return CodedFit(
        name=name,
        method="coded",
        activation=activation,
        error=error,
        bits=bits,
        domain=(-64.0, 64.0),
        weight=Weight("uniform"),
        borders=borders,
        values=values,
        derivatives=derivatives,
        reach=0.0,
    )


def rebuilt(text: str, name: str) -> GateFit:
    return GateFit(name=name, method="gate_rebuild", activation=Gate.of(text), error={})


def coded(text: str, name: str, bits: int, bits_u: int = 16) -> CodedGateFit:
    gate = Gate.of(text)
    a = part(gate.a, bits, name)
    b = part(gate.b, bits_u, name) if bits_u < 16 else None
    return CodedGateFit(name=name, method="gate_coded", activation=gate, code_g=a, code_u=b, error=combined(a, b))


def near(one: torch.Tensor, other: torch.Tensor, reach: torch.Tensor) -> None:
    """Up to three roundings apart, at numbers that are not subnormal; and special where the other is.

    Where a derivative has a root, what is added up cancels: a millionth of `reach` is allowed too.
    """
    if not other.numel():  # not wanted, or nothing there
        assert not one.numel()
        return
    dtype = one.dtype
    assert (dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    # the largest number and infinity are one truncation apart
    wide = other.double().abs() < torch.finfo(dtype).max / 2
    tiny = 4 * torch.finfo(dtype).smallest_normal
    a, b = one.double()[wide], other.double()[wide]
    assert bool(((a - b).abs() <= 4 * EPS[dtype] * b.abs() + 1e-6 * reach[wide] + tiny).all())
    assert torch.equal(one.isnan(), other.isnan())
