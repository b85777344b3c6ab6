"""Activations in the place of a function that a module holds, and of an activation that overwrites its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Held(nn.Module):
    """Is called like the function: with only an input it runs the activation, with more arguments the function.

    Args:
        activation: computes what the function does with only an input, and keeps less.
        function: the function that the module held.

    """

    def __init__(self, activation: nn.Module, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.activation = activation
        self.function = function

    def forward(self, *args: Any, **given: Any) -> Tensor:
        """Return what the function returns."""
        alone = len(args) + len(given) == 1 and given.keys() <= {"input"}
        result: Tensor = self.activation(*args, **given) if alone else self.function(*args, **given)
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
