"""The factors of gates h = a(g)·b(u)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A factor, computed again in backward.

    Attributes:
        value: of x, in PyTorch's operators, dtype kept.

    """

    value: Callable[[Tensor], Tensor]

    def gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """Return dy times the derivative, by PyTorch's own backward; it is in the dtype of dy."""
        pull: Any = torch.func.vjp(self.value, x)[1]
        dx: Tensor = pull(dy)[0]
        return dx
