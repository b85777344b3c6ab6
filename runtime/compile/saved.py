"""The tensors that a compiled forward graph hands to its backward graph, and which kind each is of."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from fitact.runtime.saving import DTYPES, FEW, STATISTIC
from fitact.runtime.torch_internals import PRODUCTS, UNSAFE_VIEW, is_operator, schema_name, size_hint

from .codes import CAST

aten = torch.ops.aten
BATCHED = (aten.bmm.default, aten.baddbmm.default)
MEANS = (aten.mean.dim, aten.var.correction, aten.var_mean.correction)  # a norm has one
MAXIMA = aten.amax.default, aten.max.dim  # so has a softmax
LINEAR = CAST.overloadpacket, aten.add, aten.sub, aten.mul, aten.div, aten.neg, aten.where, aten.clone
# An error of what these read has no bound, or they jump. The compiler has softplus and SiLU in the form of log1p
# and quotients. Of a sine, an error of half a per cent may be a period.
STEEP = (
    *(aten.log, aten.log2, aten.log10, aten.sqrt, aten.rsqrt, aten.reciprocal, aten.acos, aten.acosh, aten.asin),
    *(aten.atanh, aten.sin, aten.cos, aten.tan, aten.remainder, aten.fmod, aten.lgamma, aten.digamma, aten.atan2),
    *(aten.floor, aten.ceil, aten.trunc, aten.round, aten.sign, aten.abs),
)
SOFTMAX = "of a softmax"
# Where operators come from that are known: what others make of an error, as attention of a library, nobody knows.
KNOWN = ("aten", "prims", "fitact", "_c10d_functional", "_c10d_functional_autograd")


class SavedTensor(NamedTuple):
    """One tensor that the forward graph hands on.

    Attributes:
        node: of the forward graph.
        place: the placeholder of the backward graph that receives it.
        base: what it is a view of, perhaps itself.
        reader: what reads it, or why it stays as it is.

    """

    node: fx.Node
    place: fx.Node
    base: fx.Node
    reader: Reader


class Reader(NamedTuple):
    """What reads a tensor.

    Attributes:
        kind: the tensor's, of `quantising.KINDS`; `""` if it has none.
        reason: why it stays as it is; `""` if it may be stored otherwise.
        sharp: whether attention reads what is computed from the tensor, or it is the result of a tanh.
        fused: whether fused attention does.

    """

    kind: str
    reason: str = ""
    sharp: bool = False
    fused: bool = False


def value_of(node: Any) -> Tensor | None:
    """Return a node's result as a fake tensor; None if that is no tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def elements(node: Any) -> int:
    """Return the elements of a node's result; for a dynamic shape as when the graph was traced."""
    value = value_of(node)
    return 0 if value is None else size_hint(value.numel())


def is_view(node: fx.Node) -> bool:
    """Return whether a node's result has the storage of its first argument."""
    target: Any = node.target
    return is_operator(target) and (target.is_view or target is UNSAFE_VIEW)


def is_pointwise(node: fx.Node) -> bool:
    """Return whether a node computes each element from the elements at the same place."""
    target: Any = node.target
    return is_operator(target) and (torch.Tag.pointwise in target.tags or target is CAST)


def condition_of(node: fx.Node) -> fx.Node | None:
    """Return the condition that chooses between two numbers for a node's elements; None if there are more."""
    if node.target is not aten.where.self:
        return None
    condition, *others = node.args
    numbers = [other for other in others if isinstance(other, fx.Node)]
    alone = all(number.target is aten.full.default and not number.args[0] for number in numbers)
    return condition if alone and isinstance(condition, fx.Node) else None


def is_mask(node: fx.Node) -> bool:
    """Return whether the elements of a node are two numbers at most, which bits store as they are."""
    value = value_of(node)
    return condition_of(node) is not None or (value is not None and value.dtype is torch.bool)


