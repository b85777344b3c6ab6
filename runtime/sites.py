"""Where a model has activations, and what each of them is by its name in the catalog.

`slots` finds modules and functions that a module holds: children, and attributes such as `self.act = F.gelu`.
Calls of functions in a `forward` are not seen.
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

import fitact
from fitact.errors import UsageError

from .inplace import InPlace
from .registry import Pointwise, find

# PyTorch's modules, and the parameters with which they are shipped; those of the functions are the same.
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
# What autograd keeps of these in place is the output, and else a copy of the input.
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
# Those that are in no catalog, as formulas.
FORMULAS: dict[str, Callable[[Any], str]] = {
    "ClippedGELUActivation": lambda module: f"clamp(gelu(x), {module.min}, {module.max})",
    "HardMish": lambda module: "0.5*x*clamp(x + 2, 0, 2)",
    "HardMishMe": lambda module: "0.5*x*clamp(x + 2, 0, 2)",
    "LaplaceActivation": lambda module: "0.5*(1 + erf((x - 0.707107)/(0.282095*sqrt(2))))",
    "Softplus": lambda module: f"softplus({module.beta}*x)/{module.beta}",
    "SqrtSoftplusActivation": lambda module: "sqrt(softplus(x))",
}
REFUSED = {
    "GLU": "it multiplies one half of its input by the sigmoid of the other: no function of one element",
    "LinearActivation": "it returns its input and keeps nothing",
    "LogSoftmax": "each of its outputs depends on a whole row: no function of one element",
    "MultiheadAttention": "no activation of one element: the softmax of attention depends on a whole row",
    "RReLU": "its slopes are random in training",
    "Softmax": "each of its outputs depends on a whole row: no function of one element",
    "Softmax2d": "each of its outputs depends on all channels: no function of one element",
    "Softmin": "each of its outputs depends on a whole row: no function of one element",
}


@dataclass(frozen=True)
class Found:
    """What an activation of a model is.

    Attributes:
        before: the name of its class or function.
        activation: its name in the catalog, None if it has none.
        parameters: those with other values than the shipped ones have.
        formula: what it computes, if it is in no catalog; `""` if it is or that is not known.
        in_place: whether it overwrites its input.
        refusal: why nothing may replace it, `""` if something may.
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
        """Whether autograd keeps a copy of its input where it is in place, and not its output."""
        return self.activation not in OUTPUT_KEPT


