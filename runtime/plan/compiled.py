"""What the compiler makes of a whole model: the bytes that its graphs keep, those at the peak, and their time.

Graphs are traced and partitioned as `torch.compile` does it; no code is generated. Time is estimated as if
connected operations between two products became one kernel, which reads each tensor from outside once, and writes
once each tensor that is read outside.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, fx

from fitact.errors import UsageError
from fitact.runtime.compare.baselines import copied, traced
from fitact.runtime.compile.compile import codes_of
from fitact.runtime.compile.kept import is_pointwise, is_view
from fitact.runtime.compile.partition import Partition
from fitact.runtime.models.prepare import Inputs, starts
from fitact.runtime.torch_internals import is_operator, schema_name, storage_id, tree_iter
from fitact.text import one_line

from .costs import Step
from .devices import Device
from .subjects import Subject
from .timeline import Work, rest_of, work_of
from .ways import Way

PICKED = frozenset(["embedding", "gather", "index", "index_select"])  # these read only what they return
# Operations that Inductor fuses with those around them, besides pointwise ones.
FUSED = frozenset(
    [
        *("sum", "mean", "var", "var_mean", "amax", "amin", "prod", "any", "all", "argmax", "argmin", "max"),
        *("min", "full", "iota", "arange", "scalar_tensor", "empty", "rand", "inductor_random"),
        *("inductor_lookup_seed", "inductor_seeds", "clone", "cat", "constant_pad_nd", "slice_scatter"),
        *("select_scatter", "copy", "copy_", "where", "expand", "repeat", *PICKED),
    ]
)


def compiled_steps(
    subject: Subject, device: Device, ways: Sequence[Way], progress: Callable[[float], None] = lambda share: None
) -> dict[Way, Step]:
    """Measure training steps of the compiled model.

    Args:
        subject: the model.
        device: how long operations take.
        ways: ways with a budget.
        progress: called with the share that is done.

    Returns:
        The step of each way.

    Raises:
        UsageError: the compiler cannot trace the model, or the loss is computed outside of it.

    """
    found: dict[Way, Step] = {}

    def each(graph: fx.GraphModule, given: Sequence[Any], owned: int, **options: Any) -> None:
        progress(1 / (1 + len(ways)))
        for i, way in enumerate(ways):
            budget = 1.0 if way.budget is None else way.budget
            partition = Partition(budget, codes_of(way.error), (), lambda records: None)
            forward, backward = partition(copied(graph), given, **options)
            found[way] = step_of(forward, backward, options["num_fwd_outputs"], device)
            progress((2 + i) / (1 + len(ways)))

    with subject.environment():
        inputs = _inputs_of(subject)
        try:
            traced(subject.model, subject.mode, inputs, each, subject.casting)
        except Exception as error:
            raise UsageError(f"the compiler cannot trace the model: {one_line(error)}") from error
    return found


def _inputs_of(subject: Subject) -> Inputs:
    """Return what the model is called with; UsageError if backward does not start from what it returns."""
    calls: list[tuple[Inputs, Any]] = []

    def note(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        calls.append((Inputs(args, kwargs), output))

    handle = subject.model.register_forward_hook(note, with_kwargs=True)
    try:
        outputs = subject.run()
    finally:
        handle.remove()
    if len(calls) != 1 or [*map(id, starts(calls[0][1], subject.name))] != [*map(id, outputs)]:
        raise UsageError("the compiler needs a model that is called once and returns its loss or its outputs")
    return calls[0][0]


def step_of(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, device: Device) -> Step:
    """Return the step of a forward and a backward graph.

    Args:
        forward: the forward graph.
        backward: the backward graph, whose placeholders have the storages of what they receive.
        outputs: how many of the forward graph's results, from the first on, are the model's own.
        device: how long operations take.

    """
    there = {key for node in forward.graph.find_nodes(op="placeholder") for key, _ in _storages(node)}
    (end,) = forward.graph.find_nodes(op="output")
    one, other = _Kernels(forward, device), _Kernels(backward, device)
    saved = dict(pair for node in _nodes(end.args[0]) for pair in _storages(node) if pair[0] not in there)
    held = dict(pair for node in _nodes(end.args[0][:outputs]) for pair in _storages(node) if pair[0] not in there)
    given = dict(pair for node in backward.graph.find_nodes(op="placeholder") for pair in _storages(node))
    given = {key: size for key, size in given.items() if key not in there}
    peak = max(one.peak({}, {}), other.peak(given, held))
    return Step(sum(saved.values()), peak, one.work + other.work)


def _nodes(values: Iterable[Any]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]


def _tensors(node: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(node.meta.get("val")) if isinstance(leaf, Tensor)]


def _storages(node: fx.Node) -> Iterator[tuple[int, int]]:
    """Yield identity and bytes of the storages of a node's results."""
    for tensor in _tensors(node):
        yield storage_id(tensor), tensor.untyped_storage().nbytes()


def _bytes(node: fx.Node) -> int:
    return sum(min(one.numel() * one.element_size(), one.untyped_storage().nbytes()) for one in _tensors(node))


def _name(node: fx.Node) -> str:
    return schema_name(node.target).partition("::")[2]


