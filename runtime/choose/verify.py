"""Whether a model computes what it would without fitact, checkpoints and the compiler, and where not."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fitact.base import UsageError, one_line
from fitact.runtime.restore import Runner, explained, following, has_no_values, real, runner
from fitact.runtime.torch_internals import is_compiled, plain, plain_path, tree_iter

from .gradients import numbers, reproducibly, scalar_of, training
from .policies import revert
from .replacement import inner

Values = dict[str, list[Tensor | None]]


@dataclass(frozen=True)
class Verification:
    """How far a model's step is from the baseline's.

    An error is the norm of the difference as a share of the norm of the baseline's values, and infinite where
    shapes differ. Errors that are 0, where all values are the same, are left out.

    Attributes:
        loss: the baseline's loss and the model's.
        outputs: errors of the outputs of modules, by path, in the order of forward.
        passed: errors of the gradients that reach these outputs, in the order of backward.
        gradients: errors of the gradients of parameters, by name.
        random: whether the step draws as many random numbers.
        compared: how many outputs and parameters were compared.

    """

    loss: tuple[float, float]
    outputs: Mapping[str, float]
    passed: Mapping[str, float]
    gradients: Mapping[str, float]
    random: bool
    compared: tuple[int, int]

    @property
    def same(self) -> bool:
        """Whether all values are the baseline's."""
        return self.random and not (self.outputs or self.passed or self.gradients) and len({*self.loss}) == 1

    def __str__(self) -> str:
        outputs, parameters = self.compared
        if self.same:
            seen = f"the outputs of {outputs} modules, " if outputs else ""
            what = f"the loss, {seen}the gradients of {parameters} parameters and the random state"
            return f"{what} are the baseline's, bit for bit"
        before, after = self.loss
        text = [f"loss: {after:.7g}, the baseline's {before:.7g}"]
        if self.outputs:
            text.append(f"outputs: {len(self.outputs)} of {outputs} differ, first that of {_first(self.outputs)}")
        if self.passed:
            text.append(f"backward: first differs the gradient at the output of {_first(self.passed)}")
        if self.gradients:
            most = max(self.gradients, key=self.gradients.__getitem__)
            largest = f"most that of {_first({most: self.gradients[most]})}"
            text.append(f"gradients: {len(self.gradients)} of {parameters} differ, {largest}")
        return "\n".join([*text, *([] if self.random else ["random state: another"])])


def verify(model: nn.Module, example_inputs: Any, *, baseline: nn.Module | None = None) -> Verification:
    """Run a step of a model and one of the baseline, from the same random state, and compare all values.

    The model may be converted, planned, checkpointed or compiled, and stays as it was. In a compiled one, outputs
    of modules are not seen. This takes the memory of a second model, and of all outputs on the host.

    Args:
        model: the model, with values; it is run in training mode.
        example_inputs: as for `fitact.convert`; a loss is found in the output likewise.
        baseline: what to compare with. By default a deep copy of the model, with what fitact changed put back, not
            compiled, without checkpoints of transformers, timm and PyTorch's wrapper. A module that calls
            `torch.utils.checkpoint` itself goes on doing so.

    Returns:
        What differs, and where first. Its `str` says so in a few lines.

    Raises:
        UsageError: a model has no values, or cannot be copied or run, or no parameter of both has the same name.

    """
    run, bare = runner(example_inputs), inner(model)
    if has_no_values(bare):
        raise UsageError("the model's tensors have no values, and verify runs a step")
    if baseline is None:
        try:
            baseline = copy.deepcopy(bare)
        except Exception as error:
            raise UsageError(f"the model cannot be copied: {one_line(error)}; give a baseline") from error
        revert(baseline)
        plain(baseline)
    first, second = reproducibly(lambda: [_Step(stepped, run) for stepped in (baseline, model)])
    if not first.gradients.keys() & second.gradients.keys():
        raise UsageError("baseline: no trained parameter of it has the name of one of the model")
    return Verification(
        (first.loss, second.loss),
        _differences(first.outputs, second.outputs),
        _differences(first.passed, second.passed),
        _differences(first.gradients, second.gradients),
        all(map(torch.equal, first.random, second.random)) and first.python == second.python,
        (len(first.outputs.keys() & second.outputs.keys()), len(first.gradients.keys() & second.gradients.keys())),
    )


class _Step:
    """The values of a training step of a model, which stays as it was."""

    def __init__(self, model: nn.Module, run: Runner) -> None:
        self.outputs: Values = {}
        self.passed: Values = {}
        self.calls: Counter[str] = Counter()
        self.paths = {module: plain_path(path) for path, module in model.named_modules()}
        name, compiled = type(inner(model)).__name__, any(map(is_compiled, model.modules()))
        with training(model), _ungraded(model):
            with explained(name, "forward"), nullcontext() if compiled else following(lambda *_: None, self.leave):
                loss = scalar_of(real(run)(model))
            with explained(name, "backward"):
                loss.backward()
            self.loss = float(loss.detach())
            self.gradients: Values = {
                plain_path(name): [parameter.grad]
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
            }
            devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
            self.random = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
            self.python = random.getstate()

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        path = self.paths.get(module)
        if path is None:
            return
        self.calls[path] += 1
        name = path if self.calls[path] == 1 else f"{path} (call {self.calls[path]})"
        tensors = [leaf for leaf in tree_iter(output) if isinstance(leaf, Tensor)]
        self.outputs[name] = [tensor.detach().cpu().clone() for tensor in tensors]
        for i, tensor in enumerate(tensors):
            if tensor.requires_grad:
                tensor.register_hook(partial(self.arrive, name, i))

    def arrive(self, name: str, i: int, gradient: Tensor | None) -> None:
        if gradient is None:  # nothing reads this one of several outputs
            return
        self.passed.setdefault(name, [None] * len(self.outputs[name]))[i] = gradient.detach().cpu().clone()


@contextmanager
def _ungraded(model: nn.Module) -> Iterator[None]:
    """Let no parameter of a model have a gradient, and then those that they had; of some, none is a copy's."""
    held = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in held:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient


def _differences(expected: Values, changed: Values) -> dict[str, float]:
    """Return the errors of what is in both, where they are not 0, in the baseline's order."""
    errors = {name: _error(values, changed[name]) for name, values in expected.items() if name in changed}
    return {name: error for name, error in errors.items() if error}


def _error(expected: list[Tensor | None], changed: list[Tensor | None]) -> float:
    difference = norm = 0.0
    if len(expected) != len(changed):
        return math.inf
    for a, b in zip(map(numbers, expected), map(numbers, changed), strict=True):
        if a.shape != b.shape and a.any() | b.any():  # no gradient is one of zeros
            return math.inf
        difference += 0.0 if torch.equal(a, b) else float((a - b).square().sum())
        norm += float(a.square().sum())
    share = math.sqrt(difference / norm) if norm else difference
    return math.inf if math.isnan(share) else share


def _first(errors: Mapping[str, float]) -> str:
    path, error = next(iter(errors.items()))
    return f"{path or 'the model'}, {f'by {100 * error:.3g} %' if error < math.inf else 'in all'}"
