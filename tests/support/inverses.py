"""Inverted activations: the shipped ones, and approximants of the plain JSON by NumPy alone, in float64."""

import warnings
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, repeat
from typing import Any

import numpy as np
import torch
from numpy.polynomial.polynomial import polyval

from fitact.base import FitWarning
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.methods import inverted
from fitact.fitter.records.fit import InvertedFit
from fitact.fitter.records.reading import from_json
from tests.support.curves import CURVES
from tests.support.generated import HALVES, Generated, each_of, fits, half_ulp, patterns
from tests.support.shared import shared

# What roundings of float32 make of f′ at most in shipped modules: in half precision half of what that of dx does.
LOST = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 1.5e-5, torch.float64: 1e-12}


def _quotient(approximant: Any, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return p/q, and how large the terms are that make it up, to which roundings are relative."""
    terms = approximant["numerator"], approximant["denominator"]
    radicals = []
    for radical in approximant["radicals"]:
        d = y - radical["anchor"]
        d = np.maximum(radical["side"] * d, 0) if radical["side"] else d
        radicals.append(radical["sign"] * np.sign(d) * np.abs(d) ** (1 / radical["order"]))
    low, high = approximant["low"], approximant["high"]
    t = np.clip(sum(radicals), low, high)
    p, q = (polyval(t, coefficients) for coefficients in terms)
    reach = np.minimum(sum(np.abs(radical) for radical in radicals), 2 * max(abs(low), abs(high)))
    at = np.maximum(np.abs(t), reach)  # t may be a small difference of radicals
    of_p, of_q = (polyval(at, np.abs(coefficients)) for coefficients in terms)
    sizes = (of_p + np.abs(p / q) * of_q) / np.abs(q)
    for radical in approximant["radicals"]:
        if radical["order"] > 2:  # by way of a logarithm, whose rounding counts as it is large
            far = np.maximum(np.abs(y - radical["anchor"]), 1e-300)
            sizes = sizes * (1 + np.abs(np.log2(far)) / radical["order"] / 4)
    return p / q, sizes


def paper(approximant: Any, y: np.ndarray, anchor: float) -> np.ndarray:
    """One of the paper's approximants as its section 5.1 has it, but for its errata."""
    c = approximant["coefficients"]
    y = np.clip(y, anchor, 1000)
    v = y - anchor
    if approximant["kind"] == "power":
        u = np.minimum(v / -approximant["anchor"], 1)
        q = c[0] + c[1] * u ** c[2] * (1 - u) ** c[3]
    elif approximant["kind"] == "root":
        q = c[0] + c[1] * np.sqrt(v) + c[2] * v + c[3] * v**2
    else:
        q = 1 + (c[0] + c[1] * np.sqrt(v) + c[2] * v) * np.exp(c[3] * (c[4] - v) ** 3)
    return q * (1 - y) + y if approximant["approximates"] == "sigmoid" else q


def chain(at: float, steps: int, kind: type[np.floating]) -> np.ndarray:
    """A number and the next ones on each side."""
    sides = (accumulate(repeat(kind(to), steps), np.nextafter, initial=kind(at)) for to in (-np.inf, np.inf))
    return np.array([each for side in sides for each in side])


@dataclass(frozen=True)
class Inverse(Generated):
    saves_output = True

    @property
    def minimum(self) -> float:
        return CURVES[self.plain].minimum

    def error(self, dtype: torch.dtype) -> float:
        """The stated error; float64 has that of float32."""
        return self.fit["error"][_name(dtype)]

    def true(self, x: torch.Tensor) -> torch.Tensor:
        with np.errstate(all="ignore"):
            return torch.from_numpy(np.asarray(CURVES[self.plain].derivative(x.detach().double().numpy())))

    def code(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """How many borders lie strictly below, int64; `dtype` is that of y."""
        at = x.detach().double()
        none = torch.zeros(at.shape, dtype=torch.long)
        return sum(((at > border).long() for border in self.fit["borders"][_name(dtype)]), none)

    def derivative(self, y: torch.Tensor, code: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The approximant of f′ at each output, and what roundings of its largest terms may change, float64."""
        unit = 2.0**-53 if y.dtype == torch.float64 else 2.0**-24
        at, actual, lost = y.detach().double().numpy(), np.full(y.shape, np.nan), np.zeros(y.shape)
        for c, approximant in enumerate(self.fit["approximants"][_name(y.dtype)]):
            own = code.numpy() == c
            if approximant["kind"] == "quotient":
                actual[own], sizes = _quotient(approximant, at[own])
                lost[own] = 8 * unit * sizes
            else:  # the numbers of kernels are float32, and beside its minimum a radical tells
                kind = np.float64 if y.dtype == torch.float64 else np.float32
                actual[own] = paper(approximant, at[own], float(kind(approximant["anchor"])))
                lost[own] = 64 * unit
        most = (self.error(y.dtype) if self.own else LOST[y.dtype]) * np.maximum(np.abs(actual), 1)
        return torch.from_numpy(actual), torch.from_numpy(np.minimum(lost, most, out=lost))

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """A sample is dense at the minimum, with subnormals and huge numbers."""
        if dtype in HALVES:
            return patterns(dtype)
        kind = np.float32 if dtype == torch.float32 else np.float64
        near = [self.minimum + np.linspace(-r, r, 40_001) for r in (2e-2, 1e-3)]
        tails = np.concatenate([np.geomspace(1e-44, 1e30, 5000), [np.float32(1e30)]])
        corners = [chain(at, 3, kind) for at in (-3, 0, 3)]
        special = [np.inf, -np.inf, np.nan, 0.0, -0.0]
        parts = [*near, np.linspace(-30, 30, 120_001), tails, -tails, *corners, chain(self.minimum, 1000, kind)]
        return torch.from_numpy(np.concatenate([np.asarray(part, dtype=kind) for part in [*parts, special]]))

    def check_gradient(self, x: torch.Tensor, y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor) -> None:
        """dx is dy times the approximant of that very y, up to roundings, and NaN where y is."""
        derivative, lost = self.derivative(y, self.code(x, y.dtype))
        expected = dy.double() * derivative
        allowed = dy.double().abs() * lost
        allowed += half_ulp(expected.abs() + allowed, dx.dtype)
        wrong = (dx.double() - expected).abs() > allowed
        wrong &= ~(dx.isinf() & (expected.abs() + allowed).to(dx.dtype).isinf())
        assert dx.shape == x.shape
        assert not bool((wrong | dx.isnan())[y.isfinite()].any())
        assert bool(dx[y.isnan()].isnan().all())


def unpacked(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes of whole tiles: row r of column j in bits [k·r, k·r + k) of an 8k-bit word, in k planes."""
    planes = codes.view(-1, bits, 1024)
    words = sum(planes[:, plane].long() << (8 * plane) for plane in range(bits))
    return torch.stack([words >> (bits * row) & (2**bits - 1) for row in range(8)], dim=1).flatten()


def _name(dtype: torch.dtype) -> str:
    return "float32" if dtype == torch.float64 else str(dtype).removeprefix("torch.")


@cache
def inverses() -> list[Inverse]:
    return [Inverse(name, fit) for name, fit in fits().items() if fit["method"] == "inverted"]


@shared
def _fitted(text: str, domain: tuple[float, float] | None, tol: float) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FitWarning)
        return inverted.fit(Activation.of(text), "own_inverted", domain=domain, tol=tol).to_json()


def fitted(text: str, domain: tuple[float, float] | None = None, tol: float = inverted.TOLERANCE) -> InvertedFit:
    fit = from_json(_fitted(text, domain, tol))
    assert isinstance(fit, InvertedFit)
    return fit


@cache
def made(text: str, domain: tuple[float, float] | None, tol: float = inverted.TOLERANCE) -> Inverse:
    return Inverse.of(fitted(text, domain, tol))


# A quotient of one bit, one of two with constants, the paper's approximants.
SOME = {"gelu_inverted1", "hardswish_inverted2", "silu_inverted_published"}
each_inverse = partial(each_of, inverses)
