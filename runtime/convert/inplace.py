"""An activation that overwrites its input, like PyTorch's own with `inplace=True`."""

from __future__ import annotations

from torch import Tensor, nn


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
