"""The inputs of a model's activations: modules, and functions of PyTorch that modules call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fitact.base import UsageError, quote
from fitact.runtime.measure import Sketch
from fitact.runtime.restore import (
    check_initialised,
    check_model,
    following,
    has_no_values,
    real,
    refused,
    runner,
    untouched,
)
from fitact.runtime.torch_internals import is_compiled, without_torch_function

from .detect import CALLED, activation_sites, computed_by

Gathered = tuple[str, str, Sketch]  # a path, what computes there, and the distribution of its inputs


def gather(model: nn.Module, batches: Iterable[Any]) -> tuple[list[Gathered], list[str]]:
    """Run a model on batches, in its mode and without gradients, and gather what goes into its activations.

    It and the generators of random numbers are left as they were. The arguments are those of `fitact.calibrate`.
    Paths are those of modules, or `path:function` of a function that a module calls itself; what computes there is
    a name in the catalog, or else a formula or class. Notes are on activations that were not run.
    """
    check_model(model)
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise UsageError(f"batches: expected several batches, as a list, got {quote(batches)}")
    check_initialised(model)
    if has_no_values(model):
        raise UsageError("the model's tensors have no values, as they are meta or fake: load its weights first")
    if any(map(is_compiled, model.modules())):
        raise UsageError("the model is compiled: expected it as it was before torch.compile")
    with torch.no_grad(), untouched(model), _Watch(model) as watch, following(watch.enter, watch.leave):
        source, end = iter(batches), object()
        for number in count():
            with refused(f"batch {number}: it cannot be made"):
                batch = next(source, end)
            if batch is end:
                break
            run = real(runner(batch))
            with refused(f"batch {number}: the model cannot be run with it"):
                run(model)
    if not number:
        raise UsageError("batches: expected at least one batch, got none")
    gathered: tuple[list[Gathered], list[str]] = watch.gathered()
    return gathered


class _Watch(TorchFunctionMode):
    """Gathers what activations are given: a mode in which a model runs, whose modules may be changed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.running: list[str] = []  # the paths of the modules that run now, the innermost last
        self.activations: dict[str, str] = {}  # by path, what computes there
        self.sketches: dict[str, Sketch] = {}  # by path, the distribution of the inputs
        self.notes: list[str] = []  # on activations that cannot be fitted
        sites = {site.key: site for site in reversed(activation_sites(model))}  # a module may be at several places
        for site in reversed(sites.values()):
            if site.refusal:
                self.notes.append(f"not calibrated: {site.path}: {site.before}: {site.refusal}")
            elif isinstance(site.held, nn.Module):  # a function is seen where it is called
                self.activations[site.path] = site.activation or site.before
                site.held.register_forward_pre_hook(partial(self.add, site.path), with_kwargs=True)

    def enter(self, module: nn.Module, _: Any) -> None:
        self.running.append(self.names.get(id(module), ""))

    def leave(self, *_: Any) -> None:
        self.running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in CALLED and not any(path in self.activations for path in self.running):
            name = computed_by(func, args[1:], given) or func.__name__
            path = f"{self.running[-1] if self.running else ''}:{name}"
            self.activations[path] = name
            self.add(path, func, args, given)
        return func(*args, **given)

    def add(self, path: str, _: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Add the first tensor of the arguments of a module or function to a sketch."""
        x = next((argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor)), None)
        if x is not None:
            with without_torch_function(), torch.no_grad():
                try:
                    self.sketches.setdefault(path, Sketch()).add(x)
                except UsageError as error:
                    raise UsageError(f"{path}: {error}") from None

    def gathered(self) -> tuple[list[Gathered], list[str]]:
        seen, notes = [], list(self.notes)
        for path, activation in self.activations.items():
            if path in self.sketches:
                seen.append((path, activation, self.sketches[path]))
            else:
                notes.append(f"not calibrated: {path}: {activation}: it was not run")
        return seen, notes
