"""The codes that a compiled graph keeps, and their error in what backward computes from a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx

from fitact.runtime.torch_internals import schema_name

from .codes import Graph
from .kept import CAST, is_pointwise, is_view

aten = torch.ops.aten
SAMPLES = 20001  # at which errors are taken
Function = Callable[[Tensor], Tensor]


def _itself(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Compander:
    """A code of numbers of any kind: uniform in atan(x/√3), after rows have been scaled.

    For a density w of x and many codes, the best cells of the identity are as dense as (w(x) / (E x² + x²))^(1/3)
    says, by the theory of high resolution. For Student's t with 3 degrees of freedom that is 1/(1 + x²/3), the
    derivative of √3 atan(x/√3). With 8 bits its objective is 4 % above that of the best table.

    Attributes:
        bits: of a code.

    """

    bits: int

    def encode(self, graph: Graph, x: fx.Node) -> fx.Node:
        """Return the codes of x, uint8; those of NaN are 0."""
        codes = 1 << self.bits
        angle = graph(aten.atan.default, graph(aten.mul.Tensor, x, 1 / math.sqrt(3)))
        place = graph(aten.add.Tensor, graph(aten.mul.Tensor, angle, codes / math.pi), codes / 2)
        known = graph(aten.eq.Tensor, place, place)
        place = graph(aten.clamp_max.default, graph(aten.clamp_min.default, place, 0), codes - 1)
        return graph(CAST, graph(aten.where.ScalarOther, known, place, 0), torch.uint8)

    def decode(self, graph: Graph, codes: fx.Node) -> fx.Node:
        """Return what stands for codes, float32."""
        count = 1 << self.bits
        place = graph(aten.add.Tensor, graph(CAST, codes, torch.float32), (1 - count) / 2)
        angle = graph(aten.mul.Tensor, place, math.pi / count)
        return graph(aten.mul.Tensor, graph(aten.tan.default, angle), math.sqrt(3))

    def rounded(self, x: Tensor) -> Tensor:
        """Return what stands for the codes of numbers."""
        count, root = 1 << self.bits, math.sqrt(3)
        place = (torch.atan(x / root) * (count / math.pi) + count / 2).clamp(0, count - 1).floor()
        return torch.tan((place + (1 - count) / 2) * (math.pi / count)) * root

    def error(self, functions: Sequence[Function] = (_itself,)) -> float:
        """Return the relative root mean square error of functions of what stands for x, each counting the same.

        x is distributed as Student's t with 3 degrees of freedom. An error counts absolutely where the function is
        small, and relatively where it is large.
        """
        x, weight = _samples()
        near = self.rounded(x)
        total = 0.0
        for function in functions:
            values = function(x)
            miss = (function(near) - values).square() / _unit(values, weight)
            total += float((miss * weight).sum())
        return math.sqrt(total / len(functions))


@cache
def _samples() -> tuple[Tensor, Tensor]:
    """Return points from −64 to 64, denser near 0, and how much each counts."""
    x = torch.linspace(-math.asinh(256), math.asinh(256), SAMPLES, dtype=torch.float64).sinh() / 4
    weight = (1 + x * x / 3) ** -2 * (1 + 16 * x * x).sqrt()
    return x, weight / weight.sum()


def _unit(values: Tensor, weight: Tensor) -> Tensor:
    """Return the squares of the units in which errors of values count."""
    square = values.square()
    return (square + (square * weight).sum()) / 2


# --------------------------------------------------------------------------------------------- what backward needs


def error_of(places: Sequence[fx.Node], code: Compander) -> tuple[float, str]:
    """Return the error of a code in what backward computes from a tensor alone, and a note.

    If that cannot be told, it is the error for the numbers themselves, and the note says why.

    Args:
        places: the placeholders that receive the tensor, or views of it.
        code: the code.

    """
    try:
        return code.error([function for place in places for function in _functions(place)]), ""
    except _OperatorError as error:
        return code.error(), f"not known: what {error} makes of it"


def _functions(place: fx.Node) -> Iterator[Function]:
    """Yield what is computed from a tensor alone, element by element, and then read together with other tensors.

    Factors that multiply another tensor one after the other count as one product.
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
        groups = [nodes] if last.target is torch.ops.aten.mul.Tensor else [[node] for node in nodes]
        yield from (partial(_product, group, place) for group in groups)


class _OperatorError(Exception):
    """An operator, named in the message, cannot be evaluated on numbers."""


def _product(nodes: Sequence[fx.Node], place: fx.Node, x: Tensor) -> Tensor:
    """Return the product of nodes' results if a tensor has the numbers x."""
    product = torch.ones_like(x)
    for node in nodes:
        product = product * _evaluate(node, place, x)
    return product


def _last_product(node: fx.Node, alone: Collection[fx.Node]) -> fx.Node:
    """Return the last of the products that follow each other, each with a factor from the tensor alone."""
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
                known[one] = value(one.all_input_nodes[0])
            else:
                args, kwargs = fx.map_arg((one.args, one.kwargs), value)
                try:
                    known[one] = target(*args, **kwargs)
                except (RuntimeError, TypeError) as error:  # it takes more than numbers of one shape
                    raise _OperatorError(schema_name(target).partition("::")[2]) from error
        return known[one]

    return value(node)
