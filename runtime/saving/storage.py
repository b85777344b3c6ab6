"""How one saved tensor is stored: itself, as bits, in fewer bytes, or recomputed from other saved tensors.

A `Mark` on a tensor's memory says what is known of it: the storage that autograd has now, if any, and how the
tensor can be recomputed. It refers to storages weakly: what autograd frees is freed, whatever lives on.
"""

from __future__ import annotations

import math
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.weak import TensorWeakRef

from fitact.runtime.torch_internals import (
    FakeTensor,
    after_backward,
    base_of,
    mark_of,
    next_call,
    set_mark,
    tree_leaves,
    version_guard,
    version_of_saved,
    with_torch_function,
    without_torch_function,
)

from .bits import pack, unpack
from .blocks import decode, encode

Layout = tuple[torch.Size, tuple[int, ...], int]
MANY = 32  # parts of one memory, each stored as itself, that are known
CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: it is at "
    "version {}; expected version {} instead"
)
SPOILT = (
    "a tensor from which fitact.saving computes another was changed in place, inside of other saved-tensor hooks, "
    "such as a checkpoint's: change a copy of it, or leave this module out of the context"
)
OVERWRITTEN = (
    "a torch.autograd.Function has written, in its backward, over a tensor that it had saved and that others read "
    "in fitact.saving: let it write elsewhere, or run it in fitact.runtime.saving.baseline()"
)


class Hooks:
    """The hooks outside of a context: what is stored by them can be read inside of them alone.

    Attributes:
        own: whether they offload, and get no memory that is there in any case.

    """

    __slots__ = ("__weakref__", "own", "pack", "unpack")

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor], own: bool = False) -> None:
        self.pack, self.unpack, self.own = pack, unpack, own

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hooks) and (self.pack, self.unpack) == (other.pack, other.unpack)


class Watched:
    """What hooks return that only look at a tensor, such as those that count.

    Args:
        tensor: to be stored.
        dropped: called if the tensor turns out to be recomputed, after all.

    """

    __slots__ = ("dropped", "tensor")

    def __init__(self, tensor: Tensor, dropped: Callable[[], object]) -> None:
        self.tensor, self.dropped = tensor, dropped


class Mark:
    """What is known of a tensor's memory.

    Attributes:
        hooks: those outside, weakly: those of a checkpoint hold the tensors that it recomputes.
        known: weak references to what is stored of it.
        recompute: how to recompute it; None if that is unknown.
        waiting: weak references to what is stored elsewhere, and can be recomputed once this memory is stored.
        oldest: the least version that its tensors have by now.

    """

    __slots__ = ("_dtype", "hooks", "known", "oldest", "recompute", "waiting")

    def __init__(
        self, hooks: weakref.ref[Hooks] | None, dtype: torch.dtype | None = None, oldest: int = 0
    ) -> None:
        self.hooks, self._dtype, self.oldest = hooks, dtype, oldest
        self.known: Sequence[Callable[[], Stored | None]] = ()
        self.recompute: Any = None
        self.waiting: Sequence[Callable[[], Stored | None]] = ()

    def changed(self, version: int) -> Mark:
        """Return what is known after a change of a tensor of this version, whether or not PyTorch counts it."""
        self.oldest = max(self.oldest, version) + 1  # for those who hold this mark
        return Mark(self.hooks, self._dtype, self.oldest)

    def is_of(self, tensor: Tensor, version: int) -> bool:
        """Return whether all this is true of a tensor: not if it is complex, of another dtype, or counts anew."""
        return tensor.dtype is self._dtype and version >= self.oldest

    def add(self, stored: Stored) -> None:
        """Remember, weakly, what is stored of the memory; of many parts some will do."""
        alive = [ref for ref in self.known if ref() is not None] if self.known else ()
        if len(alive) > MANY:
            rest = [ref for ref in alive[MANY:] if (other := ref()) is not None and other.needed]
            alive = [*alive[:MANY], *rest]
        self.known = (*alive, weakref.ref(stored))

    def alive(self, version: int) -> Iterator[Stored]:
        """Return all that is stored of the memory in any layout."""
        return (stored for ref in self.known if (stored := ref()) is not None and stored.version == version)

    def has(self, version: int) -> bool:
        """Return whether anything is stored of the memory."""
        return bool(self.known) and next(self.alive(version), None) is not None

    def stored(self, version: int, layout: Layout) -> Stored | None:
        """Return what is stored from which a tensor can be read, None if nothing is."""
        for ref in self.known:  # a generator would take as long again
            stored = ref()
            if stored is not None and stored.version == version and stored.can_read(layout):
                return stored
        return None

    def same(self, tensor: Tensor, version: int) -> Stored | None:
        """Return the storage of this very tensor, or what computes it in any layout; None if there is none."""
        layout = layout_of(tensor)
        for ref in self.known:
            stored = ref()
            if stored is None or stored.version != version:
                continue
            if stored.layout == layout or (stored.replaced and type(stored) is not Quantised):
                return stored
        return None

    def needed(self) -> list[Stored]:
        """Return what is stored of the memory that something is recomputed from."""
        return [stored for ref in self.known if (stored := ref()) is not None and stored.needed]

    def wait(self, stored: Stored) -> None:
        """Remember, weakly, what can be recomputed once the memory is stored."""
        self.waiting = (*(ref for ref in self.waiting if ref() is not None), weakref.ref(stored))

    def frees(self) -> int:
        """Return the bytes that can be recomputed once the memory is stored."""
        waiting = (stored for ref in self.waiting if (stored := ref()) is not None)
        return sum(0 if stored.replaced or stored.stays else stored.recompute.size for stored in waiting)


