"""fitact: PyTorch activations that keep a few bits per element for backward instead of their input.

    fitact.activation("gelu", bits=3)    an nn.Module in place of nn.GELU()

The command line makes new ones: `fitact fit`, `fitact codegen`, `fitact plot`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fitact.errors import FitactError, FitWarning, JobError, UsageError, quote

if TYPE_CHECKING:
    from torch import nn

__all__ = ["FitWarning", "FitactError", "JobError", "UsageError", "activation"]


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
    from importlib import import_module
    from importlib.resources import files

    shipped = sorted(
        path.name.removesuffix(".json")
        for path in files("fitact.generated").joinpath("fits").iterdir()
        if path.name.endswith(".json")
    )
    if bits is not None:
        wanted = [f"{name}_{method}{bits}"]
    elif method == "exact":
        wanted = [f"{name}_exact"]
    else:
        own = [name] if method == "fewbit" else []  # the whole name of a fit says its method
        wanted = [*(f"{name}_{method}{k}" for k in (3, 0, 1, 2, 4)), *own]
    found = next((one for one in wanted if one in shipped), None)
    if found is None:
        raise UsageError(
            f"no activation {quote(wanted[0])} is shipped: there are {', '.join(shipped)}; "
            "make others with fitact fit"
        )
    module = import_module(f"fitact.generated.{found}")
    classes = [getattr(module, name) for name in module.__all__]
    made: nn.Module = next(c for c in classes if isinstance(c, type))()
    return made
