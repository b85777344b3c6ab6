"""A link between a device and the host that is simulated: both are the CPU, and copies take time."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor


class Copy(NamedTuple):
    name: str  # "to host" or "to device"
    done: float
    into: Callable[[], Tensor | None]
    of: Callable[[], Tensor | None]


class SimulatedLink:
    """Copies bytes one after another; a copy is NaN until it is done, and reads its source then, as a GPU may."""

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth, self.now, self.stalls = bandwidth, 0.0, 0.0  # seconds that computing waited for copies
        self.most, self.back = 0, 0  # bytes on the host, and memories that came back to the device
        self.log: list[tuple[str, int]] = []  # names and bytes of copies
        self.violations: list[str] = []  # memory freed while a copy wrote it, or read it
        self._free = 0.0
        self.running: deque[Copy] = deque()
        self._there: dict[str, list[Callable[[], Tensor | None]]] = {"to host": [], "to device": []}

    def alive(self, name: str) -> list[Tensor]:
        return [each for held in self._there[name] if (each := held()) is not None]

    def compute(self, seconds: float) -> None:
        self._until(self.now + seconds)

    def _until(self, time: float) -> None:
        self.now = max(self.now, time)
        while self.running and self.running[0].done <= self.now:
            copy = self.running.popleft()
            into, of = copy.into(), copy.of()
            if into is not None and of is not None:
                into.copy_(of)
            elif (into is None) == (copy.name == "to device"):
                self.violations.append(f"{copy.name}: freed too soon")

    def _copied(self, name: str, into: Tensor, of: Tensor) -> Copy:
        self.log.append((name, of.nbytes))
        self._there[name] = [held for held in self._there[name] if held() is not None] + [ref(into)]
        self._free = max(self._free, self.now) + of.nbytes / self.bandwidth
        self.running.append(Copy(name, self._free, ref(into), ref(of)))
        return self.running[-1]

    def to_host(self, memory: Tensor) -> tuple[Tensor, Any]:
        copy = torch.full_like(memory, 255)
        copied = self._copied("to host", copy, memory)
        self.most = max(self.most, sum(each.nbytes for each in self.alive("to host")))
        return copy, copied

    def to_device(self, copy: Tensor) -> tuple[Tensor, Any]:
        memory = torch.full_like(copy, 255)
        copied = self._copied("to device", memory, copy)
        self.back = max(self.back, len(self.alive("to device")))
        return memory, copied

    def wait(self, event: Copy, memory: Tensor) -> None:
        self.stalls += max(event.done - self.now, 0)
        self._until(event.done)

    def finish(self, event: Copy) -> None:
        self._until(event.done)
