"""How saved tensors are stored in a graph: block codes by two ops, masks in bits by operators that are fused."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, fx

from fitact.runtime.saving import blocks
from fitact.runtime.torch_internals import FakeTensor, size_hint

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
BYTE = 8

# The compiler calls these as they are: its own kernels for the same operators are up to four times as many.
_library = torch.library.Library("fitact", "FRAGMENT")
_PARTS = "Tensor codes, Tensor scales, Tensor shifts, Tensor shape"
_library.define(f"encode_blocks(Tensor x, int columns, int bits, bool signs) -> ({_PARTS})")
_library.define(f"decode_blocks({_PARTS}, int columns, ScalarType dtype) -> Tensor")


def _encode(x: Tensor, columns: int, bits: int, signs: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the codes, scales and shifts of a tensor, and a tensor without elements that has its shape.

    It is cut into rows of `columns` elements, a multiple of 64 that divides its size; or 64.
    """
    return *blocks.encode(x.reshape(_rows(x.numel(), columns)), bits, signs), x.new_empty(*x.shape, 0)


def _decode(
    codes: Tensor, scales: Tensor, shifts: Tensor, shape: Tensor, columns: int, dtype: torch.dtype
) -> Tensor:
    """Return the tensor that was encoded."""
    sizes = shape.shape[:-1]
    return blocks.decode(codes, scales, shifts, _rows(sizes.numel(), columns), dtype).view(sizes)


def _rows(size: int, columns: int) -> tuple[int, ...]:
    return (size // columns, columns) if size % columns == 0 else (size,)


def _fake_encode(x: Tensor, columns: int, bits: int, signs: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the same without numbers; sizes may vary."""
    size, block = x.numel(), blocks.BLOCK
    count = -(-size // block)
    tiles = -(-(size // columns) // block) * (columns // block) + count - size // block
    codes, shifts = x.new_empty(count, bits, dtype=torch.int64), x.new_empty(tiles, 4, dtype=torch.int64)
    return codes, x.new_empty(count, dtype=torch.bfloat16), shifts, x.new_empty(*x.shape, 0)


def _fake_decode(
    codes: Tensor, scales: Tensor, shifts: Tensor, shape: Tensor, columns: int, dtype: torch.dtype
) -> Tensor:
    return shape.new_empty(shape.shape[:-1], dtype=dtype)


for _name, _run, _fake in (("encode_blocks", _encode, _fake_encode), ("decode_blocks", _decode, _fake_decode)):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fitact::{_name}", _fake, lib=_library)


Add = Callable[..., fx.Node]  # adds a call of an operator to a graph


def adding(module: fx.GraphModule, before: fx.Node) -> Add:
    """Return what adds calls of operators before a node, each with its result as a fake tensor."""
    values = (node.meta.get("val") for node in module.graph.find_nodes(op="placeholder"))
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))

    def add(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with module.graph.inserting_before(before):
            node = module.graph.call_function(target, args, kwargs)
        given = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
        with mode:
            node.meta["val"] = target(*given[0], **given[1])
        return node

    return add


def encode(add: Add, x: fx.Node, bits: int, signs: bool) -> list[fx.Node]:
    """Return the parts of a tensor's block codes."""
    order, columns = _layout(x.meta["val"])
    x = add(aten.permute.default, x, order)
    parts = add(torch.ops.fitact.encode_blocks.default, x, columns, bits, signs)
    return [add(operator.getitem, parts, i) for i in range(4)]


def decode(add: Add, parts: Sequence[fx.Node], like: Tensor) -> fx.Node:
    """Return the tensor of block codes; `like`: its fake tensor in the graph that encoded it."""
    order, columns = _layout(like)
    x = add(torch.ops.fitact.decode_blocks.default, *parts, columns, like.dtype)
    return add(aten.permute.default, x, sorted(range(len(order)), key=order.__getitem__))


def _layout(x: Tensor) -> tuple[list[int], int]:
    """Return the dimensions of a tensor as they lie in memory, and the length of the rows that it is cut into."""
    order = sorted(range(x.dim()), key=lambda dim: -size_hint(x.stride(dim)))
    shape = [x.shape[dim] for dim in order]
    if all(isinstance(size, int) for size in shape):
        return order, blocks.columns_of(shape)
    features: Any = shape[-1]
    fills = isinstance(features, int) and features % blocks.BLOCK == 0
    return order, features if fills else blocks.BLOCK


def pack(add: Add, mask: fx.Node) -> fx.Node:
    """Return a mask in bits, uint8: eight along the last dimension are a byte, the first the lowest bit."""
    last = mask.meta["val"].dim() - 1
    mask = add(CAST, mask, torch.uint8)
    end = torch.iinfo(torch.int64).max
    parts = [add(aten.slice.Tensor, mask, last, i, end, BYTE) for i in range(BYTE)]
    parts = [add(aten.bitwise_left_shift.Tensor_Scalar, part, i) for i, part in enumerate(parts)]
    return reduce(partial(add, aten.bitwise_or.Tensor), parts)


def unpack(add: Add, packed: fx.Node) -> fx.Node:
    """Return the mask of bits, bool."""
    value: Tensor = packed.meta["val"]
    kind = {"dtype": torch.int64, "device": value.device, "requires_grad": False}
    bit = add(torch.ops.prims.iota.default, value.shape[-1] * BYTE, start=0, step=1, **kind)
    place = add(aten.bitwise_right_shift.Tensor_Scalar, bit, 3)
    byte = add(aten.index.Tensor, packed, [*[None] * (value.dim() - 1), place])
    shift = add(CAST, add(aten.bitwise_and.Scalar, bit, BYTE - 1), torch.uint8)
    bit = add(aten.bitwise_and.Scalar, add(aten.bitwise_right_shift.Tensor, byte, shift), 1)
    return add(aten.ne.Scalar, bit, 0)
