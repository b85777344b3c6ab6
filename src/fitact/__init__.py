"""fitact: PyTorch activations that keep a few bits per element for backward instead of their input.

    fitact.activation("gelu", bits=3)    an nn.Module in place of nn.GELU()
    fitact.convert(model)                all activations of a model, in place

The command line makes new ones: `fitact fit`, `fitact codegen`, `fitact plot`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fitact.errors import FitactError, FitWarning, JobError, UsageError, quote

if TYPE_CHECKING:
    from torch import nn

    from fitact.runtime.convert import convert, revert
    from fitact.runtime.convert_functions import converted_functions

__all__ = [
    "FitWarning",
    "FitactError",
    "JobError",
    "UsageError",
    "activation",
    "convert",
    "converted_functions",
    "revert",
    "shipped",
]
# What needs PyTorch, by the module that it is imported from when it is first asked for.
LAZY = {
    "convert": "fitact.runtime.convert",
    "converted_functions": "fitact.runtime.convert_functions",
    "revert": "fitact.runtime.convert",
}


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(LAZY[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *LAZY})


def shipped() -> tuple[str, ...]:
    """Return the names of the shipped fits, as `"gelu_fewbit3"`, sorted."""
    from importlib.resources import files

    fits = files("fitact.generated").joinpath("fits").iterdir()
    return tuple(sorted(path.name.removesuffix(".json") for path in fits if path.name.endswith(".json")))


def activation(name: str, *, method: str = "fewbit", bits: int | None = None) -> nn.Module:
    """Return a shipped activation as a module.

    Args:
        name: of the activation in the catalog, e.g. `"gelu"`; or of a shipped fit, e.g.
            `"gelu_regelu2_published"`.
        method: `"fewbit"`, the best step function for the derivative; `"relumix"`, the slopes of the best mixture
            of ReLUs; `"inverted"`, the derivative as a function of the output and of a bit or two; or `"exact"`,
            the derivative as a function of the output.
        bits: kept per element for backward; by default 3, or the least width that is shipped where there is none
            of 3. None for `"exact"`, which keeps none.

    Returns:
        An instance of the class in `fitact.generated.{name}_{method}{bits}`, or `fitact.generated.{name}_exact`.

    Raises:
        UsageError: no such activation is shipped; the message lists those that are.

    """
    there = shipped()
    if bits is not None:
        wanted = [f"{name}_{method}{bits}"]
    elif method == "exact":
        wanted = [f"{name}_exact"]
    else:
        own = [name] if method == "fewbit" else []  # the whole name of a fit says its method
        wanted = [*(f"{name}_{method}{k}" for k in (3, 0, 1, 2, 4)), *own]
    found = next((one for one in wanted if one in there), None)
    if found is None:
        raise UsageError(
            f"no activation {quote(wanted[0])} is shipped: there are {', '.join(there)}; "
            "make others with fitact fit"
        )
    module = import_module(f"fitact.generated.{found}")
    classes = [getattr(module, name) for name in module.__all__]
    made: nn.Module = next(c for c in classes if isinstance(c, type))()
    return made