def marked(tensor: Tensor, hooks: Hooks | None, storage: torch.UntypedStorage | None = None) -> Mark:
    """Return the mark on a tensor's memory; makes one if there is none, or only one made inside of other hooks."""
    storage = tensor.untyped_storage() if storage is None else storage
    mark: Mark | None = mark_of(storage)
    around = None if hooks is None else weakref.ref(hooks)
    if mark is None or mark.hooks != around:
        mark = Mark(around, None if tensor.is_complex() else tensor.dtype)
        set_mark(storage, mark)
    return mark


def layout_of(tensor: Tensor) -> Layout:
    """Return which elements of its memory a tensor has."""
    return tensor.size(), tensor.stride(), tensor.storage_offset()  # type: ignore[return-value]


def at_version(tensor: Tensor, version: int) -> Tensor:
    """Return a new tensor that has counted as many changes in place as one of this version."""
    for _ in range(version - version_of_saved(tensor)):
        increment_version(tensor)
    return tensor


def in_layout(tensor: Tensor, layout: Layout) -> Tensor:
    """Return a tensor with these elements of the memory of another."""
    return tensor if layout_of(tensor) == layout else tensor.as_strided(*layout)


# ---------------------------------------------------------------------------------------------------------- stored


class Made(ABC):
    """A tensor that is made in backward, once in each pass for all its readers, and held until the last has it.

    Attributes:
        readers: how many saved tensors and computations read it.
        first: the number of the first node that reads it, where this is known; its backward runs last.
        ours: whether no operation of the model saved it, or a tensor of its memory.
        sources: what it is made from.
        replaced: whether nothing of it is stored any more, and it is what its source is.
        how: how it is stored, for reports.
        guard: counts changes of the tensor in place; None before autograd saved it.

    """

    # of the class, since hardly one has another value and many are made
    readers, first, ours, replaced = 1, 0, True, False
    sources: Sequence[Made] = ()
    how = "recomputed"
    guard: Tensor | None = None
    _made: Tensor | None = None
    _made_at = _left = 0

    @abstractmethod
    def _make(self) -> Tensor:
        """Return the tensor."""

    def made(self) -> Tensor:
        """Return the tensor to one reader."""
        if self._made is not None and version_of_saved(self._made) != self._made_at:
            self.set_aside()  # a function of the user's has written over what it had saved
            if self._made is not None:
                raise RuntimeError(OVERWRITTEN)
        tensor = self._made
        if tensor is None:
            tensor = self.sources[0].made() if self.replaced else self._make()
            self._left = self._left or self.readers
            if self._left > 1:
                self._hold(tensor)
        self._left -= 1
        if self._left < 1 and self._made is not None:
            self._made = None
            held.drop(self)
        return tensor

    def as_saved(self, tensor: Tensor) -> Tensor:
        """Return the tensor as it was made, such that the graph of a gradient saves it in the same way."""
        return tensor

    def _hold(self, tensor: Tensor) -> None:
        if not after_backward(self):
            self._left = 1
            return
        self._made, self._made_at = tensor, version_of_saved(tensor)
        held.add(self)
        if self.ours:  # PyTorch holds none such: it takes the place of what it is made from
            for source in self.sources:
                source.set_aside()

    def is_repeatable(self) -> bool:
        """Return whether the tensor can be made again in the same pass."""
        return all(source.is_repeatable() for source in self.sources)

    def is_decoded(self) -> bool:
        """Return whether the tensor is stored in codes, or made from such."""
        return any(source.is_decoded() for source in self.sources)

    def set_aside(self) -> None:
        """Free the tensor until its next reader, for which it is made again, if that is possible."""
        if self._made is not None and self.is_repeatable():
            self._made = None
            for source in self.sources:
                source.expect()

    def expect(self) -> None:
        """Expect one more reader in this pass."""
        if self._left < 1:  # it has to be made again
            for source in self.sources:
                source.expect()
        self._left += 1

    def read_by(self, call: int) -> None:
        """Record that the node of this number reads it."""
        if self.first > call:
            self.first = call
            for source in self.sources:
                source.read_by(call)

    def release(self) -> None:
        """Free the tensor, though a reader may not have run."""
        self._made, self._left = None, 0

    def is_held(self, call: int) -> bool:
        """Return whether the tensor is held; frees it if backward has come to a node before the first reader."""
        if self.first > call:
            self.release()
        return self._made is not None


