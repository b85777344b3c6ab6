"""What a layer's input or weight is rebuilt from, as `fitact.runtime.recipes` notes it on outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fitact.runtime.autocast import active_autocast
from fitact.runtime.recipes import ATTRIBUTE, Note, Recipe, made, note, plain
from fitact.runtime.torch_internals import autocast_of, base_of, in_functorch_transform, version_of

Function = Callable[..., Tensor]
KEPT = "_fitact_kept"
NARROW = "_fitact_narrow"
NORMED = "_fitact_normed"
SMALL = "_fitact_small"
INTEGERS = torch.int8, torch.int16, torch.int32


class Source(NamedTuple):
    """What a layer's input is rebuilt from.

    Attributes:
        function: of the state.
        state: to be kept in place of the input.
        exact: whether that gives the input bit for bit.

    """

    function: Callable[..., Tensor]
    state: tuple[Tensor, ...]
    exact: bool = True


def applied(function: Any, *args: Any) -> Any:
    """Return what an autograd function returns; PyTorch does not state the types of its `apply`."""
    return function.apply(*args)


def recipe_of(output: Tensor) -> Recipe | None:
    """Return the recipe noted on an output, or else the note of what takes fewer bytes; None if there is none."""
    storage = output.untyped_storage()
    noted: Note | None = getattr(storage, ATTRIBUTE, None) or getattr(storage, NARROW, (None, 0))[0]
    return None if noted is None else noted.recipe


def source(input: Tensor, exact: bool = True) -> Source | None:
    """Return what a tensor is rebuilt from, None if it has to be kept.

    Args:
        input: the tensor.
        exact: whether to leave alone what would not be rebuilt bit for bit.

    """
    if in_functorch_transform() or input.is_inference() or not plain(input):
        return None
    return _read(input, getattr(input.untyped_storage(), ATTRIBUTE, None), exact)


def _read(input: Tensor, noted: Note | None, exact: bool = True) -> Source | None:
    if noted is None or not noted.whole():
        return None
    recipe = noted.recipe
    if exact and not recipe.exact:
        return None
    if (version_of(input), input.dtype) != (recipe.version, recipe.dtype):
        return None
    read = Read(recipe, input.shape, tuple(input.stride()), int(input.storage_offset()))
    return Source(read, noted.state, recipe.exact)


class _Itself:
    """A tensor that is kept anyway; `function`, if there is one, is told that it is used."""

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
        function: is told if that is done.

    """
    if output.grad_fn is not None and not in_functorch_transform() and plain(output):
        setattr(output.untyped_storage(), KEPT, (version_of(output), _Itself(function)))
    return output


def kept_source(input: Tensor) -> Source | None:
    """Return a tensor as its own source if its operation keeps it; else None."""
    if in_functorch_transform() or input.is_inference() or not plain(input):
        return None
    version, itself = getattr(input.untyped_storage(), KEPT, (None, None))
    return None if itself is None or version != version_of(input) else Source(itself, (input.detach(),))


def note_narrow(output: Tensor, function: Function, state: Sequence[Tensor], extra: dict[int, int]) -> Note | None:
    """Note on an output what takes fewer bytes to keep, and return the note, which holds it until it is cleared.

    Args:
        output: of an operation.
        function: of the state, gives the output.
        state: tensors.
        extra: the bytes of storages that nothing keeps yet, by storage.

    """
    noted = made(output, function, state)
    if noted is not None:
        setattr(output.untyped_storage(), NARROW, (noted, extra))
    return noted


def narrow(input: Tensor) -> tuple[Source | None, dict[int, int]]:
    """Return what may be kept in place of a tensor, None if nothing is known, and the bytes that this adds."""
    noted, extra = getattr(input.untyped_storage(), NARROW, (None, {}))
    found = _read(input, noted) if plain(input) else None
    return found, {} if found is None else extra


