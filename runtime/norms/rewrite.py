"""Merging norms, which is undone if the model then computes something else; and unmerging them later."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fitact.errors import FitactError, JobError, UsageError
from fitact.runtime.ops.autograd import autocast_dtype
from fitact.runtime.ops.reference import arithmetic_dtype
from fitact.runtime.restore import untouched
from fitact.runtime.torch_internals import modules_in
from fitact.text import few, one_line

from .dataflow import NormUsage, outside_autocast, tensors_in
from .linear import (
    Norm,
    adapter_kind_blocker,
    core,
    is_adapted,
    is_layer,
    parameter_blocker,
    shift,
    weights,
    wrappers,
)
from .modules import MSLayerNorm, MSRMSNorm

# Outputs may change by MARGIN times the change that one more rounding of the weights makes, plus MARGIN roundings.
MARGIN = 16
LIMIT = 0.5  # the largest change allowed, relative to the outputs


@dataclass
class Merged:
    """What a memory-sharing norm replaced.

    Attributes:
        norm: the original norm.
        layers: the layers that took up its α and β.
        added: those of them that had no bias before.
        dtype: the dtype of the layers' weights when it was merged.

    """

    norm: Norm
    layers: list[nn.Module]
    added: list[nn.Module]
    dtype: torch.dtype


@dataclass
class _Change:
    """A change of a model that can still be undone."""

    values: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    undo: ExitStack = field(default_factory=ExitStack)

    def hold(self, layer: nn.Module) -> None:
        """Copy the parameters of a layer that merging changes."""
        bias = core(layer).bias
        parameters = [parameter for parameter, _ in weights(layer)]
        for parameter in parameters if bias is None else [*parameters, bias]:
            self.values.append((parameter, parameter.detach().to("cpu", copy=True)))

    def restore_values(self) -> None:
        """Write the copies back."""
        for parameter, value in self.values:
            parameter.copy_(value)

    def restore(self) -> None:
        """Undo everything."""
        self.undo.close()
        with torch.inference_mode(False), torch.no_grad():
            self.restore_values()
        torch.clear_autocast_cache()  # it holds casts of the merged weights


def merge(model: nn.Module, run: Callable[[], Any], chosen: Sequence[NormUsage]) -> Callable[[], None]:
    """Merge, compare the outputs, and undo everything if they differ or there is an error.

    Outputs are compared without the caller's autocast, whose rounding would hide errors, unless the model does not
    run without it.

    Returns:
        A function that undoes everything later, from copies of the weights.

    Raises:
        JobError: the outputs differ, or the model does not run with the norms replaced.
        UsageError: the model returns no numbers to compare.

    """
    change = _Change()
    paths = _paths(model, {usage.norm.module for usage in chosen})
    with torch.no_grad():
        for usage in chosen:
            for layer in usage.layers:
                change.hold(layer)
        try:
            with _explained(model, paths):
                run, (before, units) = _stock_outputs(model, run, chosen)
            if not any(tensor.numel() for tensor in before):
                raise UsageError("no numbers to compare: expected the model to return floating-point tensors")
            with outside_autocast(model):
                for usage in chosen:
                    _round_once(usage, units[usage.norm.module])
            with _explained(model, paths):
                moved = _difference(before, _outputs(model, run))
            change.restore_values()
            with outside_autocast(model):
                for usage in chosen:
                    _merge_one(model, usage, change)
            with _explained(model, paths):
                difference = _difference(before, _outputs(model, run))
            allowed = min(MARGIN * (moved + max(units.values())), LIMIT)
            if not difference <= allowed:
                raise JobError(
                    f"after merging {len(chosen)} norms the outputs differ by {difference:.1e}, more than the "
                    f"{allowed:.1e} that rounding explains: all was undone; exclude norms to find which one it is"
                )
        except BaseException:
            change.restore()
            raise
    return change.restore


Units = Mapping[nn.Module, float]  # the machine epsilon of the output of each norm


def _stock_outputs(
    model: nn.Module, run: Callable[[], Any], chosen: Sequence[NormUsage]
) -> tuple[Callable[[], Any], tuple[list[Tensor], Units]]:
    """Return a function that runs the model for comparison, its outputs, and the precision of its norms there."""

    def precisely() -> Any:
        with outside_autocast(model):
            return run()

    try:
        return precisely, _measured(model, precisely, chosen)
    except Exception:  # it ran in the caller's autocast: its weights and inputs need that
        return run, _measured(model, run, chosen)


def _measured(model: nn.Module, run: Callable[[], Any], chosen: Sequence[NormUsage]) -> tuple[list[Tensor], Units]:
    units = {usage.norm.module: 0.0 for usage in chosen}

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        units[module] = max(units[module], torch.finfo(autocast_dtype(output)).eps)

    with ExitStack() as hooks:
        for module in units:
            hooks.callback(module.register_forward_hook(note).remove)
        return _outputs(model, run), units


@contextmanager
def _explained(model: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    """Turn an error of a model into one that names the norms to exclude."""
    try:
        yield
    except FitactError:
        raise
    except Exception as error:
        raise JobError(
            f"with its norms merged the model does not run, {one_line(error)}: all was undone; "
            f"exclude {few(_blamed(model, error, paths))}"
        ) from error


def _blamed(model: nn.Module, error: BaseException, paths: Sequence[str]) -> Sequence[str]:
    """Return the paths in the innermost running module that holds any of them."""
    names = {module: name for name, module in model.named_modules()}
    running = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    for module in reversed(running):
        name = names.get(module) if isinstance(module, nn.Module) else None
        if name is not None and (
            inside := [path for path in paths if f"{path}.".startswith(f"{name}." if name else "")]
        ):
            return inside
    return paths


def _paths(model: nn.Module, modules: set[nn.Module]) -> list[str]:
    return [name for name, module in model.named_modules() if module in modules]


def is_merged(module: nn.Module) -> bool:
    """Return whether a module replaces a norm that was merged."""
    return isinstance(getattr(module, "merged", None), Merged)


def _outputs(model: nn.Module, run: Callable[[], Any]) -> list[Tensor]:
    """Return copies of a model's floating-point outputs in evaluation mode."""
    with untouched(model):
        model.eval()
        return [tensor.clone() for tensor in tensors_in(run()) if tensor.is_floating_point()]


