"""Codes as nodes of a graph, which the compiler sees and fuses with what is around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fitact.runtime.torch_internals import fake_mode_of, size_hint

from .kept import CAST, value_of

aten = torch.ops.aten
BYTE = 8
ROW = 64
BIAS = 127  # of exponents


class Graph:
    """A graph that gets nodes, each with the fake tensor that stands for its result.

    Args:
        module: the module of the graph.
        before: the node before which the new ones come.

    """

    def __init__(self, module: fx.GraphModule, before: fx.Node) -> None:
        self.module, self.before = module, before
        self.mode = fake_mode_of(module.graph)

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node that calls an operator, and return it."""
        with self.module.graph.inserting_before(self.before):
            node = self.module.graph.call_function(target, args, kwargs)
        given = fx.map_arg((args, kwargs), lambda one: one.meta["val"])
        with self.mode:
            node.meta["val"] = target(*given[0], **given[1])
        return node

    def constant(self, name: str, tensor: Tensor, like: fx.Node) -> fx.Node:
        """Return a node whose result is a constant; the same node for the same name and device."""
        value = value_of(like)
        assert value is not None
        name = f"_fitact_{name}_{value.device.type}"
        if not hasattr(self.module, name):
            self.module.register_buffer(name, tensor.to(value.device))
        with self.module.graph.inserting_before(self.before):
            held = self.module.graph.get_attr(name)
        held.meta["val"] = self.mode.from_tensor(getattr(self.module, name), static_shapes=True)
        return self(aten.lift_fresh_copy.default, held)


def exponents(graph: Graph, x: fx.Node) -> fx.Node:
    """Return a power of two for each row of x, near its root mean square: the exponent and 127, as a byte.

    A row is as many of the last dimensions as have 64 elements together. Divided by its power of two, it has a
    root mean square of 0.84 to 1.68. Rows with NaN have the exponent 0.
    """
    value = value_of(x)
    assert value is not None
    dims, size = [], 1
    for dim in reversed(range(value.dim())):
        if size < ROW:
            dims.append(dim)
            size *= size_hint(value.shape[dim])
    wide = graph(CAST, x, torch.float32)
    square = graph(aten.mean.dim, graph(aten.mul.Tensor, wide, wide), dims, True)
    exponent = graph(aten.mul.Tensor, graph(aten.log2.default, square), 0.5)
    exponent = graph(aten.round.default, graph(aten.add.Tensor, exponent, BIAS - 0.25))
    known = graph(aten.eq.Tensor, exponent, exponent)
    exponent = graph(aten.clamp_max.default, graph(aten.clamp_min.default, exponent, 1), 2 * BIAS - 1)
    exponent = graph(aten.where.ScalarOther, known, exponent, BIAS)
    return graph(CAST, exponent, torch.uint8)


def scaled(graph: Graph, x: fx.Node, exponents: fx.Node, sign: int) -> fx.Node:
    """Return x times its rows' powers of two, to the power `sign`, in float32."""
    exponent = graph(aten.sub.Tensor, graph(CAST, exponents, torch.float32), BIAS)
    power = graph(aten.exp2.default, graph(aten.mul.Tensor, exponent, sign))
    return graph(aten.mul.Tensor, graph(CAST, x, torch.float32), power)


def pack(graph: Graph, parts: fx.Node, bits: int) -> fx.Node:
    """Return parts of a few bits as bytes, along the last dimension; the first part of a byte is the lowest."""
    value = value_of(parts)
    assert value is not None
    count, last = BYTE // bits, value.dim() - 1
    parts = graph(CAST, parts, torch.uint8)
    packed = None
    for i in range(count):
        part = graph(aten.slice.Tensor, parts, last, i, torch.iinfo(torch.int64).max, count)
        part = graph(aten.bitwise_left_shift.Tensor_Scalar, part, bits * i) if i else part
        packed = part if packed is None else graph(aten.bitwise_or.Tensor, packed, part)
    assert packed is not None
    return packed


def unpack(graph: Graph, packed: fx.Node, bits: int) -> fx.Node:
    """Return the parts of bytes, uint8."""
    value = value_of(packed)
    assert value is not None
    count, dims = BYTE // bits, value.dim()
    place = graph(
        torch.ops.prims.iota.default,
        count * value.shape[-1],
        start=0,
        step=1,
        dtype=torch.int64,
        device=value.device,
        requires_grad=False,
    )
    byte = graph(aten.bitwise_right_shift.Tensor_Scalar, place, count.bit_length() - 1)
    spread = graph(aten.index.Tensor, packed, [*[None] * (dims - 1), byte])
    shift = graph(aten.mul.Tensor, graph(aten.bitwise_and.Scalar, place, count - 1), bits)
    shift = graph(CAST, shift, torch.uint8)
    return graph(aten.bitwise_and.Scalar, graph(aten.bitwise_right_shift.Tensor, spread, shift), (1 << bits) - 1)
