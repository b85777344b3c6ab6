"""Which linear layers read the output of which norm: found by running the model and following storages.

Below autograd every operation of PyTorch passes by with the tensors that it reads. The storage of a norm's output
is followed through views; what reads it has to be a linear layer, and the layer's input has to be rows of it. (A
kernel that is launched from Python without an operator is not seen; the model's outputs are compared afterwards.)
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .merge_layers import Norm
from .ops import KERNEL_DTYPES

# Operations that need a tensor for its size alone.
SIZE_ONLY = frozenset(
    f"aten::{name}" for name in ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
) | frozenset(f"aten::new_{name}" for name in ("empty", "empty_strided", "zeros", "ones", "full"))


@dataclass
class Reading:
    """What was seen of a norm and its output.

    Attributes:
        norm: which.
        rows: normalised, in all calls together whose input needs a gradient.
        unit: the machine epsilon of its output.
        layers: that read the output, in the order of their first call; each once.
        keepers: those of them that keep it for backward.
        trouble: why it cannot be merged, `""` if nothing was seen.

    """

    norm: Norm
    rows: int = 0
    unit: float = 0.0
    layers: dict[nn.Module, None] = field(default_factory=dict)
    keepers: set[nn.Module] = field(default_factory=set)
    trouble: str = ""

    def refuse(self, reason: str) -> None:
        """Note a reason, if it is the first."""
        self.trouble = self.trouble or reason


@dataclass
class Graph:
    """What was seen of a model.

    Attributes:
        readings: by norm.
        sources: of each layer, which norms its input came from; None stands for anything else.
        crossed: layers whose inputs are not rows of the norm that they come from.
        outside: modules whose parameters something else reads too.
        kept: bytes of each storage that autograd keeps, and the norms that keep it, first come first; None stands
            for anything else.

    """

    readings: dict[nn.Module, Reading]
    sources: dict[nn.Module, set[nn.Module | None]] = field(default_factory=dict)
    crossed: set[nn.Module] = field(default_factory=set)
    outside: set[nn.Module] = field(default_factory=set)
    kept: list[tuple[int, tuple[nn.Module | None, ...]]] = field(default_factory=list)

    def kept_for(self, norm: nn.Module, among: set[nn.Module]) -> int:
        """Return the bytes that a norm is the first to keep and nothing but these norms keeps."""
        return sum(size for size, keepers in self.kept if keepers[0] is norm and among.issuperset(keepers))


def observe(graph: Graph, layers: set[nn.Module], model: nn.Module, run: Callable[[], Any]) -> Any:
    """Run a model, add to the graph what is seen, and return what the run returns.

    Under autocast a norm's output is given out in the autocast dtype, as a memory-sharing norm would.
    """
    mode = _Observer(graph, layers, model)
    entered = hooks.register_module_forward_pre_hook(mode.enter)
    left = hooks.register_module_forward_hook(mode.leave, always_call=True)
    try:
        with saved_tensors_hooks(mode.pack, lambda tensor: tensor), mode:
            result = run()
    finally:
        entered.remove()
        left.remove()
    mode.finish(result)
    return result


def storage(tensor: Tensor) -> int | None:
    """Return the identity of a tensor's storage, None if it has none."""
    try:
        identity: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse, and some wrappers
        return None
    return identity


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


