"""How an output is recomputed, stated where a context of `fitact.saving` finds it.

Standalone folders have copies of this file, and their outputs are found by the attribute too. So a change of what
is stated must change the attribute's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from .internals import in_functorch_transform, version_of

ATTRIBUTE = "_fitact_recompute"


class KernelRecompute(NamedTuple):
    """How the output of an op is recomputed.

    Attributes:
        function: of the state, gives the output bit for bit; called without autograd and without autocast.
        state: tensors that the operation saves for backward.
        version: the output's, when this was stated.

    """

    function: Callable[..., Tensor]
    state: tuple[Tensor, ...]
    version: int


def offer_recompute(output: Tensor, function: Callable[..., Tensor], *state: Tensor) -> Tensor:
    """State on an output's storage how it is recomputed, and return it; see `KernelRecompute`."""
    # a storage of its own, that takes attributes, unlike that of a DTensor or a sparse tensor
    plain = type(output) is Tensor or type(output).__name__ in ("FakeTensor", "Parameter")
    if output.grad_fn is not None and plain and not in_functorch_transform():
        offered = KernelRecompute(function, tuple(tensor.detach() for tensor in state), version_of(output))
        setattr(output.untyped_storage(), ATTRIBUTE, offered)
    return output
