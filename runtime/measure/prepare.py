"""Models to measure, built without memory for their weights: `Training` and `prepare`.

A model is made on PyTorch's meta device and run as fake tensors on the CPU. (Fake CUDA tensors would need a
PyTorch built for CUDA.) `fitact.runtime.measure.sources` makes the models.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from types import ModuleType

import torch
from torch import nn

from fitact.base import JobError, UsageError, few, integer, one_line, quote
from fitact.runtime.restore import refused

from .subjects import Source, Subject, blocks_of, converted, fake_copy


@dataclass(frozen=True)
class Training:
    """What is trained: by default what needs gradients as the model is built.

    Attributes:
        lora: names of linear layers that get adapters, such as `q_proj`, or `all` for those in the repeated
            blocks; everything else is then frozen. Needs peft.
        rank: rank of the adapters.
        freeze: patterns of names of parameters to freeze, such as `embeddings.*`.

    Raises:
        UsageError: the rank is not an integer of 1 or more.

    """

    lora: tuple[str, ...] = ()
    rank: int = 8
    freeze: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        integer("rank", self.rank, 1)

    def __str__(self) -> str:
        parts = [f"LoRA of rank {self.rank} on {', '.join(self.lora)}"] if self.lora else []
        parts += [f"{', '.join(self.freeze)} frozen"] if self.freeze else []
        return ", ".join(parts) or "what needs gradients is trained"

    def apply(self, model: nn.Module) -> None:
        """Add adapters and freeze parameters, in place."""
        if self.lora:
            _add_lora(model, self.lora, self.rank)
        names = dict(model.named_parameters())
        for pattern in self.freeze:
            matched = [name for name in names if fnmatchcase(name, pattern)]
            if not matched:
                there = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names)  # repeated ones once
                raise UsageError(f"{quote(pattern)}: no parameter has such a name; there are {few([*there])}")
            for name in matched:
                names[name].requires_grad_(False)
        if not any(parameter.requires_grad for parameter in names.values()):
            raise UsageError("every parameter is frozen: nothing is saved for backward where nothing is trained")


def prepare(
    source: Source,
    training: Training | None = None,
    *,
    batch: int,
    seq: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Subject:
    """Build a model and its inputs.

    Inputs have `batch` rows of `seq` tokens. All floating-point parameters, buffers and inputs have the dtype, and
    allocate nothing. By default what needs gradients is trained.

    Raises:
        UsageError: the model cannot be built, or does not take this `batch` and `seq`; the message says why.

    """
    with refused(f"{source.name}: cannot be built"), torch.device("meta"):
        model, inputs = source.build(batch, seq)
    longest = source.longest(model)
    if longest is not None and seq > longest:
        raise UsageError(f"{source.name}: seq {seq} does not fit, the model has positions for {longest}")
    training = training or Training()
    with torch.device("meta"):
        training.apply(model.train())
    model, mode = fake_copy(model.to(dtype))  # after the checks: the first mode takes two seconds
    call, sizes = converted(inputs, mode, dtype), source.sizes(batch, seq)
    return Subject(source.name, model, call, mode, training=str(training), inputs=sizes)


# ---------------------------------------------------------------------------------------------- optional packages


def imported(name: str) -> ModuleType:
    """Import an optional package.

    Raises:
        UsageError: the package is missing (the message says how to install it), or cannot be imported.

    """
    try:
        return import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == name:
            raise UsageError(f"{name} is not installed: pip install {name}") from None
        raise UsageError(f"{name} cannot be imported: {one_line(error)}") from None


def _add_lora(model: nn.Module, layers: Sequence[str], rank: int) -> None:
    linear = [
        name for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D") and name
    ]
    if tuple(layers) == ("all",):
        blocks = [name for name, _ in blocks_of(model)]
        targets = [name for name in linear if any(not b or name.startswith(f"{b}.") for b in blocks)]
        if not targets:
            raise UsageError("'all': no block has a linear layer to adapt")
    else:
        targets = []
        for layer in layers:
            matched = [name for name in linear if f".{name}".endswith(f".{layer}")]
            if not matched:
                leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
                raise UsageError(f"{quote(layer)}: no linear layer has that name; there are {few(leaves)}")
            targets += matched
    peft = imported("peft")
    config = peft.LoraConfig(target_modules=targets, r=rank, lora_alpha=rank, lora_dropout=0.0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns that it transposes the weights of Conv1D
            peft.inject_adapter_in_model(config, model)
    except Exception as error:
        raise JobError(f"peft cannot add adapters: {one_line(error)}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
