"""The inputs of a model's activations: modules, functions that modules hold, and functions that they call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from fitact.errors import FitactError, UsageError, quote
from fitact.runtime.measure.sketch import Sketch
from fitact.runtime.restore import check_model, following, has_no_values, real, runner, untouched
from fitact.runtime.torch_internals import is_compiled, without_torch_function
from fitact.text import one_line

from .detect import FUNCTIONS, SHIPPED, ActivationSite, Found, activation_sites, parametrised


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
        The activations that were run, those that modules hold first, with the distributions of their inputs, which
        may be empty; and notes on those that were not.

    Raises:
        UsageError: the model cannot be run with a batch, or has no values, or there is no batch.

    """
    _check(model, batches)
    watch = _Watch({id(module): name for name, module in model.named_modules()})
    count = 0
    with torch.no_grad(), untouched(model), watch.watched(model):
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
    return watch.found()


def _check(model: nn.Module, batches: object) -> None:
    check_model(model)
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise UsageError(f"batches: expected several batches, as a list, got {quote(batches)}")
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        raise UsageError("the model has parameters that are not initialised yet: run it once, then calibrate it")
    if has_no_values(model):
        raise UsageError("the model's tensors have no values, as they are meta or fake: load its weights first")
    if any(map(is_compiled, model.modules())):
        raise UsageError("the model is compiled: expected it as it was before torch.compile")


@dataclass
class _Watch:
    """Gathers inputs, and follows in which module the model is.

    Attributes:
        names: the paths of the modules, by identity.
        running: the paths of the modules that run now, the innermost last.
        inside: how many activations run now; functions that they call are part of them.
        activations: by path, what was seen at it.
        sketches: by path, the distribution of the inputs.
        skipped: notes on activations that cannot be fitted.

    """

    names: Mapping[int, str]
    running: list[str] = field(default_factory=list)
    inside: int = 0
    activations: dict[str, str] = field(default_factory=dict)
    sketches: dict[str, Sketch] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(following(self._enter, self._leave))
            keys = set()
            for site in activation_sites(model):
                if site.key not in keys:  # one module may be at several places
                    keys.add(site.key)
                    self._watch(site, stack)
            stack.enter_context(_Calls(self))
            yield

    def _watch(self, site: ActivationSite, stack: ExitStack) -> None:
        found, held = site.found, site.held
        if found.refusal and found.activation is None:
            self.skipped.append(f"{site.path}: {found.before}: {found.refusal}")
            return
        self.activations[site.path] = _name(found)
        if isinstance(held, nn.Module):
            before = held.register_forward_pre_hook(partial(self._before, site.path), with_kwargs=True)
            stack.callback(before.remove)
            after = held.register_forward_hook(self._after, always_call=True)
            stack.callback(after.remove)
        else:
            stack.callback(site.put, held)
            site.put(partial(self._called, held, site.path))

    def _enter(self, module: nn.Module, _: Any) -> None:
        self.running.append(self.names.get(id(module), ""))

    def _leave(self, *_: Any) -> None:
        self.running.pop()

    def _before(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.inside += 1
        self.add(path, args, kwargs)

    def _after(self, *_: Any) -> None:
        self.inside -= 1

    def _called(self, function: Callable[..., Any], path: str, *args: Any, **kwargs: Any) -> Any:
        self.inside += 1
        try:
            self.add(path, args, kwargs)
            return function(*args, **kwargs)
        finally:
            self.inside -= 1

    def call(self, function: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Note that a function was called in the `forward` of a module."""
        if self.inside:
            return
        given = {**dict(zip(("input", *SHIPPED[FUNCTIONS[function]]), args, strict=False)), **kwargs}
        given.pop("input", None)
        activation = _name(parametrised(FUNCTIONS[function], FUNCTIONS[function], given))
        path = f"{self.running[-1] if self.running else ''}:{activation}"
        self.activations[path] = activation
        self.add(path, args, kwargs)

    def add(self, path: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Add the first tensor of a call's arguments to a sketch."""
        x = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), None)
        if x is not None:
            with without_torch_function(), torch.no_grad():
                try:
                    self.sketches.setdefault(path, Sketch()).add(x)
                except UsageError as error:
                    raise UsageError(f"{path}: {error}") from None

    def found(self) -> tuple[list[Gathered], list[str]]:
        """Return what was gathered, and notes."""
        seen, notes = [], [f"not calibrated: {skipped}" for skipped in self.skipped]
        for path, activation in self.activations.items():
            sketch = self.sketches.get(path)
            if sketch is None:
                notes.append(f"not calibrated: {path}: {activation}: it was not run")
            else:
                seen.append(Gathered(path, activation, sketch))
        return seen, notes


class _Calls(TorchFunctionMode):
    """Tells a watch which activation functions are called."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {} if kwargs is None else kwargs
        if func in FUNCTIONS:
            self.watch.call(func, args, given)
        return func(*args, **given)


def _name(found: Found) -> str:
    """Return what an activation is called: its name in the catalog if it is what ships."""
    if found.formula:
        return found.formula
    return found.before if found.parameters or found.activation is None else found.activation
