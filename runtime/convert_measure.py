"""What autograd keeps on account of each activation of a model, measured by running it.

The model is copied as fake tensors, which have no memory, and the copy is run. Where that is not possible (a copy
or fake tensors that fail, because the model looks at values) the model itself is run, and put back as it was.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fitact.errors import FitactError, UsageError, quote

from .memory import Saved
from .models import Statistics, one_line, quiet, without_packing
from .sites import Slot, slots

Run = Callable[[nn.Module], object]
# Replaces activations of the model, given where they are, until the context ends.
Plan = Callable[[Sequence[Slot]], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Usage:
    """What one activation keeps.

    Attributes:
        kept: bytes of the storages that nothing but activations keep; what several of them keep is shared out.
        shared: whether another operation keeps the very storage of each of its outputs; None if it was not run.
        overwritten: whether something has changed one of its outputs in place, so that backward cannot use it.

    """

    kept: int
    shared: bool | None
    overwritten: bool = False


@dataclass(frozen=True)
class Trace:
    """What a forward pass keeps.

    Attributes:
        kept: bytes of all distinct storages.
        usages: one for each slot, the same for those that hold the same module.

    """

    kept: int
    usages: tuple[Usage, ...]


def runner(example_inputs: Any) -> Run:
    """Return what runs a model with example inputs.

    Args:
        example_inputs: a tensor, a tuple or list of positional arguments, a mapping of named ones, or a function
            that takes the model and runs it.

    Raises:
        UsageError: it is none of these.

    """
    match example_inputs:
        case Tensor():
            return _Call((example_inputs,), {})
        case tuple() | list():
            return _Call(tuple(example_inputs), {})
        case Mapping():
            return _Call((), dict(example_inputs))
    if callable(example_inputs) and not isinstance(example_inputs, nn.Module):
        run: Run = example_inputs
        return run
    raise UsageError(
        f"example_inputs {quote(example_inputs)}: expected a tensor, a tuple or a mapping of arguments, or a "
        "function that takes the model and runs it"
    )


@dataclass(frozen=True)
class _Call:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, model: nn.Module) -> object:
        return model(*self.args, **self.kwargs)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> _Call:
        args, kwargs = tree_map_only(Tensor, function, (self.args, self.kwargs))
        return _Call(args, kwargs)


def traces(model: nn.Module, run: Run, own: frozenset[type], plans: Sequence[Plan]) -> list[Trace]:
    """Run a model once with each plan, in the caller's autocast, and return what each run keeps.

    Every run starts from the same state, so that a model that leaves out layers at random leaves out the same.

    Args:
        model: neither it nor the generators of random numbers, PyTorch's and Python's, are changed. It is run as
            it trains: in its own mode, or in training mode if it is in evaluation mode as a whole.
        run: runs it.
        own: classes that are activations too.
        plans: replace activations of it.

    Raises:
        UsageError: the model cannot be run so, is sharded, or nothing in it is trained.

    """
    if any(kind.__name__ in SHARDED for module in model.modules() for kind in type(module).__mro__):
        raise UsageError("the model is sharded, and cannot be run forward alone: convert it first, then shard it")
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise UsageError("the model has parameters that are not initialised yet: run it once, then convert it")
    with torch.inference_mode(False), torch.enable_grad():
        try:
            return _fake_traces(model, run, plans, own)
        except _UntrainedError:
            raise
        except Exception:  # whatever fake tensors cannot do, real ones may
            return [_real_trace(model, run, plan, own) for plan in plans]
        finally:
            torch.clear_autocast_cache()  # of the weights as they were cast here


# Classes of FSDP: a forward pass gathers their parameters, and only the backward pass gives them back.
SHARDED = ("FSDPModule", "FullyShardedDataParallel")


class _Faking(TorchFunctionMode):
    """Makes copies of tensors fake."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.clone:  # which is what parameters are copied by
            return _fake(self.mode, args[0])
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = _fake(self.mode, tensor)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def _fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """Return a fake tensor like another; like one without memory, on the CPU."""
    if not (tensor.is_meta or isinstance(tensor, FakeTensor)):
        return mode.from_tensor(tensor)
    device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
    with mode:
        twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return twin.requires_grad_(tensor.requires_grad)


class _UntrainedError(UsageError):
    """Nothing that is trained has a part in the output."""


