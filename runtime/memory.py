"""Counting what autograd keeps for backward.

The unit is the storage: two saved tensors that share one are counted once, and what a module owns anyway
(parameters and buffers) is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


@dataclass
class Saved:
    """The distinct storages that autograd has kept so far.

    Attributes:
        storages: by identity; held here, so that a freed address is not taken for the same storage.

    """

    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Their size together, in bytes."""
        return sum(storage.nbytes() for storage in self.storages.values())


@contextmanager
def count_saved(*modules: nn.Module) -> Iterator[Saved]:
    """Count the storages that autograd keeps for operations inside the context.

    Args:
        modules: whose parameters and buffers are not counted.

    Yields:
        The count, which grows while the context is open. Works for real, fake and meta tensors; codes that a
        generated activation keeps count as what they are, k bits an element.

    """
    owned = {
        tensor.untyped_storage()._cdata
        for module in modules
        for tensors in (module.parameters(), module.buffers())
        for tensor in tensors
    }
    saved = Saved()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in owned:
            saved.storages[storage._cdata] = storage
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    with saved_tensors_hooks(pack, unpack):
        yield saved
