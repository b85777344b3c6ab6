"""Changing graphs: tensors that the forward graph hands on become codes, which the backward graph decodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fitact.runtime.saving import SHARP
from fitact.runtime.torch_internals import min_cut, schema_name, unset_fake_temporarily

from .codes import BYTE, CAST, Add, adding, decode, encode, pack, unpack
from .report import SavedRecord
from .saved import (
    Reader,
    SavedTensor,
    base_of,
    condition_of,
    elements,
    is_mask,
    is_pointwise,
    is_view,
    saved,
    value_of,
)

UNCHECKED = "saved_tensor_with_no_vc_check"  # the partitioner's mark of tensors that may be changed in place
Group = Sequence[SavedTensor]


@dataclass
class Partition:
    """The compiler's own partition of a joint graph, with codes.

    Attributes:
        budget: how much the compiler may save, from 0 to 1.
        policy: the bits of each kind of tensors that is quantised.
        inputs: whether inputs that are no parameters are stored otherwise, too.
        record: receives the records of a graph.

    """

    budget: float
    policy: Mapping[str, int]
    inputs: bool
    record: Callable[[Sequence[SavedRecord]], None] = field(repr=False)

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Return the forward and the backward graph; arguments are those of `min_cut`."""
        forward, backward = min_cut(graph, inputs, self.budget, **options)
        owned = options.get("static_lifetime_input_indices") or ()
        with unset_fake_temporarily():
            self.change(forward, backward, options["num_fwd_outputs"], owned)
        backward.graph.eliminate_dead_code()  # comparisons that the forward graph makes now
        for module in (forward, backward):
            module.graph.lint()
            module.recompile()
        return forward, backward

    def change(
        self, forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, owned: Collection[int]
    ) -> None:
        """Change both graphs, and record each tensor that one hands to the other."""
        groups: dict[fx.Node, list[SavedTensor]] = {}
        for tensor in saved(forward, backward, outputs, owned, self.inputs):
            groups.setdefault(tensor.base, []).append(tensor)
        names = {node.name: node for node in forward.graph.nodes}
        known = {node: names[node.name] for node in backward.graph.nodes if node.name in names}
        change = partial(self._change, forward, backward, known)
        self.record([record for group in groups.values() for record in change(group)])

    def _change(
        self, forward: fx.GraphModule, backward: fx.GraphModule, known: dict[fx.Node, fx.Node], group: Group
    ) -> Iterator[SavedRecord]:
        """Let what is saved of one storage become a code, and return the records, the first with the bytes.

        Args:
            forward: the forward graph.
            backward: the backward graph.
            known: nodes of the backward graph, and those of the forward graph that are the same.
            group: what is saved of the storage.

        """
        whole, chains = _whole(group)
        value = whole.meta["val"]
        bits = 1 if is_mask(whole) else self._bits([tensor.reader for tensor in group])
        masks = [mask for tensor in group for mask in _comparisons(tensor.place)] if bits > 1 else []
        signs = [mask for mask in masks if _asks_for_signs(mask)]
        masks = [mask for mask in masks if mask not in signs]
        reason = _blocker(group, value, len(chains)) or ("" if bits else "attention")
        reason = reason or ("" if all(_can_move(mask, known) for mask in masks) else "compared with others")
        if reason:
            return _left(group, reason)
        parts = _encode(forward, whole, bits, bool(signs))
        places = _hand_over(forward, backward, group, [*parts, *(_moved(forward, mask, known) for mask in masks)])
        for mask, place in zip(masks, places[len(parts) :], strict=True):
            add = adding(backward, mask)
            mask.replace_all_uses_with(_reshaped(add, unpack(add, place), mask.meta["val"].shape))
        _decode(backward, group, places[: len(parts)], whole, bits, chains)
        sizes = _bytes(whole), sum(map(_bytes, places))
        kind = "mask" if bits == 1 else group[0].reader.kind
        return iter([SavedRecord(_operation(whole), _shape(whole), value.dtype, *sizes, kind, bits)])

    def _bits(self, readers: Sequence[Reader]) -> int:
        """Return the bits of what is read: the most that any of it has; 0 if it stays as it is."""
        bits = [self.policy.get(reader.kind, 0) for reader in readers]
        if any(reader.sharp for reader in readers):
            fused = any(reader.fused for reader in readers)
            bits.append(self.policy.get("attention", 0 if fused else SHARP))
        return max(bits) if all(bits) else 0


