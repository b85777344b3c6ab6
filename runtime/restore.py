"""Running a model, with what inputs, and leaving it and the generators of random numbers as they were."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from fitact.base import FitactError, UsageError, one_line, quote
from fitact.runtime.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    tree_map_only,
    without_torch_function,
)

Runner = Callable[[nn.Module], object]
NO_VALUES = (DataDependentOutputException, DynamicOutputShapeException)  # what tensors without memory raise
REAL_INPUTS = "give a model and inputs with values to fitact.plan"


@contextmanager
def generators(model: nn.Module) -> Iterator[None]:
    """Put the random generators of PyTorch, Python and NumPy, and of a model's devices, back as they were."""
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}
    numpy: Any = sys.modules.get("numpy")
    state = random.getstate()
    numpy_state = numpy and numpy.random.get_state()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(state)
            if numpy:
                numpy.random.set_state(numpy_state)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Let the modules of a model hold copies of all that they hold, until the context ends.

    So nothing that a run does to them stays: flags, buffers, hooks of any kind, lists, objects, what its first run
    adds. The modules stay the same objects. Parameters share their memory with the copies.
    """
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    memo: dict[int, Any] = {id(module): module for module in modules}
    memo |= {id(parameter): _shared(parameter) for parameter in model.parameters()}
    memo[id(memo)] = []  # where `deepcopy` holds what it has copied
    with torch.no_grad(), torch.inference_mode(False), Copying(_own, lambda data: data):
        copies = [{key: _copy(value, memo) for key, value in vars(module).items()} for module in modules]
    held = [vars(module) for module in modules]
    try:
        for module, inside in zip(modules, copies, strict=True):
            object.__setattr__(module, "__dict__", inside)
        yield
    finally:
        for module, inside in zip(modules, held, strict=True):
            object.__setattr__(module, "__dict__", inside)


def _shared(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter with the same memory, but hooks and attributes of its own; of another class, itself."""
    if type(parameter) is not nn.Parameter or parameter.is_inference():
        return parameter
    alias = nn.Parameter(parameter.detach(), parameter.requires_grad)
    vars(alias).update(vars(parameter))
    return alias


class Copying(TorchFunctionMode):
    """Says how `deepcopy` copies tensors, and the data of parameters."""

    def __init__(self, tensor: Callable[[Tensor], Tensor], data: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.tensor, self.data = tensor, data

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.clone:  # which is what parameters are copied by
            return self.data(args[0])
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self.tensor(tensor)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def _own(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor's values; where there are none, the tensor itself."""
    with without_torch_function():
        return tensor if isinstance(tensor, FakeTensor) or tensor.is_meta else _copied(tensor)


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy; of what has none, such as a lock, itself; of what holds a lock, a shallow one."""
    size = len(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        while len(memo) > size:  # it holds what was copied in part
            memo.popitem()
        return copy.copy(value) if isinstance(value, (dict, list, set)) else value


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Leave a model and the random generators as they were.

    Weights that autocast has cast before, and those that it casts here, are forgotten: it would go on to use them
    after the weights have changed.
    """
    torch.clear_autocast_cache()
    with generators(model), unchanged(model):
        try:
            yield
        finally:
            torch.clear_autocast_cache()


def has_no_values(model: nn.Module) -> bool:
    """Whether a model has tensors without values, fake or meta ones."""
    return any(
        isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in (*model.parameters(), *model.buffers())
    )


def check_model(model: object) -> None:
    """Raise a UsageError unless it is an nn.Module."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a model, an nn.Module, got {type(model).__name__}")


def check_initialised(model: nn.Module) -> None:
    """Raise a UsageError if a model has lazy parameters that no run has given a size yet."""
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise UsageError("the model has parameters that are not initialised yet: run it once before")


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in a model's output, which is a mapping or has attributes; None if there is none."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else None


@contextmanager
def following(enter: Callable[..., Any], leave: Callable[..., Any]) -> Iterator[None]:
    """Call a forward pre-hook and a forward hook of any module, even if its run fails, until the context ends."""
    entered = hooks.register_module_forward_pre_hook(enter)
    with entered, hooks.register_module_forward_hook(leave, always_call=True):
        yield


@contextmanager
def refused(what: str) -> Iterator[None]:
    """Turn an error that is not fitact's into a UsageError that begins with these words."""
    try:
        yield
    except FitactError:
        raise
    except (Exception, SystemExit) as error:
        why = one_line(error)
        if isinstance(error, NO_VALUES):
            why = f"it reads a tensor's value ({getattr(error, 'func', '')}), and has none here: {REAL_INPUTS}"
        raise UsageError(f"{what}: {why}") from error


def explained(name: str, which: str) -> AbstractContextManager[None]:
    """Turn an error of a model's forward or backward pass into a UsageError that begins with the model's name."""
    return refused(f"{name}: its {which} pass failed")


def differentiate(name: str, outputs: Sequence[Tensor]) -> None:
    """Run the backward pass from a model's outputs; the UsageError if it fails begins with the model's name."""
    with explained(name, "backward"):
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


# -------------------------------------------------------------------------------------------------- example inputs


def runner(example_inputs: Any) -> Runner:
    """Return what runs a model with example inputs.

    They are a tensor, a tuple or list of positional arguments, a mapping of named ones, or a function that takes
    the model and runs it; a UsageError is raised for anything else.
    """
    match example_inputs:
        case Tensor():
            return Inputs((example_inputs,))
        case tuple() | list():
            return Inputs(tuple(example_inputs))
        case Mapping():
            return Inputs((), dict(example_inputs))
    if callable(example_inputs) and not isinstance(example_inputs, nn.Module):
        run: Runner = example_inputs
        return run
    raise UsageError(
        f"example_inputs {quote(example_inputs)}: expected a tensor, a tuple or a mapping of arguments, or a "
        "function that takes the model and runs it"
    )


@dataclass(frozen=True)
class Inputs:
    """The arguments of a model, which it can be run with."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, model: nn.Module) -> object:
        """Return what the model returns."""
        return model(*self.args, **self.kwargs)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """Return the same with a function of each tensor."""
        return Inputs(*tree_map_only(Tensor, function, (self.args, dict(self.kwargs))))


def _copied(tensor: Tensor) -> Tensor:
    """Return a tensor of its own, which the model may overwrite."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def real(run: Runner) -> Runner:
    """Return what runs a model with copies of example inputs, which it may overwrite."""
    return run.mapped(_copied) if isinstance(run, Inputs) else run
