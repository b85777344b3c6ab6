"""The meter: bytes alive in a training step, bytes saved for backward, and the work, in one pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fitact.runtime.restore import differentiate, generators
from fitact.runtime.torch_internals import (
    ATTENTION,
    GROUPED,
    FakeTensor,
    disable_fake_tensor_cache,
    storage_id,
    tree_iter,
    without_dispatch_modes,
)

from .devices import CURVED, DEVICES, USUAL, Device
from .modes import OperationMode
from .saved import Saved, count_saved
from .subjects import Subject


def _grouped(a: Tensor, b: Tensor, *_: Any, out_val: Any = None, **__: Any) -> int:
    """Return the FLOPs of the products of several experts: each row of a meets one matrix of b."""
    groups = len(a) if a.ndim > b.ndim else 1  # then a column of b meets one matrix of a
    return 2 * a.numel() * b.shape[-1] // groups


def _attention(count: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of attention; PyTorch 2.9 counts none in which several heads of queries share a key's."""
    shapes = [leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in args]
    heads = max(shape[1] for shape in shapes if isinstance(shape, torch.Size) and len(shape) == 4)
    wide = [(*shape[:1], heads, *shape[2:]) if isinstance(shape, torch.Size) else shape for shape in shapes]
    return count(*wide, **kwargs)


# PyTorch's counter of FLOPs does not know the products of experts, nor the fused attention of the CPU, whose
# arguments begin as the GPU's do.
FLOPS: dict[Any, Callable[..., int]] = {GROUPED: _grouped, **flop_registry}
FLOPS |= {cpu: flop_registry[gpu] for cpu, gpu in ATTENTION.items()}
FLOPS |= {each: partial(_attention, FLOPS[each]) for each in FLOPS if "scaled_dot_product" in str(each)}

# Operations that take about CURVED FLOPs for each element; the others count one.
HEAVY = "exp", "erf", "tanh", "gelu", "silu", "sigmoid", "softmax", "mish", "softplus", "pow", "log", "sin", "cos"


@dataclass(frozen=True)
class Work:
    """What operations do.

    Attributes:
        seconds: how long they take on a device.
        flops: FLOPs of matrix products, convolutions and attention.
        traffic: bytes that they read and write, without fusion.

    """

    seconds: float = 0.0
    flops: int = 0
    traffic: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.seconds + other.seconds, self.flops + other.flops, self.traffic + other.traffic)

    def __sub__(self, other: Work) -> Work:
        return Work(self.seconds - other.seconds, self.flops - other.flops, self.traffic - other.traffic)


@dataclass(frozen=True)
class Moment:
    """A moment of a step.

    Attributes:
        what: what happens at this moment.
        block: at which block; -1 for none.
        level: bytes that are alive, without parameters, buffers and inputs.
        peak: the most bytes that were alive since the mark before.
        work: what has been done since.
        host: bytes of the host that are pinned for what was offloaded.

    """

    what: str
    block: int
    level: int
    peak: int
    work: Work
    host: int = 0