def _difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """Return the largest relative distance of outputs in the 2-norm; infinite if non-finite values differ."""
    if len(before) != len(after):
        return float("inf")
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


def _round_once(usage: NormUsage, least: float) -> None:
    """Change the weights up or down by one rounding of their dtype, or of the norm's output if that is coarser."""
    random = torch.Generator().manual_seed(0)
    signs = 2.0 * torch.randint(2, (usage.norm.columns,), generator=random) - 1
    for layer in usage.layers:
        for weight, dim in weights(layer):
            unit = max(least, torch.finfo(weight.dtype).eps)
            _scale(weight, dim, 1 + unit * signs.to(arithmetic_dtype(weight)))


def share(model: nn.Module, usage: NormUsage, undo: ExitStack) -> tuple[MSLayerNorm | MSRMSNorm, list[nn.Module]]:
    """Put a memory-sharing norm in the place of a norm, and a bias of 0 into the layers that need one for its β.

    Args:
        model: holds the norm.
        usage: the norm.
        undo: gets what puts back what was there.

    Returns:
        The memory-sharing norm, and the layers that got a bias.

    """
    norm = usage.norm
    added = [layer for layer in usage.layers if norm.bias is not None and core(layer).bias is None]
    for linear in map(core, added):
        assert norm.bias is not None
        zeros = linear.weight.detach().new_zeros(len(linear.weight))
        linear.bias = nn.Parameter(zeros, requires_grad=norm.bias.requires_grad)
        undo.callback(setattr, linear, "bias", None)
    sharing = norm.memory_sharing()
    _replace(model, norm.module, sharing)
    undo.callback(_replace, model, sharing, norm.module)
    return sharing, added


def _merge_one(model: nn.Module, usage: NormUsage, change: _Change) -> None:
    norm = usage.norm
    alpha, beta = norm.alpha, norm.beta
    sharing, added = share(model, usage, change.undo)
    for layer in usage.layers:
        linear = core(layer)
        total = None if beta is None else shift(layer, beta)
        if alpha is not None:
            for weight, dim in weights(layer):
                _scale(weight, dim, alpha)
        if total is not None:
            linear.bias.copy_(linear.bias.to(total.dtype) + total)
    sharing.merged = Merged(norm, list(usage.layers), added, core(next(iter(usage.layers))).weight.dtype)


def _scale(weight: nn.Parameter, dim: int, by: Tensor, divide: bool = False) -> None:
    """Multiply or divide the columns of a weight, or the rows if dim is 0, rounding once."""
    kind = torch.promote_types(torch.promote_types(weight.dtype, by.dtype), torch.float32)
    factors = by.to(weight.device, kind).unsqueeze(1 - dim)
    weight.copy_(weight.to(kind) / factors if divide else weight.to(kind) * factors)


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace a module by another wherever the model holds it."""
    for parent in list(model.modules()):
        children = modules_in(parent)
        for key, child in children.items():
            if child is old:
                children[key] = new


def present(model: nn.Module, name: str, merged: Merged) -> list[nn.Module]:
    """Return the layers that took up a norm, with the adapters that they have now.

    Raises:
        UsageError: a layer is gone, or is no longer a plain linear layer.

    """
    outermost = {core(module): module for module in reversed(list(model.modules())) if is_layer(module)}
    others = wrappers(model)
    found: list[nn.Module] = []
    for layer in map(core, merged.layers):
        now = outermost.get(layer)
        if now is None:
            why = "it is no longer in the model"
        elif layer in others:
            why = f"it is in a {type(others[layer]).__name__}"
        else:
            why = parameter_blocker(layer)
        inner: Any = now
        while not why and is_adapted(inner):
            why, inner = adapter_kind_blocker(inner), inner.base_layer
        if now is None or why:
            raise UsageError(f"{name}: a layer that took up its α and β was changed since, {why}: undo that first")
        found.append(now)
    return found


def unmerge(model: nn.Module, module: nn.Module, merged: Merged, layers: Sequence[nn.Module]) -> None:
    """Put back a norm, and divide the weights of the layers that `present` found by α."""
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
