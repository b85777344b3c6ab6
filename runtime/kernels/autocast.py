"""Which autocast is on; PyTorch raises where it is asked of a type of device that has none, such as meta."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from .internals import constant_in_graphs


@constant_in_graphs
def _available(device: str) -> bool:
    """Return whether a type of device has autocast; before 2.13 a compiler cannot trace this question."""
    return torch.amp.is_autocast_available(device)


def active_autocast(device: str) -> torch.dtype | None:
    """Return the dtype to which autocast casts on a type of device, None where it is off."""
    if _available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Return a context without autocast; entering one takes longer than asking whether it is on."""
    return nullcontext() if active_autocast(device) is None else torch.autocast(device, enabled=False)