class _Held(threading.local):
    """What the backward passes of this thread hold, by identity.

    Attributes:
        first: at least the largest of theirs: until a node before it runs, nothing is to be freed.

    """

    def __init__(self) -> None:
        self.tensors: dict[int, Callable[[], Made | None]] = {}
        self.first = 0

    def add(self, made: Made) -> None:
        """Hold a tensor until `drop`, or until none of its readers is left to run."""
        self.tensors[id(made)] = weakref.ref(made)
        self.first = max(self.first, made.first)

    def drop(self, made: Made) -> None:
        """Hold a tensor no longer."""
        self.tensors.pop(id(made), None)
        if not self.tensors:
            self.first = 0

    def free_passed(self, call: int) -> None:
        """Free what only nodes after that of a number would read: backward runs from the last to the first."""
        tensors, self.tensors, self.first = self.tensors, {}, 0
        for ref in tensors.values():
            if (made := ref()) is not None and made.is_held(call):
                self.add(made)


held = _Held()


class Stored(Made):
    """A tensor as it was saved; the hooks that were on outside of the context store it, if there are any.

    Attributes:
        version: how often it had been changed in place.
        last: the number of the last node that reads it; its backward runs first.
        needed: whether something is recomputed from it.
        separate: whether it is a tensor of its own, which no change of the saved one reaches.
        instead: what it is computed by, if that turned out to add less before it was settled.
        recompute: how to recompute it, if it waits for another tensor to be stored.
        stays: whether it is never replaced: one that was is computed from it, or its memory is stored twice.
        small: whether it is in no codes only since one of a small number might be 0; it may be computed from such.
        kinked: how many readers it had when a kind of ReLU had saved it, which needs its slope alone; -1 if not.
        spared: how many bytes less that slope takes.

    """

    how = "itself"
    ours, needed, separate, instead = False, False, False, None
    stays, small, _spoilt = False, False, False
    kinked, spared = -1, 0
    recompute: Any = None
    _guard: Any = None
    _hooks: Hooks | None = None
    _layout: Layout | None = None
    _copied: Tensor | None = None

    def __init__(self, tensor: Tensor, hooks: Hooks | None) -> None:
        # autograd reads a parameter as it is in backward, also if its data was replaced
        self._saved: Any = tensor if tensor.is_leaf else tensor.detach()
        self.version, self.last, self._hooks = version_of_saved(tensor), next_call() - 1, hooks
        if hooks is not None:
            self.first = self.last

    @property
    def layout(self) -> Layout:
        """The tensor's layout."""
        if self._layout is None:
            self._layout = layout_of(self._saved)
        return self._layout

    @property
    def tensor(self) -> Tensor:
        """The tensor, before it is settled."""
        tensor: Tensor = self._saved
        return tensor

    def settle(self) -> Stored:
        """Hand the tensor to the hooks outside, once it is known that it has to be stored."""
        if self._hooks is not None:
            tensor: Tensor = self._saved
            if tensor.layout is not torch.strided or tensor.is_nested:
                self._layout, self._whole = (torch.Size(()), (), 0), False
                self._saved = self._hooks.pack(tensor)
                return self
            self._layout, self._whole = layout_of(tensor), is_dense(tensor)
            self._guard = version_guard(tensor)
            if self._whole and not tensor.is_contiguous():
                tensor = tensor.as_strided((tensor.numel(),), (1,), 0)
            self._saved = self._hooks.pack(tensor)
        return self

    def unpack(self) -> Tensor:
        """Return the tensor, to autograd or to what reads it; raises RuntimeError if it was changed in place."""
        tensor: Tensor | None = self._saved
        if self._hooks is None and tensor is not None:
            if version_of_saved(tensor) != self.version:
                raise self._changed(tensor)
            return tensor
        if self.instead is not None:
            value: Tensor = self.instead.unpack()
            return value
        if not self.replaced:
            return self._unpacked(self.layout)
        if self._guard is not None and version_of_saved(self._guard) != self.version:
            raise self._changed(self._guard)
        return self._read_to_autograd()

    def _read_to_autograd(self) -> Tensor:
        with quietly():
            tensor = self.read(self.layout)
        return self.as_saved(tensor) if torch.is_grad_enabled() else tensor

    def as_saved(self, tensor: Tensor) -> Tensor:
        """Do as what computes the tensor does, if it is computed."""
        return self.sources[0].as_saved(tensor) if self.replaced else tensor

    def _changed(self, counts: Tensor) -> RuntimeError:
        return RuntimeError(CHANGED.format(version_of_saved(counts), self.version))

    def read(self, layout: Layout) -> Tensor:
        """Return a tensor of the same memory.

        Raises:
            RuntimeError: it was changed in place and could not be copied before.

        """
        if self.replaced:
            return in_layout(self.made(), layout)
        if self._hooks is not None:
            tensor = self._unpacked(layout)
            if self._spoilt and version_of_saved(tensor) > self.version:
                raise RuntimeError(SPOILT)
            return tensor
        return in_layout(self.unpack() if self._copied is None else self._copied, layout)

    def _unpacked(self, layout: Layout) -> Tensor:
        assert self._hooks is not None
        tensor = self.made()
        if isinstance(self._saved, Watched) and tensor.layout is torch.strided and not tensor.is_nested:
            return in_layout(tensor, layout)
        if not self._whole or (tensor.size(), tensor.stride()) == layout[:2]:
            return tensor
        size, stride, offset = layout
        return tensor.contiguous().as_strided(size, stride, tensor.storage_offset() + offset)

    def _make(self) -> Tensor:
        assert self._hooks is not None
        with with_torch_function():
            return self._hooks.unpack(self._saved)

    def is_repeatable(self) -> bool:
        """Return whether what is stored can be asked for again: a checkpoint outside gives each tensor once."""
        return (self._hooks is None or self._hooks.own) and super().is_repeatable()

    def can_read(self, layout: Layout) -> bool:
        """Return whether a tensor of the same memory can be read from what is stored."""
        return self._hooks is None or self._whole or layout == self.layout or isinstance(self._saved, Watched)

    def is_current(self) -> bool:
        """Return whether what is stored is still the tensor as it was saved, or a copy of that."""
        if self.separate or self._copied is not None:
            return True
        return version_of_saved(self._saved if self._hooks is None else self._guard) == self.version

    def copy(self, storage: torch.UntypedStorage) -> None:
        """Copy the tensor for what is recomputed from it: it is about to be changed in place.

        PyTorch would allow this if no operation saved it, or none whose backward runs. What the user's hooks store
        may be the tensor itself, and there is no other one to give them.
        """
        if self.replaced:
            return
        if self._hooks is not None and not self._hooks.own and not self.separate:
            packed = [leaf for leaf in tree_leaves(self._saved) if isinstance(leaf, Tensor)]
            self._spoilt = not packed or any(leaf.untyped_storage() is storage for leaf in packed)
        if type(self) is Stored and isinstance(self._saved, Stored):  # what offloads
            self._saved.copy(storage)
        if self._hooks is None and self._copied is None:
            tensor: Tensor = self._saved
            self._copied = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            size, stride, offset = self.layout
            self._copied.set_(tensor.untyped_storage().clone(), offset, size, stride)
            if self.ours:
                self._saved = None

    def recompute_instead(self, reading: Any) -> None:
        """Store nothing, not even at first: the tensor can be recomputed."""
        self._saved, self.instead = None, reading

    @property
    def at_hand(self) -> bool:
        """Whether the tensor is here, and not with hooks that do more than look at it."""
        return self._hooks is None or isinstance(self._saved, Watched)

    @property
    def spare(self) -> bool:
        """Whether a slope will be stored in its place, if nothing else reads it."""
        return self.readers == self.kinked and not self.needed and not self.replaced

    def keep_slope(self, slope: Callable[[Tensor], tuple[Tensor, float]]) -> None:
        """Store what `Slope` does in place of the tensor, which nothing else reads."""
        tensor: Tensor = self._saved.tensor if isinstance(self._saved, Watched) else self._saved
        if version_of_saved(tensor) == self.version and is_dense(tensor) and not self.stays:
            tensor = in_layout(tensor, self.layout)
            instead = Slope(tensor, self._hooks, *slope(tensor), None)
            self.drop()
            self.recompute_instead(instead)
            self.version, self.stays = -1, True  # no other reader finds it

    def replace(self, computed: Made) -> None:
        """Free what is stored: from now on the tensor is computed."""
        self._layout = self.layout
        if self._hooks is None:
            self._guard = None if self._saved is None else version_guard(self._saved)
        elif not self._hooks.own:  # then PyTorch sees no changes
            self._guard = None
        self.drop()
        self._hooks = self._copied = None
        self.separate, self.replaced, self.sources = True, True, (computed,)
        computed.read_by(self.first)

    def drop(self) -> None:
        """Free the tensor."""
        if isinstance(self._saved, Watched):
            self._saved.dropped()
        self._saved = None


