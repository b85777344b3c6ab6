"""What tests of inverted activations share: the shipped ones, true derivatives, and the forms of the plain JSON.

Derivatives and forms are written out here with NumPy and SciPy, in float64: nothing of fitact takes part.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special

from .steps import STOCK

# What roundings of float32 make of f′ at most in shipped modules: in half precision half of what that of dx does.
LOST = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 1.5e-5, torch.float64: 1e-12}

NORMAL = math.sqrt(2 * math.pi)
TANH = math.sqrt(2 / math.pi)
CUBE = 0.044715


def _swish(beta: float) -> tuple[Callable, Callable]:
    def value(x: np.ndarray) -> np.ndarray:
        return x * special.expit(beta * x)

    def slope(x: np.ndarray) -> np.ndarray:
        s, other = special.expit(beta * x), special.expit(-beta * x)
        return s + beta * x * s * other

    return value, slope


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x * special.expit(2 * TANH * (x + CUBE * x**3))


def _gelu_tanh_slope(x: np.ndarray) -> np.ndarray:
    u = 2 * TANH * (x + CUBE * x**3)
    s, other = special.expit(u), special.expit(-u)
    return s + x * s * other * 2 * TANH * (1 + 3 * CUBE * x * x)


def _mish_slope(x: np.ndarray) -> np.ndarray:
    t = np.tanh(np.logaddexp(0, x))
    return t + x * (1 - t * t) * special.expit(x)


# name → f, f′ and the x of f's minimum
TRUE: dict[str, tuple[Callable, Callable, float]] = {
    "gelu": (
        lambda x: x * special.ndtr(x),
        lambda x: special.ndtr(x) + x * np.exp(-x * x / 2) / NORMAL,
        -0.751791524693564457,
    ),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_slope, -0.7524614220710163),
    "hardswish": (
        lambda x: x * np.clip(x + 3, 0, 6) / 6,
        lambda x: np.where(x <= -3, 0.0, np.where(x >= 3, 1.0, x / 3 + 0.5)),
        -1.5,
    ),
    "mish": (lambda x: x * np.tanh(np.logaddexp(0, x)), _mish_slope, -1.1924312145154952),
    "quick_gelu": (*_swish(1.702), -1.278464542761073795 / 1.702),
    "silu": (*_swish(1.0), -1.278464542761073795),
}


def _root(d: np.ndarray, order: int, side: int) -> np.ndarray:
    if side == 0:
        return np.sign(d) * np.abs(d) ** (1 / order)
    return np.maximum(side * d, 0) ** (1 / order)


def _polynomial(coefficients: list[float], t: np.ndarray) -> np.ndarray:
    return sum(c * t**k for k, c in enumerate(coefficients))


def _sizes(coefficients: list[float], t: np.ndarray) -> np.ndarray:
    return _polynomial([abs(c) for c in coefficients], t)


def _quotient(form: Any, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return p/q, and how large the terms are that make it up, to which roundings are relative."""
    roots = [root["sign"] * _root(y - root["anchor"], root["order"], root["side"]) for root in form["roots"]]
    t = np.clip(sum(roots), form["low"], form["high"])
    p, q = _polynomial(form["numerator"], t), _polynomial(form["denominator"], t)
    reach = np.minimum(sum(np.abs(root) for root in roots), 2 * max(abs(form["low"]), abs(form["high"])))
    at = np.maximum(np.abs(t), reach)  # t may be a small difference of roots
    sizes = (_sizes(form["numerator"], at) + np.abs(p / q) * _sizes(form["denominator"], at)) / np.abs(q)
    for root in form["roots"]:
        if root["order"] > 2:  # by way of a logarithm, whose rounding counts as it is large
            far = np.maximum(np.abs(y - root["anchor"]), 1e-300)
            sizes = sizes * (1 + np.abs(np.log2(far)) / root["order"] / 4)
    return p / q, sizes


def _paper(form: Any, y: np.ndarray, anchor: float) -> np.ndarray:
    c = form["coefficients"]
    y = np.clip(y, anchor, 1000)
    v = y - anchor
    if form["form"] == "power":
        u = np.minimum(v / -form["anchor"], 1)
        q = c[0] + c[1] * u ** c[2] * (1 - u) ** c[3]
    elif form["form"] == "root":
        q = c[0] + c[1] * np.sqrt(v) + c[2] * v + c[3] * v**2
    else:
        q = 1 + (c[0] + c[1] * np.sqrt(v) + c[2] * v) * np.exp(c[3] * (c[4] - v) ** 3)
    return q * (1 - y) + y if form["approximates"] == "sigmoid" else q


