"""Converting a model with the first batch of a trainer, and the numbers that the trainer logs."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import nn

from fitact.base import FitactError, FitWarning, UsageError
from fitact.planning import Plan, load_plan
from fitact.runtime.choose import Conversion, convert
from fitact.runtime.measure import copied, whole_step
from fitact.runtime.restore import Inputs
from fitact.runtime.saving import ERRORS, is_attached
from fitact.runtime.torch_internals import is_compiled


class Converting:
    """What callbacks of trainers share: their arguments, and what came of converting the model."""

    def __init__(
        self, error: str | None = None, *, plan: Plan | str | Path | None = None, gradients: bool = True
    ) -> None:
        super().__init__()
        if error is not None and plan is not None:
            raise UsageError("error and plan: expected one of both, since a plan has its own error")
        if error is not None and error not in ERRORS:
            raise UsageError(f"error: expected {', '.join(ERRORS)}, got {error!r}")
        self.error, self.gradients = error or "exact", gradients
        self.plan = load_plan(plan) if isinstance(plan, str | Path) else plan
        self.report: Conversion | None = None
        self._model: nn.Module | None = None  # of the run before


def does_nothing(why: str) -> None:
    """Say in a warning that training goes on without fitact."""
    warnings.warn(f"fitact does nothing here: {why}", FitWarning, stacklevel=2)


def is_converted(model: nn.Module, before: nn.Module | None) -> bool:
    """Return whether a model is converted or planned; a warning says so unless it is the one of the run before."""
    done = any(map(is_attached, model.modules()))
    if done and model is not before:
        does_nothing("the model is converted already, so this callback leaves it")
    return done


def planned(model: nn.Module, plan: Plan) -> dict[str, float]:
    """Change a model as planned, and return what to log: the peaks and bytes that the plan predicts."""
    plan.apply(model)
    if all(group.policy == "baseline" for group in plan.groups):
        does_nothing("the plan leaves every block as it is")
    return {"fitact/peak_before": plan.baseline_peak, "fitact/peak": plan.peak, "fitact/saved": plan.saved}


def converted(
    model: nn.Module, inputs: Inputs, error: str, gradients: bool
) -> tuple[Conversion | None, dict[str, float]]:
    """Convert a model with the inputs of a training step, and return the report and what to log.

    Where nothing changes, a warning says why.
    """
    if any(map(is_compiled, model.modules())):
        does_nothing("the model is compiled: use fitact.compile in place of torch.compile")
        return None, {}
    try:
        peaks = _peaks(model, inputs, error)
        report = convert(model, error=error, example_inputs=inputs, gradients=gradients)
    except FitactError as problem:
        does_nothing(str(problem))
        return None, {}
    if report.saved_before == report.saved_after:
        does_nothing("the model saves nothing that could be stored in fewer bytes")
    logged = {"fitact/saved_before": report.saved_before or 0, "fitact/saved": report.saved_after or 0, **peaks}
    if report.gradient is not None and report.gradient.error is not None:
        logged["fitact/gradient_error"] = report.gradient.error
    return report, logged


def _peaks(model: nn.Module, inputs: Inputs, error: str) -> dict[str, float]:
    """Return the peak of a forward and backward pass before and after, counted with tensors without memory."""
    device = "cuda" if any(parameter.device.type == "cuda" for parameter in model.parameters()) else "cpu"
    try:
        subject = copied(model, inputs, device=device)
        if subject.mode is None:  # it was copied with its values: a second model in the memory is too much
            return {}
        before = whole_step(subject).peak
        convert(subject.model, error=error)
        return {"fitact/peak_before": before, "fitact/peak": whole_step(subject).peak}
    except UsageError:
        return {}  # what fake tensors cannot run has no peak to log; bytes saved are counted all the same
    finally:
        torch.clear_autocast_cache()
