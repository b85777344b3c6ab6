"""Finding which linear layers read which norm, by running the model and following storages.

A dispatch mode below autograd sees every operation of PyTorch and the tensors that it reads, and follows the
storage of a norm's output through views. Only linear layers may read it, and their inputs must be rows of it. (The
mode does not see kernels that Python launches without an operator; the model's outputs are compared afterwards.)
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fitact.runtime.autocast import active_autocast, without_autocast
from fitact.runtime.modes import OperationMode, watching_saved
from fitact.runtime.ops.autograd import autocast_dtype
from fitact.runtime.ops.library import KERNEL_DTYPES
from fitact.runtime.restore import following
from fitact.runtime.torch_internals import (
    changes_arguments,
    schema_name,
    storage_id,
    tree_leaves,
)

from .linear import Norm

# Operations that need only the size of a tensor.
SIZE_ONLY = frozenset(
    f"aten::{name}" for name in ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
) | frozenset(f"aten::new_{name}" for name in ("empty", "empty_strided", "zeros", "ones", "full"))


@dataclass
class NormUsage:
    """What was seen of a norm and its output.

    Attributes:
        norm: the norm.
        rows: rows normalised in all calls whose input needs a gradient.
        unit: the machine epsilon of its output.
        largest: the largest number that its output could hold.
        layers: the layers that read the output, each once, in the order of their first call.
        keepers: those layers that keep it for backward.
        blocker: why it cannot be merged; `""` if nothing speaks against it.

    """

    norm: Norm
    rows: int = 0
    unit: float = 0.0
    largest: float = math.inf
    layers: dict[nn.Module, None] = field(default_factory=dict)
    keepers: set[nn.Module] = field(default_factory=set)
    blocker: str = ""

    def refuse(self, reason: str) -> None:
        """Note a reason not to merge, unless there is one already."""
        self.blocker = self.blocker or reason


@dataclass
class Graph:
    """What was seen of a model.

    Attributes:
        usages: what was seen of each norm.
        sources: for each layer, the norms that its input came from; None stands for anything else.
        crossed: layers whose inputs are not rows of the norm that they come from.
        outside: modules whose parameters something else reads too.
        kept: for each storage that autograd keeps, its bytes and the norms that keep it, in the order of keeping;
            None stands for anything else.

    """

    usages: dict[nn.Module, NormUsage]
    sources: dict[nn.Module, set[nn.Module | None]] = field(default_factory=dict)
    crossed: set[nn.Module] = field(default_factory=set)
    outside: set[nn.Module] = field(default_factory=set)
    kept: list[tuple[int, tuple[nn.Module | None, ...]]] = field(default_factory=list)

    def kept_for(self, norm: nn.Module, among: set[nn.Module]) -> int:
        """Return the bytes of storages that this norm keeps first and that only norms in `among` keep."""
        return sum(size for size, keepers in self.kept if keepers[0] is norm and among.issuperset(keepers))


def observe(graph: Graph, layers: set[nn.Module], model: nn.Module, run: Callable[[], Any]) -> Any:
    """Run a model, add what is seen to the graph, and return the result of the run.

    Under autocast a norm's output is returned in the autocast dtype, as a memory-sharing norm would return it.
    """
    mode = _Observer(graph, layers, model)
    with following(mode.enter, mode.leave), watching_saved(mode.keep), mode:
        result = run()
    mode.finish(result)
    return result


def storage(tensor: Tensor) -> int | None:
    """Return the identity of a tensor's storage, None if it has none."""
    try:
        return storage_id(tensor)
    except (NotImplementedError, RuntimeError):  # sparse, and some wrappers
        return None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a model returns, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from tensors_in(getattr(value, part.name))


