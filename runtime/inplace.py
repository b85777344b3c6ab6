"""An activation that overwrites its input, as PyTorch's own do with `inplace=True`."""

from __future__ import annotations

from torch import Tensor, nn


class InPlace(nn.Module):
    """Writes an activation's output over its input, and keeps what the activation keeps.

    Args:
        activation: one that keeps codes and not its output, which would then be there twice.

    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        """Return input, which holds the activation of what it held."""
        return overwrite(input, self.activation)


def overwrite(input: Tensor, activation: nn.Module) -> Tensor:
    """Return input after it has been overwritten by the activation of itself; autograd keeps no copy of it."""
    result: Tensor = input.copy_(activation(input))
    return result
