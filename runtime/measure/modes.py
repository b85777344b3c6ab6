"""Contexts that see every operation below autograd, and every tensor that autograd saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fitact.runtime.saving import Watched
from fitact.runtime.torch_internals import FakeTensor, TorchDispatchMode, without_torch_function

META = torch.device("meta")
DEVICE = torch.ops.prim.device.default


class OperationMode(TorchDispatchMode):
    """Hands every operation to `_run`, which subclasses define.

    In each operation PyTorch asks several times for the device of a fake tensor, and asks the mode first. That is
    answered here as the fake tensor would: it is no operation, and passing it on takes time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:
            return META if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and return its result."""
        return func(*args, **kwargs)


def watching_saved(see: Callable[[Tensor], Callable[[], object]]) -> saved_tensors_hooks:
    """Return a context that shows each tensor that autograd saves for backward.

    What `see` returns is called if a `saving` that stored the tensor finds that it can be recomputed. What has a
    node is stored detached: an output that is stored as it is holds the node that saves it, and neither would be
    freed.
    """

    def pack(tensor: Tensor) -> Watched:
        with without_torch_function():  # this is no operation of the model
            dropped = see(tensor)
            return Watched(tensor if tensor.grad_fn is None else tensor.detach(), dropped)

    return saved_tensors_hooks(pack, lambda watched: watched.tensor)
