"""A context that sees every operation below autograd."""

from __future__ import annotations

from typing import Any

import torch

from fitact.runtime.torch_internals import FakeTensor, TorchDispatchMode

META, DEVICE = torch.device("meta"), torch.ops.prim.device.default


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
