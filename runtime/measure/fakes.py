"""Fake copies: models and tensors without memory."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor, nn

from fitact.runtime.restore import Copying, Inputs, Runner
from fitact.runtime.torch_internals import FakeTensor, FakeTensorMode, fake_mode


def fake_copy(model: nn.Module, mode: FakeTensorMode | None = None) -> tuple[nn.Module, FakeTensorMode]:
    """Return a copy of a model with fake tensors, and their mode: by default the model's own, or a new one."""
    if mode is None:
        tensors = (*model.parameters(), *model.buffers())
        modes = [tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)]
        mode = modes[0] if modes else fake_mode()
    made = partial(fake, mode)
    with Copying(made, made):
        return copy.deepcopy(model), mode


def fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """Return a fake tensor like another; like one without memory, on the CPU."""
    if not (tensor.is_meta or isinstance(tensor, FakeTensor)):
        return mode.from_tensor(tensor)
    device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


def faked(run: Runner, mode: FakeTensorMode) -> Runner:
    """Return what runs a model with fake inputs; a function of the user's makes its own."""
    return run.mapped(partial(fake, mode)) if isinstance(run, Inputs) else run