@dataclass(frozen=True)
class Inverse:
    """An inverted activation, its fit as plain JSON; `own` is its module where it is not a shipped one."""

    name: str
    fit: Any
    own: ModuleType | None = None

    @property
    def plain(self) -> str:
        return self.fit["activation"]["name"]

    @property
    def bits(self) -> int:
        return self.fit["bits"]

    @property
    def published(self) -> bool:
        return self.name.endswith("_published")

    @property
    def module(self) -> ModuleType:
        return self.own or importlib.import_module(f"fitact.generated.{self.name}")

    @property
    def function(self) -> Any:
        return getattr(self.module, self.name)

    @property
    def key(self) -> str:
        return self.module.KEY

    @property
    def stock(self) -> Any:
        return STOCK[self.plain]

    @property
    def minimum(self) -> float:
        return TRUE[self.plain][2]

    def error(self, dtype: torch.dtype) -> float:
        """The stated error; float64 has that of float32."""
        return self.fit["error"][_fitted(dtype)]

    def true(self, x: torch.Tensor) -> torch.Tensor:
        """f′(x), float64."""
        with np.errstate(all="ignore"):
            return torch.from_numpy(np.asarray(TRUE[self.plain][1](x.detach().double().numpy())))

    def code(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """How many splits lie strictly below, int64; `dtype` is that of y."""
        at = x.detach().double()
        none = torch.zeros(at.shape, dtype=torch.long)
        return sum(((at > split).long() for split in self.fit["splits"][_fitted(dtype)]), none)

    def form(self, y: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
        """What stands for f′ at each output, by the definition, float64."""
        return self._evaluated(y, code)[0]

    def lost(self, y: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
        """What roundings may make of it: a few units of the largest terms, and no more than fits the dtype."""
        found, lost = self._evaluated(y, code)
        most = self.error(y.dtype) if self.own else LOST[y.dtype]
        return torch.minimum(lost, most * found.abs().clamp(min=1))

    def _evaluated(self, y: torch.Tensor, code: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        unit = 2.0**-53 if y.dtype == torch.float64 else 2.0**-24
        at, found, lost = y.detach().double().numpy(), np.full(y.shape, np.nan), np.zeros(y.shape)
        for c, form in enumerate(self.fit["forms"][_fitted(y.dtype)]):
            own = code.numpy() == c
            if form["form"] == "quotient":
                found[own], sizes = _quotient(form, at[own])
                lost[own] = 8 * unit * sizes
            else:  # the numbers of kernels are float32, and beside its minimum a root tells
                anchor = form["anchor"] if y.dtype == torch.float64 else float(np.float32(form["anchor"]))
                found[own] = _paper(form, at[own], anchor)
                lost[own] = 64 * unit
        return torch.from_numpy(found), torch.from_numpy(lost)

    def stock_gradient(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """PyTorch's own, by autograd."""
        leaf = x.detach().clone().requires_grad_()
        (dx,) = torch.autograd.grad(self.stock(leaf), leaf, dy)
        return dx


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, the sign of 0 too, but for the payload of NaNs."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    a, b = a.detach().contiguous(), b.detach().contiguous()
    return a.dtype == b.dtype and bool(torch.all((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())))


def unpacked(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes of whole tiles: row r of column j in bits [k·r, k·r + k) of an 8k-bit word, in k planes."""
    planes = codes.view(-1, bits, 1024)
    words = sum(planes[:, plane].long() << (8 * plane) for plane in range(bits))
    return torch.stack([words >> (bits * row) & (2**bits - 1) for row in range(8)], dim=1).flatten()


def _fitted(dtype: torch.dtype) -> str:
    return "float32" if dtype == torch.float64 else str(dtype).removeprefix("torch.")


@cache
def inverses() -> list[Inverse]:
    """The shipped inverted activations."""
    folder = files("fitact.generated") / "fits"
    fits = sorted((path.name, json.loads(path.read_text())) for path in folder.iterdir())
    return [Inverse(file.removesuffix(".json"), fit) for file, fit in fits if fit["method"] == "inverted"]


@cache
def _fitted_text(text: str, domain: tuple[float, float] | None, name: str) -> Any:
    from fitact.errors import FitWarning
    from fitact.fitter import inverted
    from fitact.fitter.activation import Activation

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FitWarning)
        return inverted.fit(Activation.of(text), name, domain=domain)


def made(text: str, domain: tuple[float, float] | None, folder: Path, name: str = "own_inverted") -> Inverse:
    """Fit a formula, generate its module into a folder, and import it from there."""
    from fitact.codegen import generate

    fit = _fitted_text(text, domain, name)
    generate.generate(generate.plan([fit]), folder, prune=False)
    path = folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"of_tests_{abs(hash((text, domain)))}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Inverse(name, json.loads(fit.to_json()), module)


# A quotient of one bit, one of two with constants, the paper's forms.
SOME = {"gelu_inverted1", "hardswish_inverted2", "silu_inverted_published"}


def named(*names: str) -> pytest.MarkDecorator:
    """Parametrise `one` by some of the shipped activations."""
    return pytest.mark.parametrize(
        "one", [pytest.param(one, id=one.name) for one in inverses() if one.name in names]
    )


def each_inverse(only: set[str] | None = None) -> pytest.MarkDecorator:
    """Parametrise `one` by the shipped activations; those not in `only` run in the full product alone."""
    return pytest.mark.parametrize(
        "one",
        [
            pytest.param(one, id=one.name, marks=[] if only is None or one.name in only else pytest.mark.full)
            for one in inverses()
        ],
    )
