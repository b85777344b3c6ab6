"""Copies of a model, and of tensors, without memory."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fitact.runtime.restore import Copying, Inputs, Run
from fitact.runtime.torch_internals import FakeTensor, FakeTensorMode


@dataclass
class Twins:
    """Copies of a model with fake tensors; the copies share them, as each tensor is made fake once.

    Attributes:
        mode: of the fake tensors; None until there is a copy.
        made: the model's tensors by identity, with their twins; held here, so that no address is used again.

    """

    mode: FakeTensorMode | None = None
    made: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def of(self, model: nn.Module) -> tuple[nn.Module, FakeTensorMode]:
        """Return a copy of the model, as its modules are now, and the mode of its tensors."""
        tensors = [*model.parameters(), *model.buffers()]
        if self.mode is None:
            modes = [tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)]
            self.mode = modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True)
        memo: dict[int, Any] = {key: twin for key, (tensor, twin) in self.made.items() if _alike(tensor, twin)}
        made = partial(fake, self.mode)
        with Copying(made, made):
            twin = copy.deepcopy(model, memo)
        self.made |= {id(tensor): (tensor, memo[id(tensor)]) for tensor in tensors if id(tensor) in memo}
        return twin, self.mode


def _alike(tensor: Tensor, twin: Tensor) -> bool:
    """Return whether a twin is still what would be made of a tensor, which may have been given other data."""
    if tensor.layout != torch.strided or tensor.is_nested:  # these have no strides to compare
        return False
    now, then = ((one.shape, one.stride(), one.dtype, one.requires_grad) for one in (tensor, twin))
    return now == then


def fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """Return a fake tensor like another; like one without memory, on the CPU."""
    if not (tensor.is_meta or isinstance(tensor, FakeTensor)):
        return mode.from_tensor(tensor)
    device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
    with mode:
        twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return twin.requires_grad_(tensor.requires_grad)


def faked(run: Run, mode: FakeTensorMode) -> Run:
    """Return what runs a model with fake inputs; a function of the user's makes its own."""
    return run.mapped(partial(fake, mode)) if isinstance(run, Inputs) else run
