"""Codes as nodes of a graph, which the compiler sees and fuses with what is around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fitact.runtime.torch_internals import FakeTensor, size_hint

from .kept import CAST, value_of

aten = torch.ops.aten
BYTE = 8
ROW = 64
BIAS = 127  # of exponents
HUGE = 2.0**54  # numbers below have squares whose sums are finite


class Graph:
    """A graph that gets nodes, each with the fake tensor that stands for its result.

    Args:
        module: the module of the graph.
        before: the node before which the new ones come.

    """

    def __init__(self, module: fx.GraphModule, before: fx.Node) -> None:
        self.module, self.before = module, before
        values = (node.meta.get("val") for node in module.graph.find_nodes(op="placeholder"))
        self.mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node that calls an operator, and return it."""
        with self.module.graph.inserting_before(self.before):
            node = self.module.graph.call_function(target, args, kwargs)
        given = fx.map_arg((args, kwargs), lambda one: one.meta["val"])
        with self.mode:
            node.meta["val"] = target(*given[0], **given[1])
        return node


def exponents(graph: Graph, x: fx.Node) -> fx.Node:
    """Return a power of two for each row of x, near its root mean square: the exponent and 127, as a byte.

    A row is as many of the last dimensions as have 64 elements together. Divided by its power of two, it has a
    root mean square of 0.84 to 1.68. NaN, infinities and numbers of more than 2^54 do not count.
    """
    value = value_of(x)
    assert value is not None
    dims, size = [], 1
    for dim in reversed(range(value.dim())):
        if size < ROW:
            dims.append(dim)
            size *= size_hint(value.shape[dim])
    wide = graph(CAST, x, torch.float32)
    usual = graph(aten.lt.Scalar, graph(aten.abs.default, wide), HUGE)
    wide = graph(aten.where.ScalarOther, usual, wide, 0)
    square = graph(aten.mean.dim, graph(aten.mul.Tensor, wide, wide), dims, True)
    exponent = graph(aten.mul.Tensor, graph(aten.log2.default, square), 0.5)
    exponent = graph(aten.round.default, graph(aten.add.Tensor, exponent, BIAS - 0.25))
    exponent = graph(aten.clamp_max.default, graph(aten.clamp_min.default, exponent, 1), 2 * BIAS - 1)
    return graph(CAST, exponent, torch.uint8)


def scaled(graph: Graph, x: fx.Node, exponents: fx.Node, sign: int) -> fx.Node:
    """Return x times its rows' powers of two, to the power `sign`, in float32."""
    exponent = graph(aten.sub.Tensor, graph(CAST, exponents, torch.float32), BIAS)
    power = graph(aten.exp2.default, graph(aten.mul.Tensor, exponent, sign))
    return graph(aten.mul.Tensor, graph(CAST, x, torch.float32), power)


def pack(graph: Graph, parts: fx.Node, bits: int) -> fx.Node:
    """Return parts of 1, 4 or 6 bits as bytes, along the last dimension; the first part has the lowest bits."""
    value = value_of(parts)
    assert value is not None
    if BYTE % bits:
        return _pack_across(graph, parts, bits)
    count, last = BYTE // bits, value.dim() - 1
    parts = graph(CAST, parts, torch.uint8)
    packed = None
    for i in range(count):
        part = graph(aten.slice.Tensor, parts, last, i, torch.iinfo(torch.int64).max, count)
        part = graph(aten.bitwise_left_shift.Tensor_Scalar, part, bits * i) if i else part
        packed = part if packed is None else graph(aten.bitwise_or.Tensor, packed, part)
    assert packed is not None
    return packed


def _pack_across(graph: Graph, parts: fx.Node, bits: int) -> fx.Node:
    """Return parts of more than half a byte as bytes; each has bits of two parts, the end of one and the next."""
    value = value_of(parts)
    assert value is not None
    place = _places(graph, value.shape[-1] * bits // BYTE, value)
    bit = graph(aten.mul.Tensor, place, BYTE)
    part = graph(aten.div.Tensor_mode, bit, bits, rounding_mode="floor")
    shift = graph(aten.sub.Tensor, bit, graph(aten.mul.Tensor, part, bits))
    wide = graph(CAST, parts, torch.int32)
    low, high = (_at(graph, wide, one) for one in (part, graph(aten.add.Tensor, part, 1)))
    both = graph(aten.bitwise_or.Tensor, low, graph(aten.bitwise_left_shift.Tensor_Scalar, high, bits))
    byte = graph(aten.bitwise_right_shift.Tensor, both, graph(CAST, shift, torch.int32))
    return graph(CAST, graph(aten.bitwise_and.Scalar, byte, (1 << BYTE) - 1), torch.uint8)


def unpack(graph: Graph, packed: fx.Node, bits: int) -> fx.Node:
    """Return the parts of bytes, uint8."""
    value = value_of(packed)
    assert value is not None
    bit = graph(aten.mul.Tensor, _places(graph, value.shape[-1] * BYTE // bits, value), bits)
    byte = graph(aten.bitwise_right_shift.Tensor_Scalar, bit, BYTE.bit_length() - 1)
    shift = graph(aten.bitwise_and.Scalar, bit, BYTE - 1)
    found = _at(graph, packed, byte)
    if BYTE % bits:
        after = graph(aten.clamp_max.default, graph(aten.add.Tensor, byte, 1), value.shape[-1] - 1)
        high = graph(CAST, _at(graph, packed, after), torch.int32)
        high = graph(aten.bitwise_left_shift.Tensor_Scalar, high, BYTE)
        found = graph(aten.bitwise_or.Tensor, graph(CAST, found, torch.int32), high)
        shift = graph(CAST, shift, torch.int32)
    else:
        shift = graph(CAST, shift, torch.uint8)
    found = graph(aten.bitwise_right_shift.Tensor, found, shift)
    return graph(CAST, graph(aten.bitwise_and.Scalar, found, (1 << bits) - 1), torch.uint8)


def _places(graph: Graph, count: Any, like: Tensor) -> fx.Node:
    """Return 0, 1, 2, … as int64."""
    kind = {"dtype": torch.int64, "device": like.device, "requires_grad": False}
    return graph(torch.ops.prims.iota.default, count, start=0, step=1, **kind)


def _at(graph: Graph, x: fx.Node, places: fx.Node) -> fx.Node:
    """Return the elements of x at places along the last dimension."""
    value = value_of(x)
    assert value is not None
    return graph(aten.index.Tensor, x, [*[None] * (value.dim() - 1), places])
