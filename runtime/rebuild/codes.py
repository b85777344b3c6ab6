"""What keeps codes in place of tensors: gates f(g)·u, activations with learned numbers, and norms.

A gate keeps codes of g by f's coded fit, and u itself or codes of it by the identity's fit. Gates that ship, or
that the user has generated, have their own kernels. All others are composed of the activations' ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fitact.runtime.autocast import active_autocast, without_autocast
from fitact.runtime.learned import ops as learned
from fitact.runtime.learned.function import apply_learned
from fitact.runtime.learned.uses import Use
from fitact.runtime.norms.linear import Norm
from fitact.runtime.ops import decode, gate_ops
from fitact.runtime.ops.factors import CodedFactor, Factor
from fitact.runtime.ops.gates import apply_gate
from fitact.runtime.ops.library import DTYPES, KERNEL_DEVICES, ops
from fitact.runtime.ops.reference import arithmetic_dtype
from fitact.runtime.ops.registry import Coded, find
from fitact.runtime.recipes import note, plain

from . import functions
from .derivatives import once
from .recipes import Function, applied

SHIPPED = {"gelu": "geglu", "silu": "swiglu"}  # the gates that ship, by f


class Codes(NamedTuple):
    """The codes that a gate keeps.

    Attributes:
        g: the key of f's coded fit.
        u: the key of the identity's coded fit; None to keep u as it is.

    """

    g: str
    u: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the fits."""
        return tuple(find(key).name for key in self if key is not None)

    @property
    def gate(self) -> gate_ops.Gate:
        """The gate that keeps them."""
        return gate_of(self)

    def table(self, _: nn.Module) -> Table:
        """Return the codes of g, and what is looked up by them."""
        coded = decode.coded(self.g)
        return Table(coded.borders, coded.argument.values, coded.value)


