"""Changing graphs: tensors that the forward graph hands on become codes, which the backward graph looks up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fitact.runtime.torch_internals import min_cut, schema_name, unset_fake_temporarily

from .codes import BYTE, Graph, exponents, pack, scaled, unpack
from .compander import Compander, error_of
from .kept import CAST, Kept, condition_of, elements, kept, value_of
from .report import KeptRecord

UNCHECKED = "saved_tensor_with_no_vc_check"  # the partitioner's mark of tensors that may be changed in place


@dataclass
class Partition:
    """The compiler's own partition of a joint graph, with codes.

    Attributes:
        budget: how much the compiler may keep, from 0 to 1.
        code: of what is kept; None if values may not change.
        also: what else becomes codes, of `ALSO` in `kept`.
        record: receives the records of a graph.

    """

    budget: float
    code: Compander | None
    also: Collection[str]
    record: Callable[[Sequence[KeptRecord]], None] = field(repr=False)

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Return the forward and the backward graph; arguments are those of `min_cut`."""
        forward, backward = min_cut(graph, inputs, self.budget, **options)
        owned = options.get("static_lifetime_input_indices") or ()
        with unset_fake_temporarily():
            self.change(forward, backward, options["num_fwd_outputs"], owned)
        for module in (forward, backward):
            module.graph.lint()
            module.recompile()
        return forward, backward

    def change(
        self, forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, owned: Collection[int]
    ) -> None:
        """Change both graphs, and record each tensor that one hands to the other."""
        found = list(kept(forward, backward, outputs, owned, self.also))
        likes: dict[fx.Node, list[Kept]] = {}
        for one in found:
            likes.setdefault(one.base, []).append(one)
        records = [self._change(forward, backward, group) for group in likes.values()]
        self.record([record for group in records for record in group])

    def _change(
        self, forward: fx.GraphModule, backward: fx.GraphModule, group: list[Kept]
    ) -> Iterator[KeptRecord]:
        """Let what is kept of one storage become a code, and return the records, the first with the bytes."""
        whole = group[0].node if len(group) == 1 else group[0].base
        value = value_of(whole)
        assert value is not None
        name = _operation(group[0].base)
        code, error, note = self._code(group, whole)
        bits = 1 if code is None else code.bits
        chains = [chain for one in group if (chain := _views(one.node, whole)) is not None]
        if reason := self._blocker(group, whole, value, bits, len(chains)):
            return _left(group, name, reason)
        before = _bytes(value)
        parts = _encode(forward, whole, code)
        places = _hand_over(forward, backward, group, parts)
        _decode(backward, group, places, whole, code, chains)
        after = sum(_bytes(part.meta["val"]) for part in parts)
        label = "bits" if code is None else f"identity, {bits} bits"
        shape = tuple(map(str, value.shape))
        return iter([KeptRecord(name, shape, value.dtype, before, after, label, error, note)])

    def _code(self, group: Sequence[Kept], whole: fx.Node) -> tuple[Compander | None, float, str]:
        """Return the code for a group, its error and a note on it; None for a mask or if there is no code."""
        if _is_mask(whole) or self.code is None or group[0].reason:
            return None, 0.0, ""
        return self.code, *error_of([one.place for one in group], self.code)

    def _blocker(self, group: Sequence[Kept], whole: fx.Node, value: Tensor, bits: int, chains: int) -> str:
        """Return why a group stays as it is; `""` if it becomes a code."""
        reasons = [one.reason for one in group if one.reason]
        if reasons:
            return reasons[0]
        if chains < len(group):
            return "kept under several shapes that vary"
        if not _is_mask(whole) and self.code is None:
            return "a code would change it"
        row: Any = value.shape[-1] if value.dim() else 1
        fills = isinstance(row, int) and row * bits % BYTE == 0
        return "" if bits == BYTE or fills else "its rows do not fill whole bytes"


