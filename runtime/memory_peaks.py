"""The most memory that a training step takes: of a GPU's allocator, and estimated without a GPU."""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fitact.errors import JobError


@dataclass
class Allocated:
    """Bytes of a GPU's memory that PyTorch's allocator has handed out.

    Attributes:
        before, after: at the ends of the context.
        peak: the most in between.

    """

    before: int
    after: int = 0
    peak: int = 0

    @property
    def delta(self) -> int:
        """What is left allocated, in bytes."""
        return self.after - self.before


@contextmanager
def cuda_memory(device: torch.device | int | None = None) -> Iterator[Allocated]:
    """Measure the CUDA allocator inside the context.

    Args:
        device: by default the current one.

    Yields:
        The record; `after` and `peak` are set when the context closes.

    Raises:
        JobError: there is no GPU; `peak_memory` measures without one.

    """
    if not torch.cuda.is_available():
        raise JobError("no GPU that PyTorch can use: peak_memory, beside it, estimates without one")
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    allocated = Allocated(torch.cuda.memory_allocated(device))
    try:
        yield allocated
    finally:
        torch.cuda.synchronize(device)
        allocated.after = torch.cuda.memory_allocated(device)
        allocated.peak = torch.cuda.max_memory_allocated(device)


def peak_memory(step: Callable[[], object], *external: nn.Module | torch.optim.Optimizer) -> dict[str, int]:
    """Run a step under PyTorch's own memory tracker, which needs no GPU and no memory if its tensors are fake.

    Args:
        step: what is run, e.g. forward, backward and the optimizer's step.
        external: models and optimizers, made before.

    Returns:
        Bytes alive when most are, by what they are: `parameters`, `buffers`, `gradients`, `activations` (what the
        forward pass makes), `temporaries` (what the backward pass makes), `optimizer`, `other`; and `total`.

    """
    from torch.distributed._tools.mem_tracker import MemTracker

    names = {
        "PARAM": "parameters",
        "BUFFER": "buffers",
        "GRAD": "gradients",
        "ACT": "activations",
        "TEMP": "temporaries",
        "OPT": "optimizer",
        "OTH": "other",
        "Total": "total",
    }
    tracker = MemTracker()
    nothing = RemovableHandle(OrderedDict())  # the tracker hooks what has no handle; on frozen ones it fails
    for module in external:
        for parameter in module.parameters() if isinstance(module, nn.Module) else ():
            if not parameter.requires_grad:
                tracker._param_to_grad_hook_handles[parameter] = (nothing, nothing)
    tracker.track_external(*external)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Module is None", UserWarning)  # of modules that nothing differentiates
        with tracker:
            step()
    peak: Counter[str] = Counter(dict.fromkeys(names.values(), 0))
    for device in tracker.get_tracker_snapshot("peak").values():
        for kind, size in device.items():
            peak[names[getattr(kind, "name", kind)]] += size
    return dict(peak)