class Compact(Stored):
    """A tensor in fewer bytes, without loss."""

    separate = True

    def unpack(self) -> Tensor:
        """Return the tensor to autograd."""
        return self._read_to_autograd()

    def as_saved(self, tensor: Tensor) -> Tensor:
        """Return a tensor, each reader its own, such that the graph of a gradient saves it in these bytes."""
        marked(tensor, self._hooks).add(self)
        return at_version(tensor, self.version)


class Shape(Compact):
    """The shape of a tensor whose numbers backward does not read, and perhaps the order of its dimensions."""

    how = "its shape"

    def __init__(self, tensor: Tensor, hooks: Hooks | None, ordered: bool) -> None:
        super().__init__(tensor.new_empty(0), hooks)
        self._layout = tensor.size(), tensor.stride() if ordered else (0,) * tensor.dim(), 0

    def read(self, layout: Layout) -> Tensor:
        """Return a tensor of any numbers."""
        tensor: Tensor = self._saved.new_empty_strided(*layout[:2])
        return tensor

    def can_read(self, layout: Layout) -> bool:
        """Return False: nothing can be computed from it."""
        return False


class Bits(Compact):
    """A mask, or the factors 0 and 1/(1 - p) of dropout, in one bit an element."""

    how = "mask in bits"

    def __init__(self, mask: Tensor, hooks: Hooks | None, p: float | None = None) -> None:
        super().__init__(pack(mask if mask.dtype == torch.bool else mask != 0), hooks)
        self.settle()
        self._factor = None if p is None else (mask.dtype, p)
        self.version, self._layout = version_of_saved(mask), layout_of(mask)

    def read(self, layout: Layout) -> Tensor:
        """Return the mask, or the factors."""
        bits = self._saved if self._hooks is None else self.made()
        mask = unpack(bits, *self.layout[:2])
        if self._factor is not None:
            dtype, p = self._factor
            mask = mask.to(dtype).div_(1 - p)
        return in_layout(mask, layout)

    def can_read(self, layout: Layout) -> bool:
        """Return True: bits have no other layout."""
        return True