class Meter(OperationMode):
    """Counts storages while they are alive, and the work of operations.

    Args:
        there: tensors that exist before and are not counted.
        device: how long operations take.

    Attributes:
        level, peak: bytes that are alive; the most since the last mark.
        work: since the last mark.
        marks: moments of the step.
        clock: seconds since the meter was made.
        host: as in `Moment`.

    """

    def __init__(self, there: Iterable[Tensor] = (), device: Device = DEVICES[USUAL]) -> None:
        super().__init__()
        self.device = device
        self.level = self.peak = 0
        self.work = Work()
        self.clock, self.host = 0.0, 0
        self.marks: list[Moment] = []
        self.alive: dict[int, Any] = {storage_id(tensor): tensor.untyped_storage() for tensor in there}

    def mark(self, what: str, block: int = -1) -> None:
        """Record that something happens now."""
        self.marks.append(Moment(what, block, self.level, self.peak, self.work, self.host))
        self.peak, self.work = self.level, Work()

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        sets = func.overloadpacket is torch.ops.aten.set_
        fake = sets and isinstance(args[0], FakeTensor)
        with disable_fake_tensor_cache(args[0].fake_mode) if fake else nullcontext():  # it would hold the memory
            result = func(*args, **kwargs)
        if sets or func.namespace == "prim" or func is torch.ops.aten.detach.default:
            return result  # no work: a question, or a name
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor):
                self.born(leaf)
        if not func.is_view:
            self.spend(self._work(func, args, kwargs, result))
        return result

    def spend(self, work: Work) -> None:
        """Count work."""
        self.work += work
        self.clock += work.seconds

    def born(self, tensor: Tensor) -> None:
        """Count a tensor's memory while it is alive; a sparse one is not counted."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key, size = storage_id(storage), storage.nbytes()
        if key in self.alive:
            return
        self.alive[key] = weakref.ref(storage, partial(self._dead, key, size))
        self.level += size
        self.peak = max(self.peak, self.level)

    def _dead(self, key: int, size: int, _: Any) -> None:
        self.level -= size
        del self.alive[key]

    def _work(self, func: Any, args: Any, kwargs: Any, result: Any) -> Work:
        tensors = [leaf for leaf in tree_iter((args, kwargs, result)) if isinstance(leaf, Tensor)]
        traffic = sum(leaf.numel() * leaf.element_size() for leaf in tensors)
        count = FLOPS.get(func.overloadpacket)
        if count is not None:
            flops = int(count(*args, **kwargs, out_val=result))
            half = any(leaf.dtype in (torch.bfloat16, torch.float16) for leaf in tensors)
            seconds = self.device.seconds(traffic, flops if half else 0, 0 if half else flops, 0)
            return Work(seconds, flops, traffic)
        heavy = func.namespace == "fitact" or any(word in func.overloadpacket.__name__ for word in HEAVY)
        rest = max((leaf.numel() for leaf in tensors), default=0) * (CURVED if heavy else 1)
        return Work(self.device.seconds(traffic, 0, 0, rest), 0, traffic)


class MeteredLink:
    """A link to the host, for `fitact.runtime.saving.offload`, whose copies take time on the clock of a meter.

    Both directions share one queue, beside which the device computes. The meter's clock runs on while something
    waits for a copy. The bandwidth is in bytes a second.
    """

    def __init__(self, meter: Meter, bandwidth: float) -> None:
        self._meter, self._bandwidth, self._free = meter, bandwidth, 0.0

    def to_host(self, memory: Tensor) -> tuple[Tensor, float]:
        """Copy bytes to the host, where PyTorch's pool takes a power of two for them."""
        with without_dispatch_modes():  # so that the meter counts no operation
            copy = memory.clone()
        size = 1 << (memory.nbytes - 1).bit_length()
        self._meter.host += size
        weakref.finalize(copy, self._freed, size)
        return copy, self._done(memory)

    def to_device(self, copy: Tensor) -> tuple[Tensor, float]:
        """Copy them back."""
        with without_dispatch_modes():
            memory = copy.clone()
        self._meter.born(memory)
        return memory, self._done(copy)

    def wait(self, event: float, memory: Tensor) -> None:
        """Wait for a copy."""
        self.finish(event)

    def finish(self, event: float) -> None:
        """Wait for a copy."""
        self._meter.spend(Work(max(event - self._meter.clock, 0.0)))

    def _freed(self, size: int) -> None:
        self._meter.host -= size

    def _done(self, copied: Tensor) -> float:
        self._free = max(self._free, self._meter.clock) + copied.nbytes / self._bandwidth
        return self._free


@dataclass(frozen=True)
class Measured:
    """A training step of a model.

    Attributes:
        saved: what autograd saves from forward to backward.
        forward, backward: the work of both passes.
        peak: the most bytes alive, without parameters, buffers and inputs.

    """

    saved: Saved
    forward: Work
    backward: Work
    peak: int


def whole_step(subject: Subject) -> Measured:
    """Run a training step once, and count all of it.

    Raises:
        UsageError: the model cannot be run, or nothing in it is trained.

    """
    model = subject.model
    with generators(model), subject.environment(), Meter([*model.parameters(), *model.buffers()]) as meter:
        try:
            with count_saved(model, detail=True) as saved:
                outputs = subject.forward()
            saved.release()  # so that backward frees it
            meter.mark("loss")
            differentiate(subject.name, outputs)
            meter.mark("end")
        finally:
            model.zero_grad(set_to_none=True)
    forward, backward = meter.marks
    return Measured(saved, forward.work, backward.work, max(forward.peak, backward.peak))
