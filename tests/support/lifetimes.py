"""What of a step is still in memory, while something of it is held."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from .saving import X, loss_of, train


@contextmanager
def alive(model: nn.Module) -> Iterator[Callable[[], set[str]]]:
    """Yield what returns the modules whose outputs are still in memory."""
    storages: list[tuple[str, Any]] = []

    def note(name: str, _: Any, __: Any, y: Tensor) -> None:
        storages.append((name, weakref.ref(y.untyped_storage())))

    hooks = [one.register_forward_hook(partial(note, name)) for name, one in model.named_modules() if name]
    yield lambda: {name for name, storage in storages if storage() is not None}
    for hook in hooks:
        hook.remove()


def _offloaded(model: Any, x: Tensor) -> Any:
    with save_on_cpu():
        return model(x)


def _detached(model: Any, x: Tensor) -> Any:
    """Hold all outputs without what made them, as one does who gathers hidden states."""
    held: list[Tensor] = []
    hooks = [one.register_forward_hook(lambda _, __, y: held.append(y.detach())) for one in _recomputed(model)]
    model(x)
    for hook in hooks:
        hook.remove()
    return held


def _recomputed(model: nn.Module) -> list[nn.Module]:
    return [one for one in model.modules() if type(one).__name__ in ("GELU", "Own", "LayerNorm")]


def _after(model: Any, x: Tensor) -> Any:
    held: list[Tensor] = []
    hooks = [one.register_forward_hook(lambda _, __, y: held.append(y)) for one in _recomputed(model)]
    y = model(x)
    for hook in hooks:
        hook.remove()
    loss_of(y).backward()
    return held, y


def _asked(model: Any, x: Tensor) -> Any:
    y = model(x)
    torch.autograd.grad(loss_of(y), next(one for one in model.parameters() if one.ndim == 2))
    return y.detach()


HELD: dict[str, Callable[[Any, Tensor], Any]] = {
    "the graph": lambda model, x: model(x),
    "the graph of a checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "the graph, all offloaded": _offloaded,
    "the outputs without their graph": _detached,
    "the outputs after backward": _after,
    "the loss after a partial backward": _asked,
    "nothing": lambda model, x: train(model, x).sum().item(),
}


def lifetimes(models: tuple[Any, Any], held: str) -> Iterator[set[str]]:
    """Yield what lives while something of a step is held, and afterwards, for each model."""
    for model in models:
        with alive(model) as living:
            x = X.clone().requires_grad_()
            hold = HELD[held](model, x)
            gc.collect()
            yield living()
            del hold
            gc.collect()
            yield living()  # PyTorch's own hooks on an output that its operation saves never let go of it