def _whole(group: Group) -> tuple[fx.Node, list[list[fx.Node]]]:
    """Return what of a storage is encoded, and the views that make what is saved, where these can be replayed."""
    base, node = group[0].base, group[0].node
    chains = [chain for tensor in group if (chain := _views(tensor.node, base)) is not None]
    if len(group) == 1 and (not chains or elements(base) > elements(node)):
        return node, [[]]
    return base, chains


def _views(node: fx.Node, whole: fx.Node) -> list[fx.Node] | None:
    """Return the views that make a node of another, the first first; None if their shapes vary."""
    chain: list[fx.Node] = []
    while node is not whole:
        chain.insert(0, node)
        if len(node.all_input_nodes) > 1:
            return None
        node = node.all_input_nodes[0]
    return chain


def _blocker(group: Group, value: Tensor, chains: int) -> str:
    """Return why a group stays as it is; `""` if it may be stored otherwise."""
    reasons = [tensor.reader.reason for tensor in group if tensor.reader.reason]
    if chains < len(group):
        reasons.append("saved under several shapes that vary")
    if value.dim() and 0 in value.stride():
        reasons.append("repeated in memory")
    width: Any = value.shape[-1] if value.dim() else 1
    if is_mask(group[0].base) and not (isinstance(width, int) and width % BYTE == 0):
        reasons.append("its rows do not fill whole bytes")
    return reasons[0] if reasons else ""


def _left(group: Group, reason: str) -> Iterator[SavedRecord]:
    for i, tensor in enumerate(group):
        size = 0 if i else _bytes(tensor.node)
        dtype, kind = tensor.node.meta["val"].dtype, tensor.reader.kind
        yield SavedRecord(_operation(tensor.base), _shape(tensor.node), dtype, size, size, kind, None, reason)


def _operation(base: fx.Node) -> str:
    source: Any = base_of(base)
    if source.op == "placeholder":
        return "input"
    while source.op == "call_function" and source.target.__name__ == "getitem":
        source = source.args[0]
    return schema_name(source.target).partition("::")[2] or str(source.target)


def _shape(node: fx.Node) -> tuple[str, ...]:
    return tuple(map(str, node.meta["val"].shape))


def _bytes(node: fx.Node) -> int:
    return elements(node) * int(node.meta["val"].element_size())


