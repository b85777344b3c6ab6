"""Finding which modules keep less: activations and norms by trying a few numbers, own calls by running the model.

Calls are also checked by running it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fitact.runtime.convert.detect import MODULES
from fitact.runtime.convert.measure import tensors_of, traces
from fitact.runtime.learned.uses import Use
from fitact.runtime.memory.saved import count_saved
from fitact.runtime.norms import linear as layers
from fitact.runtime.recipes import Recipe
from fitact.runtime.restore import Run, following, has_no_values, real, unchanged, untouched
from fitact.runtime.torch_internals import (
    buffers_in,
    parameters_in,
    storage_id,
    unset_fake_temporarily,
)

from .calls import Looking, here
from .derivatives import READS, count_reads
from .modules import PATH, Rebuilding
from .recipes import recipe_of

PROBE = 64  # elements that an activation is tried with
ROWS = 3  # that a norm is tried with
UNLIKE = "its outputs would not be stock's bit for bit"
RANDOM = "the model's outputs differ from one run to the next"


# --------------------------------------------------------------------------------------- by trying a few numbers


def is_composed(norm: layers.Norm) -> bool:
    """Return whether a norm is several operations, which keep more bytes for a few rows than these have."""
    with unset_fake_temporarily(), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        for dtype in (torch.float32, torch.bfloat16):
            x, trial = torch.ones(ROWS, norm.columns, dtype=dtype), layers.trial_copy(norm.module, dtype)
            with count_saved(trial) as saved:
                y = trial(x.requires_grad_())
            large = [one.nbytes() for one in saved.storages.values() if one.nbytes() >= x.nbytes]
            del y
            if sum(large) > x.nbytes:
                return count_reads(trial, x) <= READS
    return False


def learned_kind(module: nn.Module, use: Use) -> str | None:
    """Return the kind of an activation with learned numbers, by what a copy of it keeps for a few numbers."""
    with unset_fake_temporarily():
        trial = module.__new__(type(module))
        parameters, buffers = _ones(parameters_in(module)), _ones(buffers_in(module))
        vars(trial).update(vars(module), _parameters=parameters, _buffers=buffers)
        kind = kind_of(trial, torch.linspace(-3, 3, math.prod(use.shape)).view(use.shape))
    return {"Activation": "Learned", "Composed": "ComposedLearned"}.get(kind or "")


def _ones(held: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return ones of float32 in place of tensors, which may be fake."""
    return {
        name: None if one is None else torch.ones(one.shape).requires_grad_(one.requires_grad)
        for name, one in held.items()
    }


