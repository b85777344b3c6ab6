"""How an output is computed again, noted where a context of `fitact.saving` finds it.

Standalone folders have copies of this file, and their outputs are found by the attribute too. So a change of what
is noted must change the attribute's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from .internals import in_functorch_transform, version_of

ATTRIBUTE = "_fitact_recompute"


class Noted(NamedTuple):
    """What is noted on a storage.

    Attributes:
        function: of the state, gives the output bit for bit; called without autograd and without autocast.
        state: tensors that the operation saves for backward.
        version: the output's, when it was noted.

    """

    function: Callable[..., Tensor]
    state: tuple[Tensor, ...]
    version: int


def note(output: Tensor, function: Callable[..., Tensor], *state: Tensor) -> Tensor:
    """Note on an output how it is computed again, and return it; see `Noted` for the arguments."""
    if output.grad_fn is not None and _plain(output) and not in_functorch_transform():
        noted = Noted(function, tuple(one.detach() for one in state), version_of(output))
        setattr(output.untyped_storage(), ATTRIBUTE, noted)
    return output


def _plain(tensor: Tensor) -> bool:
    """Return whether a tensor has a storage of its own to note something on, unlike a DTensor or a sparse one."""
    return type(tensor) is Tensor or type(tensor).__name__ in ("FakeTensor", "Parameter")
