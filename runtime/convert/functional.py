"""Converting the activations that a model calls as functions, for as long as a context lasts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fitact.errors import UsageError, quote
from fitact.runtime.ops.library import DTYPES
from fitact.runtime.ops.registry import registered
from fitact.runtime.wrappers import overwrite

from .choices import METHODS, check_bits
from .detect import FUNCTIONS, SHIPPED, parametrised, shipped_class

IN_PLACE = frozenset(
    ("celu", "elu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "mish", "relu", "relu6", "selu", "silu")
) | {"threshold"}
KEYWORDS = frozenset(["approximate"])  # arguments that cannot be positional


def _arguments(function: Any, name: str) -> tuple[str, ...]:
    """Return the arguments of a PyTorch function in order; functions of torch and Tensor are never in place."""
    in_place = name in IN_PLACE and function is getattr(F, name)
    return ("input", *SHIPPED[name], *(["inplace"] if in_place else []))


ARGUMENTS = {function: _arguments(function, name) for function, name in FUNCTIONS.items()}


class converted_functions(TorchFunctionMode):  # noqa: N801
    """A context in which calls of PyTorch's activation functions keep less for backward.

        with fitact.converted_functions("fewbit", bits=3):
            loss = model(batch).loss
        loss.backward()

    This replaces every call of `F.gelu`, `F.silu`, `torch.relu`, `x.tanh()` and similar functions, also in modules
    such as nn.GELU. Calls with parameters that do not ship, and activations that the method does not ship, stay
    PyTorch's. Only calls that autograd records are replaced. In a function that is composed of others, these are
    replaced; use `names` to leave out functions such as `"tanh"`.

    Code that `torch.utils.checkpoint` runs again in backward is outside of this context, wherever `backward` is
    called. Enter the context within the checkpointed function, or pass
    `context_fn=lambda: (nullcontext(), converted_functions())`.

    Args:
        method: `"fewbit"`, `"relumix"`, `"inverted"` or `"exact"`.
        bits: as in `fitact.convert`.
        names: one or several activations, by their names in the catalog, to replace; by default all.

    Raises:
        UsageError: there is no such method or name, or the method ships none of them.

    """

    def __init__(
        self, method: str = "fewbit", bits: int | None = None, *, names: str | Collection[str] | None = None
    ) -> None:
        super().__init__()
        if method not in METHODS:
            raise UsageError(
                f"no method {quote(method)}: expected {', '.join(METHODS)}; auto is for fitact.convert"
            )
        check_bits(method, bits)
        known = {*SHIPPED, "gelu_tanh"}
        wanted = known if names is None else {names} if isinstance(names, str) else set(names)
        for name in sorted(wanted - known, key=str):
            raise UsageError(f"{quote(name)}: expected names of {', '.join(sorted(known))}")
        if not wanted:
            raise UsageError(f"names {quote(names)}: expected at least one")
        kinds = {name: shipped_class(name, method, bits) for name in sorted(wanted)}
        self.modules: Mapping[str, nn.Module] = {name: kind() for name, kind in kinds.items() if kind is not None}
        if not self.modules:
            raise UsageError(f"{method}: nothing is shipped for {', '.join(kinds)}")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function's replacement, or the function."""
        given = {} if kwargs is None else kwargs
        if func in FUNCTIONS and torch.is_grad_enabled():
            found = self._replaced(func, args, dict(given))
            if found is not None:
                return found
        return func(*args, **given)

    def _replaced(self, function: Any, args: Any, named: dict[str, Any]) -> Tensor | None:
        """Return the result of the function's replacement; None if there is none or PyTorch would raise."""
        names = ARGUMENTS[function]
        if len(args) > len(names):
            return None
        # before PyTorch 2.12 the compiler traces no `zip` of unlike lengths, and no union of keys and a set
        given = {names[i]: value for i, value in enumerate(args)}
        twice = any(name in named or name in KEYWORDS for name in given)
        if twice or any(name not in names for name in named):
            return None
        given |= named
        x = given.pop("input", None)
        if not _differentiated(x):
            return None
        name = FUNCTIONS[function]
        found = parametrised(name, name, given)
        module = self.modules.get(found.activation or "")
        if module is None or found.parameters or found.formula or found.refusal:
            return None
        if not found.in_place:
            y: Tensor = module(x)
            return y
        step = not registered(type(module)).keeps_output
        return overwrite(x, module) if step and found.keeps_input else None


def _differentiated(x: Any) -> bool:
    """Return whether autograd would record an activation of a tensor that fitact takes."""
    return isinstance(x, Tensor) and x.requires_grad and x.layout == torch.strided and x.dtype in DTYPES
