"""What users do around a model's step: checkpoints, hooks, threads and others, by name."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .saving import HALF, Step, cast, loss_of, train


def policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


def _accumulated(model: Any, x: Tensor) -> Tensor:
    for part in (x, x.cos()):
        train(model, part)
    return train(model, x)


def _between(backward: Callable[[Any, Tensor], object], model: Any, x: Tensor) -> Tensor:
    """Go backward as a function of the model and the loss does."""
    y = model(x)
    backward(model, loss_of(y))
    return y.detach()


def _in_a_thread(_: Any, loss: Tensor) -> None:
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def _partial(model: Any, x: Tensor) -> Any:
    y = model(x)
    weights = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    some = weights[-1], weights[0], weights[-1]
    first = [torch.autograd.grad(loss_of(y), each, retain_graph=True)[0] for each in some]
    loss_of(y).backward()
    return first


def _inside(context: Callable[[], Any], model: Any, x: Tensor) -> Tensor:
    with context():
        return train(model, x)


def _hooked(model: Any, x: Tensor) -> Any:
    """Hooks see what they saw, forward and backward, and may replace outputs."""
    seen: list[Any] = []
    for name, module in model.named_modules():
        if type(module).__name__ in ("GELU", "SiLU", "Dropout", "LayerNorm", "RMSNorm", "Linear"):
            module.register_forward_hook(
                lambda _, given, y, name=name: seen.append((name, given[0].shape, y.detach()))
            )
            module.register_full_backward_hook(lambda _, dx, dy, name=name: seen.append((name, dx[0], dy[0])))
    for norm in [module for module in model.modules() if "Norm" in type(module).__name__][:1]:
        norm.register_forward_hook(lambda _, __, y: y * 1.5)
    return train(model, x), sorted(seen, key=lambda each: each[0])


def _checkpointed(model: Any, x: Tensor, **how: Any) -> Tensor:
    return train(model, x, lambda model, x: checkpoint(model, x, **how))


AROUND: dict[str, Step] = {
    "reentrant": partial(_checkpointed, use_reentrant=True),
    "checkpoint": partial(_checkpointed, use_reentrant=False),
    "selective": partial(
        _checkpointed, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy)
    ),
    "save_on_cpu": partial(_inside, save_on_cpu),
    "autocast, backward inside": partial(_inside, partial(cast, HALF)),
    "backward in autocast": partial(_between, lambda _, loss: cast(HALF)(loss.backward)()),
    "anomalies": partial(_inside, torch.autograd.detect_anomaly),
    "accumulated": _accumulated,
    "retained": partial(_between, lambda _, loss: [loss.backward(retain_graph=again) for again in (True, False)]),
    "partial": _partial,
    "threaded": partial(_between, _in_a_thread),
    "evaluated": partial(_between, lambda model, loss: [model.eval(), loss.backward()]),
    "hooked": _hooked,
}
