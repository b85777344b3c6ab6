"""Merging as a change that is taken back if the model does not compute what it did; and undoing it later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fitact.errors import JobError, UsageError

from .eager import arithmetic_dtype
from .merge_graph import Reading, tensors_in, untouched
from .merge_layers import (
    Norm,
    adapter_kind_trouble,
    core,
    is_adapted,
    is_layer,
    parameter_trouble,
    shift,
    weights,
    wrappers,
)

# Outputs may move so many times as far as they do when the weights are rounded once more, and so many roundings.
MARGIN = 16
LIMIT = 0.5  # but never farther, relative to their size


@dataclass
class Merged:
    """What a memory-sharing norm stands for.

    Attributes:
        norm: what stood there.
        layers: that took up its α and β.
        added: those of them that had no bias before.
        dtype: of the layers' weights then.

    """

    norm: Norm
    layers: list[nn.Module]
    added: list[nn.Module]
    dtype: torch.dtype


@dataclass
class _Change:
    """What is done to a model, as long as it can be taken back."""

    values: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    undo: ExitStack = field(default_factory=ExitStack)

    def hold(self, layer: nn.Module) -> None:
        """Copy what merging changes in a layer."""
        bias = core(layer).bias
        parameters = [parameter for parameter, _ in weights(layer)]
        for parameter in parameters if bias is None else [*parameters, bias]:
            self.values.append((parameter, parameter.detach().to("cpu", copy=True)))

    def restore_values(self) -> None:
        """Write the copies back."""
        for parameter, value in self.values:
            parameter.copy_(value)

    def restore(self) -> None:
        """Take everything back."""
        self.undo.close()
        self.restore_values()


def merge(model: nn.Module, run: Callable[[], Any], chosen: Sequence[Reading]) -> None:
    """Merge, compare the outputs, and take everything back if they differ or there is an error."""
    change = _Change()
    with torch.no_grad():
        for reading in chosen:
            for layer in reading.layers:
                change.hold(layer)
        try:
            before = _outputs(model, run)
            if not any(tensor.numel() for tensor in before):
                raise UsageError("no numbers to compare: expected the model to return tensors of floating point")
            for reading in chosen:
                _round_once(reading)
            moved = _difference(before, _outputs(model, run))
            change.restore_values()
            for reading in chosen:
                _merge_one(model, reading, change)
            unit = max(reading.unit for reading in chosen)
            difference, allowed = _difference(before, _outputs(model, run)), min(MARGIN * (moved + unit), LIMIT)
            if not difference <= allowed:
                raise JobError(
                    f"after merging {len(chosen)} norms the outputs differ by {difference:.1e}, more than the "
                    f"{allowed:.1e} that rounding explains: all was taken back; exclude norms to find which it is"
                )
        except BaseException:
            change.restore()
            raise


def _outputs(model: nn.Module, run: Callable[[], Any]) -> list[Tensor]:
    """Return copies of the floating-point outputs of a model in evaluation."""
    with untouched(model):
        model.eval()
        return [tensor.clone() for tensor in tensors_in(run()) if tensor.is_floating_point()]


def _difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """Return the largest relative distance of outputs in the 2-norm; infinite if what is not finite differs."""
    largest = 0.0
    for old, new in zip(before, after, strict=True):
        wide, other = old.cpu().double(), new.cpu().double()
        finite = wide.isfinite()
        if not torch.equal(finite, other.isfinite()):
            return float("inf")
        size = float(wide[finite].norm())
        distance = float((wide[finite] - other[finite]).norm())
        largest = max(largest, distance / size if size else (0.0 if distance == 0 else float("inf")))
    return largest


def _round_once(reading: Reading) -> None:
    """Change the weights by one rounding of their dtype, or of the norm's output if that is wider, up or down."""
    random = torch.Generator().manual_seed(0)
    signs = 2.0 * torch.randint(2, (reading.norm.columns,), generator=random) - 1
    for layer in reading.layers:
        for weight, dim in weights(layer):
            unit = max(reading.unit, torch.finfo(weight.dtype).eps)
            _scale(weight, dim, 1 + unit * signs.to(arithmetic_dtype(weight)))


def _merge_one(model: nn.Module, reading: Reading, change: _Change) -> None:
    norm = reading.norm
    alpha, beta = norm.alpha, norm.beta
    added: list[nn.Module] = []
    for layer in reading.layers:
        linear = core(layer)
        total = None if beta is None else shift(layer, beta)
        if alpha is not None:
            for weight, dim in weights(layer):
                _scale(weight, dim, alpha)
        if total is None or norm.bias is None:
            continue
        if linear.bias is None:
            linear.bias = nn.Parameter(total.to(linear.weight.dtype), requires_grad=norm.bias.requires_grad)
            added.append(layer)
            change.undo.callback(setattr, linear, "bias", None)
        else:
            linear.bias.copy_(linear.bias.to(total.dtype) + total)
    sharing = norm.memory_sharing()
    sharing.merged = Merged(norm, list(reading.layers), added, core(next(iter(reading.layers))).weight.dtype)
    _replace(model, norm.module, sharing)
    change.undo.callback(_replace, model, sharing, norm.module)


def _scale(weight: nn.Parameter, dim: int, by: Tensor, divide: bool = False) -> None:
    """Multiply or divide the columns of a weight, or the rows if dim is 0, rounding once."""
    kind = torch.promote_types(torch.promote_types(weight.dtype, by.dtype), torch.float32)
    factors = by.to(weight.device, kind).unsqueeze(1 - dim)
    weight.copy_(weight.to(kind) / factors if divide else weight.to(kind) * factors)


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module wherever another one is."""
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is old:
                parent._modules[key] = new


def present(model: nn.Module, name: str, merged: Merged) -> list[nn.Module]:
    """Return the layers that took up a norm as they are in the model now, with the adapters that they have now.

    Raises:
        UsageError: one is gone, or not a plain linear layer any more.

    """
    outermost = {core(module): module for module in reversed(list(model.modules())) if is_layer(module)}
    others = wrappers(model)
    found: list[nn.Module] = []
    for layer in map(core, merged.layers):
        now = outermost.get(layer)
        if now is None:
            why = "it is not in the model any more"
        elif layer in others:
            why = f"it is in a {type(others[layer]).__name__}"
        else:
            why = parameter_trouble(layer)
        inner: Any = now
        while not why and is_adapted(inner):
            why, inner = adapter_kind_trouble(inner), inner.base_layer
        if now is None or why:
            raise UsageError(f"{name}: a layer that took up its α and β was changed since, {why}: undo that first")
        found.append(now)
    return found


def unmerge(model: nn.Module, module: nn.Module, merged: Merged, layers: Sequence[nn.Module]) -> None:
    """Put back a norm, and divide the weights of its layers, as `present` found them, by α."""
    norm, first = merged.norm, core(layers[0]).weight
    norm.module.to(first.device)
    if first.dtype != merged.dtype:
        norm.module.to(first.dtype)
    alpha, beta, added = norm.alpha, norm.beta, [core(layer) for layer in merged.added]
    for layer in layers:
        linear = core(layer)
        if alpha is not None:
            for weight, dim in weights(layer):
                _scale(weight, dim, alpha, divide=True)
        if beta is None:
            continue
        total = shift(layer, beta)
        rest = linear.bias.to(total.dtype) - total
        rounding = MARGIN * torch.finfo(linear.weight.dtype).eps * float(total.abs().max())
        if linear in added and float(rest.abs().max()) <= rounding:
            linear.bias = None
        else:
            linear.bias.copy_(rest)
    _replace(model, module, norm.module.train(module.training))
