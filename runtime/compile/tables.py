"""The codes that a compiled graph may use, and which of them serves best what backward computes of a tensor."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, fx, nn

from fitact.errors import UsageError, quote
from fitact.runtime.ops.registry import Coded, is_generated, registered

from .kept import CAST, is_pointwise, is_view

SHIPPED = ("identity", "gelu", "gelu_tanh", "silu", "quick_gelu", "mish", "relu2")
FARTHEST = 1e5  # where the points of the outer cells are looked for
CANDIDATES = 256  # points of a cell, of which one stands for all
SAMPLES = 20001  # at which codes are compared
Function = Callable[[Tensor], Tensor]


def _itself(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, eq=False)
class Table:
    """A code, and a point for each of its cells.

    Attributes:
        name: of the fit.
        bits: of a code.
        borders: float32, (2^bits − 1,), increasing.
        points: float32, (2^bits,): what stands for a cell.
        scaled: whether rows are divided by powers of two near their root mean squares first.

    """

    name: str
    bits: int
    borders: Tensor
    points: Tensor
    scaled: bool

    def digest(self) -> str:
        """Return what names the numbers."""
        numbers = torch.cat([self.borders, self.points]).numpy().tobytes()
        return hashlib.sha256(self.name.encode() + numbers).hexdigest()

    def rounded(self, x: Tensor) -> Tensor:
        """Return the point of each number's cell."""
        points = self.points.to(x.dtype)
        return points[torch.bucketize(x, self.borders.to(x.dtype))]

    def error(self, functions: Sequence[Function] = (_itself,)) -> float:
        """Return the relative root mean square error of functions at the points, each counting the same.

        The numbers are distributed as Student's t with 3 degrees of freedom. An error counts absolutely where the
        function is small, and relatively where it is large.
        """
        x, weight = _samples()
        near = self.rounded(x)
        total = 0.0
        for function in functions:
            values = function(x)
            miss = (function(near) - values).square() / _unit(values, weight)
            total += float((miss * weight).sum())
        return math.sqrt(total / len(functions))


def shipped(bits: int) -> tuple[Table, ...]:
    """Return the tables of the fits that ship, the identity's first."""
    return tuple(_shipped(f"{name}_coded{bits}") for name in SHIPPED)


def wide() -> Table:
    """Return the table for sums, of 8 bits and of a wider range."""
    return _shipped("identity_wide_coded8")


@cache
def _shipped(name: str) -> Table:
    module = import_module(f"fitact.generated.{name}")
    return table_of(getattr(module, module.__all__[0]))


def table_of(kind: type[nn.Module]) -> Table:
    """Return the table of a generated class.

    Raises:
        UsageError: its activation keeps no code from which a value is looked up.

    """
    activation = registered(kind) if is_generated(kind) else None
    if not isinstance(activation, Coded):
        raise UsageError(
            "tables: expected classes that fitact codegen made of fits by the method coded, "
            f"got {quote(kind.__name__)}"
        )
    borders = torch.tensor(activation.borders, dtype=torch.float64)
    points = _points(activation, borders).float()
    samples = _samples()[0]
    linear = torch.equal(activation.value(samples), samples)
    return Table(activation.name, activation.bits, borders.float(), points, linear)


def _points(activation: Coded, borders: Tensor) -> Tensor:
    """Return the point of each cell at which f and f′ are nearest to what is looked up for it."""
    ends = torch.cat(
        [(-borders[:1].abs() * 4).clamp(min=-FARTHEST), borders, (borders[-1:].abs() * 4).clamp(max=FARTHEST)]
    )
    x = torch.lerp(ends[:-1, None], ends[1:, None], torch.linspace(0, 1, CANDIDATES, dtype=torch.float64))
    grid, weight = _samples()
    miss = torch.zeros_like(x)
    for i, function in enumerate(_with_derivative(activation.value)):
        miss += (function(x) - torch.tensor(activation.table, dtype=torch.float64)[:, i, None]).square() / _unit(
            function(x), weight, function(grid)
        )
    return x.gather(1, miss.argmin(1, keepdim=True)).squeeze(1)


def _with_derivative(function: Function) -> tuple[Function, Function]:
    def derivative(x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(function(leaf).sum(), leaf)
        return found

    return function, derivative


@cache
def _samples() -> tuple[Tensor, Tensor]:
    """Return points from −64 to 64, denser near 0, and how much each counts."""
    x = torch.linspace(-math.asinh(256), math.asinh(256), SAMPLES, dtype=torch.float64).sinh() / 4
    weight = (1 + x * x / 3) ** -2 * (1 + 16 * x * x).sqrt()
    return x, weight / weight.sum()


def _unit(values: Tensor, weight: Tensor, all_values: Tensor | None = None) -> Tensor:
    """Return the squares of the units in which errors of values count."""
    square = values.square()
    mean = ((square if all_values is None else all_values.square()) * weight).sum()
    return (square + mean) / 2


# --------------------------------------------------------------------------------------------- what backward needs


def best(place: fx.Node, tables: Sequence[Table]) -> tuple[Table, float]:
    """Return the table under which what backward computes of a tensor alone is nearest, and the error.

    The first table is returned, with its error for the numbers themselves, where that cannot be told.
    """
    try:
        functions = [*_functions(place)]
        errors = [table.error(functions) for table in tables]
    except (RuntimeError, TypeError, NotImplementedError):  # an operator that wants more than numbers of one shape
        return tables[0], tables[0].error()
    return min(zip(tables, errors, strict=True), key=lambda pair: pair[1])


def _functions(place: fx.Node) -> Iterator[Function]:
    """Yield what is computed of a tensor alone, element by element, and then read together with other tensors.

    What another tensor is multiplied by, one after the other, counts as one product.
    """
    alone: dict[fx.Node, None] = {place: None}
    for node in place.graph.nodes:
        inputs = node.all_input_nodes
        elementwise = node.op == "call_function" and (is_view(node) or is_pointwise(node))
        if elementwise and inputs and alone.keys() >= {*inputs}:
            alone[node] = None
    factors: dict[fx.Node, list[fx.Node]] = {}
    for node in alone:
        for user in node.users:
            if user not in alone:
                factors.setdefault(_last_product(user, alone), []).append(node)
    for last, nodes in factors.items():
        if last.target is torch.ops.aten.mul.Tensor:
            yield lambda x, nodes=nodes: math.prod(_evaluate(node, place, x) for node in nodes)
        else:
            yield from (lambda x, node=node: _evaluate(node, place, x) for node in nodes)


def _last_product(node: fx.Node, alone: Collection[fx.Node]) -> fx.Node:
    """Return the last of the products that follow each other, each with what is computed of the tensor alone."""
    mul = torch.ops.aten.mul.Tensor
    while node.target is mul and len(node.users) == 1:
        (user,) = node.users
        if user.target is not mul or not any(one in alone for one in user.all_input_nodes):
            break
        node = user
    return node


def _evaluate(node: fx.Node, place: fx.Node, x: Tensor) -> Tensor:
    """Return a node's result if a tensor has the numbers x, without roundings between its operations."""
    known = {place: x}

    def value(one: fx.Node) -> Tensor:
        if one not in known:
            target: Any = one.target
            if is_view(one) or target is CAST:
                known[one] = value(one.args[0])  # type: ignore[arg-type]
            else:
                args, kwargs = fx.map_arg((one.args, one.kwargs), value)
                known[one] = target(*args, **kwargs)
        return known[one]

    return value(node)