@dataclass(frozen=True)
class Slot:
    """A place where a module holds an activation.

    Attributes:
        parent, attribute: the module, and the name under which it holds it.
        path: of the activation in the model.
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
        """Its name in the catalog, None if it is not shipped."""
        return None if self.found.parameters or self.found.refusal else self.found.activation

    @property
    def key(self) -> Any:
        """What is the same for all places of one module, while a function is another at each place."""
        return id(self.held) if isinstance(self.held, nn.Module) else (id(self.parent), self.attribute)

    def put(self, held: Any) -> None:
        """Let the parent hold something else."""
        places = self.parent._modules if self.attribute in self.parent._modules else vars(self.parent)
        places[self.attribute] = held


def slots(model: nn.Module, own: frozenset[type] = frozenset()) -> list[Slot]:
    """Return where a model has activations, each place once, in the order of its modules.

    Args:
        model: what is searched.
        own: classes that are activations too.

    """
    return list(_slots(model, "", own, set()))


def _slots(parent: nn.Module, path: str, own: frozenset[type], seen: set[int]) -> Iterator[Slot]:
    if id(parent) in seen:
        return
    seen.add(id(parent))
    for attribute, held in [*parent._modules.items(), *vars(parent).items()]:
        place = f"{path}.{attribute}" if path else attribute
        found = recognise(held, own)
        if found is not None:
            yield Slot(parent, attribute, place, held, found)
        elif isinstance(held, nn.Module) and attribute in parent._modules:
            yield from _slots(held, place, own, seen)


def recognise(held: Any, own: frozenset[type] = frozenset()) -> Found | None:
    """Return what a module or a function is, None if it is no activation.

    Args:
        held: anything.
        own: classes that are activations too.

    """
    if isinstance(held, nn.Module):
        found = _module(held, own)
        if found is not None and not found.refusal and not found.converted:
            return _checked(held, found)
        return found
    given: Mapping[str, Any] = {}
    if isinstance(held, partial) and not held.args:
        held, given = held.func, held.keywords
    if isinstance(held, (BuiltinFunctionType, FunctionType, MethodDescriptorType)) and held in FUNCTIONS:
        name = FUNCTIONS[held]
        if name == "threshold" and not given:  # which has to be called with more than its input
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
    if isinstance(module, InPlace) or is_generated(kind):
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
    return None


def parametrised(before: str, activation: str, given: dict[str, Any]) -> Found:
    """Return what a module or function of PyTorch is with given parameters."""
    in_place = bool(given.pop("inplace", False))
    if given.pop("approximate", "none") == "tanh":
        return Found(before, "gelu_tanh", in_place=in_place)
    defaults = SHIPPED[activation]
    other = {key: float(value) for key, value in given.items() if value != defaults.get(key)}
    if activation == "softplus" and other.keys() & {"beta"}:
        beta = float(other["beta"])
        return Found(_named(before, other), formula=f"softplus({beta}*x)/{beta}")
    if activation == "softplus":
        other = {}  # where it becomes linear, which is a matter of rounding
    return Found(_named(before, other) if other else before, activation, other, in_place=in_place)


def _named(before: str, parameters: Mapping[str, float]) -> str:
    return f"{before}({', '.join(f'{key}={value:g}' for key, value in parameters.items())})"


def _checked(module: nn.Module, found: Found) -> Found:
    """Refuse what a replacement would lose."""
    refusal = ""
    if any(True for _ in module.parameters()):
        refusal = "its parameters are learned"
    elif any(vars(module).get(hooks) for hooks in HOOKS) or "forward" in vars(module):
        refusal = "it has hooks, which would be lost"
    return Found(found.before, found.activation, refusal=refusal) if refusal else found


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_generated(kind: type) -> bool:
    """Return whether a class comes from `fitact codegen`, whose modules register their activation under a key."""
    home = _home(kind)
    return isinstance(home.get("KEY"), str) and kind.__name__ in home.get("__all__", ())


def registered(kind: type[nn.Module]) -> Pointwise:
    """Return what a generated class has registered; a file made with --standalone has a registry of its own."""
    home = _home(kind)
    activation: Pointwise = home.get("find", find)(home["KEY"])
    return activation


def _home(kind: type) -> Mapping[str, Any]:
    """Return the names of the module that a class of modules was defined in, imported by name or not."""
    names: Mapping[str, Any] = getattr(getattr(kind, "forward", None), "__globals__", {})
    return names


def label(module: nn.Module) -> str:
    """Return the name of the fit of a replacement."""
    if isinstance(module, InPlace):
        return f"{label(module.activation)}, in place"
    return registered(type(module)).name


@cache
def shipped_class(name: str, method: str, bits: int | None) -> type[nn.Module] | None:
    """Return the class of a shipped activation, None if there is none.

    Args:
        name: in the catalog.
        method: as in `fitact.activation`.
        bits: the most that are kept per element; None for 3, or the least where there is none of 3.

    """
    for width in [None] if bits is None or method == "exact" else range(bits, 0, -1):
        try:
            return type(fitact.activation(name, method=method, bits=width))
        except UsageError:
            continue
    return None


def recipe(found: Found, method: str, bits: int | None) -> str:
    """Return the `fitact fit` command that makes what is not shipped, `""` if its formula is not known."""
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
    """Return the bits of what is shipped with the usual parameters."""
    kind = None if activation is None else shipped_class(activation, method, None)
    return {"fewbit": 3, "relumix": 2}.get(method) if kind is None else registered(kind).bits or None
