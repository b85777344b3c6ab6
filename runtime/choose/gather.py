"""The inputs of a model's activations: modules, and functions of PyTorch that modules call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fitact.base import FitactError, UsageError, one_line, quote
from fitact.runtime.measure import Sketch
from fitact.runtime.restore import (
    check_initialised,
    check_model,
    following,
    has_no_values,
    real,
    runner,
    untouched,
)
from fitact.runtime.torch_internals import is_compiled, without_torch_function

from .detect import CALLED, activation_sites, computed_by


@dataclass(frozen=True)
class Gathered:
    """What went into one activation.

    Attributes:
        path: of the module in the model; of a function that it calls itself, `path:function`.
        activation: its name in the catalog, or else its formula or class.
        sketch: the distribution of its inputs.

    """

    path: str
    activation: str
    sketch: Sketch


def gather(model: nn.Module, batches: Iterable[Any]) -> tuple[list[Gathered], list[str]]:
    """Run a model on batches, in its mode and without gradients, and gather what goes into its activations.

    The model and the generators of random numbers are left as they were.

    Args:
        model: the model, with values.
        batches: each is a tensor, a tuple or list of positional arguments, a mapping of named ones, or a function
            that takes the model and runs it.

    Returns:
        The activations that were run, with the distributions of their inputs, which
        may be empty; and notes on those that were not.

    Raises:
        UsageError: the model cannot be run with a batch, or has no values, or there is no batch.

    """
    _check(model, batches)
    count = 0
    with torch.no_grad(), untouched(model), _Watch(model) as watch, following(watch.enter, watch.leave):
        source = iter(batches)
        while True:
            try:
                batch = next(source)
            except StopIteration:
                break
            except FitactError:
                raise
            except (Exception, SystemExit) as error:
                raise UsageError(f"batch {count}: it cannot be made: {one_line(error)}") from error
            run = real(runner(batch))
            try:
                run(model)
            except FitactError:
                raise
            except (Exception, SystemExit) as error:
                raise UsageError(f"batch {count}: the model cannot be run with it: {one_line(error)}") from error
            count += 1
    if not count:
        raise UsageError("batches: expected at least one batch, got none")
    gathered: tuple[list[Gathered], list[str]] = watch.gathered()
    return gathered


def _check(model: nn.Module, batches: object) -> None:
    check_model(model)
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise UsageError(f"batches: expected several batches, as a list, got {quote(batches)}")
    check_initialised(model)
    if has_no_values(model):
        raise UsageError("the model's tensors have no values, as they are meta or fake: load its weights first")
    if any(map(is_compiled, model.modules())):
        raise UsageError("the model is compiled: expected it as it was before torch.compile")


class _Watch(TorchFunctionMode):
    """Gathers what goes into activations: a mode in which a model runs, whose modules may be changed.

    Attributes:
        names: the paths of the modules, by identity.
        running: the paths of the modules that run now, the innermost last.
        activations: by path, what computes there.
        sketches: by path, the distribution of the inputs.
        notes: on activations that cannot be fitted.

    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.running: list[str] = []
        self.activations: dict[str, str] = {}
        self.sketches: dict[str, Sketch] = {}
        self.notes: list[str] = []
        sites = {site.key: site for site in reversed(activation_sites(model))}  # a module may be at several places
        for site in reversed(sites.values()):
            if site.refusal:
                self.notes.append(f"not calibrated: {site.path}: {site.before}: {site.refusal}")
            elif isinstance(site.held, nn.Module):  # a function is seen where it is called
                self.activations[site.path] = site.activation or site.before
                site.held.register_forward_pre_hook(partial(self._before, site.path), with_kwargs=True)

    def enter(self, module: nn.Module, _: Any) -> None:
        """Record that a module runs."""
        self.running.append(self.names.get(id(module), ""))

    def leave(self, *_: Any) -> None:
        """Record that the innermost module has run."""
        self.running.pop()

    def _before(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.add(path, args, kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in CALLED and not any(path in self.activations for path in self.running):
            name = computed_by(func, args[1:], given) or func.__name__
            path = f"{self.running[-1] if self.running else ''}:{name}"
            self.activations[path] = name
            self.add(path, args, given)
        return func(*args, **given)

    def add(self, path: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Add the first tensor of a call's arguments to a sketch."""
        x = next((argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor)), None)
        if x is not None:
            with without_torch_function(), torch.no_grad():
                try:
                    self.sketches.setdefault(path, Sketch()).add(x)
                except UsageError as error:
                    raise UsageError(f"{path}: {error}") from None

    def gathered(self) -> tuple[list[Gathered], list[str]]:
        """Return what was gathered, and notes."""
        seen, notes = [], list(self.notes)
        for path, activation in self.activations.items():
            if path in self.sketches:
                seen.append(Gathered(path, activation, self.sketches[path]))
            else:
                notes.append(f"not calibrated: {path}: {activation}: it was not run")
        return seen, notes
