"""Offloading: the memory of saved tensors goes to the host, and comes back before backward needs it."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from typing import Any, Protocol
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fitact.base import UsageError
from fitact.runtime.torch_internals import (
    FakeTensor,
    after_backward,
    storage_id,
    version_guard,
    version_of_saved,
)

from .capture import is_plain
from .storage import CHANGED, Hooks, Stored, layout_of, quietly

Amount = bool | str | float | int
LEAST = 2**20  # bytes: less memory stays where it is
DEPTH = 2  # copies to the host that run at a time, and memories that come back before they are asked for


class Link(Protocol):
    """How memory gets from a device to the host and back, beside what the device computes."""

    def to_host(self, memory: Tensor) -> tuple[Tensor, Any]:
        """Copy bytes once all is computed that was asked for; returns the copy and when it is done."""

    def to_device(self, copy: Tensor) -> tuple[Tensor, Any]:
        """Copy them back, into memory that what was asked for before may still use; returns the same."""

    def wait(self, event: Any, memory: Tensor) -> None:
        """Let what is computed from now on wait for a copy of a device's memory."""

    def finish(self, event: Any) -> None:
        """Wait for a copy."""


class CudaLink:
    """A GPU's: a stream of its own, and pinned memory from PyTorch's pool, which rounds up to a power of two."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def to_host(self, memory: Tensor) -> tuple[Tensor, Any]:
        """Copy bytes to the host."""
        copy = torch.empty_like(memory, device="cpu", pin_memory=True)
        return copy, self._copied(copy, memory)

    def to_device(self, copy: Tensor) -> tuple[Tensor, Any]:
        """Copy them back."""
        memory = torch.empty_like(copy, device=self._device)
        return memory, self._copied(memory, copy)

    def _copied(self, into: Tensor, of: Tensor) -> Any:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            into.copy_(of, non_blocking=True)
            return self._stream.record_event(), current

    def wait(self, event: Any, memory: Tensor) -> None:
        """Let the current stream wait, and the one that the memory belongs to."""
        done, owner = event
        current = torch.cuda.current_stream(self._device)
        current.wait_event(done)
        if current != owner:
            owner.wait_event(done)
            memory.record_stream(current)

    def finish(self, event: Any) -> None:
        """Wait for a copy."""
        event[0].synchronize()


META = torch.device("meta")  # which fake tensors count for, whatever they imitate
LINKS: dict[torch.device, Link] = {}


def _link_of(tensor: Tensor) -> Link | None:
    device = META if isinstance(tensor, FakeTensor) else tensor.device
    if device not in LINKS and device.type == "cuda":
        LINKS[device] = CudaLink(device)
    return LINKS.get(device)


class Memory(Stored):
    """The whole memory of tensors: on the device, on its way, or on the host.

    Attributes:
        bytes: on the device; None if it is on the host.

    """

    _host: Tensor | None = None
    _leaving: Any = None  # when the copy to the host is done, while it runs
    _stayed: Any = None  # the same of memory that stays: nothing reads the copy
    _coming: Any = None  # when the copy back is, until something has waited for it
    _was_read = False  # in this pass: it does not come again ahead of its reader

    def __init__(self, tensor: Tensor, offload: Offload, link: Link, number: int) -> None:
        storage = tensor.untyped_storage()
        self._offload, self._link, self._number = offload, link, number
        self.version, self.size = version_of_saved(tensor), storage.nbytes()
        self._weak = StorageWeakRef(storage)  # so no other storage gets its identity
        self.bytes: Tensor | None = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.bytes.set_(storage)

    def leave(self) -> None:
        """Start to copy the memory to the host."""
        if self.bytes is not None and self._host is None:
            self._host, self._leaving = self._link.to_host(self.bytes)

    def left(self) -> None:
        """Free the memory of the device once it is copied, which the device waits for."""
        if self._leaving is not None and self.bytes is not None:
            self._link.wait(self._leaving, self.bytes)
            self.bytes = self._leaving = None

    def settle_now(self) -> None:
        """Let what is saved no longer share the memory, which is about to be changed."""
        if self._leaving is not None:
            self.left()
        elif self._host is None and self.bytes is not None:
            self.bytes = self.bytes.clone()

    def come(self) -> None:
        """Start to copy the memory back."""
        if self.bytes is None and self._host is not None and not self._was_read:
            self.bytes, self._coming = self._link.to_device(self._host)
            after_backward(self)

    def _make(self) -> Tensor:
        if self._leaving is not None:  # it is needed too soon, and stays
            self._host, self._leaving, self._stayed = None, None, self._leaving
        self._was_read = False
        self.come()
        memory = self.bytes
        assert memory is not None
        if self._coming is not None:
            self._link.wait(self._coming, memory)
            self.bytes = self._coming = None
            self._was_read = True
        self._offload.ahead(self._number)
        return memory

    def release(self) -> None:
        """Free what came back, though nothing may have read it."""
        super().release()
        self._was_read = False
        if self._coming is not None:
            self._link.finish(self._coming)
            self.bytes = self._coming = None

    def __del__(self) -> None:
        if self._coming is not None:
            self._link.finish(self._coming)
        if self._stayed is not None and self.bytes is not None:
            self._link.wait(self._stayed, self.bytes)  # a CUDA graph has to end with all copies done
        self._offload.bytes -= self.size


class Offloaded(Stored):
    """A tensor whose memory goes to the host."""

    def __init__(self, tensor: Tensor, memory: Memory) -> None:
        self._memory, self._dtype = memory, tensor.dtype
        self._layout, self.version = layout_of(tensor), version_of_saved(tensor)
        self._counts: Tensor | None = version_guard(tensor)

    def unpack(self) -> Tensor:
        """Return the tensor; raises RuntimeError if it was changed in place."""
        if self._counts is not None and version_of_saved(self._counts) != self.version:
            raise RuntimeError(CHANGED.format(version_of_saved(self._counts), self.version))
        memory = self._memory.made()
        size, stride, offset = self.layout
        tensor = torch.empty(0, dtype=self._dtype, device=memory.device)
        return tensor.set_(memory.untyped_storage(), offset, size, stride)

    def copy(self, storage: torch.UntypedStorage) -> None:
        """Let the tensor be changed in place."""
        self._memory.settle_now()
        self._counts = None


class Offload:
    """Hooks that send the memory of saved tensors to the host, as far as the amount goes; of one thread.

    A memory leaves when the next one has come. So the last ones, which backward needs first, stay. A forward pass
    that is faster than the copies waits for them: at most DEPTH + 1 memories have not left. Backward asks for
    DEPTH memories ahead.

    Attributes:
        bytes: of what is on the host, or on its way.
        hooks: which send and fetch.

    """

    def __init__(self, amount: Amount) -> None:
        self._amount = amount
        self.hooks = Hooks(self.pack, _unpack, own=True)
        self.bytes = self._seen = self._sent = self._number = 0
        self._known: WeakValueDictionary[int, Stored] = WeakValueDictionary()  # by identity of storages
        self._numbered: WeakValueDictionary[int, Memory] = WeakValueDictionary()
        self._leaving: deque[ref[Memory]] = deque()
        self._warned = False

    def restart(self) -> None:
        """Count what a share is of anew."""
        self._seen = self._sent = 0

    def pack(self, tensor: Tensor) -> Stored:
        """Return how a tensor is stored, which is no leaf."""
        with quietly():
            if not is_plain(tensor) or tensor.is_complex():
                return Stored(tensor, None)
            key, version = storage_id(tensor), version_of_saved(tensor)
            known = self._known.get(key)
            if known is None or known.version != version:
                known = self._known[key] = self._new(tensor)
                return Offloaded(tensor, known) if isinstance(known, Memory) else known
            if not isinstance(known, Memory):
                return Stored(tensor, None)
            known.readers += 1
            return Offloaded(tensor, known)

    def _new(self, tensor: Tensor) -> Stored:
        """Return a tensor's memory, which goes to the host, or the tensor, which stays."""
        size = tensor.untyped_storage().nbytes()
        link = _link_of(tensor) if size >= LEAST else None
        if link is None and size >= LEAST and not self._warned and not isinstance(tensor, FakeTensor):
            self._warned = True
            warnings.warn(f"offload moves nothing: tensors of the device {tensor.device} stay where they are")
        if link is None or not self._takes(size):
            return Stored(tensor, None)
        self._number += 1
        memory = self._numbered[self._number] = Memory(tensor, self, link, self._number)
        self._send()
        return memory

    def _takes(self, size: int) -> bool:
        """Return whether the amount allows `size` bytes more."""
        self._seen += size
        if type(self._amount) is float and self._sent + size > self._amount * self._seen:
            return False
        if type(self._amount) is int and self.bytes + size > self._amount:
            return False
        self._sent += size
        self.bytes += size
        return True

    def _send(self) -> None:
        """Let the memory before the newest leave, and free the one that left DEPTH memories before it."""
        before = self._numbered.get(self._number - 1)
        if before is not None:
            before.leave()
            self._leaving.append(ref(before))
        while len(self._leaving) > DEPTH:
            first = self._leaving.popleft()()
            if first is not None:
                first.left()

    def ahead(self, number: int) -> None:
        """Let the memories come that were sent before one that backward reads."""
        for ahead in range(number - 1, number - 1 - DEPTH, -1):
            memory = self._numbered.get(ahead)
            if memory is not None:
                memory.come()


def _unpack(stored: Stored) -> Tensor:
    with quietly():
        return stored.read(stored.layout)


class _Made(threading.local):
    def __init__(self) -> None:
        self.offloads: dict[tuple[type, Amount], Offload] = {}


_made = _Made()


def offload_hooks(amount: Amount, restart: bool = False) -> Hooks | None:
    """Return this thread's hooks that offload so much; None for False.

    Args:
        amount: `"all"`, or True; a share, a float up to 1; or how many bytes are on the host at most, an int.
        restart: whether a share is one of what comes from now on.

    Raises:
        UsageError: the amount is none of these.

    """
    if amount is False:
        return None
    amount = "all" if amount is True else amount
    share, number = type(amount) is float and 0 < amount <= 1, type(amount) is int and amount >= LEAST
    if not (amount == "all" or share or number):
        raise UsageError(f'offload: expected "all", a share up to 1.0, or bytes from {LEAST:,} on, got {amount!r}')
    key = type(amount), amount
    if key not in _made.offloads:
        _made.offloads[key] = Offload(amount)
    if restart:
        _made.offloads[key].restart()
    return _made.offloads[key].hooks
