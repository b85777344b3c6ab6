"""Converting the activations that a model calls as functions, for as long as a context lasts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fitact.errors import UsageError, quote

from .convert_choices import METHODS, check_bits
from .inplace import overwrite
from .ops import DTYPES
from .sites import FUNCTIONS, SHIPPED, parametrised, registered, shipped_class

IN_PLACE = frozenset(
    [
        *("celu", "elu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "mish", "relu", "relu6", "selu"),
        *("silu", "threshold"),
    ]
)
# What PyTorch's functions take after their input, in this order.
ARGUMENTS = {
    name: (*parameters, *(["inplace"] if name in IN_PLACE else [])) for name, parameters in SHIPPED.items()
}


class converted_functions(TorchFunctionMode):  # noqa: N801
    """A context in which calls of PyTorch's activation functions keep less for backward.

        with fitact.converted_functions("fewbit", bits=3):
            loss = model(batch).loss
        loss.backward()

    Concerned are `F.gelu`, `F.silu`, `torch.relu`, `x.tanh()` and their like wherever they are called inside, in
    modules such as nn.GELU too; with parameters other than the shipped ones, and where nothing is shipped by the
    method, they are PyTorch's. Only calls that autograd records are changed. Functions composed of others are as
    they were but for their parts; names such as `"tanh"` can be left out.

    What `torch.utils.checkpoint` runs again in backward is outside of this context, wherever `backward` is called:
    enter it within what is checkpointed, or pass on `context_fn=lambda: (nullcontext(), converted_functions())`.

    Args:
        method: `"fewbit"`, `"relumix"`, `"inverted"` or `"exact"`.
        bits: as in `fitact.convert`.
        names: one or several of the activations, as in the catalog, that are concerned; by default all.

    Raises:
        UsageError: no such method or name, or nothing is shipped by it.

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
        """Call what stands for the function."""
        given = {} if kwargs is None else kwargs
        name = FUNCTIONS.get(func)
        if name is not None and torch.is_grad_enabled():
            found = self._replaced(name, args, dict(given))
            if found is not None:
                return found
        return func(*args, **given)

    def _replaced(self, name: str, args: Any, given: dict[str, Any]) -> Tensor | None:
        """Return the result of what stands for the function, None if nothing does."""
        names = ("input", *ARGUMENTS[name])
        if len(args) > len(names):
            return None
        given.update(zip(names, args, strict=False))
        x = given.pop("input", None)
        if not given.keys() <= set(names) or not _differentiated(x):
            return None
        found = parametrised(name, name, given)
        module = self.modules.get(found.activation or "")
        if module is None or found.parameters or found.formula:
            return None
        if not found.in_place:
            y: Tensor = module(x)
            return y
        step = not registered(type(module)).keeps_output
        return overwrite(x, module) if step and found.keeps_input else None


def _differentiated(x: Any) -> bool:
    """Return whether autograd would record an activation of a tensor that fitact takes."""
    return isinstance(x, Tensor) and x.requires_grad and x.layout == torch.strided and x.dtype in DTYPES
