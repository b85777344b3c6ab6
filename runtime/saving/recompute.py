"""How a tensor is recomputed in backward, from tensors that are stored or recomputed themselves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from fitact.runtime.kernels import active_autocast
from fitact.runtime.torch_internals import (
    FakeTensor,
    any_autocast,
    mark_of,
    next_call,
    version_guard,
    version_of_saved,
    without_torch_function,
)

from . import cheap
from .storage import (
    CHANGED,
    Hooks,
    Layout,
    Made,
    Mark,
    Stored,
    at_version,
    in_layout,
    is_parameter,
    layout_of,
    marked,
    quietly,
)

# Stores a tensor, given the mark on its memory, and whether it has a gradient and is not the user's.
Store = Callable[[Tensor, Mark, bool], Stored]
MOST, WIDER = 30, 12  # bytes that are recomputed for a byte of a tensor; before a wider copy is made of it
# Sums in a row, as of a residual stream: backward computes the first ones first and holds each until it is read.
SUMS = 8
# Of arguments that stay what they are: numbers, texts, and what PyTorch has by name.
CONSTANT = frozenset(map(type, (None, True, 0, 0.0, "", ..., torch.float32, torch.strided, torch.preserve_format)))
PLAIN = frozenset({Tensor, nn.Parameter, FakeTensor})
CHAIN = 100  # tensors in a row, each computed from the one before
WAITS = 4  # computations in a row that wait for a tensor to be stored


class Operand:
    """A tensor that a recomputation reads: what autograd stores of it, or its own recomputation, or itself.

    Attributes:
        mark: of its memory.
        recompute: how to recompute it; None if it is stored.
        later: how to recompute it once what that takes is stored.
        tensor: the tensor, if it is a parameter, or storing it would take less than the value.
        weak: a weak reference to it, if neither autograd nor anything else saved it yet.
        grows: whether that has a gradient and is no parameter or input of the user.

    """

    __slots__ = ("grows", "later", "layout", "mark", "recompute", "tensor", "version", "weak")

    def __init__(self, mark: Mark, version: int, layout: Layout, recompute: Recompute | None = None) -> None:
        self.mark, self.version, self.layout, self.recompute = mark, version, layout, recompute
        self.tensor: Tensor | None = None
        self.weak: Callable[[], Tensor | None] | None = None
        self.later: Recompute | None = None
        self.grows = False

    def is_stored(self) -> bool:
        """Return whether autograd stores the tensor by now, or what it is recomputed from."""
        stored = self.mark.stored(self.version, self.layout) if self.mark.known else None
        if stored is not None and not stored.spare:
            return True
        if self.later is not None and self.later.is_free():
            self.recompute, self.tensor = self.later, None
        return self.recompute is not None

    def bytes(self) -> float:
        """Return what storing the tensor adds; without end if it may be gone."""
        if self.mark.known and (stored := self.mark.stored(self.version, self.layout)) is not None:
            return stored.spared
        if self.tensor is not None:
            return self.tensor.untyped_storage().nbytes()
        tensor = self._alive()
        return inf if tensor is None else tensor.untyped_storage().nbytes() - self.mark.frees()

    def _alive(self) -> Tensor | None:
        if self.tensor is not None or self.weak is None:
            return self.tensor
        tensor = self.weak()  # the user's, whose `data` may have been replaced
        return None if tensor is None or mark_of(tensor.untyped_storage()) is not self.mark else tensor

    def _is_there(self, tensor: Tensor) -> bool:
        """Return whether a tensor is unchanged and has its memory, which FSDP takes from weights between uses."""
        unchanged = version_of_saved(tensor) == self.version and self.mark.is_of(tensor, self.version)
        return unchanged and tensor.untyped_storage().nbytes() >= min(tensor.nbytes, 1)

    def store(self, store: Store) -> Stored | Computed | None:
        """Return what the tensor is read from, which is stored from now on; None if it is gone or was changed."""
        if self.later is not None:
            self.is_stored()
        if self.recompute is not None:
            return self.recompute.store(store)
        stored = self.mark.stored(self.version, self.layout)
        if stored is not None:
            if not stored.is_current():
                return None
            stored.readers += 1
            stored.needed = True
        elif (tensor := self._alive()) is not None and self._is_there(tensor):
            stored = store(tensor, self.mark, self.grows)
            stored.ours = stored.needed = True
        if stored is not None and self.weak is not None:
            self.tensor = None  # what is stored has it, or codes of it, or the hooks elsewhere
        return stored


class Unsuitable(Exception):  # noqa: N818  no error
    """A value cannot be recomputed, or that would take too much."""


class Recompute:
    """How a tensor is recomputed: a function, and the arguments of its call.

    Attributes:
        operands: the tensors among the arguments, in their order.
        unsaved: the tensors that nothing else stored yet when this was made, by the identity of their marks.
        work: bytes that are written to compute it.
        layout: the tensor's.
        sums: how many sums are in a row.
        holds: whether it refers, directly or not, to tensors that nothing else stored.
        waits: how many computations are in a row that wait for one tensor to be stored.
        chain: how many tensors are in a row that are known to be computed from each other.
        version: the tensor's.

    Args:
        function: pure.
        args: its arguments.
        kwargs: its arguments by name.
        output: the tensor, or the one that will have its value.
        hooks: those outside of the context.
        autocast: whether one may be on.
        changes: how often the output will be changed in place until it has the value; 0 if it has it.

    Raises:
        Unsuitable: there is no tensor among the arguments, or one that shares the output's memory, is complex or
            of inference mode; the output has not its memory alone; or much would have to be computed.

    """

    __slots__ = (
        *("__weakref__", "_args", "_autocast", "_computed", "_function", "_kwargs", "holds"),
        *("chain", "largest", "layout", "operands", "size", "sums", "unsaved", "version", "waits", "work"),
    )

    def __init__(
        self,
        function: Callable[..., Tensor],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        output: Tensor,
        hooks: Hooks | None,
        autocast: bool,
        changes: int,
    ) -> None:
        storage = output.untyped_storage()
        self._function, own = function, None if changes else storage
        self.operands: list[Operand] = []
        self.unsaved: dict[int, Operand] | None = None
        self.size = self.largest = self.work = storage.nbytes()
        self.sums = self.waits = self.chain = 0
        self.holds = False
        self._computed: Callable[[], Computed | None] | None = None
        self._args = self._taken(args, hooks, own)
        self._kwargs = (
            dict(zip(kwargs, self._taken(kwargs.values(), hooks, own), strict=True)) if kwargs else kwargs
        )
        self.sums += function in cheap.SUMS
        if not self.operands or self.size != output.nbytes or self.work > MOST * self.largest or self.sums > SUMS:
            raise Unsuitable
        self._refer()
        self.version, self.layout = version_of_saved(output) + changes, layout_of(output)
        self._autocast = None
        if autocast:
            device = output.device.type
            dtype = active_autocast(device)
            self._autocast = None if dtype is None else (device, dtype)

    def _taken(self, arguments: Iterable[Any], hooks: Hooks | None, own: torch.UntypedStorage | None) -> list[Any]:
        """Return arguments with operands in place of tensors; nothing in them can change."""
        taken: list[Any] = []
        for argument in arguments:
            kind = type(argument)
            if kind is Tensor or isinstance(argument, Tensor):
                taken.append(self._operand(argument, hooks, own))
            elif kind in CONSTANT:
                taken.append(argument)
            elif kind is Operand:
                self.operands.append(argument)
                taken.append(argument)
            elif isinstance(argument, tuple | list):
                parts = self._taken(argument, hooks, own)
                taken.append(parts if kind is list else tuple(parts))
            elif isinstance(argument, Number) or (kind is slice and _is_constant(argument)):
                taken.append(argument)
            else:  # an array, say, which may change
                raise Unsuitable
        return taken

    def _operand(self, tensor: Tensor, hooks: Hooks | None, own: torch.UntypedStorage | None) -> Operand:
        # a class of the user's computes as it likes
        if tensor.layout is not torch.strided or not (type(tensor) in PLAIN or isinstance(tensor, nn.Parameter)):
            raise Unsuitable
        storage = tensor.untyped_storage()
        if storage is own or tensor.is_inference():
            raise Unsuitable
        mark, version, layout = marked(tensor, hooks, storage), version_of_saved(tensor), layout_of(tensor)
        if not mark.is_of(tensor, version) or tensor.is_neg():
            raise Unsuitable
        operand = Operand(mark, version, layout)
        self.operands.append(operand)
        inner: Recompute | None = mark.recompute
        self.holds = self.holds or (inner is not None and inner.holds)
        if mark.known and (stored := mark.stored(version, layout)) is not None:
            if stored.spare:
                self.unsaved = {**(self.unsaved or {}), id(mark): operand}
            return operand
        current = inner is not None and inner.version == version
        if inner is not None and current and inner.pays() and not self._cuts(inner):
            operand.recompute = inner
            self.work += inner.work
            self.largest = max(self.largest, inner.largest)
            self.sums, self.waits = max(self.sums, inner.sums), max(self.waits, inner.waits)
            self.chain = max(self.chain, inner.chain)
            if inner.unsaved:
                self.unsaved = {**self.unsaved, **inner.unsaved} if self.unsaved else inner.unsaved
        elif is_parameter(tensor):
            operand.tensor = tensor.detach()
        else:
            if inner is not None and current and inner.waits < WAITS and not inner.holds:
                operand.later, self.waits = inner, max(self.waits, inner.waits + 1)
            elif inner is not None and inner.chain >= CHAIN:
                mark.recompute = inner = None  # a state that goes from step to step would hold all before
            operand.tensor, operand.grows = tensor, tensor.requires_grad and not tensor.is_leaf
            operand.weak = TensorWeakRef(tensor)
            self.chain = max(self.chain, 0 if inner is None else inner.chain + 1)
            self.unsaved = {**self.unsaved, id(mark): operand} if self.unsaved else {id(mark): operand}
        return operand

    def _refer(self) -> None:
        """Refer to operands that nothing else stores, if they take less than the value.

        Otherwise it can be recomputed only if something else stores them later.
        """
        if self.unsaved is None:
            return
        pays = self.pays()
        self.holds = self.holds or pays
        for operand in self.operands:
            if operand.tensor is not None and operand.weak is not None:
                operand.tensor = operand.tensor.detach() if pays else None

    def let_go(self) -> None:
        """Refer to operands that nothing else stores no longer; then nothing is recomputed from them."""
        for operand in self.operands:
            if operand.weak is not None:
                operand.tensor = None

    def _cuts(self, inner: Recompute) -> bool:
        """Return whether an operand had better be stored: it takes much to compute, and a wider tensor follows."""
        return self.size > inner.size and inner.work > WIDER * inner.largest

    def pays(self) -> bool:
        """Return whether storing what it needs takes less than its value."""
        return self.unsaved is None or self.adds() < self.size

    def adds(self) -> float:
        """Return the bytes that storing what it needs adds to what is stored."""
        if self.unsaved is None:
            return 0
        self.unsaved = {key: each for key, each in self.unsaved.items() if not each.is_stored()} or None
        return sum(map(Operand.bytes, self.unsaved.values())) if self.unsaved else 0

    def is_free(self) -> bool:
        """Return whether all that it needs is stored."""
        self.adds()
        return self.unsaved is None

    def alive(self) -> Computed | None:
        """Return what computes the value for those who will read it; None if nobody will."""
        return self._computed and self._computed()

    def store(self, store: Store) -> Computed | None:
        """Return what computes the value for one more reader; None if an operand is gone or was changed."""
        computed = self.alive()
        if computed is None:
            if not self.pays():
                return None
            values = []
            for operand in self.operands:
                value = operand.store(store)
                if value is None:
                    return None
                values.append(value)
            computed = Computed(self, values)
            self._computed = weakref.ref(computed)
        computed.readers += 1
        return computed

    def wait(self, stored: Stored) -> None:
        """Remember that a stored tensor can be recomputed once a single other one is stored."""
        waiting = None if self.holds else self
        while waiting is not None and waiting.unsaved and len(waiting.unsaved) == 1:
            (unsaved,) = waiting.unsaved.values()
            unsaved.mark.wait(stored)
            stored.recompute, stored.first = self, stored.first or next_call() - 1
            waiting = unsaved.later

    def functions(self) -> Iterator[Callable[..., Tensor]]:
        """Return the functions that compute the tensor, the last one first."""
        yield self._function
        for operand in self.operands:
            if operand.recompute is not None:
                yield from operand.recompute.functions()

    def is_difference(self) -> bool:
        """Return whether the tensor is the difference of two of its size."""
        shapes = [operand.layout[0] for operand in self.operands]
        return self._function in cheap.DIFFERENCES and shapes == [self.layout[0]] * 2

    def leaves(self) -> Iterator[Stored]:
        """Return what is stored of the tensors from which this and its operands are computed."""
        for operand in self.operands:
            if operand.recompute is not None:
                yield from operand.recompute.leaves()
            elif (stored := operand.mark.stored(operand.version, operand.layout)) is not None:
                yield stored

    def run(self, values: Sequence[Stored | Computed]) -> Tensor:
        """Compute the tensor."""
        pairs = zip(values, self.operands, strict=True)
        tensors = [value.read(operand.layout) for value, operand in pairs]
        filling = iter(tensors)
        args = [_filled(argument, filling) for argument in self._args]
        kwargs = {name: _filled(argument, filling) for name, argument in self._kwargs.items()}
        if self._autocast is None and not any_autocast():
            made = self._function(*args, **kwargs)
        else:
            device, dtype = self._autocast or (max(tensors, key=Tensor.dim).device.type, None)
            with torch.autocast(device, dtype, enabled=dtype is not None):
                made = self._function(*args, **kwargs)
        if layout_of(made) == self.layout:
            return made
        size, stride, _ = self.layout
        return torch.empty_strided(size, stride, dtype=made.dtype, device=made.device).copy_(made)


def _is_constant(part: slice) -> bool:
    return all(end is None or isinstance(end, Number) for end in (part.start, part.stop, part.step))


def _filled(argument: Any, tensors: Any) -> Any:
    if type(argument) is Operand:
        return next(tensors)
    if type(argument) in (list, tuple):
        return type(argument)(_filled(part, tensors) for part in argument)
    return argument


class Computed(Made):
    """A tensor that is computed in backward.

    Attributes:
        value: the tensor, if it could not be computed any more.

    """

    readers = 0
    sources: Sequence[Stored | Computed]
    value: Tensor | None = None

    def __init__(self, recompute: Recompute, sources: Sequence[Stored | Computed]) -> None:
        self.recompute, self.sources, self.first = recompute, sources, next_call() - 1

    def _make(self) -> Tensor:
        if self.value is not None:
            return self.value
        tensor, version = self.recompute.run(self.sources), self.recompute.version
        return at_version(tensor, version) if version else tensor

    def read(self, layout: Layout) -> Tensor:
        """Return a view of the tensor."""
        tensor = self.made()
        return tensor if layout == self.recompute.layout else in_layout(tensor, layout)

    def as_saved(self, tensor: Tensor) -> Tensor:
        """Return what was computed, such that the graph of a gradient saves no more than how to compute it."""
        outside = self.recompute.operands[0].mark.hooks
        if self.value is None and version_of_saved(tensor) == self.recompute.version:
            marked(tensor, None if outside is None else outside()).recompute = self.recompute
        return tensor


class Reading:
    """A saved tensor that is computed in backward, or a view of one; raises if it was changed in place.

    Args:
        computed: what computes or decodes it.
        tensor: what autograd saves.
        outside: whether there are hooks outside of the context; PyTorch checks no changes then.

    """

    __slots__ = ("_guard", "_saved_at", "computed", "last", "layout")

    def __init__(self, computed: Computed | Stored, tensor: Tensor, outside: bool) -> None:
        self.computed, self.layout, self.last = computed, layout_of(tensor), next_call() - 1
        if computed.guard is None and not outside:
            computed.guard = version_guard(tensor)
        self._guard = guard = computed.guard  # of another tensor, if the graph of a gradient saves one made anew
        self._saved_at = version_of_saved(tensor if guard is None else guard)
        computed.ours = False

    def unpack(self) -> Tensor:
        """Return the tensor to autograd."""
        if self._guard is not None and version_of_saved(self._guard) != self._saved_at:
            raise RuntimeError(CHANGED.format(version_of_saved(self._guard), self._saved_at))
        differentiated = torch.is_grad_enabled()
        with quietly() if differentiated else without_torch_function():
            tensor = self.computed.read(self.layout)
            return self.computed.as_saved(tensor) if differentiated else tensor