class _Kernels:
    """A graph's kernels: products and the like, each alone, and the connected parts between them.

    Attributes:
        work: of all kernels.

    """

    def __init__(self, module: fx.GraphModule, device: Device) -> None:
        self.nodes = [*module.graph.nodes]
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.source: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:  # views and parts of a result are the result itself
            alias = node.op == "call_function" and (node.target is operator.getitem or is_view(node))
            self.source[node] = self.source[node.all_input_nodes[0]] if alias else node
        self.fused = {node: self._is_fused(node) for node in self.nodes}
        self.kernel = self._connected()
        self.written = {node for node in self.nodes if self._is_written(node)}
        self.work = sum(self._works(device), Work())

    def _is_fused(self, node: fx.Node) -> bool:
        return node.op == "call_function" and (is_pointwise(node) or _name(node) in FUSED)

    def _inputs(self, node: fx.Node) -> list[fx.Node]:
        return [self.source[one] for one in node.all_input_nodes]

    def _calls(self) -> Iterator[fx.Node]:
        """Yield the nodes that compute something."""
        return (
            node
            for node in self.nodes
            if node.op == "call_function" and self.source[node] is node and is_operator(node.target)
        )

    def _connected(self) -> dict[fx.Node, fx.Node]:
        """Return for each fused node the first of its kernel."""
        stage: dict[fx.Node, int] = {}  # how many products come before on the longest way
        for node in self.nodes:
            found = [
                stage[one] + (one.op == "call_function" and not self.fused[one]) for one in self._inputs(node)
            ]
            stage[node] = max(found, default=0)
        first: dict[fx.Node, fx.Node] = {}

        def root(node: fx.Node) -> fx.Node:
            while first[node] is not node:
                node = first[node]
            return node

        for node in filter(self.fused.__getitem__, self._calls()):
            first[node] = node
            for one in self._inputs(node):
                if self.fused[one] and stage[one] == stage[node]:
                    a, b = root(one), root(node)
                    first[b if self.place[a] < self.place[b] else a] = min(a, b, key=self.place.__getitem__)
        return {node: root(node) for node in first}

    def _is_written(self, node: fx.Node) -> bool:
        """Return whether a node's result is in memory: its kernel is not its only reader."""
        if node.op != "call_function" or self.source[node] is not node:
            return False
        return not self.fused[node] or any(
            self.kernel.get(one) is not self.kernel[node] for one in self._readers(node)
        )

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the nodes that read a node's result, or a view of it."""
        for user in node.users:
            if self.source[user] is user:
                yield user
            else:
                yield from self._readers(user)

    def _works(self, device: Device) -> Iterator[Work]:
        traffic: dict[fx.Node, int] = {}
        rest: dict[fx.Node, int] = {}
        read: set[tuple[fx.Node, fx.Node]] = set()
        for node in self._calls():
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda other: other.meta.get("val"))
            if not self.fused[node]:
                yield work_of(device, node.target, args, kwargs, node.meta.get("val"))
                continue
            kernel = self.kernel[node]
            traffic[kernel] = traffic.get(kernel, 0) + (_bytes(node) if node in self.written else 0)
            tensors = [
                leaf for leaf in tree_iter((args, kwargs, node.meta.get("val"))) if isinstance(leaf, Tensor)
            ]
            rest[kernel] = rest.get(kernel, 0) + rest_of(node.target, tensors)
            for given, one in zip(node.all_input_nodes, self._inputs(node), strict=True):
                if self.kernel.get(one) is kernel or (kernel, one) in read:
                    continue
                read.add((kernel, one))
                picks = _name(node) in PICKED and given is node.args[0]
                traffic[kernel] += min(_bytes(given), _bytes(node)) if picks else _bytes(given)
        for kernel, count in traffic.items():
            yield Work(device.seconds(count, 0, 0, rest[kernel]), 0, count)

    def peak(self, given: dict[int, int], held: dict[int, int]) -> int:
        """Return the most bytes alive.

        Args:
            given: identities and bytes of storages that are alive at first, until they have been read.
            held: the same of storages that are always alive.

        """
        last: dict[fx.Node, int] = {}
        ends: dict[int, int] = dict.fromkeys(given, 0)
        for node in reversed(self.nodes):
            passes = (user for user in node.users if self.source[user] is not user or self._is_inner(user))
            reads = (user for user in node.users if self.source[user] is user and not self._is_inner(user))
            found = [*(last[user] for user in passes), *(self.place[user] for user in reads)]
            last[node] = max(found, default=self.place[node])
            for key, _ in _storages(node):
                ends[key] = max(ends.get(key, 0), last[node])
        born: dict[int, dict[int, int]] = {}
        for node in self.written:
            born.setdefault(self.place[node], {}).update(_storages(node))
        level = sum((given | held).values())
        alive = given | held
        dying: dict[int, list[int]] = {}
        for key, at in ends.items():
            dying.setdefault(at, []).append(key)
        most = level
        for at in range(len(self.nodes)):
            for key, size in born.get(at, {}).items():
                level += size if key not in alive else 0
                alive[key] = size
            most = max(most, level)
            for key in dying.get(at, []):
                if key not in held:
                    level -= alive.pop(key, 0)
        return most

    def _is_inner(self, node: fx.Node) -> bool:
        return self.fused[node] and node not in self.written
