"""The private parts of PyTorch that the ops use; `fitact.runtime.torch_internals` has the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor has been changed in place; tensors of inference mode do not count this.

    PyTorch documents `Tensor._version` in its notes on autograd, under this name.
    """
    return 0 if tensor.is_inference() else tensor._version


def constant_in_graphs(function: Function) -> Function:
    """Let the compiler call a function while it traces, and use the result as a constant.

    The public `torch.compiler.assume_constant_result` does the same, but imports the whole compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_graphs
def in_functorch_transform() -> bool:
    """Return whether a transform of `torch.func` is running; no public function tells.

    Before 2.13 the compiler cannot trace this. As it runs the transforms while it traces, the answer holds.
    """
    return bool(torch._C._functorch.get_dynamic_layer_stack_depth() > 0)