def base_of(node: fx.Node) -> fx.Node:
    """Return what a node is a view of, perhaps itself."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def saved(
    forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, owned: Collection[int], inputs: bool
) -> Iterator[SavedTensor]:
    """Yield what the forward graph hands to the backward graph, whose placeholders have the names of its outputs.

    The first `outputs` of the forward graph's outputs are the model's own. Of its inputs, those `owned` are
    parameters and buffers, and the others may be stored otherwise if `inputs` says so.
    """
    graph = _Graph(forward, outputs, owned, inputs)
    places = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    for node in graph.results[outputs:]:
        if value_of(node) is not None and node.name in places:  # not the state of a random generator
            reason = graph.reason(node)
            reader = Reader("", reason) if reason or is_mask(node) else graph.reader(node)
            yield SavedTensor(node, places[node.name], base_of(node), reader)


class _Graph:
    """A forward graph, and the roles of its nodes."""

    def __init__(self, forward: fx.GraphModule, outputs: int, owned: Collection[int], inputs: bool) -> None:
        self.nodes = list(forward.graph.nodes)
        self.places = {node: i for i, node in enumerate(self.nodes)}
        given = list(forward.graph.find_nodes(op="placeholder"))
        (end,) = forward.graph.find_nodes(op="output")
        self.results: Sequence[Any] = end.args[0]
        returned = [result for result in self.results[:outputs] if isinstance(result, fx.Node)]
        self.returned = {base_of(node) for node in returned}
        self.inputs = inputs
        self.loss = _loss(returned)
        self.weights = {node for i, node in enumerate(given) if i in owned}
        for node in self.nodes:
            sources = node.all_input_nodes
            if node.op == "call_function" and sources and self.weights.issuperset(sources):
                self.weights.add(node)

    def reason(self, node: fx.Node) -> str:
        """Return why a node is left as it is, whatever reads it."""
        value, base = value_of(node), base_of(node)
        assert value is not None
        if base in self.weights:
            return "a parameter" if base.op == "placeholder" else "made of parameters alone"
        if base.op == "placeholder" and not self.inputs:
            return "an input"
        if value.dtype not in DTYPES and value.dtype is not torch.bool:
            return f"of {str(value.dtype).removeprefix('torch.')}"
        if elements(node) < FEW:
            return "small"
        if base in self.loss:
            return "saved by the loss"
        return "an output of the model" if base in self.returned else ""

    def reader(self, node: fx.Node) -> Reader:
        """Return what reads a node first, through operators that change each element alone, sums and copies."""
        base = base_of(node)
        passing, first, sharp, fused = {base}, None, False, False
        todo = {self.places[user] for user in base.users}
        while todo:
            place = min(todo)
            todo.remove(place)
            current = self.nodes[place]
            if is_pointwise(current) and elements(current) >= STATISTIC * elements(base):
                return Reader("", "a statistic")
            if _is_steep(current, passing, elements(base)) or _divides(current, base):
                return Reader("", "of a quotient, logarithm, root or sine")
            if is_operator(current.target) and schema_name(current.target).partition("::")[0] not in KNOWN:
                return Reader("", "of an operator that is not known")
            reader = self._reads(current, passing)
            first = first or reader
            if reader is not None and reader.kind == "attention":
                sharp, fused = True, fused or _attends(current)
            if current not in passing and (reader is None or reader.kind in ("activation", "gate")):
                passing.add(current)
                todo |= {self.places[user] for user in current.users}
        first = first or Reader("", "read by nothing that is quantised")
        made = None if first.reason == SOFTMAX else self._made(base)
        read = made or first
        return Reader(read.kind, read.reason, sharp or base.target is aten.tanh.default, fused)

    def _reads(self, node: fx.Node, passing: Collection[fx.Node]) -> Reader | None:
        """Return what a node is as a reader of the nodes that are found; None if it passes their elements on."""
        target: Any = node.target
        if _attends(node):
            read = any(argument in passing for argument in node.args[:3])  # queries, keys and values
            return Reader("attention") if read else Reader("", "attention's mask")
        if target in PRODUCTS:
            return Reader("attention" if self._is_batched(node) else "linear")
        if _maximises(node):
            return Reader("", SOFTMAX)
        if target in MEANS:
            rank, dims = node.all_input_nodes[0].meta["val"].dim(), cast("Any", node.args[1:2])
            over = [dim % rank for dim in (dims[0] if dims and dims[0] else range(rank))]
            return Reader("", "of a norm over the batch") if 0 in over else Reader("norm")
        if target is aten.mul.Tensor and any(
            factor not in passing and elements(factor) == elements(node) and factor.meta["val"].is_floating_point()
            for factor in node.all_input_nodes
        ):
            return Reader("gate")
        return Reader("activation") if is_pointwise(node) and not _is_linear(node) else None

    def _made(self, base: fx.Node) -> Reader | None:
        """Return the reader of what attention makes, or a softmax, or its maximum."""
        source = base.all_input_nodes[0] if base.target is operator.getitem else base
        if _attends(source):
            return Reader("attention") if base.args[1] == 0 else Reader("", "attention's statistics")
        if _is_softmax(base) or any(_maximises(base_of(source)) for source in base.all_input_nodes):
            return Reader("", SOFTMAX)
        return Reader("attention") if self._is_batched(base) else None

    def _is_batched(self, node: fx.Node) -> bool:
        """Whether a node is a product of two batches, as attention makes them; one with a weight is a layer."""
        return node.target in BATCHED and not any(
            base_of(source) in self.weights for source in node.all_input_nodes
        )


def _attends(node: fx.Node) -> bool:
    return node.op == "call_function" and "attention" in schema_name(node.target)


def _is_steep(node: fx.Node, passing: Collection[fx.Node], size: int) -> bool:
    """Return whether an error of what a node reads has no bound; a statistic of `size` elements has one."""
    steep = getattr(node.target, "overloadpacket", None) in STEEP or "max_pool" in schema_name(node.target)
    if not steep and not (node.target is aten.pow.Tensor_Scalar and cast("Any", node.args[1]) < 1):
        return False
    read = [source for source in node.all_input_nodes if source in passing]
    return any(STATISTIC * elements(base_of(source)) >= size for source in read)


def _divides(node: fx.Node, base: fx.Node) -> bool:
    """Return whether a node divides by sums and products of a tensor, which may be near 0, unlike 1 + exp(-x)."""
    divisors = [node.args[1]] if node.target is aten.div.Tensor else []
    while divisors:
        divisor: Any = divisors.pop()
        if divisor is base:
            return True
        if STATISTIC * elements(divisor) >= elements(base) and _is_linear(divisor):
            divisors += divisor.all_input_nodes
    return False


def _is_linear(node: fx.Node) -> bool:
    square = node.target is aten.pow.Tensor_Scalar and node.args[1] == 2  # of a norm
    return getattr(node.target, "overloadpacket", None) in LINEAR or is_view(node) or bool(square)


def _maximises(node: fx.Node) -> bool:
    return node.target in MAXIMA or (node.op == "call_function" and "softmax" in schema_name(node.target))


def _is_softmax(node: fx.Node) -> bool:
    """Return whether a node is a quotient by the sum of what is divided, perhaps cast."""
    while node.target is CAST or is_view(node):
        node = node.all_input_nodes[0]
    total: Any = node.args[1] if node.target is aten.div.Tensor else None
    return isinstance(total, fx.Node) and total.target is aten.sum.dim_IntList and total.args[0] is node.args[0]


def _loss(returned: Sequence[fx.Node]) -> set[fx.Node]:
    """Return what leads to a loss: from a number that is returned back to a product or a sum of equal shapes."""
    nodes: set[fx.Node] = set()
    todo = [node for node in returned if (value := value_of(node)) is not None and not value.dim()]
    while todo:
        node = todo.pop()
        if node in nodes or node.op == "placeholder":
            continue
        nodes.add(node)
        shapes = [value.shape for source in node.all_input_nodes if (value := value_of(source)) is not None]
        sums = node.target is aten.add.Tensor and len(shapes) == 2 and shapes[0] == shapes[1]
        if node.target not in PRODUCTS and not sums:
            todo += node.all_input_nodes
    return nodes