def kind_of(activation: nn.Module, values: Tensor | None = None) -> str | None:
    """Return the kind of an activation by what it keeps for a few numbers; None if that is its output alone.

    Args:
        activation: the module.
        values: what it is tried with, float32; by default PROBE numbers.

    """
    try:
        with (
            unchanged(activation),
            unset_fake_temporarily(),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            values = torch.linspace(-3, 3, PROBE) if values is None else values
            x = values.clone().requires_grad_().clone()
            with count_saved(activation) as saved:
                y = activation(x)
            reads = 1 if storage_id(y) == storage_id(x) else count_reads(activation, values)
    except Exception:  # whatever it needs, it is not a function of a tensor alone
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape or not saved.storages:
        return None
    if storage_id(y) == storage_id(x) or {*saved.storages} == {storage_id(y)}:
        return "Chained" if type(activation) in MODULES else None
    if {*saved.storages} == {storage_id(x)}:
        return "Activation"
    return "Composed" if saved.bytes >= x.nbytes and reads <= READS else None


# ---------------------------------------------------------------------------------------- by running the model


class _Finder:
    """Notes the modules in which a call keeps less, or returns what others rebuild."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.running: list[tuple[str | None, Looking]] = []
        self.paths: set[str] = set()
        self.recipes: dict[Recipe, str] = {}

    def enter(self, module: nn.Module, _: Any) -> None:
        path = vars(module).get(PATH, self.running[-1][0] if self.running else None)  # or made while it runs
        self.running.append((path, Looking(module=module)))
        self.running[-1][1].__enter__()

    def leave(self, *_: Any) -> None:
        self.running.pop()[1].__exit__()

    def watch(self, output: Tensor, less: bool) -> None:
        path = self.running[-1][0]
        recipe = recipe_of(output)
        if path is not None and less:
            self.paths.add(path)
        if path is not None and recipe is not None:
            self.recipes[recipe] = path

    @contextmanager
    def looking(self, _: Any) -> Iterator[None]:
        """Look at every call of a model: a plan of `traces`."""
        self.begin()
        with following(self.enter, self.leave):
            try:
                here.watch = self.watch
                yield
            finally:
                while self.running:  # of what has failed
                    self.leave()
                here.watch = None

    def found(self) -> set[str]:
        """Return the paths of the modules in which a call keeps less, or makes another keep less."""
        return self.paths | {path for recipe, path in self.recipes.items() if recipe.readers}


def find_calls(model: nn.Module, run: Run) -> list[str]:
    """Return the paths of the modules whose own calls would keep less, in the order of the model.

    Args:
        model: rebuilt otherwise.
        run: runs it; it is run forward once, as fake tensors where it can be.

    Raises:
        UsageError: it cannot be run.

    """
    finder = _Finder()
    with _tagged(model):
        traces(model, run, frozenset(), [finder.looking])
    found = finder.found()
    return [path for path, _ in model.named_modules() if path in found]


@contextmanager
def _tagged(model: nn.Module) -> Iterator[None]:
    """Let each module know its path, and so its copies, until the context ends."""
    modules: dict[str, Any] = dict(model.named_modules())
    for path, module in modules.items():
        vars(module)[PATH] = path
    try:
        yield
    finally:
        for module in modules.values():
            if not isinstance(module, Rebuilding):  # which knows it anyway
                vars(module).pop(PATH, None)


class Checked(NamedTuple):
    """The result of running a model.

    Attributes:
        sound: the paths of modules whose calls may be replaced.
        reasons: why those of others may not, by path.

    """

    sound: list[str]
    reasons: dict[str, str]


def check_calls(
    model: nn.Module,
    run: Run,
    paths: Sequence[str],
    swapped: Callable[[Sequence[str]], AbstractContextManager[None]],
) -> Checked:
    """Run a model as it is and rebuilt, from the same random numbers, and compare the outputs bit for bit.

    If they differ, the modules of each class are tried alone.

    Args:
        model: left as it was, with the generators of random numbers.
        run: runs it.
        paths: of modules whose calls are to be replaced.
        swapped: rebuilds the model, with the calls of the modules at these paths.

    Raises:
        UsageError: it cannot be run.

    """
    if has_no_values(model):
        return Checked([], dict.fromkeys(paths, "the model's tensors have no values to check its outputs with"))

    def outputs(of: Sequence[str]) -> list[Tensor]:
        with torch.inference_mode(False), torch.enable_grad(), untouched(model), swapped(of):
            if not model.training:
                model.train()
            return [leaf.detach() for leaf in tensors_of(real(run), model)]

    expected = outputs([])
    if _equal(expected, outputs(paths)):
        return Checked([*paths], {})
    if not _equal(expected, outputs([])):
        return Checked([], dict.fromkeys(paths, RANDOM))
    classes: dict[type, list[str]] = {}
    for path in paths:
        classes.setdefault(type(model.get_submodule(path)), []).append(path)
    sound = {path for group in classes.values() if _equal(expected, outputs(group)) for path in group}
    found = [path for path in paths if path in sound]
    if not _equal(expected, outputs(found)):
        found = []
    return Checked(found, {path: UNLIKE for path in paths if path not in found})


def _equal(expected: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
    return len(expected) == len(found) and all(map(_same, expected, found))


def _same(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return False
    equal = a == b
    return bool((equal | (a.isnan() & b.isnan()) if a.is_floating_point() else equal).all())
