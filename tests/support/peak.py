"""The peak memory of a training step, by PyTorch's own tracker, beside which fitact's meter is tested."""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary


class _Unlisted(WeakIdKeyDictionary):
    """What PyTorch's tracker knows of each module; it would look at all of them after each operation."""

    def values(self) -> Any:
        return ()


def peak_memory(step: Callable[[], object], *external: nn.Module | torch.optim.Optimizer) -> dict[str, int]:
    """Run a step under PyTorch's own memory tracker, beside models and optimizers that exist already.

    Returns the bytes at the peak by kind and in `total`; `activations` are made in the forward pass, `temporaries`
    in the backward pass. It needs no GPU, and no memory if the tensors are fake.
    """
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
    tracker, nothing = MemTracker(), RemovableHandle(OrderedDict())
    for module in external:
        for parameter in module.parameters() if isinstance(module, nn.Module) else ():
            if not parameter.requires_grad:  # the tracker hooks parameters without a handle, and fails on these
                tracker._param_to_grad_hook_handles[parameter] = (nothing, nothing)
    tracker.memory_tracking = _Unlisted()  # the peak of the step is asked for, and not that of each module
    tracker.track_external(*external)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Module is None", UserWarning)  # for modules that nothing differentiates
        with tracker:
            step()
    peak: Counter[str] = Counter(dict.fromkeys(names.values(), 0))
    for device in tracker.get_tracker_snapshot("peak").values():
        for kind, size in device.items():
            peak[names[getattr(kind, "name", kind)]] += size
    return dict(peak)
