"""Modules whose forward runs in a context of `saving`, and modules inside that save as they are.

Such a module has another class: a subclass of its own, of the same name. So its parameters, hooks, attributes and
state dict stay, and `isinstance` holds. No other module is changed.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, update_wrapper, wraps
from typing import Any

import torch
from torch import nn

from fitact.runtime.torch_internals import in_functorch_transform, is_tracing

Context = Callable[[], AbstractContextManager[Any]]  # makes the context of a call; picklable, as the module is
CONTEXT = "_fitact_context"  # the attribute of a module that makes the context


class Attached:
    """What the classes of such modules share. Other modules of these classes, which users make, have no context.

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


class ForwardInContext:
    """A module's own `forward` attribute, as accelerate sets one, run in the module's context."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.module, self.forward = module, forward
        update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        if _as_it_is():
            return self.forward(*args, **kwargs)
        with _context_of(self.module):
            return self.forward(*args, **kwargs)


def _as_it_is() -> bool:
    return not torch.is_grad_enabled() or torch.compiler.is_compiling() or in_functorch_transform() or is_tracing()


def _context_of(module: nn.Module) -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = vars(module).get(CONTEXT, nullcontext)()
    return context


@cache
def _class(own: Any) -> Any:
    @wraps(own.forward)  # transformers and `torch.fx` read its arguments
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _as_it_is():
            return own.forward(self, *args, **kwargs)
        with _context_of(self):
            return own.forward(self, *args, **kwargs)

    names = {"fitact_own": own, "forward": forward, "__module__": own.__module__, "__qualname__": own.__qualname__}
    return type(own.__name__, (Attached, own), names)


def _empty(own: Any, *arguments: Any) -> Any:
    made = _class(own)
    return made.__new__(made, *arguments)


def attach(module: nn.Module, context: Context) -> None:
    """Let a module's forward run in a context, in place of one that it has.

    Without gradients, under `torch.compile`, in `torch.func` and while it is traced, it runs as it is.
    """
    if not isinstance(module, Attached):
        own: Any = type(module)
        module.__class__ = _class(own)
    forward = vars(module).get("forward")
    if forward is not None and not isinstance(forward, ForwardInContext):
        vars(module)["forward"] = ForwardInContext(module, forward)
    vars(module)[CONTEXT] = context


def has_context(module: nn.Module) -> bool:
    """Return whether a module's forward runs in a context."""
    return CONTEXT in vars(module)


def detach(module: nn.Module) -> bool:
    """Let a module's forward run as it is; returns whether it had a context."""
    if "fitact_own" in vars(type(module)):  # otherwise FSDP may have made another class of this one
        own: Any = module.fitact_own
        module.__class__ = own
    forward = vars(module).get("forward")
    if isinstance(forward, ForwardInContext):
        vars(module)["forward"] = forward.forward
    return vars(module).pop(CONTEXT, None) is not None


@contextmanager
def attaching(model: nn.Module, contexts: Mapping[str, Context]) -> Iterator[None]:
    """Let modules of a model, by path, run in these contexts, and no others in any, until the context ends."""
    was: dict[nn.Module, Context]
    was = {module: vars(module)[CONTEXT] for module in model.modules() if has_context(module)}
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