class _Observer(TorchDispatchMode):
    """Sees every operation below autograd, and which modules are running."""

    supports_higher_order_operators = True

    def __init__(self, graph: Graph, layers: set[nn.Module], model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.layers = graph, layers
        self.running: list[nn.Module] = []
        # storages are held, lest the address of one is used again
        self.outputs: dict[int, tuple[torch.UntypedStorage, Reading]] = {}
        self.kept: dict[int, tuple[torch.UntypedStorage, dict[nn.Module | None, None]]] = {}
        self.inputs: int | None = None  # storage of the input of the layer that is running
        self.owners: dict[int, set[nn.Module]] = {}
        watched = {part for layer in layers for part in layer.modules()} | set(graph.readings)
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
        reading = self.graph.readings.get(module)
        if reading is None:
            return None
        if len(args) != 1 or not isinstance(output, Tensor):
            reading.refuse("it is not called with one positional argument, or returns no tensor")
            return None
        return self._follow(reading, args[0], output)

    def _follow(self, reading: Reading, given: Any, output: Tensor) -> Tensor:
        """Follow the output of a norm, in the dtype that a memory-sharing one would give it."""
        device = output.device.type
        if torch.is_autocast_enabled(device) and output.dtype in KERNEL_DTYPES:
            output = output.to(torch.get_autocast_dtype(device))
        elif not isinstance(given, Tensor) or given.dtype != output.dtype:
            reading.refuse("its output has another dtype than its input")
        if not output.is_contiguous() or output.shape[-1:] != (reading.norm.columns,):
            reading.refuse("its output is not contiguous")
        if torch.is_grad_enabled() and isinstance(given, Tensor) and given.requires_grad:
            reading.rows += output.numel() // max(reading.norm.columns, 1)
        reading.unit = max(reading.unit, torch.finfo(output.dtype).eps)
        self.outputs[output.untyped_storage()._cdata] = output.untyped_storage(), reading
        return output

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs or {})):
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
        """Return what to call that which is running: a module of PyTorch, or an operation in a module."""
        inner = self.running[-1] if self.running else None
        kind = type(inner).__name__
        if inner is not None and type(inner).__module__.startswith("torch.nn.modules."):
            return kind
        return f"{_name(func).split('::')[-1]} in {kind if inner is not None else 'the caller'}"

    def pack(self, tensor: Tensor) -> Tensor:
        """Note who keeps a tensor."""
        key = storage(tensor)
        if key is not None and key not in self.owned:
            norm = next((module for module in self.running if module in self.graph.readings), None)
            self.kept.setdefault(key, (tensor.untyped_storage(), {}))[1][norm] = None
            layer = self.layer()
            if key in self.outputs and layer is not None:
                self.outputs[key][1].keepers.add(layer)
        return tensor

    def finish(self, result: Any) -> None:
        """Note which outputs leave the model or outlive the run, and what is kept for norms alone."""
        for tensor in tensors_in(result):
            found = self.outputs.get(storage(tensor) or 0)
            if found is not None:
                found[1].refuse("its output is one of the model's")
        self.graph.kept += [(held.nbytes(), tuple(keepers)) for held, keepers in self.kept.values()]
        if not torch.is_grad_enabled():  # with gradients, autograd may hold them as well
            self._refuse_held()

    def _refuse_held(self) -> None:
        """Refuse norms whose outputs something holds after the run: an attribute, a hook that collects."""
        left = [(StorageWeakRef(held), reading) for held, reading in self.outputs.values()]
        self.outputs.clear()
        if not all(reference.expired() for reference, _ in left):
            gc.collect()  # what is in a cycle is not held
        for reference, reading in left:
            if not reference.expired():
                reading.refuse("its output is held after the run, by a hook or an attribute")


def _looks_only(func: Any, key: int, result: Any) -> bool:
    """Return whether an operation makes nothing but views, or uses a size."""
    if _name(func) in SIZE_ONLY:
        return True
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    changes = isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable
    return bool(made) and not changes and all(storage(one) == key for one in made)


def _name(func: Any) -> str:
    """Return the name of an operator, `aten::add`."""
    return func._schema.name if isinstance(func, torch._ops.OpOverload) else str(func)


def _are_rows(tensor: Tensor, columns: int) -> bool:
    """Return whether each row of a view of contiguous rows of a length is one of these."""
    if tensor.dim() == 0 or tensor.shape[-1] != columns or tensor.storage_offset() % columns:
        return False
    steps = (step for step, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if size > 1)
    return (columns == 1 or tensor.stride(-1) == 1) and all(step % columns == 0 for step in steps)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Leave training flags, buffers and random state of PyTorch and Python as they were."""
    import random

    flags = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    devices = {parameter.device.index for parameter in model.parameters() if parameter.device.type == "cuda"}
    state = random.getstate()
    with torch.random.fork_rng(sorted(devices)):
        try:
            yield
        finally:
            random.setstate(state)
            for module, training in flags:
                module.training = training
            with torch.no_grad():
                for module, name, buffer, before in buffers:
                    module._buffers[name] = buffer
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)
