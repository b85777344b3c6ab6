"""The change to the graphs: what the forward graph hands on becomes codes, looked up in the backward graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fitact.runtime.torch_internals import schema_name

from .codes import BYTE, Graph, encode, look_up, pack, unpack
from .kept import Kept, elements, kept, value_of
from .report import KeptRecord
from .tables import Table, best


@dataclass
class Edit:
    """Changes graphs as the partitioner returns them.

    Attributes:
        tables: the codes to choose from, the identity's first; empty if values may not change.
        wide: the code for sums; None if values may not change.
        attention: whether queries, keys, values and outputs of attention become codes.
        record: receives the records of a graph.

    """

    tables: Sequence[Table]
    wide: Table | None
    attention: bool
    record: Callable[[Sequence[KeptRecord]], None] = field(repr=False)

    def __call__(
        self, forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, owned: Collection[int]
    ) -> None:
        """Change both graphs, and record each tensor that one hands to the other."""
        found = list(kept(forward, backward, outputs, owned, self.attention))
        likes: dict[fx.Node, list[Kept]] = {}
        for one in found:
            likes.setdefault(one.base, []).append(one)
        records = [self._change(forward, backward, group) for group in likes.values()]
        self.record([record for group in records for record in group])

    def _change(
        self, forward: fx.GraphModule, backward: fx.GraphModule, group: list[Kept]
    ) -> Iterator[KeptRecord]:
        """Let what is kept of one storage become a code, and return the records, the first with the bytes."""
        first = group[0]
        value = value_of(first.node)
        assert value is not None
        reason = next((one.reason for one in group if one.reason), "")
        if not reason and len(group) > 1:
            reason = "kept under several shapes"
        name = _operation(first.base)
        if reason:
            return _left(group, name, reason)
        table, error = None, 0.0
        if value.dtype is not torch.bool:
            if self.wide is None:
                return _left(group, name, "a code would change it")
            table, error = (self.wide, self.wide.error()) if first.summed else best(first.place, self.tables)
        bits = 1 if table is None else table.bits
        row = value.shape[-1] if value.dim() else 1
        if bits < BYTE and not (isinstance(row, int) and row % (BYTE // bits) == 0):
            return _left(group, name, "its rows do not fill whole bytes")
        before = _bytes(value)
        packed = _encode(forward, first.node, table, bits)
        _replace_result(forward, first.node, packed)
        _decode(backward, first.place, packed, value, table, bits)
        code = "bits" if table is None else table.name
        shape = tuple(map(str, value.shape))
        return iter([KeptRecord(name, shape, value.dtype, before, _bytes(packed.meta["val"]), code, error)])


def _left(group: Sequence[Kept], name: str, reason: str) -> Iterator[KeptRecord]:
    for i, one in enumerate(group):
        value = value_of(one.node)
        assert value is not None
        size = 0 if i else _bytes(value)
        yield KeptRecord(name, tuple(map(str, value.shape)), value.dtype, size, size, None, 0.0, reason)


def _operation(base: fx.Node) -> str:
    if base.op == "placeholder":
        return "input"
    source: Any = base.args[0] if base.target is getattr else base
    while source.op == "call_function" and source.target.__name__ == "getitem":
        source = source.args[0]
    return schema_name(source.target).partition("::")[2] or str(source.target)


def _bytes(value: Tensor) -> int:
    return elements(value) * value.element_size()


def _encode(module: fx.GraphModule, node: fx.Node, table: Table | None, bits: int) -> fx.Node:
    graph = Graph(module, node.next)
    codes = node if table is None else encode(graph, node, table.name, table.borders)
    packed = codes if bits == BYTE else pack(graph, codes, bits)
    if "saved_tensor_with_no_vc_check" in node.meta:
        packed.meta["saved_tensor_with_no_vc_check"] = node.meta["saved_tensor_with_no_vc_check"]
    return packed


def _replace_result(module: fx.GraphModule, node: fx.Node, packed: fx.Node) -> None:
    (end,) = module.graph.find_nodes(op="output")
    end.args = (tuple(packed if one is node else one for one in end.args[0]),)


def _decode(
    module: fx.GraphModule, place: fx.Node, packed: fx.Node, value: Tensor, table: Table | None, bits: int
) -> None:
    """Let a placeholder receive codes, and its readers what is looked up."""
    readers = list(place.users)
    place.meta = {**place.meta, "val": packed.meta["val"]}
    place.meta.pop("tensor_meta", None)
    first = min(readers, key=list(module.graph.nodes).index)
    graph = Graph(module, first)
    codes = place if bits == BYTE else unpack(graph, place, bits)
    if table is None:
        found = graph(torch.ops.aten.ne.Scalar, codes, 0)
    else:
        found = look_up(graph, codes, f"{table.name}_points", table.points, value.dtype)
    for reader in readers:
        reader.replace_input_with(place, found)
