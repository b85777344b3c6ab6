"""The peak memory of a training step, by PyTorch's own tracker, beside which fitact's meter is tested."""

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary


class _Unlisted(WeakIdKeyDictionary):
    """What PyTorch's tracker knows of each module; it would look at all of them after each operation."""

    def values(self) -> Any:
        return ()


def peak_memory(step: Callable[[], object], *models: nn.Module) -> Counter[str]:
    """Return a step's `parameters`, `buffers`, `other` and `total` bytes at its peak, models included."""
    tracker, nothing = MemTracker(), RemovableHandle(OrderedDict())
    for parameter in (each for model in models for each in model.parameters() if not each.requires_grad):
        # the tracker hooks parameters without a handle, and fails on these
        tracker._param_to_grad_hook_handles[parameter] = (nothing, nothing)
    tracker.memory_tracking = _Unlisted()  # the peak of the step is asked for, and not that of each module
    tracker.track_external(*models)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Module is None", UserWarning)  # for modules that nothing differentiates
        with tracker:
            step()
    peak: Counter[str] = Counter()
    names = {"PARAM": "parameters", "BUFFER": "buffers", "Total": "total"}
    for device in tracker.get_tracker_snapshot("peak").values():
        for kind, size in device.items():
            peak[names.get(getattr(kind, "name", kind), "other")] += size
    return peak
