"""For tests of generated activations: PyTorch's own, numbers and layouts, and what each kind has to define."""

import importlib
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fitact.codegen.generate import render
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.numerics.weight import Weight
from fitact.fitter.records.fit import AnyFit, StepFit
from fitact.runtime.kernels import ops, registry
from fitact.runtime.measure.saved import Saved
from tests.support import package
from tests.support.rows import full

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32, torch.float64)
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EACH_HALF = pytest.mark.parametrize("dtype", HALVES, ids=str)


def wide(x: torch.Tensor) -> torch.Tensor:
    """At least float32."""
    return x if x.dtype == torch.float64 else x.float()


def _squareplus(x: torch.Tensor) -> torch.Tensor:
    root = 2 * torch.hypot(x / 2, x.new_ones(()))
    return torch.where(x > 0, x / 2 + root / 2, 2 / (root - x))


# PyTorch's own, written out here: the catalog is under test.
BASELINE: dict[str, Any] = {
    **{name: getattr(F, name) for name in ("celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish")},
    **{name: getattr(F, name) for name in ("hardtanh", "leaky_relu", "logsigmoid", "mish", "relu", "relu6")},
    **{name: getattr(F, name) for name in ("selu", "silu", "softplus", "softshrink", "softsign", "tanhshrink")},
    "exp": torch.exp,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "identity": torch.clone,
    # PyTorch has none; rounded once
    "quick_gelu": lambda x: (wide(x) * torch.sigmoid(1.702 * wide(x))).to(x.dtype),
    "relu2": lambda x: F.relu(x).square(),
    # the next, and two below, PyTorch does not have either; rounded once
    "serf": lambda x: (wide(x) * torch.erf(F.softplus(wide(x)))).to(x.dtype),
    "sigmoid": torch.sigmoid,
    "snake": lambda x: (wide(x) + torch.sin(wide(x)).square()).to(x.dtype),
    # (x + √(x² + 4))/2, written so that nothing cancels for x < 0
    "squareplus": lambda x: _squareplus(wide(x)).to(x.dtype),
    "tanh": torch.tanh,
    "threshold": lambda x: F.threshold(x, 1.0, 0.0),
}


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """All 65 536 bit patterns of a half-precision dtype, NaNs and infinities among them."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def sample(dtype: torch.dtype, corners: Sequence[float]) -> torch.Tensor:
    """Numbers of every size and both signs, corners with their neighbours, and special values."""
    kind = np.float32 if dtype == torch.float32 else np.float64
    at = np.array([0.0, *corners], dtype=kind)
    beside = [np.nextafter(at, kind(to)) for to in (-np.inf, np.inf)]
    special = [np.inf, np.nan, np.finfo(kind).max]
    parts = [np.linspace(0, 30, 30_001), np.geomspace(1e-42, 1e30, 2000), at, *beside, special]
    half = np.concatenate([np.asarray(part, dtype=kind) for part in parts])
    return torch.from_numpy(np.concatenate([half, -half]))


# Orders and sizes that a tensor may have; of those that are not dense the result is contiguous.
LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.randn(3, 50, 70),
    "transposed": lambda: torch.randn(50, 70).t(),
    "channels_last": lambda: torch.randn(2, 5, 30, 40).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: torch.randn(2, 5, 6, 7, 8).to(memory_format=torch.channels_last_3d),
    "permuted": lambda: torch.randn(4, 5, 6, 7).permute(2, 0, 3, 1),
    "size_one_dims": lambda: torch.randn(3, 1, 5, 1).transpose(0, 2),
    "expanded": lambda: torch.randn(30, 1).expand(30, 50),
    "sliced": lambda: torch.randn(100, 40)[::3, 1::2],
    "overlapping": lambda: torch.randn(100).as_strided((20, 20), (2, 1)),
    "empty": lambda: torch.randn(0, 3),
    "zero_dim": lambda: torch.randn(()),
    "below_a_tile": lambda: torch.randn(8191),
    "one_tile": lambda: torch.randn(8192),
    "above_a_tile": lambda: torch.randn(8193),
    "many_chunks": lambda: torch.randn(8192 * 35 + 5),
}


def first_row(y: torch.Tensor) -> torch.Tensor:
    (y[0] if y.dim() else y).zero_()
    return y


# Changes in place of an activation's output.
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "product": lambda y: y.mul_(2),
    "relu": lambda y: F.relu(y, inplace=True),
    "row": first_row,
}


def forward_op(x, dtype, key, other=None, *, inner=1, eps=0.0, reference=False, check=False):
    """y in a dtype, and the codes, by the op, or by PyTorch's operators; `check`: PyTorch's own of an op."""
    op = ops._forward_reference if reference else ops.ops.forward
    arguments = x, other, inner, eps, None, ops.NUMBER[dtype], key
    if check:
        torch.library.opcheck(op.default, arguments)
    return op(*arguments)


def backward_op(dy, saved, codes, dtype, key, other=None, *, inner=1, wants=None, reference=False, check=False):
    """The gradients of x, in a dtype, and of the other tensor, likewise; by default of all that there are."""
    wants = wants or (True, other is not None)
    op = ops._backward_reference if reference else ops.ops.backward
    arguments = dy, saved, other, codes, inner, ops.NUMBER[dtype], *wants, key
    if check:
        torch.library.opcheck(op.default, arguments)
    return op(*arguments)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, the sign of 0 too, but for the payload of NaNs."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    a, b = a.detach().contiguous(), b.detach().contiguous()
    return a.dtype == b.dtype and bool(torch.all((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())))


def half_ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What rounding float64 values to a dtype costs at most; the doubled unit is for values that round up."""
    info = torch.finfo(dtype)
    return values.abs() * info.eps / 2 * (1 + info.eps) + info.smallest_normal * info.eps


