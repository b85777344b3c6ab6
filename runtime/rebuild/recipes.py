"""What an output is computed again from, and where whoever needs it in backward finds that.

An operation notes on its output how to compute it again, from tensors that it keeps for its own backward anyway. A
layer that would keep the output keeps these tensors instead. The note is on the output's storage, so that views of
it find it too. Nothing is noted while the compiler traces: what it keeps and computes again is its own choice.

A note counts only as long as the output is what was noted: a change in place changes its version, and then the
output is kept as ever. Changes of the tensors that it is rebuilt from are found by autograd, which keeps them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fitact.runtime.torch_internals import in_functorch_transform, version_of

Function = Callable[..., Tensor]
ATTRIBUTE = "_fitact_recipe"
KEPT = "_fitact_kept"


@dataclass(eq=False)
class Recipe:
    """How an output is computed again; its readers share it.

    Attributes:
        function: of what it is computed from, without autograd; gives the output bit for bit.
        version: the output's, when it was noted.
        dtype: the output's.
        shape: the output's.
        stride: the output's.
        readers: how many layers rebuild it.
        served: to how many of these the current backward pass has given it.
        value: the rebuilt output, while a backward pass still has to give it to others.

    """

    function: Callable[..., Tensor]
    version: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    readers: int = 0
    served: int = 0
    value: Tensor | None = field(default=None, repr=False)

    def output(self, state: tuple[Tensor, ...]) -> Tensor:
        """Return the output from the state as a reader kept it, computed once a backward for all readers."""
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


class _Note:
    """What is noted on a storage: a recipe and the state, which nothing else holds for it."""

    def __init__(self, recipe: Recipe, state: tuple[Tensor, ...]) -> None:
        self.recipe, self.state = recipe, state
        self.versions = [version_of(one) for one in state]

    def whole(self) -> bool:
        """Whether the state is still there, and as it was; FSDP takes memory from weights between uses."""
        return bool(self.state) and all(
            version_of(one) == version and one.untyped_storage().nbytes() >= one.nbytes
            for one, version in zip(self.state, self.versions, strict=True)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copy nothing: the copy of a tensor is no operation's output."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class _Clear:
    """Takes the state from a note when the operation's backward has been run, or its node is gone."""

    def __init__(self, note: _Note) -> None:
        self.note = weakref.ref(note)

    def __call__(self, *_: Any) -> None:
        note = self.note()
        if note is not None:
            note.state = ()

    __del__ = __call__


class Source(NamedTuple):
    """What a layer's input is rebuilt from.

    Attributes:
        function: of the state.
        state: to be kept in place of the input.

    """

    function: Callable[..., Tensor]
    state: tuple[Tensor, ...]


def applied(function: Any, *args: Any) -> Any:
    """Return what an autograd function returns; PyTorch does not state the types of its `apply`."""
    return function.apply(*args)


def note(output: Tensor, function: Callable[..., Tensor], *state: Tensor) -> Tensor:
    """Note on an output how to compute it again, and return it.

    Args:
        output: of an operation; not a view.
        function: of the state, gives the output bit for bit; called without autograd and without autocast.
        state: tensors that the operation keeps for backward.

    """
    if output.grad_fn is not None and not in_functorch_transform() and _whole(output):
        layout = output.shape, tuple(output.stride())
        recipe = Recipe(function, version_of(output), output.dtype, *layout)
        noted = _Note(recipe, tuple(one.detach() for one in state))
        setattr(output.untyped_storage(), ATTRIBUTE, noted)
        output.grad_fn.register_hook(_Clear(noted))
    return output


def recipe_of(output: Tensor) -> Recipe | None:
    """Return the recipe that is noted on an output, None if there is none."""
    noted: _Note | None = getattr(output.untyped_storage(), ATTRIBUTE, None)
    return None if noted is None else noted.recipe


def source(input: Tensor) -> Source | None:
    """Return what a tensor is rebuilt from, None if it has to be kept."""
    if in_functorch_transform() or input.is_inference() or not plain(input):
        return None
    noted: _Note | None = getattr(input.untyped_storage(), ATTRIBUTE, None)
    if noted is None or not noted.whole():
        return None
    recipe = noted.recipe
    if (version_of(input), input.dtype) != (recipe.version, recipe.dtype):
        return None
    read = Read(recipe, input.shape, tuple(input.stride()), int(input.storage_offset()))
    return Source(read, noted.state)


class _Itself:
    """What is kept anyway; `function` may want to know that it is used."""

    def __init__(self, function: Function | None) -> None:
        self.function = function

    def use(self) -> None:
        if self.function is not None:
            use(self.function)

    def __call__(self, kept: Tensor) -> Tensor:
        return kept


def note_kept(output: Tensor, function: Function | None = None) -> Tensor:
    """Note on an output that its operation keeps it, so that more can be rebuilt from it, and return it.

    Args:
        output: of an operation.
        function: what is told if that is done.

    """
    if output.grad_fn is not None and not in_functorch_transform() and plain(output):
        setattr(output.untyped_storage(), KEPT, (version_of(output), _Itself(function)))
    return output


def kept_source(input: Tensor) -> Source | None:
    """Return a tensor itself as what it is rebuilt from, if its operation keeps it; else None."""
    if in_functorch_transform() or input.is_inference() or not plain(input):
        return None
    version, itself = getattr(input.untyped_storage(), KEPT, (None, None))
    return None if itself is None or version != version_of(input) else Source(itself, (input.detach(),))


@dataclass(frozen=True)
class Read:
    """The rebuilt output, as a view of it."""

    recipe: Recipe
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def use(self) -> None:
        """Count one more layer that will ask for the output."""
        if not self.recipe.readers:
            use(self.recipe.function)
        self.recipe.readers += 1

    def __call__(self, *state: Tensor) -> Tensor:
        """Return what is read of the rebuilt output."""
        output = self.recipe.output(state)
        if (output.shape, tuple(output.stride()), 0) == (self.shape, self.stride, self.offset):
            return output
        return output.as_strided(self.shape, self.stride, self.offset)


def use(function: Callable[..., Tensor]) -> None:
    """Tell a function of a source that a layer will call it once in each backward pass."""
    if hasattr(function, "use"):
        function.use()


def plain(tensor: Tensor) -> bool:
    """Return whether a tensor has a storage of its own to note something on; a DTensor has not."""
    return type(tensor) is Tensor or type(tensor).__name__ in ("FakeTensor", "Parameter")


def _whole(tensor: Tensor) -> bool:
    return plain(tensor) and tensor.storage_offset() == 0 and tensor.nbytes == tensor.untyped_storage().nbytes()
