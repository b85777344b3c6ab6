"""What a layer may keep of an input x for backward, and what stands for f(x) and f′(x) then.

Codes of fitact, and what they are compared with: x rounded to bfloat16, to float8, and to int8. f and f′ of a
rounded x are computed again. Kept tensors have the size that is claimed: codes of k bits are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fitact.fitter.analysis.activation import Activation
from fitact.fitter.methods import coded
from fitact.fitter.numerics.weight import Weight
from fitact.fitter.records.coded import CodedFit
from fitact.fitter.records.reading import read

BLOCK = 64  # numbers that share a scale
WIDE = -65504.0, 65504.0  # the domain of wide fits
Kept = tuple[Tensor, ...]
StandIns = tuple[Tensor, Tensor]

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu, "identity": lambda x: x}
DERIVATIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: torch.ops.aten.gelu_backward(torch.ones_like(x), x),
    "silu": lambda x: torch.ops.aten.silu_backward(torch.ones_like(x), x),
    "identity": torch.ones_like,
}


@dataclass(frozen=True)
class Keeper:
    """One way to keep an input.

    Attributes:
        name: in files.
        label: in tables.
        bits: an element, without scales.
        keep: name of f and x, of rows (…, width) → what is kept.
        restore: name of f, what is kept, and shape and dtype of x → what stands for f(x) and f′(x).

    """

    name: str
    label: str
    bits: int
    keep: Callable[[str, Tensor], Kept]
    restore: Callable[[str, Kept, torch.Size, torch.dtype], StandIns]

    def stand_ins(self, function: str, x: Tensor) -> StandIns:
        """Return what stands for f(x) and f′(x), shape and dtype of x."""
        return self.restore(function, self.keep(function, x), x.shape, x.dtype)


@cache
def fit(function: str, bits: int, *, wide: bool = False) -> CodedFit:
    """Return the fit that ships, or else make it, which takes seconds; a wide one has cells for all of float16."""
    name = f"{function}_{'wide_' if wide else ''}coded{bits}"
    shipped = Path(str(files("fitact.generated") / "fits" / f"{name}.json"))
    options = {"domain": WIDE, "weight": Weight("student(2)")} if wide else {}
    found = read(shipped) if shipped.exists() else coded.fit(Activation.of(function), bits, name, **options)
    assert isinstance(found, CodedFit)
    return found


@cache
def _borders(function: str, bits: int, wide: bool) -> Tensor:
    return torch.tensor(fit(function, bits, wide=wide).borders, dtype=torch.float32)


@cache
def _tables(function: str, bits: int, wide: bool, dtype: torch.dtype) -> Tensor:
    made = fit(function, bits, wide=wide)
    return torch.tensor([made.values, made.derivatives], dtype=dtype)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes of k bits in k bytes for eight of them, (k, ⌈n / 8⌉): a byte has one bit of each."""
    codes = codes.flatten()
    codes = F.pad(codes, (0, -codes.numel() % 8)).view(-1, 8).to(torch.uint8)
    places = torch.arange(8, dtype=torch.uint8)
    return torch.stack([((codes >> bit & 1) << places).sum(1, dtype=torch.uint8) for bit in range(bits)])


def unpack(planes: Tensor, count: int) -> Tensor:
    """Return the first `count` codes, (count,) of int64, from what `pack` returns."""
    places = torch.arange(8, dtype=torch.uint8)
    codes = torch.zeros(planes.shape[1], 8, dtype=torch.uint8)
    for bit, plane in enumerate(planes):
        codes |= (plane[:, None] >> places & 1) << bit
    return codes.flatten()[:count].long()


def _coded(bits: int, *, wide: bool = False) -> Keeper:
    def keep(function: str, x: Tensor) -> Kept:
        codes = torch.bucketize(x, _borders(function, bits, wide).to(x.dtype), out_int32=True)
        return (codes.to(torch.uint8) if bits == 8 else pack(codes, bits),)

    def restore(function: str, kept: Kept, shape: torch.Size, dtype: torch.dtype) -> StandIns:
        codes = kept[0].int() if bits == 8 else unpack(kept[0], shape.numel()).view(shape)
        value, derivative = _tables(function, bits, wide, dtype)
        return value[codes], derivative[codes]

    kind = "_wide" if wide else ""
    return Keeper(f"coded{bits}{kind}", f"codes of {bits} bits{', wide' if wide else ''}", bits, keep, restore)


def _rounded(
    name: str, label: str, bits: int, keep: Callable[[Tensor], Kept], wide: Callable[..., Tensor]
) -> Keeper:
    """Return a keeper of a rounded x, of which f and f′ are computed; `wide` restores it from what is kept."""

    def restore(function: str, kept: Kept, shape: torch.Size, dtype: torch.dtype) -> StandIns:
        x = wide(dtype, *kept).view(shape)
        return FUNCTIONS[function](x), DERIVATIVES[function](x)

    return Keeper(name, label, bits, lambda _, x: keep(x), restore)


