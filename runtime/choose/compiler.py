"""What PyTorch's compiler saves for backward under a memory budget, as it is and in fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx

from fitact.runtime.compile import Partition
from fitact.runtime.measure import FLOPS, Saved, Subject, gpu_kernels, without_packing
from fitact.runtime.restore import Inputs, loss_of
from fitact.runtime.saving import POLICIES
from fitact.runtime.torch_internals import (
    fake_mode,
    min_cut,
    partition_with,
    quiet_fake_tensors,
    storage_id,
    trace_joint,
    tree_leaves,
    unset_fake_temporarily,
)


@dataclass(frozen=True)
class Compiled:
    """What PyTorch's compiler saves under a memory budget."""

    budget: float  # of `torch._functorch.config.activation_memory_budget`
    saved: Saved  # what the forward graph passes to the backward graph, without parameters and buffers
    flops: int  # of both graphs
    stored: str = ""  # `"codes"` of 8 bits as `fitact.compile` chooses them, or `"float8"` by PyTorch's own pass


class _DoneError(Exception):
    """Ends a compilation when its graphs have been seen."""


def _saved(forward: fx.GraphModule, owned: int, outputs: int) -> Saved:
    """Return what a forward graph saves, whose first inputs are owned and whose first outputs are the model's."""
    places = islice(forward.graph.find_nodes(op="placeholder"), owned)
    saved = Saved(owned={storage_id(node.meta["val"]) for node in places})
    (end,) = forward.graph.find_nodes(op="output")
    for node in end.args[0][outputs:]:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(value, Tensor):
            saved.add(value)
    return saved


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        nodes[node] = graph.node_copy(node, nodes.__getitem__)
    return fx.GraphModule(module, graph)


def _flops(module: fx.GraphModule) -> int:
    total = 0
    for node in module.graph.nodes:
        if node.op == "call_function" and (count := FLOPS.get(getattr(node.target, "overloadpacket", None))):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda other: other.meta.get("val"))
            total += count(*args, **kwargs, out_val=node.meta.get("val"))
    return total


def compiled(
    subject: Subject,
    budgets: Sequence[float],
    advance: Callable[[], None] = lambda: None,
    coded: Sequence[float] = (),
) -> list[Compiled]:
    """Trace a model as `torch.compile` does, and count in its graphs what each memory budget saves.

    The graphs go through Inductor's own passes and partitioner; no code is generated. The results of budgets in
    `coded` are followed by those with codes, and with PyTorch's float8. `advance` is called after the model has
    been traced, and after each result.
    """
    model, mode, inputs = subject.model, subject.mode, subject.call
    assert isinstance(inputs, Inputs)
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names, values = list(tensors), list(tensors.values())
    own = [leaf for leaf in tree_leaves((inputs.args, dict(inputs.kwargs))) if isinstance(leaf, Tensor)]

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        parameters, others = dict(zip(names, given, strict=False)), iter(given[len(names) :])
        filled = inputs.mapped(lambda _: next(others))
        with gpu_kernels() if subject.device == "cuda" else nullcontext(), subject.casting():
            output = torch.func.functional_call(model, parameters, filled.args, dict(filled.kwargs))
        loss = loss_of(output)
        outputs = tree_leaves(output) if loss is None else [loss]
        return tuple(leaf for leaf in outputs if isinstance(leaf, Tensor))

    owned, results = len(values), list[Compiled]()

    def each(graph: fx.GraphModule, given: Sequence[Any], **more: Any) -> None:
        """Partition the joint graph under each budget, as Inductor does, and end the compilation."""
        outputs = more["num_fwd_outputs"]

        def read(budget: float, graphs: tuple[fx.GraphModule, fx.GraphModule], stored: str = "") -> None:
            saved = _saved(graphs[0], owned, outputs)
            results.append(Compiled(budget, saved, sum(map(_flops, graphs)), stored))
            advance()

        advance()
        for budget in budgets:
            graphs = min_cut(_copied(graph), given, budget, **more)
            read(budget, graphs)
            if budget in coded:
                codes = Partition(budget, POLICIES["rounding"], False, lambda records: None)
                with unset_fake_temporarily():
                    codes.change(graphs[0], graphs[1], outputs, range(owned))
                read(budget, graphs, "codes")
                read(budget, min_cut(_copied(graph), given, budget, float8=True, **more), "float8")
        raise _DoneError

    def partition(joint: fx.GraphModule, given: Sequence[Any], **options: Any) -> Any:
        return partition_with(joint, given, owned, each, **options)

    fake = mode or fake_mode()
    given = (*values, *own)
    with mode or nullcontext(), without_packing(), quiet_fake_tensors(), suppress(_DoneError):
        trace_joint(run, given, owned, fake, partition)
    return results
