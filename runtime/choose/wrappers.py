"""Modules around activations: one for a function, and one that overwrites its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Held(nn.Module):
    """Called like the original: with only an input it runs the activation, with more arguments the original.

    The `function` is the original, or the forward of the original module; `argument` is the name of its input.
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
    """Writes an activation's output over its input; the activation saves codes, and not its output."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        """Overwrite input with its activation, and return it; autograd saves no copy of it."""
        return input.copy_(self.activation(input))
