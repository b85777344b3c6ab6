"""Operations of PyTorch that keep what their tensors are rebuilt from, in place of these tensors.

PyTorch's own operation runs inside another node, which keeps things on its behalf. So the backward pass is
PyTorch's own too, whatever kernel it chose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from fitact.runtime.recipes import Note
from fitact.runtime.torch_internals import storage_id, without_torch_function

from .derivatives import Plain, once, started
from .recipes import (
    Read,
    Source,
    applied,
    narrow,
    normed,
    note_narrow,
    owned,
    small_source,
    source,
    use,
)

Function = Callable[..., Tensor]
SHARED = "_fitact_shared"  # the attribute of storages from which scores are rebuilt, perhaps of several layers
SHALLOW = 1  # functions of what is kept, in a sum that is rebuilt: what is rebuilt of one is kept in another
DEEPEST = 64  # functions of functions; each takes five frames of Python's stack in backward


class _Slot(NamedTuple):
    """One tensor that the operation keeps.

    Attributes:
        function: rebuilds it from the tensors `start` to `stop`; None if it is the one at `start`.

    """

    function: Function | None
    start: int
    stop: int


class _Shelf:
    """What an operation keeps, held by another node."""

    def __init__(self) -> None:
        self.found: list[Source | Tensor] = []
        self.slots: list[_Slot] = []
        self.values: tuple[Tensor, ...] = ()

    def pack(self, tensor: Tensor) -> int:
        """Take a tensor from the operation's node, and return its number."""
        with without_torch_function():
            found = source(tensor) or small_source(tensor)
            self.found.append(tensor.detach() if found is None else found)
        return len(self.found) - 1

    def replace(self, output: Tensor, found: Source) -> None:
        """Rebuild the output too, if it is kept."""
        key = storage_id(output)
        self.found = [found if isinstance(one, Tensor) and storage_id(one) == key else one for one in self.found]

    def tensors(self) -> list[Tensor]:
        """Return what has to be kept for all that has been packed, and hold none of it."""
        kept: list[Tensor] = []
        for one in self.found:
            function, state = (None, (one,)) if isinstance(one, Tensor) else one[:2]
            if function is not None:
                use(function)
            self.slots.append(_Slot(function, len(kept), len(kept) + len(state)))
            kept += state
        self.found = []
        return kept

    def unpack(self, number: int) -> Tensor:
        """Give a tensor back to the operation's node."""
        function, start, stop = self.slots[number]
        with without_torch_function():
            return self.values[start] if function is None else function(*self.values[start:stop])


class _Recorded:
    """A context that autograd records, which modes of `torch.overrides` do not see, unlike `torch.enable_grad`."""

    def __enter__(self) -> None:
        with without_torch_function():
            torch.set_grad_enabled(True)

    def __exit__(self, *_: Any) -> None:
        with without_torch_function():
            torch.set_grad_enabled(False)


class Operation(torch.autograd.Function):
    """A function of tensors whose node keeps the shelf's tensors."""

    @staticmethod
    def forward(ctx: Any, function: Function, rebuilt: Source | None, *tensors: Tensor) -> Tensor:
        """Return the function of tensors, with the arguments of `operation`."""
        shelf = ctx.shelf = _Shelf()
        with _Recorded():
            with without_torch_function():
                inside = [
                    started(one.detach()) if wanted else one.detach()
                    for one, wanted in zip(tensors, ctx.needs_input_grad[2:], strict=True)
                ]
                ctx.starts = [get_gradient_edge(one) for one in inside if one.requires_grad]
            with saved_tensors_hooks(shelf.pack, shelf.unpack):
                output = function(*inside)
        with without_torch_function():
            ctx.end = get_gradient_edge(output)
            if rebuilt is not None:
                shelf.replace(output, rebuilt)
            ctx.save_for_backward(*shelf.tensors())
            return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, by PyTorch's own node."""
        once()
        ctx.shelf.values = ctx.saved_tensors
        try:
            found = iter(torch.autograd.grad(ctx.end, ctx.starts, grads, retain_graph=True, allow_unused=True))
        finally:
            ctx.shelf.values = ()
        return None, None, *(next(found) if wanted else None for wanted in ctx.needs_input_grad[2:])


