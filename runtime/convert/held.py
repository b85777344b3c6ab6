"""An activation in place of a function that a module holds, such as `self.act = F.gelu`."""

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