def run(function: Any, x: torch.Tensor, dy: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and gradient of a fresh leaf with the layout of x."""
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = function(leaf)
    (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y) if dy is None else dy)
    return y.detach(), dx


def sizes(saved: Saved) -> list[int]:
    return sorted(storage.nbytes() for storage in saved.storages.values() if storage.nbytes())


@dataclass(frozen=True)
class Generated(ABC):
    """A generated activation, its fit as plain JSON; `own` is its module where it is not a shipped one."""

    name: str
    fit: Any
    own: ModuleType | None = None

    saves_output: ClassVar[bool]

    @classmethod
    def of(cls, fit: AnyFit, **more: Any) -> Self:
        return cls(fit.name, json.loads(fit.to_json()), load(fit), **more)

    @property
    def plain(self) -> str:
        return self.fit["activation"]["name"]

    @property
    def module(self) -> ModuleType:
        return self.own or importlib.import_module(f"fitact.generated.{self.name}")

    @property
    def function(self) -> Any:
        return getattr(self.module, self.name)

    @property
    def key(self) -> str:
        return self.module._KEY

    @property
    def bits(self) -> int:
        return self.fit.get("bits", 0)

    @property
    def baseline(self) -> Any:
        """PyTorch's own; for a formula that PyTorch lacks what the module composes, which has tests of its own."""
        return BASELINE[self.plain] if self.own is None else registry.find(self.key).value

    def baseline_gradient(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        return run(self.baseline, x, dy)[1]

    def saved(self, y: torch.Tensor) -> list[int]:
        """The bytes of each storage saved for backward: the output where it is needed, whole tiles of codes."""
        whole = y.numel() * y.element_size() if self.saves_output else 0
        return sorted(filter(None, [whole, -(-y.numel() // 8192) * 1024 * self.bits]))

    @property
    def corners(self) -> Sequence[float]:
        """Where this activation is special, beside 0."""
        return ()

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """All numbers of half precision; else a sample, with all that is special to this activation."""
        return patterns(dtype) if dtype in HALVES else sample(dtype, self.corners)

    @abstractmethod
    def check_gradient(self, x: torch.Tensor, y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor) -> None:
        """Compare dx with dy times what replaces f′, by the definition."""


@cache
def fits() -> dict[str, Any]:
    folder = files("fitact.generated") / "fits"
    paths = sorted(folder.iterdir(), key=lambda path: path.name)
    return {path.name.removesuffix(".json"): json.loads(path.read_text()) for path in paths}


def made_up(function: str, name: str = "some_fit", bits: int = 1, *, even: bool = False) -> StepFit:
    return StepFit(
        name=name,
        method="fewbit",
        activation=Activation.of(function),
        bits=bits,
        domain=(-10.0, 10.0),
        weight=Weight(),
        even=even,
        borders=tuple(i / 4 for i in range(2**bits - 1)),
        levels=tuple(i / 8 for i in range(2**bits)),
        error={"max": 0.25, "objective": 0.1, "primitive_max": 0.0, "primitive_norm": 0.0, "rms": 0.05},
    )


def load(fit: AnyFit) -> ModuleType:
    path = Path(tempfile.mkdtemp(dir=os.environ.get("FITACT_TESTS_SHARED")), f"{fit.name}.py")
    path.write_text(render(fit), encoding="utf-8")
    return package.load(path, f"of_tests_{path.parent.name}_{fit.name}")


def each_of(ones: Callable[[], Sequence[Generated]], only: set[str] | None = None) -> pytest.MarkDecorator:
    """Parametrise `case` by activations; those not in `only` run in the full product alone."""
    rows = full(ones(), lambda each: only is None or each.name in only)
    return pytest.mark.parametrize("case", rows, ids=lambda each: each.name)
