"""The activations that fitact knows by name: each as a formula, and as the PyTorch function it equals."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One row of the catalog.

    Attributes:
        expression: the activation in the language of `parser`.
        torch: a call of PyTorch's own function on `x`, as generated code writes it.

    """

    expression: str
    torch: str


# α and λ of Klambauer et al., Self-Normalizing Neural Networks, as PyTorch rounds them to float64.
_SELU = "1.0507009873554805*where(x > 0, x, 1.6732632423543772*expm1(x))"

CATALOG: dict[str, Entry] = {
    "gelu": Entry("x*(1 + erf(x/sqrt(2)))/2", "F.gelu(x)"),
    "relu": Entry("relu(x)", "F.relu(x)"),
    "selu": Entry(_SELU, "F.selu(x)"),
    "sigmoid": Entry("sigmoid(x)", "torch.sigmoid(x)"),
    "silu": Entry("x*sigmoid(x)", "F.silu(x)"),
    "softplus": Entry("softplus(x)", "F.softplus(x)"),
    "tanh": Entry("tanh(x)", "torch.tanh(x)"),
}
