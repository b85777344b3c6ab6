"""fitact: training that saves less for backward, by recomputing and quantising what autograd saves.

    with fitact.saving(): ...            any code
    fitact.convert(model)                a model, with a report
    fitact.verify(model, batch)          whether a step computes what the baseline's does, and where not
    fitact.plan(model, gib=24)           a model that has to fit a memory
    fitact.activation("gelu", bits=3)    an nn.Module in place of nn.GELU(), with a fitted derivative

The command line makes new ones: `fitact fit`, `fitact codegen`, `fitact plot`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fitact.base import FitactError, FitWarning, JobError, UsageError

from . import operators

if TYPE_CHECKING:
    from fitact.calibration import calibrate
    from fitact.planning import load_plan, plan, planner
    from fitact.runtime.choose import convert, revert, verify
    from fitact.runtime.compile import compile, compile_options, compile_report  # noqa: A004  as torch.compile
    from fitact.runtime.saving import checkpoint, hooks, saving
    from fitact.runtime.shipped import activation, shipped

__all__ = [
    "FitWarning",
    "FitactError",
    "JobError",
    "UsageError",
    "activation",
    "calibrate",
    "checkpoint",
    "compile",
    "compile_options",
    "compile_report",
    "convert",
    "hooks",
    "load_plan",
    "plan",
    "planner",
    "revert",
    "saving",
    "shipped",
    "verify",
]
# Names that need PyTorch, by the modules they are imported from on first use.
_LAZY = {
    "fitact.calibration": "calibrate",
    "fitact.planning": "load_plan plan planner",
    "fitact.runtime.choose": "convert revert verify",
    "fitact.runtime.compile": "compile compile_options compile_report",
    "fitact.runtime.saving": "checkpoint hooks saving",
    "fitact.runtime.shipped": "activation shipped",
}
LAZY = {name: module for module, names in _LAZY.items() for name in names.split()}
# Names of once, by those that do the same now.
OLD = {
    "rebuild": "fitact.convert(model)",
    "converted_functions": "fitact.saving()",
    "revert_plan": "fitact.revert(model)",
}


def __getattr__(name: str) -> Any:
    if name in OLD:
        raise AttributeError(f"fitact.{name} is now {OLD[name]}")
    if name == "__version__":
        from importlib.metadata import version  # takes longer than all else here

        return version("fitact")
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *LAZY})


operators.register()
