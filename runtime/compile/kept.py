"""The tensors that a compiled forward graph hands to its backward graph, and which may become codes."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fitact.runtime.torch_internals import PRODUCTS, UNSAFE_VIEW, is_operator, schema_name, size_hint

aten = torch.ops.aten
SMALL = 1024  # elements: a smaller tensor is not worth a code
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ALSO = ("attention", "inputs", "loss")  # what becomes codes only on request
ON_REQUEST = ("attention", "products that attention makes")
NEVER = ("attention's mask", "attention's statistics")
BATCHED = (aten.bmm.default, aten.baddbmm.default)


class Kept(NamedTuple):
    """One tensor that the forward graph hands on.

    Attributes:
        node: of the forward graph.
        place: the placeholder of the backward graph that receives it.
        base: what it is a view of, perhaps itself.
        reason: why it stays as it is; `""` if it may become a code.

    """

    node: fx.Node
    place: fx.Node
    base: fx.Node
    reason: str


def value_of(node: Any) -> Tensor | None:
    """Return the fake tensor that stands for a node's result; None if that is no tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def elements(value: Tensor) -> int:
    """Return the number of elements; for a dynamic shape as it was when the graph was traced."""
    return size_hint(value.numel())


def is_view(node: fx.Node) -> bool:
    """Return whether a node's result has the storage of its first argument."""
    target: Any = node.target
    return is_operator(target) and (target.is_view or target is UNSAFE_VIEW)


def is_pointwise(node: fx.Node) -> bool:
    """Return whether a node computes each element from the elements at the same place."""
    target: Any = node.target
    return is_operator(target) and (torch.Tag.pointwise in target.tags or target is CAST)


CAST = torch.ops.prims.convert_element_type.default


def condition_of(node: fx.Node) -> fx.Node | None:
    """Return the condition that chooses between two numbers for a node's elements; None if there are more."""
    if node.target is not aten.where.self:
        return None
    condition, *others = node.args
    numbers = [one for one in others if isinstance(one, fx.Node)]
    alone = all(one.target is aten.full.default and not one.args[0] for one in numbers)
    return condition if alone and isinstance(condition, fx.Node) else None


def base_of(node: fx.Node) -> fx.Node:
    """Return what a node is a view of, perhaps itself."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def kept(
    forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, owned: Collection[int], also: Collection[str]
) -> Iterator[Kept]:
    """Yield what the forward graph hands to the backward graph.

    Args:
        forward: the forward graph.
        backward: the backward graph, whose placeholders have the names of what they receive.
        outputs: how many of the forward graph's outputs, from the first on, are the model's own.
        owned: which of the inputs are parameters and buffers.
        also: what else may become codes, of `ALSO`.

    """
    graph = _Graph(forward, outputs, owned)
    places = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    for node in graph.results[outputs:]:
        if value_of(node) is not None:
            yield Kept(node, places[node.name], base_of(node), graph.reason(node, also))


class _Graph:
    """A forward graph, and the roles of its nodes."""

    def __init__(self, forward: fx.GraphModule, outputs: int, owned: Collection[int]) -> None:
        inputs = list(forward.graph.find_nodes(op="placeholder"))
        (end,) = forward.graph.find_nodes(op="output")
        self.results: Sequence[Any] = end.args[0]
        returned = [one for one in self.results[:outputs] if isinstance(one, fx.Node)]
        self.returned = {base_of(one) for one in returned}
        self.loss = _loss(returned)
        self.weights = {node for i, node in enumerate(inputs) if i in owned}
        self.attention = _attention(forward.graph)
        for node in forward.graph.nodes:
            if (
                node.op == "call_function"
                and node.all_input_nodes
                and self.weights.issuperset(node.all_input_nodes)
            ):
                self.weights.add(node)

    def reason(self, node: fx.Node, also: Collection[str]) -> str:
        """Return why a node is left as it is."""
        value, base = value_of(node), base_of(node)
        assert value is not None
        if base in self.weights:
            return "a parameter" if base.op == "placeholder" else "made of parameters alone"
        if base.op == "placeholder" and "inputs" not in also:
            return "an input"
        if value.dtype not in FLOATS and value.dtype is not torch.bool:
            return f"of {str(value.dtype).removeprefix('torch.')}"
        if elements(value) < SMALL:
            return "small"
        if base in self.loss and "loss" not in also:
            return "kept by the loss"
        if base in self.returned:
            return "an output of the model"
        if value.dtype is torch.bool or condition_of(node) is not None:
            return ""
        part = self.attention.get(base, "")
        if part in NEVER or (part in ON_REQUEST and "attention" not in also):
            return f"of {part}"
        return "a statistic" if _is_statistic(node) else ""


def _loss(returned: Sequence[fx.Node]) -> set[fx.Node]:
    """Return what leads to a loss: from a number that is returned back to a product or a sum of two tensors."""
    found: set[fx.Node] = set()
    todo = [node for node in returned if (value := value_of(node)) is not None and not value.dim()]
    while todo:
        node = todo.pop()
        if node in found or node.op == "placeholder":
            continue
        found.add(node)
        if node.target not in PRODUCTS and not _adds_tensors(node):
            todo += node.all_input_nodes
    return found


def _attention(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return what attention reads and returns, and what else it keeps."""
    found: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if "attention" in schema_name(node.target):
            read = {one for one in node.args[:3] if isinstance(one, fx.Node)}  # queries, keys and values
            others = (one for one in node.all_input_nodes if one not in read)
            found |= dict.fromkeys(_inputs_of(others), "attention's mask")
            found |= dict.fromkeys(_inputs_of(read), "attention")
            found |= {user: "attention" if user.args[1] == 0 else "attention's statistics" for user in node.users}
        elif node.target in BATCHED:
            found |= dict.fromkeys((*_inputs_of(node.args), *_outputs_of(node)), "products that attention makes")
    return found


def _inputs_of(nodes: Iterable[Any]) -> Iterator[fx.Node]:
    """Yield nodes, and what they are views, copies and multiples of."""
    for node in nodes:
        one = node
        while isinstance(one, fx.Node):
            yield one
            tensors = [other for other in one.all_input_nodes if value_of(other) is not None]
            same = is_view(one) or one.target in (aten.clone.default, CAST, aten.mul.Tensor, aten.mul.Scalar)
            one = tensors[0] if same and len(tensors) == 1 else None


def _outputs_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a node, and its views and copies."""
    todo = [node]
    while todo:
        one = todo.pop()
        yield one
        todo += [user for user in one.users if is_view(user) or user.target in (aten.clone.default, CAST)]


def _adds_tensors(node: fx.Node) -> bool:
    """Whether a node is the sum of two tensors of one shape."""
    shapes = [value.shape for one in node.all_input_nodes if (value := value_of(one)) is not None]
    return node.target is aten.add.Tensor and len(shapes) == 2 and shapes[0] == shapes[1]


def _is_statistic(node: fx.Node) -> bool:
    """Whether a node is a sum, a mean or the like, or computed from such alone, element by element."""
    todo, seen = [base_of(node)], set[fx.Node]()
    numbers = value_of(node)
    assert numbers is not None
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        source = one.all_input_nodes[0] if one.target is operator.getitem else one
        inputs = [other for other in source.all_input_nodes if value_of(other) is not None]
        sizes = [elements(value) for other in inputs if (value := value_of(other)) is not None]
        if is_pointwise(one) or is_view(one):
            todo += [other for other, size in zip(inputs, sizes, strict=False) if size == elements(numbers)]
        elif one.target not in PRODUCTS and sizes and max(sizes) >= 4 * elements(numbers):
            return True
    return False