class OwnCodes(NamedTuple):
    """The codes of a generated gate that the user gives.

    Attributes:
        key: the gate's.

    """

    key: str

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the fit."""
        return (self.gate.name,)

    @property
    def gate(self) -> gate_ops.Gate:
        """The gate."""
        return gate_ops.find(self.key)


class Table(NamedTuple):
    """Codes of x, and the values that are looked up by them.

    Attributes:
        borders: increasing; a code counts those strictly below x.
        values: by code, what stands in place of f(x).
        value: f.
        coded: gives x from what the module is called with.

    """

    borders: tuple[float, ...]
    values: tuple[float, ...]
    value: Callable[[Tensor], Tensor]
    coded: Callable[[Tensor], Tensor] = Tensor.detach


class LearnedCodes(NamedTuple):
    """The codes that an activation with learned numbers keeps.

    Attributes:
        key: of the shipped formula.
        use: how the module computes it.

    """

    key: str
    use: Use

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the fit."""
        return (learned.find(self.key).name,)

    def apply(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """Return the formula of x, which keeps codes; None where the module has to compute it itself."""
        if not (plain(x) and x.dtype in DTYPES and self.use.takes(x)):
            return None
        numbers = self._numbers(module, x.device)
        if not functions.recorded(x, *numbers) or not all(map(plain, numbers)):
            return None
        same = all(torch.result_type(x, one) == x.dtype for one in numbers)
        if not (same or active_autocast(x.device.type)):
            return None  # the module returns another dtype, which layers that follow may need
        return apply_learned(x, numbers, self.use.dim, self.key)

    def _numbers(self, module: nn.Module, device: torch.device) -> list[Tensor]:
        """Return the numbers; a constant for each that the module does not have."""
        own = [getattr(module, one) if isinstance(one, str) else one for one in self.use.numbers]
        return [one if isinstance(one, Tensor) else torch.full((), one, device=device) for one in own]

    def table(self, module: nn.Module) -> Table:
        """Return the codes of x, and the formula at their points; numbers of channels are at their starts."""
        formula = learned.find(self.key)
        numbers = [
            torch.full((), kind.start) if one.numel() > 1 else one.detach().cpu().float().reshape(())
            for one, kind in zip(self._numbers(module, torch.device("cpu")), formula.numbers, strict=True)
        ]

        def value(x: Tensor) -> Tensor:
            return formula.value(x.float(), *numbers)

        return Table(formula.borders, tuple(value(torch.tensor(formula.points)).tolist()), value)


class NormCodes(NamedTuple):
    """The codes that a norm keeps, of its normalised rows z; its output is z·α + β with α = offset + weight.

    Attributes:
        key: of the identity's coded fit.
        centred: whether the mean is subtracted.
        eps: the number added under the root; None for the machine epsilon.
        offset: 0 or 1.
        weight, bias: the names of the norm's parameters; None if α is 1, or β is 0.

    """

    key: str
    centred: bool
    eps: float | None
    offset: float
    weight: str | None
    bias: str | None

    @classmethod
    def of(cls, norm: Norm, key: str) -> NormCodes:
        """Return the codes of a norm."""
        names = {id(one): name for name, one in norm.module.named_parameters(recurse=False)}
        of_norm = (names.get(id(one)) for one in (norm.weight, norm.bias))
        return cls(key, norm.centred, norm.eps, norm.offset, *of_norm)

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the fit."""
        return (find(self.key).name,)

    def apply(self, module: Any, x: Tensor) -> Tensor | None:
        """Return the norm of x, which keeps codes; None where the module has to compute it itself."""
        own = [None if name is None else getattr(module, name) for name in (self.weight, self.bias)]
        there = [one for one in (x, *own) if one is not None]
        known = all(plain(one) and one.dtype in DTYPES for one in there)
        if not (known and functions.recorded(*there) and x.numel()):
            return None
        if x.device.type in KERNEL_DEVICES:
            decode.prepare(self.key, str(x.device))
        y, codes, _ = applied(_CodedNorm, x, *own, partial(module.fitact_stock.forward, module), self)
        held = [one for one in own if one is not None]
        return note(y, partial(self.looked_up, y.shape, y.dtype), codes, *held, exact=False)

    def looked_up(self, size: torch.Size, dtype: torch.dtype, codes: Tensor, *own: Tensor) -> Tensor:
        """Return what stands in place of the norm's output, from codes and the norm's parameters."""
        given, wide = iter(own), torch.float64 if dtype == torch.float64 else torch.float32
        with torch.no_grad(), without_autocast(codes.device.type):
            y: Tensor = ops.decode(codes, size, wide, self.key)
            if self.weight is not None:
                y = y * (next(given).to(wide) + self.offset)
            if self.bias is not None:
                y = y + next(given).to(wide)
            return y.to(dtype)

    def normalised(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return z, contiguous and of the dtype of x, and 1/σ of each row."""
        eps = torch.finfo(arithmetic_dtype(x)).eps if self.eps is None else self.eps
        z, scale = ops.norm_forward(x.contiguous(), 1, self.centred, eps, x.dtype)
        return z, scale

    def table(self, _: nn.Module) -> Table:
        """Return the codes of z, and what is looked up by them."""
        identity = Codes(self.key).table(nn.Identity())
        table = identity.borders, identity.values, identity.value
        return Table(*table, lambda x: self.normalised(x.detach())[0])


class _CodedNorm(torch.autograd.Function):
    """A norm that keeps codes of z and 1/σ of each row, from which all gradients are computed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, run: Function, of: NormCodes
    ) -> tuple[Tensor, Tensor, Tensor]:
        y = run(x)
        z, scale = of.normalised(x)
        codes = ops.forward(z, z.dtype, None, of.key)[1]
        ctx.of, ctx.dtype, ctx.dtype_of_bias = of, x.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(codes, scale)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(codes, scale, weight)
        return y, codes, scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        once()
        codes, scale, weight = ctx.saved_tensors
        dy, of = grads[0], ctx.of
        if dy is None:
            return None, None, None, None, None
        dy = dy.contiguous().to(scale.dtype)
        z = ops.decode(codes, dy.shape, scale.dtype, of.key)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dx = dw = db = None
        if wants_weight:
            dw = (dy * z).sum_to_size(z.shape[-1:]).to(weight.dtype)
        if wants_bias:
            db = dy.sum_to_size(z.shape[-1:]).to(ctx.dtype_of_bias)
        if wants_x:
            dz = dy if weight is None else dy * (weight.to(dy.dtype) + of.offset)
            dx = ops.norm_backward(dz, z, scale, 1, of.centred, ctx.dtype)
        return dx, dw, db, None, None


AnyCodes = Codes | OwnCodes | LearnedCodes | NormCodes


@dataclass(frozen=True, kw_only=True)
class _Itself(Factor):
    """u, which is kept as it is."""

    def gradient(self, dy: Tensor, kept: Tensor) -> Tensor:
        return dy


@dataclass(frozen=True, kw_only=True)
class _Activated(Factor):
    """A coded activation, by its own ops.

    Attributes:
        key: of the activation.

    """

    key: str

    @property
    def bits(self) -> int:
        return find(self.key).bits

    def value_and_codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, codes = ops.forward(x.contiguous(), x.dtype, None, self.key)
        return y if x.is_contiguous() else self.value(x), codes  # a CPU rounds a view's otherwise

    def again(self, kept: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        y: Tensor = ops.decode(kept, size, dtype, self.key)
        return y

    def gradient(self, dy: Tensor, kept: Tensor) -> Tensor:
        dx: Tensor = ops.backward(dy.contiguous(), None, kept, dy.dtype, self.key)
        return dx

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        return decode.coded(self.key).argument.tables(device)


def _alike(factor: Factor, coded: Coded | None) -> bool:
    """Whether a factor has the codes and the tables of an activation; None has no codes."""
    if coded is None or not isinstance(factor, CodedFactor):
        return coded is None
    return (factor.borders, factor.table) == (coded.borders, coded.table)


@cache
def gate_of(codes: Codes) -> gate_ops.Gate:
    """Return the gate that keeps these codes: the shipped one with the same tables, or else a composed one."""
    a, b = decode.coded(codes.g), None if codes.u is None else decode.coded(codes.u)
    name, _, bits = a.name.rpartition("_coded")
    path = f"fitact.generated.{SHIPPED.get(name)}_coded{bits}" + ("" if b is None else f"_{b.bits}")
    if name in SHIPPED and find_spec(path) is not None:
        module = import_module(path)
        shipped = gate_ops.find(module._KEY)
        factors = zip((shipped.a, shipped.b), (a, b), strict=True)
        if all(_alike(factor, one) for factor, one in factors):
            return shipped
    composed = gate_ops.Gate(
        key=f"{codes.g}*{codes.u or 'u'}",
        name=" * ".join(codes.names),
        a=_Activated(value=a.value, key=codes.g),
        b=_Itself(value=lambda u: u) if codes.u is None else _Activated(value=lambda u: u, key=codes.u),
    )
    gate_ops.register_gate(composed)
    return composed


def gate(codes: Codes | OwnCodes, function: Callable[..., Tensor], g: Tensor, u: Tensor) -> Tensor:
    """Return f(g)·u, which keeps codes of g, and u or its codes; the next layers find what stands for it.

    Args:
        codes: which codes.
        function: f, elementwise, as the model computes it; used where nothing is coded.
        g: its argument, any shape.
        u: of the shape and dtype of g.

    """
    alike = g.shape == u.shape and g.dtype == u.dtype
    if alike and functions.recorded(g, u) and plain(g) and plain(u) and g.dtype in DTYPES:
        return apply_gate(g, u, codes.gate.key)
    return functions.gate(function, g, u)


class Gate(NamedTuple):
    """The names of the children of a gated MLP.

    Attributes:
        activation: f.
        gate: the layer whose output is g.
        up: the layer whose output is u; None if `gate` returns both side by side.
        down: the layer that follows.
        dropout: the dropout in between, None if there is none.
        turned: whether u comes first, among the halves or in the order of calls.

    """

    activation: str
    gate: str
    up: str | None
    down: str
    dropout: str | None
    turned: bool

    def compute(self, module: Any, x: Tensor, codes: Codes | OwnCodes | None = None) -> Tensor:
        """Return down(dropout(f(g) · u)), which keeps codes if they are given."""
        if self.up is None:
            parts = getattr(module, self.gate)(x).chunk(2, -1)
        else:
            order = [self.up, self.gate] if self.turned else [self.gate, self.up]
            parts = [getattr(module, name)(x) for name in order]
        g, u = reversed(parts) if self.turned else parts
        f = getattr(module, self.activation)
        h = functions.gate(f, g, u) if codes is None else gate(codes, f, g, u)
        if self.dropout is not None:
            h = getattr(module, self.dropout)(h)
        result: Tensor = getattr(module, self.down)(h)
        return result
