"""Modules whose forward runs in a context of `saving`, and modules inside that save as they are.

Such a module has another class: a subclass of its own, of the same name. So its parameters, hooks, attributes and
state dict stay, and `isinstance` holds. No other module is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from typing import Any

import torch
from torch import nn

from fitact.runtime.torch_internals import in_functorch_transform, is_tracing

Context = Callable[[], AbstractContextManager[Any]]  # makes the context of a call; picklable, as the module is
CONTEXT = "_fitact_context"  # the attribute of a module that makes the context


class Attached:
    """What the classes of such modules share.

    Attributes:
        fitact_own: the module's own class.

    """

    fitact_own: type[Any]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to make the module again: its class is nowhere to be imported from."""
        return _empty, (self.fitact_own,), self.__dict__.copy()


@cache
def _class(own: Any) -> Any:
    @wraps(own.forward)  # of which transformers and `torch.fx` read the arguments
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            not torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or in_functorch_transform()
            or is_tracing()
        ):
            return own.forward(self, *args, **kwargs)
        with vars(self)[CONTEXT]():
            return own.forward(self, *args, **kwargs)

    names = {"fitact_own": own, "forward": forward, "__module__": own.__module__, "__qualname__": own.__qualname__}
    return type(own.__name__, (Attached, own), names)


def _empty(own: Any) -> Any:
    made = _class(own)
    return made.__new__(made)


def attach(module: nn.Module, context: Context) -> None:
    """Let a module's forward run in a context, in place of one that it has.

    Without gradients, under `torch.compile`, in `torch.func` and while it is traced, it runs as it is.
    """
    if not isinstance(module, Attached):
        own: Any = type(module)
        module.__class__ = _class(own)
    vars(module)[CONTEXT] = context


def detach(module: nn.Module) -> bool:
    """Let a module's forward run as it is; returns whether it had a context."""
    if not isinstance(module, Attached):
        return False
    if "fitact_own" in vars(type(module)):
        module.__class__ = module.fitact_own
        del vars(module)[CONTEXT]
    else:  # FSDP has made another class of this one
        vars(module)[CONTEXT] = nullcontext
    return True


@contextmanager
def attaching(model: nn.Module, contexts: Mapping[str, Context]) -> Iterator[None]:
    """Let modules of a model, by path, run in these contexts, and no others in any, until the context ends."""
    was: dict[nn.Module, Context]
    was = {module: vars(module)[CONTEXT] for module in model.modules() if isinstance(module, Attached)}
    for module in was:
        detach(module)
    attached = {model.get_submodule(path): context for path, context in contexts.items()}
    try:
        for one, context in attached.items():
            attach(one, context)
        yield
    finally:
        for one in attached:
            detach(one)
        for one, context in was.items():
            attach(one, context)