def operation(function: Function, tensors: list[Tensor], rebuilt: Source | None = None) -> Tensor:
    """Return a function of tensors; where it would keep one of them, it keeps what that is rebuilt from.

    Args:
        function: one operation of PyTorch, which reads each tensor once and returns a tensor of its own.
        tensors: one of them has a source, and one of them requires a gradient.
        rebuilt: what the output is rebuilt from, if the operation keeps that.

    """
    output: Tensor = applied(Operation, function, rebuilt, *tensors)
    return output


def rebuilds(output: Tensor) -> bool:
    """Return whether anything is rebuilt for the backward of `operation`, whose output this is."""
    node: Any = output.grad_fn
    return any(slot.function is not None for slot in node.shelf.slots)


# ----------------------------------------------------------------------------------------------------- arguments


class _Place(NamedTuple):
    """Where a tensor was among the arguments of a call."""

    number: int


def bound(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], Function]:
    """Return the tensors among arguments, also those in lists, and the function of these alone."""
    tensors: list[Tensor] = []
    rest = [_taken(one, tensors) for one in args]
    named = {name: _taken(one, tensors) for name, one in kwargs.items()}

    def call(*given: Tensor) -> Any:
        return function(
            *(_filled(one, given) for one in rest), **{name: _filled(one, given) for name, one in named.items()}
        )

    return tensors, call


def _taken(one: Any, tensors: list[Tensor]) -> Any:
    """Return an argument with places in place of tensors, which are added to a list."""
    if isinstance(one, Tensor):
        tensors.append(one)
        return _Place(len(tensors) - 1)
    return type(one)(_taken(each, tensors) for each in one) if type(one) in (list, tuple) else one


def _filled(one: Any, given: Sequence[Tensor]) -> Any:
    """Return an argument with tensors in their places."""
    if type(one) is _Place:
        return given[one.number]
    return type(one)(_filled(each, given) for each in one) if type(one) in (list, tuple) else one


class Expression:
    """A function of tensors that rebuilds some of them first."""

    def __init__(self, function: Function, tensors: Sequence[Tensor], found: Sequence[Source | None]) -> None:
        self.function = function
        self.depth = 1 + max((depth(one.function) for one in found if one is not None), default=0)
        self.state: list[Tensor] = []
        self.parts: list[tuple[Function | None, list[int]]] = []
        numbers: dict[int, int] = {}
        for tensor, one in zip(tensors, found, strict=True):
            state = (tensor,) if one is None else one.state
            for each in state:
                if id(each) not in numbers:
                    numbers[id(each)] = len(self.state)
                    self.state.append(each)
            self.parts.append((one and one.function, [numbers[id(each)] for each in state]))

    def take_state(self) -> tuple[Tensor, ...]:
        """Return the tensors that it is a function of, and hold them no longer."""
        state, self.state = tuple(self.state), []
        return state

    def use(self) -> None:
        """Tell what rebuilds tensors that a layer will call it once in each backward pass."""
        for function, _ in self.parts:
            if function is not None:
                use(function)

    def __call__(self, *state: Tensor) -> Any:
        """Return the function of the tensors, rebuilt from what has been taken."""
        given = (
            state[at[0]] if function is None else function(*(state[i] for i in at)) for function, at in self.parts
        )
        return self.function(*given)


def depth(function: Any) -> int:
    """Return how many functions deep something is rebuilt."""
    if isinstance(function, Read):
        function = function.recipe.function
    if isinstance(function, Plain):
        function = function.function
    if isinstance(function, Expression):
        return function.depth
    rebuild = getattr(function, "rebuild", None)
    return 1 if rebuild is None else 1 + depth(rebuild)


# ---------------------------------------------------------------------------------- what takes fewer bytes to keep


class _Narrow(Plain):
    """What takes fewer bytes to keep than its output."""


def is_narrow(found: Source) -> bool:
    """Whether a tensor is kept as something narrower; sums with it are not: each would be rebuilt from all."""
    return isinstance(found.function, Read) and isinstance(found.function.recipe.function, _Narrow)


