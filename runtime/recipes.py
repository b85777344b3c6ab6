"""How an output is computed again, noted where whatever needs it in backward finds it.

An operation notes on its output how to compute it again from tensors that it keeps for its own backward anyway. A
layer that would keep the output keeps these tensors instead (`rebuild`). The note is on the output's storage, so
that views find it too. Nothing is noted while the compiler traces, which itself chooses what to keep and what to
compute again.

A note is valid only while the output stays as it was: a change in place changes its version, and then the output
is kept as usual. Changes of the tensors that it is rebuilt from are found by autograd, which keeps them.

Standalone folders have copies of this file, and their outputs are found by the attribute too. So a change of what
is noted must change the attribute's name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .torch_internals import in_functorch_transform, version_of

ATTRIBUTE = "_fitact_recipe"


@dataclass(eq=False)
class Recipe:
    """How an output is computed again; its readers share it.

    Attributes:
        function: of what it is computed from, without autograd.
        exact: whether it gives the output bit for bit.
        version: the output's, when it was noted.
        dtype: the output's.
        shape: the output's.
        stride: the output's.
        readers: how many layers rebuild it.
        served: how many of these have it already in the current backward pass.
        value: the rebuilt output, while some of them do not have it yet.

    """

    function: Callable[..., Tensor]
    exact: bool
    version: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    readers: int = 0
    served: int = 0
    value: Tensor | None = field(default=None, repr=False)

    def output(self, state: tuple[Tensor, ...]) -> Tensor:
        """Return the output from the state that a reader kept; each backward pass computes it once for all."""
        value = self.value
        if value is None:
            value = self.function(*state)
            if value.stride() != self.stride:
                value = torch.empty_strided(self.shape, self.stride, dtype=value.dtype, device=value.device).copy_(
                    value
                )
        self.served += 1
        last = self.served >= self.readers
        self.value = None if last else value
        self.served = 0 if last else self.served
        return value


class Note:
    """What is noted on a storage: a recipe, and the state, which the note alone holds."""

    def __init__(self, recipe: Recipe, state: tuple[Tensor, ...]) -> None:
        self.recipe, self.state = recipe, state
        self.versions = [version_of(one) for one in state]

    def whole(self) -> bool:
        """Whether the state is still there, and as it was; FSDP takes memory from weights between uses."""
        return bool(self.state) and all(
            version_of(one) == version and one.untyped_storage().nbytes() >= min(one.nbytes, 1)
            for one, version in zip(self.state, self.versions, strict=True)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copy nothing: the copy of a tensor is no operation's output."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class _Clear:
    """Takes the state from a note when the operation's backward has run, or its node is gone."""

    def __init__(self, note: Note) -> None:
        self.note = weakref.ref(note)

    def __call__(self, *_: Any) -> None:
        note = self.note()
        if note is not None:
            note.state = ()

    __del__ = __call__


def note(output: Tensor, function: Callable[..., Tensor], *state: Tensor, exact: bool = True) -> Tensor:
    """Note on an output how to compute it again, and return it.

    Args:
        output: of an operation; not a view.
        function: of the state, gives the output; called without autograd and without autocast.
        state: tensors that the operation keeps for backward.
        exact: whether the function gives the output bit for bit.

    """
    noted = made(output, function, state, exact)
    if noted is not None:
        setattr(output.untyped_storage(), ATTRIBUTE, noted)
    return output


def made(
    output: Tensor, function: Callable[..., Tensor], state: Sequence[Tensor], exact: bool = True
) -> Note | None:
    """Return what may be noted on an output, by the arguments of `note`; None if nothing may be.

    Integers have no graph, so nothing clears their note.
    """
    whole_numbers = not (output.is_floating_point() or output.is_complex())
    if (output.grad_fn is None and not whole_numbers) or in_functorch_transform() or not _whole(output):
        return None
    layout = output.shape, tuple(output.stride())
    recipe = Recipe(function, exact, version_of(output), output.dtype, *layout)
    noted = Note(recipe, tuple(one.detach() for one in state))
    if output.grad_fn is not None:
        output.grad_fn.register_hook(_Clear(noted))
    return noted


def plain(tensor: Tensor) -> bool:
    """Return whether a tensor has a storage of its own to note something on, unlike a DTensor or a sparse one."""
    dense = tensor.layout is torch.strided
    return dense and (type(tensor) is Tensor or type(tensor).__name__ in ("FakeTensor", "Parameter"))


def _whole(tensor: Tensor) -> bool:
    return plain(tensor) and tensor.storage_offset() == 0 and tensor.nbytes == tensor.untyped_storage().nbytes()
