"""Modules whose forward runs in a context or a checkpoint, and modules inside that save as they are.

Such a module has another class: a subclass of its own, of the same name. So its parameters, hooks, attributes and
state dict stay, and `isinstance` holds. No other module is changed.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial, update_wrapper, wraps
from typing import Any

import torch
from torch import nn

from fitact.runtime.torch_internals import is_tracing

Context = AbstractContextManager[Any]  # of each call; picklable, as the module is
# Calls its first argument with the others, now and again in backward; picklable.
Checkpoint = Callable[..., Any]
CONTEXT, CHECKPOINT = "_fitact_context", "_fitact_checkpoint"  # the attributes of a module that have these


class Attached:
    """What the classes of such modules share. Other modules of these classes, which users make, run as they are.

    Attributes:
        fitact_own: the module's own class.

    """

    fitact_own: type[Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let no base class hear of a class of this kind: some register their subclasses, or ask for arguments."""
        if "fitact_own" not in vars(cls):
            super().__init_subclass__(**kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to make the module again: its class is nowhere to be imported from."""
        made: Any = super().__reduce_ex__(max(protocol, 2))
        function, arguments, *state = made
        if function is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return function, arguments, *state
        return _empty, (self.fitact_own, *arguments[1:]), *state


class AttachedForward:
    """A module's own `forward` attribute, as accelerate sets one, run as the module's class would run forward."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.module, self.forward = module, forward
        update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        return _run(self.module, self.forward, args, kwargs)


def _run(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    checkpoint = vars(module).get(CHECKPOINT)
    if checkpoint is None:
        return _in_context(module, forward, *args, **kwargs)
    return checkpoint(partial(_in_context, module, forward), *args, **kwargs)


def _in_context(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    as_it_is = not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_tracing()
    context = None if as_it_is else vars(module).get(CONTEXT)
    if context is None:
        return forward(*args, **kwargs)
    with context:
        return forward(*args, **kwargs)


@cache
def _class(own: Any) -> Any:
    @wraps(own.forward)  # transformers and `torch.fx` read its arguments
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(self, partial(own.forward, self), args, kwargs)

    names = {"fitact_own": own, "forward": forward, "__module__": own.__module__, "__qualname__": own.__qualname__}
    return type(own.__name__, (Attached, own), names)


def _empty(own: Any, *arguments: Any) -> Any:
    made = _class(own)
    return made.__new__(made, *arguments)


def attach(module: nn.Module, context: Context | None = None, checkpoint: Checkpoint | None = None) -> None:
    """Let a module's forward run in a context, in a checkpoint, or in both, in place of those that it has.

    Without gradients, under `torch.compile`, in `torch.func` and while it is traced, it has no context.
    """
    if not isinstance(module, Attached):
        own: Any = type(module)
        object.__setattr__(module, "__class__", _class(own))  # some modules refuse to be changed, or pass it on
    forward = vars(module).get("forward")
    if forward is not None and not isinstance(forward, AttachedForward):
        vars(module)["forward"] = AttachedForward(module, forward)
    given = {CONTEXT: context, CHECKPOINT: checkpoint}
    vars(module).update({name: value for name, value in given.items() if value is not None})


def is_attached(module: nn.Module) -> bool:
    """Return whether a module's forward runs in a context or in a checkpoint."""
    return CONTEXT in vars(module) or CHECKPOINT in vars(module)


def detach(module: nn.Module, what: str = CONTEXT) -> bool:
    """Let a module's forward run without its CONTEXT or CHECKPOINT; returns whether it had one."""
    had = vars(module).pop(what, None) is not None
    if is_attached(module):
        return had
    if "fitact_own" in vars(type(module)):  # otherwise FSDP may have made another class of this one
        own: Any = module.fitact_own
        object.__setattr__(module, "__class__", own)
    forward = vars(module).get("forward")
    if isinstance(forward, AttachedForward):
        vars(module)["forward"] = forward.forward
    return had


@contextmanager
def attaching(model: nn.Module, contexts: Mapping[str, Context]) -> Iterator[None]:
    """Let modules of a model, by path, run in these contexts, and no others in any, until the context ends."""
    was: dict[nn.Module, Context]
    was = {module: vars(module)[CONTEXT] for module in model.modules() if CONTEXT in vars(module)}
    for module in was:
        detach(module)
    attached = {model.get_submodule(path): context for path, context in contexts.items()}
    try:
        for module, context in attached.items():
            attach(module, context)
        yield
    finally:
        for module in attached:
            detach(module)
        for module, context in was.items():
            attach(module, context)
