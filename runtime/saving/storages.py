"""How each tensor is stored that autograd saves in a context, for reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from .capture import observer
from .recompute import Reading
from .storage import Bits, Quantised, Small, Stored

Seen = list[tuple[Any, Callable[[], str]]]


@contextmanager
def observing(where: Callable[[Tensor], Any]) -> Iterator[Seen]:
    """Record how the tensors that autograd saves in contexts are stored, while this context is open.

    Args:
        where: what to record of a tensor.

    Yields:
        For each tensor what `where` returned, and a function that says how it is stored, to be called in the end.

    """
    seen: Seen = []
    token = observer.set(lambda tensor, made: seen.append((where(tensor), lambda: _how(made))))
    try:
        yield seen
    finally:
        observer.reset(token)


def _how(saved: Stored | Reading) -> str:
    if isinstance(saved, Stored) and saved.instead is not None:
        saved = saved.instead
    source = saved.computed if isinstance(saved, Reading) else saved
    match source:
        case Stored() if source.replaced:
            return "recomputed"
        case Quantised():
            return f"{source.bits} bits"
        case Bits():
            return "mask in bits"
        case Small():
            return "index in fewer bytes"
        case Stored():
            return "itself"
    return "recomputed"
