"""What PyTorch's compiler saves for backward under a memory budget, as it is and in fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
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
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    unset_fake_temporarily,
)


@dataclass(frozen=True)
class Compiled:
    """What PyTorch's compiler saves under a memory budget.

    Attributes:
        budget: the value of `torch._functorch.config.activation_memory_budget`.
        saved: the storages that the forward graph passes to the backward graph, without parameters and buffers.
        flops: FLOPs of both graphs.
        stored: how it is stored in fewer bits: `"codes"` of 8 bits as `fitact.compile` chooses them, or `"float8"`
            by PyTorch's own pass; `""` if it is not.

    """

    budget: float
    saved: Saved
    flops: int
    stored: str = ""


class _DoneError(Exception):
    """Ends a compilation when its graphs have been seen."""


@dataclass
class _Partitions:
    owned: int  # how many of the graph's inputs are parameters and buffers, which come first
    budgets: Sequence[float]
    coded: Sequence[float]
    advance: Callable[[], None]
    results: list[Compiled] = field(default_factory=list)

    def partition(self, joint: fx.GraphModule, given: Sequence[Any], **options: Any) -> Any:
        """Partition the joint graph under each budget, as Inductor does, and end the compilation."""
        return partition_with(joint, given, self.owned, self.each, **options)

    def each(self, graph: fx.GraphModule, given: Sequence[Any], **more: Any) -> None:
        self.advance()
        for budget in self.budgets:
            forward, backward = min_cut(_copied(graph), given, budget, **more)
            read = partial(self.read, budget, forward, backward, more["num_fwd_outputs"])
            self.results.append(read())
            self.advance()
            if budget in self.coded:
                coded = Partition(budget, POLICIES["rounding"], False, lambda records: None)
                with unset_fake_temporarily():
                    coded.change(forward, backward, more["num_fwd_outputs"], range(self.owned))
                self.results.append(read(stored="codes"))
                self.advance()
                forward, backward = min_cut(_copied(graph), given, budget, float8=True, **more)
                self.results.append(self.read(budget, forward, backward, more["num_fwd_outputs"], "float8"))
                self.advance()
        raise _DoneError

    def read(
        self, budget: float, forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, stored: str = ""
    ) -> Compiled:
        places = [node for node in forward.graph.nodes if node.op == "placeholder"]
        saved = Saved(owned={storage_id(node.meta["val"]) for node in places[: self.owned]})
        (end,) = (node for node in forward.graph.nodes if node.op == "output")
        for node in end.args[0][outputs:]:
            value = node.meta.get("val") if isinstance(node, fx.Node) else None
            if isinstance(value, Tensor):
                saved.add(value)
        return Compiled(budget, saved, _flops(forward) + _flops(backward), stored)


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    (old,) = module.graph.find_nodes(op="output")
    (new,) = graph.find_nodes(op="output")
    new.meta = dict(old.meta)
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

    Args:
        subject: the model, whose `call` are its arguments.
        budgets: memory budgets between 0 and 1.
        advance: called after the model has been traced, and after each result.
        coded: the budgets for which the bytes are also counted with codes, and with PyTorch's float8.

    Returns:
        The result for each budget, and after it those in fewer bits. The graphs go through Inductor's own passes
        and partitioner; no code is generated.

    """
    model, mode, inputs = subject.model, subject.mode, subject.call
    assert isinstance(inputs, Inputs)
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names, values = list(tensors), list(tensors.values())
    leaves, spec = tree_flatten((inputs.args, dict(inputs.kwargs)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        filled = list(leaves)
        for i, tensor in zip(places, given[len(names) :], strict=True):
            filled[i] = tensor
        args, kwargs = tree_unflatten(filled, spec)
        owned = dict(zip(names, given, strict=False))
        with gpu_kernels() if subject.device == "cuda" else nullcontext(), subject.casting():
            output = torch.func.functional_call(model, owned, args, kwargs)
        loss = loss_of(output)
        outputs = tree_leaves(output) if loss is None else [loss]
        return tuple(leaf for leaf in outputs if isinstance(leaf, Tensor))

    partitions = _Partitions(len(values), budgets, coded, advance)
    fake = mode or fake_mode()
    given = (*values, *(leaves[i] for i in places))
    with mode or nullcontext(), without_packing(), quiet_fake_tensors(), suppress(_DoneError):
        trace_joint(run, given, len(values), fake, partitions.partition)
    return partitions.results
