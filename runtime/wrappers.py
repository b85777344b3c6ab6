"""Modules around activations: one for a function, one that overwrites its input, and two that are rebuilt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fitact.errors import UsageError, quote
from fitact.runtime.convert.probe import FUNCTIONS
from fitact.runtime.ops.gate_ops import generated_gate
from fitact.runtime.rebuild import functions


class Held(nn.Module):
    """Called like the original: with only an input it runs the activation, with more arguments the original.

    Args:
        activation: computes what the original does with only an input, and keeps less.
        function: the original function, or the forward of the original module.
        argument: the name that the original gives to its input.

    """

    def __init__(
        self, activation: nn.Module, function: Callable[..., Tensor], argument: str | None = "input"
    ) -> None:
        super().__init__()
        self.activation = activation
        self.function = function
        self.argument = argument

    def forward(self, *args: Any, **given: Any) -> Tensor:
        """Return what the original returns."""
        alone = len(args) + len(given) == 1 and given.keys() <= {self.argument}
        result: Tensor = self.activation(*args, *given.values()) if alone else self.function(*args, **given)
        return result


class InPlace(nn.Module):
    """Writes an activation's output over its input, and keeps what the activation keeps.

    Args:
        activation: one that keeps codes and not its output, which would otherwise exist twice.

    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        """Overwrite input with its activation, and return it."""
        return overwrite(input, self.activation)


def overwrite(input: Tensor, activation: nn.Module) -> Tensor:
    """Overwrite input with its activation, and return it; autograd keeps no copy of it."""
    result: Tensor = input.copy_(activation(input))
    return result


class _Alone(nn.Module):
    """A module around a function of the catalog.

    Args:
        name: of the activation in the catalog.

    """

    def __init__(self, name: str) -> None:
        super().__init__()
        if name not in FUNCTIONS:
            raise UsageError(f"no activation {quote(name)} to rebuild: expected one of {', '.join(FUNCTIONS)}")
        self.name = name

    def extra_repr(self) -> str:
        """Return the name."""
        return repr(self.name)


class Rebuilt(_Alone):
    """An activation that keeps its input alone; layers that `fitact.rebuild` has prepared rebuild its output."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the activation of a tensor of any shape and floating dtype, PyTorch's own bit for bit."""
        function = FUNCTIONS[self.name]
        return function(input) if torch.compiler.is_compiling() else functions.again(function, input)


class RebuiltGate(_Alone):
    """f(g)·u that keeps g and u alone; layers that `fitact.rebuild` has prepared rebuild its output."""

    def forward(self, g: Tensor, u: Tensor) -> Tensor:
        """Return f(g)·u, PyTorch's own bit for bit, of two tensors of any shape and floating dtype."""
        function = FUNCTIONS[self.name]
        return function(g) * u if torch.compiler.is_compiling() else functions.gate(function, g, u)


def is_exact_gate(module: nn.Module) -> bool:
    """Whether a module is a gate that keeps g and u, of PyTorch's operations or of generated kernels."""
    generated = generated_gate(type(module))
    return isinstance(module, RebuiltGate) or (generated is not None and generated.exact)
