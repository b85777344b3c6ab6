"""How each tensor is stored that autograd saves in a context, for reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

from torch import Tensor

from .capture import Capture
from .quantising import Quantising
from .recompute import Reading
from .storage import Bits, Quantised, Small, Stored

Seen = list[tuple[Any, Callable[[], str]]]


@contextmanager
def noting(where: Callable[[Tensor], Any]) -> Iterator[Seen]:
    """Note how the tensors are stored that autograd saves inside of contexts, while this one is open.

    Args:
        where: what to note of a tensor.

    Yields:
        For each tensor what `where` returned, and a function that says how it is stored, to be called in the end.

    """
    seen: Seen = []
    inside: list[Any] = []

    def spied(pack: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Any]:
        @wraps(pack)
        def noted(self: Any, tensor: Tensor) -> Any:
            inside.append(tensor)
            try:
                made = pack(self, tensor)
            finally:
                inside.pop()
            if not inside:
                seen.append((where(tensor), lambda: _how(made)))
            return made

        return noted

    with ExitStack() as stack:
        for kind in (Capture, Quantising):
            stack.enter_context(mock.patch.object(kind, "pack", spied(vars(kind)["pack"])))
        yield seen


def _how(saved: Stored | Reading) -> str:
    if isinstance(saved, Stored) and saved.instead is not None:
        saved = saved.instead
    source = saved.computed if isinstance(saved, Reading) else saved
    match source:
        case Quantised():
            return f"{source.bits} bits"
        case Bits():
            return "mask in bits"
        case Small():
            return "index in fewer bytes"
        case Stored():
            return "itself"
    return "recomputed"