class _Observer(OperationMode):
    """Sees every operation below autograd, and which modules are running."""

    supports_higher_order_operators = True

    def __init__(self, graph: Graph, layers: set[nn.Module], model: nn.Module) -> None:
        super().__init__()
        self.graph, self.layers = graph, layers
        self.running: list[nn.Module] = []
        # storages are held, so that no address is used again
        self.outputs: dict[int, tuple[torch.UntypedStorage, NormUsage]] = {}
        self.kept: dict[int, tuple[torch.UntypedStorage, dict[nn.Module | None, None]]] = {}
        self.inputs: int | None = None  # storage of the input of the layer that is running
        self.owners: dict[int, set[nn.Module]] = {}
        watched = {part for layer in layers for part in layer.modules()} | set(graph.usages)
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if module in watched and (key := storage(parameter)) is not None:
                    self.owners.setdefault(key, set()).add(module)
        tensors = (*model.parameters(), *model.buffers())
        self.owned = {storage(tensor) for tensor in tensors}

    def layer(self) -> nn.Module | None:
        """Return the outermost linear layer that is running."""
        return next((module for module in self.running if module in self.layers), None)

    def enter(self, module: nn.Module, args: Any) -> None:
        outer = self.layer()
        self.running.append(module)
        if outer is None and module in self.layers:
            self._feed(module, args[0] if args and isinstance(args[0], Tensor) else None)

    def _feed(self, layer: nn.Module, given: Tensor | None) -> None:
        """Note where the input of a layer comes from."""
        self.inputs = None if given is None else storage(given)
        found = self.outputs.get(self.inputs) if self.inputs is not None else None
        self.graph.sources.setdefault(layer, set()).add(None if found is None else found[1].norm.module)
        if found is not None and given is not None:
            found[1].layers[layer] = None
            if not _are_rows(given, found[1].norm.columns):
                self.graph.crossed.add(layer)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.running.pop()
        usage = self.graph.usages.get(module)
        if usage is None:
            return None
        if len(args) != 1 or not isinstance(output, Tensor):
            usage.refuse("it is not called with one positional argument, or returns no tensor")
            return None
        return self._follow(usage, args[0], output)

    def _follow(self, usage: NormUsage, given: Any, output: Tensor) -> Tensor:
        """Follow the output of a norm, in the dtype that a memory-sharing norm would return."""
        dtype = autocast_dtype(output)
        autocast = active_autocast(output.device.type) and output.dtype in KERNEL_DTYPES
        if not autocast and (not isinstance(given, Tensor) or given.dtype != output.dtype):
            usage.refuse("its output has another dtype than its input")
        output = output.to(dtype)
        if not output.is_contiguous() or output.shape[-1:] != (usage.norm.columns,):
            usage.refuse("its output is not contiguous")
        if torch.is_grad_enabled() and isinstance(given, Tensor) and given.requires_grad:
            usage.rows += output.numel() // max(usage.norm.columns, 1)
        usage.unit = max(usage.unit, torch.finfo(dtype).eps)
        usage.largest = min(usage.largest, torch.finfo(dtype).max)
        self.outputs[storage_id(output)] = output.untyped_storage(), usage
        return output

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and (key := storage(tensor)) is not None:
                self._read(func, key, result)
        return result

    def _read(self, func: Any, key: int, result: Any) -> None:
        owners = self.owners.get(key)
        if owners is not None and not owners.intersection(self.running):
            self.graph.outside |= owners
        found = self.outputs.get(key)
        if found is None or (self.layer() is not None and key == self.inputs) or _looks_only(func, key, result):
            return
        found[1].refuse(f"{self._reader(func)} reads its output")

    def _reader(self, func: Any) -> str:
        """Return the name of the reader: a module of PyTorch, or an operation in a module."""
        inner = self.running[-1] if self.running else None
        kind = type(inner).__name__
        if inner is not None and type(inner).__module__.startswith("torch.nn.modules."):
            return kind
        return f"{schema_name(func).split('::')[-1]} in {kind if inner is not None else 'the caller'}"

    def keep(self, tensor: Tensor) -> None:
        """Note which norm and layer keep a tensor."""
        key = storage(tensor)
        if key is not None and key not in self.owned:
            norm = next((module for module in self.running if module in self.graph.usages), None)
            self.kept.setdefault(key, (tensor.untyped_storage(), {}))[1][norm] = None
            layer = self.layer()
            if key in self.outputs and layer is not None:
                self.outputs[key][1].keepers.add(layer)

    def finish(self, result: Any) -> None:
        """Note which outputs leave the model or outlive the run, and what only norms keep."""
        for tensor in tensors_in(result):
            found = self.outputs.get(storage(tensor) or 0)
            if found is not None:
                found[1].refuse("its output is one of the model's")
        self.graph.kept += [(held.nbytes(), tuple(keepers)) for held, keepers in self.kept.values()]
        if not torch.is_grad_enabled():  # with gradients, autograd may hold them as well
            self._refuse_held()

    def _refuse_held(self) -> None:
        """Refuse norms whose outputs something holds after the run: an attribute, a hook that collects."""
        left = [(StorageWeakRef(held), usage) for held, usage in self.outputs.values()]
        self.outputs.clear()
        if not all(reference.expired() for reference, _ in left):
            gc.collect()  # garbage in cycles does not count as held
        for reference, usage in left:
            if not reference.expired():
                usage.refuse("its output is held after the run, by a hook or an attribute")


def _looks_only(func: Any, key: int, result: Any) -> bool:
    """Return whether an operation only makes views, or only uses the size."""
    if schema_name(func) in SIZE_ONLY:
        return True
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return bool(made) and not changes_arguments(func) and all(storage(one) == key for one in made)


def _are_rows(tensor: Tensor, columns: int) -> bool:
    """Return whether each row of a view of contiguous rows is one of these rows."""
    if tensor.dim() == 0 or tensor.shape[-1] != columns or tensor.storage_offset() % columns:
        return False
    steps = (step for step, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if size > 1)
    return (columns == 1 or tensor.stride(-1) == 1) and all(step % columns == 0 for step in steps)


@contextmanager
def outside_autocast(model: nn.Module) -> Iterator[None]:
    """Turn the caller's autocast off."""
    kinds = {"cpu", *(parameter.device.type for parameter in model.parameters())}
    with ExitStack() as stack:
        for kind in sorted(kinds):
            stack.enter_context(without_autocast(kind))
        yield