def note_if_narrow(
    output: Tensor, call: Function, tensors: Sequence[Tensor], keeps: Sequence[bool]
) -> Note | None:
    """Note on an output what it is a function of, if keeping that takes no more bytes, and return the note.

    This can be so for casts, repetitions, and sums with a parameter or with what a norm keeps.

    Args:
        output: of an operation.
        call: the operation, of tensors.
        tensors: its arguments.
        keeps: whether it keeps each.

    """
    widens, extra, found = output.dtype != tensors[0].dtype, dict[int, int](), []
    for tensor, kept in zip(tensors, keeps, strict=True):
        one, more = narrow(tensor)
        widens = widens or one is not None
        if one is None:
            near = source(tensor)
            if near is not None and depth(near.function) <= SHALLOW and not is_narrow(near):
                one = near
            elif not kept:
                more = _held(tensor)
        found.append(one)
        extra |= more
    if sum(extra.values()) >= output.nbytes + widens:
        return None
    expression = Expression(call, tensors, found)
    if expression.depth > DEEPEST:
        return None
    state = expression.take_state()
    return note_narrow(output, _Narrow(expression, output.device.type), state, extra)


def _held(tensor: Tensor) -> dict[int, int]:
    """Return the memory that is held if a tensor is: none of a parameter, or of what others keep anyway."""
    storage = tensor.untyped_storage()
    free = owned(tensor) or hasattr(storage, SHARED) or normed(tensor)
    return {} if free else {storage_id(storage): storage.nbytes()}


# ---------------------------------------------------------------------------------------- what operations keep

Keeps = Callable[[Sequence[Tensor]], Sequence[bool]]


class Rule(NamedTuple):
    """What a function of PyTorch keeps; each is one operation, which reads its tensors once.

    Attributes:
        keeps: of the tensors among its arguments, whether it keeps each.
        keeps_output: whether it keeps what it returns; it has one tensor then.
        noted: whether the output gets a note of what it is rebuilt from; products, not computed again, get none.
        replaced: whether it may keep something else, as `operation` does it.
        cast: whether autocast casts its arguments.

    """

    keeps: Keeps
    keeps_output: bool = False
    noted: bool = True
    replaced: bool = True
    cast: bool = False


def keep_nothing(tensors: Sequence[Tensor]) -> Sequence[bool]:
    """Keep none of the tensors."""
    return [False] * len(tensors)


def keep_everything(tensors: Sequence[Tensor]) -> Sequence[bool]:
    """Keep all tensors."""
    return [True] * len(tensors)


def keep_input(tensors: Sequence[Tensor]) -> Sequence[bool]:
    """Keep one tensor."""
    return [one.requires_grad for one in tensors] if len(tensors) == 1 else keep_nothing(tensors)


def keep_factors(tensors: Sequence[Tensor]) -> Sequence[bool]:
    """Keep each of two factors for the other's gradient, and what follows them."""
    if len(tensors) < 2:
        return keep_nothing(tensors)
    a, b, *others = tensors
    return [b.requires_grad, a.requires_grad, *(True for _ in others)]


def keep_summed_factors(tensors: Sequence[Tensor]) -> Sequence[bool]:
    """Keep the factors of a product that is added to the first tensor."""
    return [False, *keep_factors(tensors[1:])]


def keep_quotient(tensors: Sequence[Tensor]) -> Sequence[bool]:
    """Keep the divisor, and the dividend for its gradient."""
    if len(tensors) < 2:
        return keep_nothing(tensors)
    a, b = tensors
    return [b.requires_grad, a.requires_grad or b.requires_grad]


def keep_indexed(tensors: Sequence[Tensor]) -> Sequence[bool]:
    """Keep indices, if they are numbers."""
    return [False, *(one.dtype == torch.int64 for one in tensors[1:])]


def keep_normed(tensors: Sequence[Tensor]) -> Sequence[bool]:
    """Keep the input of a norm, and parameters, which exist anyway."""
    x, *parameters = tensors
    return [x.requires_grad, *(isinstance(one, nn.Parameter) for one in parameters)]