def narrower(input: Tensor) -> Source | None:
    """Return what takes fewer bytes to keep than a tensor, None if nothing does.

    The caller must keep it: from now on all others that would keep the tensor find it as its source.
    """
    found, extra = narrow(input)
    storage = input.untyped_storage()
    if found is None or sum(extra.values()) >= storage.nbytes() or in_functorch_transform():
        return None
    setattr(storage, ATTRIBUTE, getattr(storage, NARROW)[0])
    delattr(storage, NARROW)
    return found


def note_normed(input: Tensor) -> None:
    """Note on a tensor that a norm keeps it, so that a sum with it may be rebuilt."""
    if plain(input) and not in_functorch_transform():
        setattr(input.untyped_storage(), NORMED, version_of(input))


def normed(input: Tensor) -> bool:
    """Whether a norm keeps a tensor."""
    return getattr(input.untyped_storage(), NORMED, None) == version_of(input)


def small(index: Tensor, size: int) -> Source | None:
    """Return int64 numbers from -size to size - 1 in a dtype of fewer bytes, None if there is none."""
    if index.dtype != torch.int64 or not plain(index) or in_functorch_transform():
        return None
    storage = index.untyped_storage()
    dtype = next((one for one in INTEGERS if size <= torch.iinfo(one).max + 1), None)
    if dtype is None or index.numel() * dtype.itemsize >= storage.nbytes():
        return None
    found = small_source(index)
    if found is None or found.state[0].dtype != dtype:
        found = Source(Tensor.long, (index.to(dtype),))
        setattr(storage, SMALL, getattr(storage, SMALL, {}) | {layout(index): found})
    return found


def small_source(index: Tensor) -> Source | None:
    """Return what `small` returned last for a tensor."""
    noted: dict[Any, Source] = getattr(index.untyped_storage(), SMALL, {})
    return noted.get(layout(index)) if noted else None


def layout(x: Tensor) -> tuple[Any, ...]:
    """Return which elements of its storage a tensor has, and its version."""
    return version_of(x), x.shape, x.stride(), x.storage_offset()


@dataclass(frozen=True)
class Read:
    """A view of a rebuilt output."""

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
        """Return the view."""
        output = self.recipe.output(state)
        if (output.shape, tuple(output.stride()), 0) == (self.shape, self.stride, self.offset):
            return output
        return output.as_strided(self.shape, self.stride, self.offset)


def use(function: Callable[..., Tensor]) -> None:
    """Tell a function of a source that a layer will call it once in each backward pass."""
    if hasattr(function, "use"):
        function.use()


# ----------------------------------------------------------------------------------------------- casts of autocast


def product_dtype(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """Return the dtype in which a layer multiplies; None if PyTorch has to multiply, or to raise its error."""
    low = active_autocast(x.device.type)
    if low is None:
        return x.dtype if x.dtype == weight.dtype else None
    return None if torch.float64 in (weight.dtype, x.dtype) else low


def cast(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a parameter in the dtype of a product; inside one autocast all layers share what is returned.

    The cast of a trained parameter gets a note that it can be cast again.
    """
    if parameter.dtype == dtype:
        return parameter
    if not parameter.requires_grad:
        return parameter.to(dtype)
    made = autocast_of(parameter)
    if owned(parameter) and source(made) is None:
        note(made, partial(Tensor.to, dtype=dtype), parameter)
    return made


def owned(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or a view of one, as the weight of one of several experts is."""
    return isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter)


def shares_cast(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether autocast caches its cast of a tensor for all readers, as it does for a trained leaf."""
    return x.is_leaf and x.requires_grad and x.dtype != dtype


def recast(x: Tensor, weight: Tensor, dtype: torch.dtype | None) -> bool:
    """Whether a layer would keep a cast weight, but may cast it again in backward from the parameter."""
    if dtype is None or dtype == weight.dtype or not owned(weight):
        return False
    ours = plain(x) and plain(weight) and not in_functorch_transform() and not x.is_inference()
    return ours and not shares_cast(x, dtype)