def _is_mask(node: fx.Node) -> bool:
    """Return whether the elements of a node are two numbers at most, which bits keep as they are."""
    value = value_of(node)
    return condition_of(node) is not None or (value is not None and value.dtype is torch.bool)


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


def _encode(module: fx.GraphModule, node: fx.Node, code: Compander | None) -> list[fx.Node]:
    """Return what is kept in place of a node: its codes and its rows' powers of two, or a mask's bits."""
    after = node.next
    while after.op == "placeholder":
        after = after.next
    graph = Graph(module, after)
    if code is None:
        return [pack(graph, condition_of(node) or node, 1)]
    scale = exponents(graph, node)
    codes = code.encode(graph, scaled(graph, node, scale, -1))
    return [codes if code.bits == BYTE else pack(graph, codes, code.bits), scale]


def _views(node: fx.Node, whole: fx.Node) -> list[fx.Node] | None:
    """Return the views that make a node of another, the first first; None if their shapes vary."""
    chain: list[fx.Node] = []
    while node is not whole:
        chain.insert(0, node)
        if len(node.all_input_nodes) > 1:
            return None
        node = node.all_input_nodes[0]
    return chain


def _hand_over(
    forward: fx.GraphModule, backward: fx.GraphModule, group: Sequence[Kept], parts: Sequence[fx.Node]
) -> list[fx.Node]:
    """Let the forward graph return parts in place of a group, and return the placeholders that receive them."""
    first, *others = group
    (end,) = forward.graph.find_nodes(op="output")
    (results,) = end.args
    described = end.meta.get("desc") or [None] * len(results)
    kept_results: list[Any] = []
    kept_described: list[Any] = []
    gone = {one.node for one in others}
    for result, description in zip(results, described, strict=True):
        if result is first.node:
            kept_results += parts
            kept_described += [description] * len(parts)
        elif result not in gone:
            kept_results.append(result)
            kept_described.append(description)
    end.args = (tuple(kept_results),)
    if "desc" in end.meta:
        end.meta["desc"] = kept_described
    places = [first.place]
    for i in range(1, len(parts)):
        with backward.graph.inserting_after(places[-1]):
            places.append(backward.graph.placeholder(f"fitact_part_{i}_of_{first.place.name}"))
    for place, part in zip(places, parts, strict=True):
        place.meta = {**first.place.meta, "val": part.meta["val"]}
        place.meta.pop("tensor_meta", None)
        if UNCHECKED in first.node.meta:
            part.meta[UNCHECKED] = first.node.meta[UNCHECKED]
    return places


def _decode(
    module: fx.GraphModule,
    group: Sequence[Kept],
    places: Sequence[fx.Node],
    whole: fx.Node,
    code: Compander | None,
    chains: Sequence[Sequence[fx.Node]],
) -> None:
    """Let the readers of a group's placeholders read what stands for the codes that the first receives now."""
    readers = [(one.place, [*one.place.users]) for one in group]
    place, order = places[0], [*module.graph.nodes]
    graph = Graph(module, min((user for _, users in readers for user in users), key=order.index))
    if code is None:
        found = graph(torch.ops.aten.ne.Scalar, unpack(graph, place, 1), 0)
        if condition_of(whole) is not None:
            numbers = [
                graph(one.target, *one.args, **one.kwargs) for one in whole.args[1:] if isinstance(one, fx.Node)
            ]
            found = graph(whole.target, found, *numbers)
    else:
        found = code.decode(graph, place if code.bits == BYTE else unpack(graph, place, code.bits))
        found = graph(CAST, scaled(graph, found, places[1], 1), whole.meta["val"].dtype)
    for (old, users), chain in zip(readers, chains, strict=True):
        new = found
        for view in chain:
            new = graph(view.target, new, *view.args[1:], **view.kwargs)
        for user in users:
            user.replace_input_with(old, new)
        if old is not place:
            module.graph.erase_node(old)
