"""Shipped activations by name, and by the keys of their kernels, so that a loaded program need not import them."""

from __future__ import annotations

from importlib import import_module
from importlib.resources import files

from torch import nn

from fitact.base import UsageError, integer, near, quote
from fitact.runtime.kernels import sources


def shipped() -> tuple[str, ...]:
    """Return the names of the shipped fits, as `"gelu_fewbit3"`, sorted."""
    fits = files("fitact.generated").joinpath("fits").iterdir()
    return tuple(sorted(path.name.removesuffix(".json") for path in fits if path.name.endswith(".json")))


def activation(name: str, *, method: str | None = None, bits: int | None = None) -> nn.Module:
    """Return an activation as a module.

    Args:
        name: name of the activation in the catalog, e.g. `"gelu"`, or of a shipped fit, e.g.
            `"gelu_regelu2_published"`.
        method: `"fewbit"`, the best step function for the derivative; `"relumix"`, the slopes of the best mixture
            of ReLUs; `"inverted"`, the derivative as a function of the output and of one or two bits; or
            `"output"`, the derivative as a function of the output. By default `"fewbit"`.
        bits: bits saved per element for backward; by default 3, or the least width that ships if 3 does not. None
            for `"output"`, which saves no bits.

    Returns:
        An instance of the class in `fitact.generated.{name}_{method}{bits}`, or `fitact.generated.{name}_output`.

    Raises:
        UsageError: no such activation is shipped (the message names some that are), or `bits` is not a valid
            number of bits or the method saves none.

    """
    there = shipped()
    method = method or "fewbit"
    if bits is not None:
        wanted = [f"{name}_{method}{integer('bits', bits, 0)}"]
    elif method in ("output", "recompute"):
        wanted = [f"{name}_{method}"]
    else:
        own = [name] if method == "fewbit" else []  # the whole name of a fit says its method
        wanted = [*(f"{name}_{method}{k}" for k in (3, 0, 1, 2, 4)), *own]
    fit = next((fit for fit in wanted if fit in there), None)
    if fit is None:
        raise UsageError(
            f"no activation {quote(wanted[0])} is shipped{near(wanted[0], there)}; make others with fitact fit"
        )
    module = import_module(f"fitact.generated.{fit}")
    kind = next(member for member in map(vars(module).get, module.__all__) if isinstance(member, type))
    try:
        made: nn.Module = kind()
    except TypeError as error:  # it has a number for every channel
        raise UsageError(f"{error}: make it as fitact.generated.{fit}.{kind.__name__}(channels)") from None
    return made


def import_shipped(key: str) -> None:
    """Import the shipped module that a key belongs to, if there is one.

    Raises:
        RuntimeError: the module has another key.

    """
    name = key.rpartition("-")[0]
    if not name.isidentifier() or not files("fitact.generated").joinpath("fits", f"{name}.json").is_file():
        return
    module = import_module(f"fitact.generated.{name}")
    if key != module._KEY:
        raise RuntimeError(
            f"expected the shipped {name} to have the key {key!r}, but it has {module._KEY!r}: use the fitact "
            "that the program was made with, or export the model again"
        )


sources.append(import_shipped)