def _copied(tensor: Tensor) -> Tensor:
    """Return a tensor of its own, which the model may overwrite."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _fake_traces(model: nn.Module, run: Run, plans: Sequence[Plan], own: frozenset[type]) -> list[Trace]:
    modes = [tensor.fake_mode for tensor in model.parameters() if isinstance(tensor, FakeTensor)]
    mode = modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True)
    with _Faking(mode):
        twin = copy.deepcopy(model)
    found = []
    for plan in plans:
        faked = run.mapped(partial(_fake, mode)) if isinstance(run, _Call) else run
        with _generators(model), mode, Statistics(), without_packing(), quiet(), _unchanged(twin):
            found.append(_planned_trace(twin, faked, plan, own))
    return found


def _real_trace(model: nn.Module, run: Run, plan: Plan, own: frozenset[type]) -> Trace:
    with _generators(model), _unchanged(model):
        return _planned_trace(model, run.mapped(_copied) if isinstance(run, _Call) else run, plan, own)


def _planned_trace(model: nn.Module, run: Run, plan: Plan, own: frozenset[type]) -> Trace:
    if not model.training:
        model.train()
    with plan(slots(model, own)):
        return _trace(model, run, own)


def _trace(model: nn.Module, run: Run, own: frozenset[type]) -> Trace:
    places = slots(model, own)
    owned = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    watch = _Watch(Saved(owned=owned))
    with ExitStack() as stack:
        for slot in {slot.key: slot for slot in places}.values():
            stack.enter_context(watch.watched(slot))
        stack.enter_context(saved_tensors_hooks(watch.pack, lambda tensor: tensor))
        try:
            output = run(model)
        except FitactError:
            raise
        except Exception as error:
            raise UsageError(f"the model cannot be run with example_inputs: {one_line(error)}") from error
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    if leaves and not any(leaf.requires_grad for leaf in leaves):
        raise _UntrainedError("no output of the model depends on anything that is trained: nothing is kept")
    return watch.trace([slot.key for slot in places])


@dataclass
class _Watch:
    """Notes which storages are kept, by which activation or by something else, and what activations return."""

    saved: Saved
    running: list[Any] = field(default_factory=list)
    keepers: dict[int, set[Any]] = field(default_factory=dict)
    outputs: dict[Any, list[tuple[Tensor, int]]] = field(default_factory=dict)  # with their versions

    def pack(self, tensor: Tensor) -> Tensor:
        self.saved.add(tensor)
        storage = tensor.untyped_storage()._cdata
        if storage in self.saved.storages:
            self.keepers.setdefault(storage, set()).add(self.running[-1] if self.running else None)
        return tensor

    def enter(self, key: Any, *_: Any) -> None:
        self.running.append(key)

    def leave(self, module: Any, _: Any, output: Any) -> None:
        key = self.running.pop()
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):  # its storage is held, so that the address is not another's
                self.outputs.setdefault(key, []).append((leaf.detach(), _version(leaf)))

    @contextmanager
    def watched(self, slot: Slot) -> Iterator[None]:
        held, key = slot.held, slot.key
        if isinstance(held, nn.Module):
            entered = held.register_forward_pre_hook(lambda *_: self.enter(key))
            left = held.register_forward_hook(self.leave)
            try:
                yield
            finally:
                entered.remove()
                left.remove()
        else:
            slot.put(partial(self.call, held, key))
            try:
                yield
            finally:
                slot.put(held)

    def call(self, function: Callable[..., Any], key: Any, *args: Any, **kwargs: Any) -> Any:
        self.enter(key)
        output = function(*args, **kwargs)
        self.leave(function, args, output)
        return output

    def trace(self, keys: Sequence[Any]) -> Trace:
        kept = dict.fromkeys(keys, 0)
        order = {key: i for i, key in enumerate(kept)}
        for storage, keepers in self.keepers.items():
            if None not in keepers:
                share, rest = divmod(self.saved.storages[storage].nbytes(), len(keepers))
                for i, key in enumerate(sorted(keepers, key=order.__getitem__)):
                    kept[key] += share + (i < rest)
        usages = (Usage(kept[key], self.shared(key), self.overwritten(key)) for key in keys)
        return Trace(self.saved.bytes, tuple(usages))

    def shared(self, key: Any) -> bool | None:
        if key not in self.outputs:
            return None
        storages = (tensor.untyped_storage()._cdata for tensor, _ in self.outputs[key])
        return all(self.keepers.get(storage, set()) - {key} for storage in storages)

    def overwritten(self, key: Any) -> bool:
        return any(_version(tensor) != version for tensor, version in self.outputs.get(key, ()))


def _version(tensor: Tensor) -> int:
    """Return how often a tensor has been changed in place; one of inference mode does not count that."""
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def _generators(model: nn.Module) -> Iterator[None]:
    """Put the generators of random numbers back."""
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}
    state = random.getstate()
    with torch.random.fork_rng(devices, enabled=True):
        try:
            yield
        finally:
            random.setstate(state)


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Put a model back as it was: what its modules hold, and the values of their buffers."""
    values = [(buffer, buffer.clone()) for buffer in map(_unexpanded, model.buffers())]
    states = [(module, _contents(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, contents in states:
            _restore(vars(module), contents)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


def _unexpanded(tensor: Tensor) -> Tensor:
    """Return a view in which each element is once, which can be written to."""
    view = tensor.detach()
    if view.layout == torch.strided and not view.is_nested:
        for dim, stride in enumerate(view.stride()):
            view = view.narrow(dim, 0, 1) if stride == 0 and view.shape[dim] > 1 else view
    return view


def _contents(held: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what is held, and of lists and dictionaries what they hold."""
    return {key: (value, copy.copy(value) if type(value) in (dict, list) else None) for key, value in held.items()}


def _restore(held: dict[str, Any], contents: dict[str, tuple[Any, Any]]) -> None:
    held.clear()
    for key, (value, inside) in contents.items():
        if isinstance(inside, dict):
            value.clear()
            value.update(inside)
        elif isinstance(inside, list):
            value[:] = inside
        held[key] = value


stock: Plan = nullcontext