def _float8(name: str, label: str, dtype: torch.dtype, *, scaled: bool) -> Keeper:
    """Return a keeper of float8; too large a number becomes the largest, as in the saturating mode of hardware."""
    most = torch.finfo(dtype).max

    def keep(x: Tensor) -> Kept:
        if not scaled:
            return (x.clamp(-most, most).to(dtype),)
        scale = x.abs().amax().float() / most
        return (x / scale).clamp(-most, most).to(dtype), scale

    def wide(to: torch.dtype, kept: Tensor, scale: Tensor | None = None) -> Tensor:
        return kept.to(to) if scale is None else kept.to(to) * scale.to(to)

    return _rounded(name, label, 8, keep, wide)


def _int8(name: str, label: str, block: int | None) -> Keeper:
    """Return a keeper of whole numbers from −127 to 127, with a scale a row or a block of a row."""

    def keep(x: Tensor) -> Kept:
        groups = x.reshape(-1, block or x.shape[-1])
        scale = groups.abs().amax(1, keepdim=True).float() / 127
        scale = scale.where(scale > 0, 1)
        return (groups / scale).round().to(torch.int8), scale

    return _rounded(name, label, 8, keep, lambda to, kept, scale: kept.to(to) * scale.to(to))


def _floating(dtype: torch.dtype, bits: int) -> Keeper:
    name = str(dtype).removeprefix("torch.")
    return _rounded(name, name, bits, lambda x: (x.to(dtype),), lambda to, kept: kept.to(to))


KEEPERS = {
    keeper.name: keeper
    for keeper in (
        _floating(torch.bfloat16, 16),
        *map(_coded, (8, 6, 5, 4)),
        _coded(8, wide=True),
        _float8("e4m3", "float8 e4m3", torch.float8_e4m3fn, scaled=False),
        _float8("e4m3_scaled", "float8 e4m3, scale of the tensor", torch.float8_e4m3fn, scaled=True),
        _float8("e5m2", "float8 e5m2", torch.float8_e5m2, scaled=False),
        _float8("e5m2_scaled", "float8 e5m2, scale of the tensor", torch.float8_e5m2, scaled=True),
        _int8("int8_row", "int8, scale of the row", None),
        _int8("int8_block", f"int8, scale of {BLOCK}", BLOCK),
    )
}
EXACT = Keeper(
    "exact", "exact", 32, lambda _, x: (x,), _rounded("", "", 32, lambda x: (x,), lambda _, x: x).restore
)


def backward(dz: Tensor, weight: Tensor, x: StandIns, u: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradients of z = f(x) · u @ weightᵀ, or of f(x) @ weightᵀ where there is no u.

    Args:
        dz: of the output, (…, outputs).
        weight: (outputs, width).
        x: what stands for f(x) and f′(x), each (…, width).
        u: what stands for u, (…, width).

    Returns:
        dx, du and dW.

    """
    value, derivative = x
    dh = dz @ weight
    h = value if u is None else value * u
    dx = dh * derivative if u is None else dh * u * derivative
    return dx, None if u is None else dh * value, dz.flatten(0, -2).t() @ h.flatten(0, -2)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: str,
        keepers: Sequence[Keeper],
        weight: Tensor,
        bias: Tensor,
        x: Tensor,
        u: Tensor | None,
    ) -> Tensor:
        kept = keepers[0].keep(function, x)
        ctx.function, ctx.keepers, ctx.split = function, keepers, len(kept)
        h = FUNCTIONS[function](x)
        if u is not None:
            kept, h = kept + keepers[1].keep("identity", u), h * u
        ctx.save_for_backward(weight, *kept)
        return F.linear(h, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        of = dz.shape[:-1] + weight.shape[1:], dz.dtype
        x = ctx.keepers[0].restore(ctx.function, tuple(kept[: ctx.split]), *of)
        rest = tuple(kept[ctx.split :])
        u = ctx.keepers[1].restore("identity", rest, *of)[0] if rest else None
        dx, du, dw = backward(dz, weight, x, u)
        return None, None, dw, dz.flatten(0, -2).sum(0), dx, du


def product(
    layer: nn.Linear, function: str, keepers: Sequence[Keeper], x: Tensor, u: Tensor | None = None
) -> Tensor:
    """Return layer(f(x)), or layer(f(x) · u), exactly; for backward, what `keepers` keep of x and u is kept."""
    z: Tensor = _Product.apply(function, keepers, layer.weight, layer.bias, x, u)
    return z