class Slope(Bits):
    """Between which kinks of a kind of ReLU its input or output is, in one bit an element.

    Args:
        value: what the activation saves.
        hooks: those outside of the context.
        mask: bool, as the value.
        number: what backward gets where the mask is true.
        computed: what computes the value, for those who read it later.

    """

    def __init__(self, value: Tensor, hooks: Hooks | None, mask: Tensor, number: float, computed: object) -> None:
        with quietly():
            super().__init__(mask, hooks)
        self._factor = value.dtype, 1 - 1 / number
        self.version, self._computed = version_of_saved(value), computed
        self._guard = version_guard(value)

    def unpack(self) -> Tensor:
        """Return the number where the mask is true, else 0; RuntimeError if the value was changed in place."""
        if version_of_saved(self._guard) != self.version:
            raise self._changed(self._guard)
        return super().unpack()


class Small(Compact):
    """Indices of int64 in a dtype of fewer bytes."""

    how = "index in fewer bytes"

    def __init__(self, index: Tensor, hooks: Hooks | None, dtype: torch.dtype) -> None:
        whole = is_dense(index)
        super().__init__(index.to(dtype) if whole else index.to(dtype).contiguous(), hooks)
        self.settle()
        self.version, self._layout, self._whole = version_of_saved(index), layout_of(index), whole

    def read(self, layout: Layout) -> Tensor:
        """Return the indices."""
        index: Tensor = self._saved if self._hooks is None else self.made()
        return in_layout(index.long(), layout) if self._whole else index.long()

    def can_read(self, layout: Layout) -> bool:
        """Return whether what is stored are all of the memory's indices, or those."""
        return self._whole or layout == self.layout


