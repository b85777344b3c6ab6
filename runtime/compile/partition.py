"""The change to the graphs: what the forward graph hands on becomes codes, looked up in the backward graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fitact.runtime.torch_internals import schema_name

from .codes import BYTE, Graph, encode, look_up, pack, scale, scaled, unpack
from .kept import CAST, Kept, elements, kept, value_of
from .report import KeptRecord
from .tables import Table, best

UNCHECKED = "saved_tensor_with_no_vc_check"  # the partitioner's mark of tensors that may be changed in place


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
        parts = _encode(forward, first.node, table, bits)
        places = _hand_over(forward, backward, first, parts)
        _decode(backward, places, value, table, bits)
        after = sum(_bytes(part.meta["val"]) for part in parts)
        code = "bits" if table is None else table.name
        return iter([KeptRecord(name, tuple(map(str, value.shape)), value.dtype, before, after, code, error)])


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


def _encode(module: fx.GraphModule, node: fx.Node, table: Table | None, bits: int) -> list[fx.Node]:
    """Return what is kept in place of a node: its codes, and the scales of its rows if the table wants them."""
    graph = Graph(module, node.next)
    if table is None:
        return [pack(graph, node, bits)]
    scales = [scale(graph, node)] if table.scaled else []
    codes = encode(graph, scaled(graph, node, scales[0], -1) if scales else node, table.name, table.borders)
    return [codes if bits == BYTE else pack(graph, codes, bits), *scales]


def _hand_over(
    forward: fx.GraphModule, backward: fx.GraphModule, one: Kept, parts: Sequence[fx.Node]
) -> list[fx.Node]:
    """Let the forward graph return parts in place of a node, and return the placeholders that receive them."""
    (end,) = forward.graph.find_nodes(op="output")
    (results,) = end.args
    at = results.index(one.node)
    end.args = ((*results[:at], *parts, *results[at + 1 :]),)
    if "desc" in end.meta:
        described = list(end.meta["desc"])
        end.meta["desc"] = [*described[:at], *(described[at] for _ in parts), *described[at + 1 :]]
    places = [one.place]
    for i in range(1, len(parts)):
        with backward.graph.inserting_after(places[-1]):
            places.append(backward.graph.placeholder(f"{one.place.name}_{i}"))
    for place, part in zip(places, parts, strict=True):
        place.meta = {**one.place.meta, "val": part.meta["val"]}
        place.meta.pop("tensor_meta", None)
        if UNCHECKED in one.node.meta:
            part.meta[UNCHECKED] = one.node.meta[UNCHECKED]
    return places


def _decode(
    module: fx.GraphModule, places: Sequence[fx.Node], value: Tensor, table: Table | None, bits: int
) -> None:
    """Let the readers of the first placeholder read what is looked up by the codes that it receives now."""
    place = places[0]
    readers = list(place.users)
    graph = Graph(module, min(readers, key=list(module.graph.nodes).index))
    codes = place if bits == BYTE else unpack(graph, place, bits)
    if table is None:
        found = graph(torch.ops.aten.ne.Scalar, codes, 0)
    else:
        found = look_up(graph, codes, f"{table.name}_points", table.points)
        found = graph(CAST, scaled(graph, found, places[1], 1) if table.scaled else found, value.dtype)
    for reader in readers:
        reader.replace_input_with(place, found)