def _is_bool(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and value.dtype is torch.bool


def _comparisons(place: fx.Node) -> list[fx.Node]:
    """Return the masks that backward computes from a tensor, as from the input of a ReLU or a clamp."""
    nodes = [place]
    for node in nodes:
        users = [user for user in node.users if user not in nodes and (is_view(user) or is_pointwise(user))]
        nodes += [user for user in users if _is_bool(user) >= _is_bool(node)]
    return [node for node in nodes if _is_bool(node) and not all(map(_is_bool, node.users))]


def _asks_for_signs(mask: fx.Node) -> bool:
    """Return whether a mask says on which side of 0 the elements of what is saved are."""
    source: Any = mask.args[0]
    while source.op == "call_function" and (is_view(source) or source.target is CAST):
        source = source.args[0]
    return mask.args[1:] == (0,) and source.op == "placeholder"


def _can_move(mask: fx.Node, known: Collection[fx.Node]) -> bool:
    """Return whether the forward pass can compute a mask, and hand it on in bits."""
    sources = [mask]
    for node in sources:
        if node not in known:
            if node.op != "call_function":
                return False
            sources += [each for each in node.all_input_nodes if each not in sources]
    return _rows(mask.meta["val"].shape) is not None


def _rows(shape: Sequence[Any]) -> Sequence[Any] | None:
    """Return a shape whose last dimension fills whole bytes, by joining the last ones; None if sizes vary."""
    if shape and isinstance(shape[-1], int) and shape[-1] % BYTE == 0:
        return shape
    sizes = [size for size in shape if isinstance(size, int)]
    joined = next((i for i in range(2, len(sizes) + 1) if math.prod(sizes[-i:]) % BYTE == 0), 0)
    return [*shape[:-joined], math.prod(sizes[-joined:])] if joined and len(sizes) == len(shape) else None


def _reshaped(add: Add, x: fx.Node, shape: Sequence[Any]) -> fx.Node:
    same = len(shape) == x.meta["val"].dim()
    return x if same else add(torch.ops.aten.reshape.default, x, [*shape])


def _moved(forward: fx.GraphModule, mask: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return the bits of a mask, computed in the forward graph."""
    (end,) = forward.graph.find_nodes(op="output")
    add = adding(forward, end)

    def copied(node: fx.Node) -> fx.Node:
        if node not in known:
            args, kwargs = fx.map_arg((node.args, node.kwargs), copied)
            known[node] = add(node.target, *args, **kwargs)
        return known[node]

    shape = _rows(mask.meta["val"].shape)
    assert shape is not None
    return pack(add, _reshaped(add, copied(mask), shape))


def _encode(module: fx.GraphModule, node: fx.Node, bits: int, signs: bool) -> list[fx.Node]:
    """Return what is saved in place of a node: the parts of its codes, or a mask's bits."""
    after = node.next
    while after.op == "placeholder":
        after = after.next
    add = adding(module, after)
    return [pack(add, condition_of(node) or node)] if bits == 1 else encode(add, node, bits, signs)


def _hand_over(
    forward: fx.GraphModule, backward: fx.GraphModule, group: Group, parts: Sequence[fx.Node]
) -> list[fx.Node]:
    """Let the forward graph return parts in place of a group, and return the placeholders that receive them."""
    first, *others = group
    (end,) = forward.graph.find_nodes(op="output")
    (results,) = end.args
    described = end.meta.get("desc") or [None] * len(results)
    pairs: list[tuple[Any, Any]] = []
    gone = {tensor.node for tensor in others}
    for result, description in zip(results, described, strict=True):
        if result is first.node:
            pairs += [(part, description) for part in parts]
        elif result not in gone:
            pairs.append((result, description))
    end.args = (tuple(result for result, _ in pairs),)
    if "desc" in end.meta:
        end.meta["desc"] = [description for _, description in pairs]
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
    group: Group,
    places: Sequence[fx.Node],
    whole: fx.Node,
    bits: int,
    chains: Sequence[Sequence[fx.Node]],
) -> None:
    """Let the readers of a group's placeholders read the tensor whose parts the placeholders receive now."""
    readers = [(tensor.place, [*tensor.place.users]) for tensor in group]
    place, order = places[0], [*module.graph.nodes]
    add = adding(module, min((user for _, users in readers for user in users), key=order.index))
    if bits > 1:
        decoded = decode(add, places, whole.meta["val"])
    else:
        decoded = unpack(add, place)
        if condition_of(whole) is not None:
            numbers = [each for each in whole.args[1:] if isinstance(each, fx.Node)]
            copies = [add(number.target, *number.args, **number.kwargs) for number in numbers]
            decoded = add(whole.target, decoded, *copies)
    for (old, users), chain in zip(readers, chains, strict=True):
        new = decoded
        for view in chain:
            new = add(view.target, new, *view.args[1:], **view.kwargs)
        for user in users:
            user.replace_input_with(old, new)
        if old is not place:
            module.graph.erase_node(old)