class Quantised(Stored):
    """The whole memory of a tensor in block codes, decoded once in each pass for all that read it.

    Attributes:
        bits: of a code; without end if none is read.
        signs: whether elements that are not 0 have their sign.
        exact: what is read in place of the codes, because it is stored anyway.

    """

    ours = separate = True
    _saved = None
    sources: Sequence[Any]
    bits: float
    exact: Stored | None = None
    _layout: Layout = torch.Size(()), (), -1  # no tensor's: what autograd saves is a `Reading`

    def __init__(self, tensor: Tensor, hooks: Hooks | None, bits: int, signs: bool) -> None:
        n, columns = tensor.numel(), next((step for step in tensor.stride()[:-3:-1] if step > 1), 1)
        self._shape = (n // columns, columns) if n % columns == 0 else (n, 1)
        self._dtype, self.bits, self.signs, self.version = tensor.dtype, bits, signs, version_of_saved(tensor)
        self._weak = TensorWeakRef(tensor)
        with quietly():
            parts = encode(tensor.as_strided(self._shape, (self._shape[1], 1)), bits, signs)
        self.sources = [Stored(part, hooks).settle() for part in parts]
        self._outside, self.how = hooks, f"{bits} bits"

    def tensor_at_hand(self) -> Tensor | None:
        """Return the tensor, None if it is gone or was changed."""
        tensor = self._weak()
        mark = None if tensor is None else mark_of(tensor.untyped_storage())
        return None if mark is None or self not in mark.alive(version_of_saved(tensor)) else tensor

    @property
    def at_hand(self) -> bool:
        """Whether all parts are."""
        return all(source.at_hand for source in self.sources)

    def keep_slope(self, slope: Callable[[Tensor], tuple[Tensor, float]]) -> None:
        """Store what `Slope` does in place of the codes, which nothing else reads."""
        if self.readers and self.exact is None:
            with quietly():
                tensor = self._make()
            self.read_exact(Slope(tensor, self._outside, *slope(tensor), None))
        elif self.exact is None:  # slopes are stored already
            self.drop()
        self.version = -1

    def is_finite(self) -> bool:
        """Return whether every number is, which waits for the device."""
        return bool(self.sources[1].unpack().isfinite().all())

    def read(self, layout: Layout) -> Tensor:
        """Return a tensor of the memory."""
        return self.made().as_strided(*layout) if self.exact is None else self.exact.read(layout)

    def read_exact(self, stored: Stored) -> None:
        """Free the codes: the memory is also stored as it is."""
        if not self.replaced and stored.can_read(self._layout):
            self.exact, self.bits, self.how, stored.needed = stored, math.inf, stored.how, True
            self.drop()

    def _make(self) -> Tensor:
        codes, scales, shifts = (source.unpack() for source in self.sources)
        return decode(codes, scales, shifts, self._shape, self._dtype)

    def can_read(self, layout: Layout) -> bool:
        """Return True: the whole memory is stored."""
        return True

    def is_decoded(self) -> bool:
        """Return whether the codes are read."""
        return self.exact is None

    def as_saved(self, tensor: Tensor) -> Tensor:
        """Return a tensor that was decoded, such that it is saved in its codes where gradients are differentiated.

        One that had been changed in place before it was saved is saved as it is.
        """
        tensor = tensor.data  # whose changes in place are counted anew
        if self.version == 0:
            marked(tensor, self._outside).add(self)
        return tensor

    def copy(self, storage: torch.UntypedStorage) -> None:
        """Do nothing: codes do not change with the tensor."""

    def drop(self) -> None:
        """Free the codes."""
        for source in self.sources:
            source.drop()


class Part(Quantised):
    """A tensor that is no view, in codes of its own: of its memory, other parts count their changes themselves."""

    def __init__(self, tensor: Tensor, hooks: Hooks | None, bits: int, signs: bool) -> None:
        super().__init__(tensor.contiguous(), hooks, bits, signs)
        self.version, self._part = version_of_saved(tensor), layout_of(tensor)

    def read(self, layout: Layout) -> Tensor:
        """Return the tensor."""
        return self.made().view(layout[0])

    def can_read(self, layout: Layout) -> bool:
        """Return whether it is this part."""
        return layout == self._part


@contextmanager
def quietly() -> Iterator[None]:
    """Enter a context in which autograd and modes of `torch.overrides` see no operation."""
    with without_torch_function(), torch.no_grad():
        yield


def is_parameter(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter, or a view of one: its memory is the model's in any case."""
    if type(tensor) is nn.Parameter:
        return True
    base = base_of(tensor)
    owner = tensor if base is None else base
    kind = type(owner)  # `isinstance` takes ten times as long
    return kind is nn.Parameter or (kind is FakeTensor and isinstance(owner, nn.Parameter))


def is_leaf(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter or a leaf of the user's with a gradient, or a view of one."""
    base = base_of(tensor)
    owner = tensor if base is None else base
    return isinstance(owner, nn.Parameter) or (owner.is_leaf and owner.requires_grad)


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill its memory, each once."""
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return False
    step = 1
    for stride, size in () if tensor.is_contiguous() else sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != step:
            return False
        step *= size
    return True
