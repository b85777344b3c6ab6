"""Finding a model's activations, and their names in the catalog.

`activation_sites` finds modules and functions that a module holds: children, and attributes such as
`self.act = F.gelu`. A user's own modules are recognised by what they compute. Calls of functions in a `forward`
are not seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from fitact.api import activation
from fitact.errors import UsageError, quote
from fitact.runtime.kernels.registry import is_generated, registered
from fitact.runtime.torch_internals import has_hooks, modules_in
from fitact.runtime.wrappers import Held, InPlace

from .probe import computes

# PyTorch's modules, and the parameters with which they ship; the functions have the same.
MODULES: dict[type[nn.Module], tuple[str, dict[str, Any]]] = {
    nn.CELU: ("celu", {"alpha": 1.0}),
    nn.ELU: ("elu", {"alpha": 1.0}),
    nn.GELU: ("gelu", {"approximate": "none"}),
    nn.Hardshrink: ("hardshrink", {"lambd": 0.5}),
    nn.Hardsigmoid: ("hardsigmoid", {}),
    nn.Hardswish: ("hardswish", {}),
    nn.Hardtanh: ("hardtanh", {"min_val": -1.0, "max_val": 1.0}),
    nn.LeakyReLU: ("leaky_relu", {"negative_slope": 0.01}),
    nn.LogSigmoid: ("logsigmoid", {}),
    nn.Mish: ("mish", {}),
    nn.ReLU: ("relu", {}),
    nn.ReLU6: ("relu6", {}),
    nn.SELU: ("selu", {}),
    nn.SiLU: ("silu", {}),
    nn.Sigmoid: ("sigmoid", {}),
    nn.Softplus: ("softplus", {"beta": 1.0, "threshold": 20.0}),
    nn.Softshrink: ("softshrink", {"lambd": 0.5}),
    nn.Softsign: ("softsign", {}),
    nn.Tanh: ("tanh", {}),
    nn.Tanhshrink: ("tanhshrink", {}),
    nn.Threshold: ("threshold", {"threshold": 1.0, "value": 0.0}),
}
SHIPPED: dict[str, dict[str, Any]] = dict(MODULES.values())
FUNCTIONS: dict[Any, str] = {
    **{getattr(F, name): name for name in SHIPPED},
    **{getattr(torch, name): name for name in ("relu", "sigmoid", "tanh", "celu", "selu", "hardshrink")},
    **{getattr(torch.Tensor, name): name for name in ("relu", "sigmoid", "tanh", "hardshrink")},
    torch.special.expit: "sigmoid",
}
FUNCTION = (BuiltinFunctionType, FunctionType, MethodDescriptorType)
CALLABLE = (nn.Module, partial, *FUNCTION)  # what may be an activation
# In place, autograd keeps the output of these, and a copy of the input of others.
OUTPUT_KEPT = frozenset(("celu", "elu", "leaky_relu", "relu", "selu", "sigmoid", "tanh"))

# The activations of transformers and timm, by class.
LIBRARIES = ("transformers.activations", "timm.layers.activations", "timm.layers.activations_me")
NAMES = {
    "AccurateGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "HardSigmoid": "hardsigmoid",
    "HardSigmoidMe": "hardsigmoid",
    "HardSwish": "hardswish",
    "HardSwishMe": "hardswish",
    "Mish": "mish",
    "MishActivation": "mish",
    "MishMe": "mish",
    "NewGELUActivation": "gelu_tanh",
    "QuickGELU": "quick_gelu",
    "QuickGELUActivation": "quick_gelu",
    "ReLUSquaredActivation": "relu2",
    "SiLUActivation": "silu",
    "Sigmoid": "sigmoid",
    "Swish": "silu",
    "SwishMe": "silu",
    "Tanh": "tanh",
}
# Formulas of those that are not in the catalog.
FORMULAS: dict[str, Callable[[Any], str]] = {
    "ClippedGELUActivation": lambda module: f"clamp(gelu(x), {module.min}, {module.max})",
    "HardMish": lambda module: "0.5*x*clamp(x + 2, 0, 2)",
    "HardMishMe": lambda module: "0.5*x*clamp(x + 2, 0, 2)",
    "LaplaceActivation": lambda module: "0.5*(1 + erf((x - 0.707107)/(0.282095*sqrt(2))))",
    "Softplus": lambda module: f"softplus({module.beta}*x)/{module.beta}",
    "SqrtSoftplusActivation": lambda module: "sqrt(softplus(x))",
}
REFUSED = {
    "GLU": "not a function of one element: it multiplies one half of its input by the sigmoid of the other",
    "LinearActivation": "it returns its input and keeps nothing",
    "LogSoftmax": "not a function of one element: each output depends on a whole row",
    "MultiheadAttention": "not a function of one element: the softmax of attention depends on a whole row",
    "RReLU": "its slopes are random in training",
    "Softmax": "not a function of one element: each output depends on a whole row",
    "Softmax2d": "not a function of one element: each output depends on all channels",
    "Softmin": "not a function of one element: each output depends on a whole row",
}


@dataclass(frozen=True)
class Found:
    """An activation that was found in a model.

    Attributes:
        before: the name of its class or function.
        activation: its name in the catalog; None if it has none.
        parameters: those whose values differ from the shipped ones.
        formula: what it computes, if it is not in the catalog; `""` if it is in the catalog or unknown.
        in_place: whether it overwrites its input.
        refusal: why it must not be replaced; `""` if it may.
        converted: whether it is fitact's.

    """

    before: str
    activation: str | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)
    formula: str = ""
    in_place: bool = False
    refusal: str = ""
    converted: bool = False

    @property
    def keeps_input(self) -> bool:
        """Whether autograd keeps a copy of its input, and not its output, if it is in place."""
        return self.activation not in OUTPUT_KEPT


@dataclass(frozen=True)
class ActivationSite:
    """A place where a module holds an activation.

    Attributes:
        parent, attribute: the module, and the attribute that holds the activation.
        path: path of the activation in the model.
        held: the activation, a module or a function.
        found: what it is.

    """

    parent: nn.Module
    attribute: str
    path: str
    held: Any
    found: Found

    @property
    def activation(self) -> str | None:
        """Its name in the catalog; None if it does not ship or must not be replaced."""
        return None if self.found.parameters or self.found.refusal else self.found.activation

    @property
    def key(self) -> Any:
        """The same for all sites of one module, and different for each site of a function."""
        return id(self.held) if isinstance(self.held, nn.Module) else (id(self.parent), self.attribute)

    def put(self, held: Any) -> None:
        """Make the parent hold something else."""
        children: dict[str, Any] = modules_in(self.parent)
        holder = children if self.attribute in children else vars(self.parent)
        holder[self.attribute] = held


def activation_sites(model: nn.Module, own: frozenset[type] = frozenset()) -> list[ActivationSite]:
    """Return the places where a model holds activations, each once, in the order of its modules.

    Args:
        model: the model to search.
        own: further classes that are activations.

    """
    return list(_activation_sites(model, "", own, set()))


def _activation_sites(
    parent: nn.Module, path: str, own: frozenset[type], seen: set[int]
) -> Iterator[ActivationSite]:
    if id(parent) in seen:
        return
    seen.add(id(parent))
    for attribute, held in [*modules_in(parent).items(), *vars(parent).items()]:
        if not isinstance(held, CALLABLE):
            continue
        full_path = f"{path}.{attribute}" if path else attribute
        found = recognise(held, own)
        if found is not None:
            yield ActivationSite(parent, attribute, full_path, held, found)
        elif isinstance(held, ParametrizationList):
            continue  # it computes a parameter
        elif isinstance(held, nn.Module) and attribute in modules_in(parent):
            yield from _activation_sites(held, full_path, own, seen)


def recognise(held: Any, own: frozenset[type] = frozenset()) -> Found | None:
    """Return a module or a function as an activation; None if it is not one.

    Args:
        held: any object.
        own: further classes that are activations.

    """
    if isinstance(held, nn.Module):
        found = _module(held, own)
        if found is not None and not found.refusal and not found.converted:
            return _checked(held, found)
        return found
    given: Mapping[str, Any] = {}
    if isinstance(held, partial) and not held.args:
        held, given = held.func, held.keywords
    if isinstance(held, FUNCTION) and held in FUNCTIONS:
        name = FUNCTIONS[held]
        if name == "threshold" and not given:  # it cannot be called with only an input
            return None
        return parametrised(name, name, {**given})
    return None


def _module(module: nn.Module, own: frozenset[type]) -> Found | None:
    kind = type(module)
    name = kind.__name__
    if kind in own:
        return Found(name)
    if kind in MODULES:
        activation, defaults = MODULES[kind]
        given = {key: getattr(module, key) for key in (*defaults, "inplace") if hasattr(module, key)}
        return parametrised(name, activation, given)
    if isinstance(module, (Held, InPlace)) or is_generated(kind):
        return Found(label(module), converted=True)
    home = kind.__module__
    if home == "torch.nn.modules.activation" or home in LIBRARIES:
        in_place = bool(getattr(module, "inplace", False))
        if name in REFUSED:
            return Found(name, refusal=REFUSED[name])
        if name in FORMULAS:
            return Found(name, formula=FORMULAS[name](module), in_place=in_place)
        return Found(name, NAMES.get(name), in_place=in_place)
    if isinstance(module, (*MODULES, nn.PReLU)):
        return Found(name)
    computed = computes(module)
    return None if computed is None else Found(name, computed)


def parametrised(before: str, activation: str, given: dict[str, Any]) -> Found:
    """Return a module or function of PyTorch with given parameters, refused if PyTorch refuses them."""
    in_place = bool(given.pop("inplace", False))
    approximate = given.pop("approximate", "none")
    if approximate == "tanh":
        return Found(before, "gelu_tanh", in_place=in_place)
    if approximate != "none":
        return Found(before, refusal=f"approximate={quote(approximate)}: expected none or tanh")
    for key, value in given.items():
        if not isinstance(value, (int, float)):
            return Found(before, refusal=f"{key}={quote(value)}: expected a number")
    defaults = SHIPPED[activation]
    other = {key: float(value) for key, value in given.items() if value != defaults.get(key)}
    if activation == "softplus" and "threshold" in other:
        return Found(_named(before, other), refusal="with a threshold other than 20 it is not softplus: it jumps")
    if activation == "softplus" and "beta" in other:
        beta = other["beta"]
        return Found(_named(before, other), formula=f"softplus({beta}*x)/{beta}")
    return Found(_named(before, other) if other else before, activation, other, in_place=in_place)


def _named(before: str, parameters: Mapping[str, float]) -> str:
    return f"{before}({', '.join(f'{key}={value:g}' for key, value in parameters.items())})"


def _checked(module: nn.Module, found: Found) -> Found:
    """Refuse a module with parts that a replacement would lose."""
    refusal = ""
    if any(True for _ in module.parameters()):
        refusal = "its parameters are learned"
    elif "forward" in vars(module):
        refusal = "its forward is not that of its class"
    elif has_hooks(module):
        refusal = "it has hooks, which would be lost"
    return Found(found.before, found.activation, refusal=refusal) if refusal else found


def label(module: nn.Module) -> str:
    """Return the name of the fit of a replacement."""
    if isinstance(module, Held):
        return label(module.activation)
    if isinstance(module, InPlace):
        return f"{label(module.activation)}, in place"
    return registered(type(module)).name


@cache
def shipped_class(name: str, method: str, bits: int | None) -> type[nn.Module] | None:
    """Return the class of a shipped activation; None if there is none.

    Args:
        name: its name in the catalog.
        method: as in `fitact.activation`.
        bits: the most bits kept per element; None for the default of `fitact.activation`.

    """
    for width in [None] if bits is None or method == "exact" else range(bits, 0, -1):
        try:
            return type(activation(name, method=method, bits=width))
        except UsageError:
            continue
    return None


def recipe(found: Found, method: str, bits: int | None) -> str:
    """Return the `fitact fit` command for an activation that does not ship; `""` if its formula is unknown."""
    if found.activation is None and not found.formula:
        return ""
    width = None if method == "exact" else bits or _usual_width(found.activation, method)
    options = "" if method == "fewbit" else f" --method {method}"
    options += "" if width is None else f" --bits {width}"
    if found.formula:
        named, what = found.before, f'"{found.formula}"'
    elif found.parameters:
        values = "_".join(f"{value:g}" for value in found.parameters.values())
        named = f"{found.activation}_{values}"
        what = " ".join(
            [str(found.activation), *(f"--param {key}={value!r}" for key, value in found.parameters.items())]
        )
    else:
        return f"fitact fit --fn {found.activation}{options}"
    name = re.sub(r"\W+", "_", named.replace("-", "minus_")).strip("_").lower()
    return f"fitact fit --fn {what}{options} --name {name}_{method}{width or ''}"


def _usual_width(activation: str | None, method: str) -> int | None:
    """Return the bits of the shipped fit with the usual parameters."""
    kind = None if activation is None else shipped_class(activation, method, None)
    return {"fewbit": 3, "relumix": 2}.get(method) if kind is None else registered(kind).bits or None
