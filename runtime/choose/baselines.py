"""The baselines: checkpointing, full and selective, and the compiler; and the extra work that each costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fitact.runtime.compile.compander import Compander
from fitact.runtime.compile.partition import Partition
from fitact.runtime.measure.meter import FLOPS
from fitact.runtime.measure.prepare import Inputs, Prepared, without_packing
from fitact.runtime.measure.saved import Saved
from fitact.runtime.modes import OperationMode
from fitact.runtime.restore import loss_of
from fitact.runtime.torch_internals import (
    FakeTensorMode,
    kept_selectively,
    min_cut,
    partition_with,
    quiet_fake_tensors,
    storage_id,
    trace_joint,
    tree_flatten,
    tree_iter,
    tree_leaves,
    tree_unflatten,
    unset_fake_temporarily,
)

aten = torch.ops.aten


# From 2.14 on, hooks of saved tensors can see what a selective checkpoint keeps; this keeps them from seeing it.
UNSEEN = (
    {"respect_saved_tensors_hooks": False}
    if "respect_saved_tensors_hooks" in signature(checkpoint).parameters
    else {}
)


@contextmanager
def checkpointed(blocks: Sequence[nn.Module], saved: Saved, *, selective: bool = False) -> Iterator[None]:
    """Checkpoint blocks inside the context, and count what checkpointing keeps unseen by autograd.

    Args:
        blocks: each is run again in the backward pass, from its inputs.
        saved: the count, which receives the inputs of the blocks and what is kept selectively.
        selective: whether to keep the results of matrix products, convolutions and fused attention, and to run
            only the rest again.

    """
    caches: list[Any] = []

    def contexts() -> tuple[Any, Any]:
        pair = selectively()
        caches.append(pair[0])
        return pair

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                for leaf in tree_iter((args, kwargs)):
                    if isinstance(leaf, Tensor):
                        saved.add(leaf)
            # The generator's state is not saved: it is not on the device, and fake tensors have none.
            options: dict[str, Any] = {"context_fn": contexts, **UNSEEN} if selective else {}
            result = checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)
            for cache in caches:
                for tensor in kept_selectively(cache):
                    saved.add(tensor)
            caches.clear()
            return result

        return run

    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(mock.patch.object(block, "forward", wrap(block.forward)))
        yield


def selectively() -> tuple[Any, Any]:
    """Return contexts of a checkpoint that keeps results of matrix products, convolutions and attention."""
    pair: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)
    return pair


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    costly = getattr(operation, "overloadpacket", operation) in FLOPS
    return CheckpointPolicy.MUST_SAVE if costly else CheckpointPolicy.PREFER_RECOMPUTE


class Work(OperationMode):
    """The work of all operations inside it.

    Attributes:
        flops: FLOPs of matrix products, convolutions and attention, as PyTorch counts them.
        traffic: bytes that operations read and write, without fusion; views and questions for a device are free.

    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.traffic = 0

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if (count := FLOPS.get(func.overloadpacket)) is not None:
            self.flops += count(*args, **kwargs, out_val=result)
        if func.namespace != "prim" and not func.is_view and func is not aten.detach.default:
            self.traffic += sum(
                leaf.numel() * leaf.element_size()
                for leaf in tree_iter((args, kwargs, result))
                if isinstance(leaf, Tensor)
            )
        return result


def work_of(step: Callable[[], object]) -> Work:
    """Run a step and return its work."""
    work = Work()
    with work:
        step()
    return work


# ---------------------------------------------------------------------------------------------------- the compiler


@dataclass(frozen=True)
class Compiled:
    """What PyTorch's compiler keeps under a memory budget.

    Attributes:
        budget: the value of `torch._functorch.config.activation_memory_budget`.
        saved: the storages that the forward graph passes to the backward graph, without parameters and buffers.
        flops: FLOPs of both graphs.
        kept: how it is kept in fewer bits: `"codes"` of 8 bits as `fitact.compile` chooses them, or `"float8"` by
            PyTorch's own pass; `""` if it is not.

    """

    budget: float
    saved: Saved
    flops: int
    kept: str = ""


class _DoneError(Exception):
    """Ends a compilation when its graphs have been seen."""


@dataclass
class _Partitions:
    owned: int  # how many of the graph's inputs are parameters and buffers, which come first
    budgets: Sequence[float]
    coded: Sequence[float]
    advance: Callable[[], None]
    found: list[Compiled] = field(default_factory=list)

    def partition(self, joint: fx.GraphModule, given: Sequence[Any], **options: Any) -> Any:
        """Partition the joint graph under each budget, as Inductor does, and end the compilation."""
        return partition_with(joint, given, self.owned, self.each, **options)

    def each(self, graph: fx.GraphModule, given: Sequence[Any], **more: Any) -> None:
        self.advance()
        for budget in self.budgets:
            forward, backward = min_cut(_copied(graph), given, budget, **more)
            read = partial(self.read, budget, forward, backward, more["num_fwd_outputs"])
            self.found.append(read())
            self.advance()
            if budget in self.coded:
                coded = Partition(budget, Compander(8), (), lambda records: None)
                with unset_fake_temporarily():
                    coded.change(forward, backward, more["num_fwd_outputs"], range(self.owned))
                self.found.append(read(kept="codes"))
                self.advance()
                forward, backward = min_cut(_copied(graph), given, budget, float8=True, **more)
                self.found.append(self.read(budget, forward, backward, more["num_fwd_outputs"], "float8"))
                self.advance()
        raise _DoneError

    def read(
        self, budget: float, forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, kept: str = ""
    ) -> Compiled:
        places = [node for node in forward.graph.nodes if node.op == "placeholder"]
        saved = Saved(owned={storage_id(node.meta["val"]) for node in places[: self.owned]})
        (end,) = (node for node in forward.graph.nodes if node.op == "output")
        for node in end.args[0][outputs:]:
            value = node.meta.get("val") if isinstance(node, fx.Node) else None
            if isinstance(value, Tensor):
                saved.add(value)
        return Compiled(budget, saved, _flops(forward) + _flops(backward), kept)


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
    prepared: Prepared,
    inputs: Inputs,
    budgets: Sequence[float],
    advance: Callable[[], None] = lambda: None,
    around: Callable[[], Any] = nullcontext,
    coded: Sequence[float] = (),
) -> list[Compiled]:
    """Trace a model as `torch.compile` does, and count in its graphs what each memory budget keeps.

    Args:
        prepared: the model.
        inputs: its inputs.
        budgets: memory budgets between 0 and 1.
        advance: called after the model has been traced, and after each result.
        around: a context for the forward pass, such as autocast.
        coded: the budgets for which the bytes are also counted with codes, and with PyTorch's float8.

    Returns:
        The result for each budget, and after it those in fewer bits. The graphs go through Inductor's own passes
        and partitioner; no code is generated.

    """
    model, mode = prepared.model, prepared.mode
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
        with around():
            output = torch.func.functional_call(model, owned, args, kwargs)
        loss = loss_of(output)
        found = tree_leaves(output) if loss is None else [loss]
        return tuple(leaf for leaf in found if isinstance(leaf, Tensor))

    partitions = _Partitions(len(values), budgets, coded, advance)
    fake = mode or FakeTensorMode(allow_non_fake_inputs=True)
    given = (*values, *(leaves[i] for i in places))
    with mode or nullcontext(), without_packing(), quiet_fake_tensors(), suppress(_DoneError):
        trace_joint(run, given, len(values), fake, partitions.partition)
    return partitions.found
