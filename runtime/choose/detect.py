"""Finding a model's activations by what they compute, and their names in the catalog.

`activation_sites` finds modules and functions that a module holds: children, and attributes such as
`self.act = F.gelu`. A module is recognised by running a copy of it beside PyTorch's functions, whoever wrote it.
Calls of functions in a `forward` are not seen.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodDescriptorType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrize import ParametrizationList

from fitact.base import UsageError
from fitact.runtime.kernels import is_generated, registered
from fitact.runtime.measure import is_activation
from fitact.runtime.shipped import activation
from fitact.runtime.torch_internals import has_hooks, modules_in, unset_fake_temporarily, without_torch_function

from .wrappers import Held, InPlace

# PyTorch's functions, by their names in the catalog, with the parameters that are shipped.
NAMES = (
    *("celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid"),
    *("mish", "relu", "relu6", "selu", "sigmoid", "silu", "softplus", "softshrink", "softsign", "tanh"),
    "tanhshrink",
)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(F, name) for name in NAMES},
    "exp": torch.exp,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: F.relu(x).square(),
    "serf": lambda x: x * torch.erf(F.softplus(x)),
    "snake": lambda x: x + torch.sin(x).square(),
    "squareplus": lambda x: (x + torch.sqrt(x.square() + 4)) / 2,
    "threshold": lambda x: F.threshold(x, 1.0, 0.0),
}
# What a model may hold or call in place of a module.
CALLED: frozenset[Any] = frozenset(
    getattr(home, name) for home in (F, torch, torch.Tensor) for name in NAMES if hasattr(home, name)
) | {torch.special.expit}
FUNCTION = (partial, BuiltinFunctionType, FunctionType, MethodDescriptorType)
# In place, autograd saves the output of these, and a copy of the input of others.
OUTPUT_SAVED = frozenset(("celu", "elu", "leaky_relu", "relu", "selu", "sigmoid", "tanh"))
PLAIN = frozenset((bool, int, float, str, type(None)))  # what a recognised module may hold
EMPTY = frozenset(vars(nn.Module()))
Attributes = tuple[tuple[str, type, Any], ...]  # name, type and value
# Up to several float32 roundings, relative to a value, and to the terms of a difference.
_near = partial(torch.allclose, rtol=1e-5, atol=2e-6)


@dataclass(frozen=True)
class ActivationSite:
    """A place where a module holds an activation."""

    parent: nn.Module
    attribute: str  # of the parent, which holds the activation
    path: str  # of the activation in the model
    held: Any  # the activation, a module or a function
    before: str  # the name of its class or function
    activation: str | None = None  # its name in the catalog, if it has one
    in_place: bool = False  # whether it overwrites its input
    refusal: str = ""  # why it must not be replaced, if it must not
    converted: bool = False  # whether it is fitact's

    @property
    def key(self) -> Any:
        """The same for all sites of one module, and different for each site of a function."""
        return id(self.held) if isinstance(self.held, nn.Module) else (id(self.parent), self.attribute)

    def replace(self, held: Any) -> None:
        """Make the parent hold something else."""
        children: dict[str, Any] = modules_in(self.parent)
        holder = children if self.attribute in children else vars(self.parent)
        holder[self.attribute] = held


def activation_sites(model: nn.Module, own: frozenset[type] = frozenset()) -> list[ActivationSite]:
    """Return the places where a model holds activations, also of classes in `own`, in the order of its modules."""
    seen: set[int] = set()

    def inside(parent: nn.Module, prefix: str) -> Iterator[ActivationSite]:
        if id(parent) in seen:
            return
        seen.add(id(parent))
        for attribute, held in [*modules_in(parent).items(), *vars(parent).items()]:
            if isinstance(held, ParametrizationList):  # it computes a parameter
                continue
            site = recognise(held, own, parent, attribute, prefix + attribute)
            if site is not None:
                yield site
            elif isinstance(held, nn.Module) and attribute in modules_in(parent):
                yield from inside(held, f"{prefix}{attribute}.")

    return list(inside(model, ""))


def recognise(
    held: Any, own: frozenset[type], parent: nn.Module, attribute: str, path: str
) -> ActivationSite | None:
    """Return the site of an activation, a module or a function; None for any other object.

    Modules of the classes in `own` are activations too; the other arguments are as in `ActivationSite`.
    """
    site = partial(ActivationSite, parent, attribute, path, held)
    if isinstance(held, FUNCTION):
        function, given = (held.func, held.keywords) if isinstance(held, partial) and not held.args else (held, {})
        name = computed_by(function, given=given)
        return None if name is None else site(name, name, bool(given.get("inplace", False)))
    if not isinstance(held, nn.Module):
        return None
    before = type(held).__name__
    if isinstance(held, (Held, InPlace)) or is_generated(type(held)):
        return site(label(held), converted=True)
    name = computes(held)
    if name is None and type(held) not in own and not is_activation(held):
        return None
    refusal = ""
    if next(held.parameters(), None) is not None and type(held) not in own:
        refusal = "its parameters are learned"
    elif "forward" in vars(held):
        refusal = "its forward is not that of its class"
    elif has_hooks(held):
        refusal = "it has hooks, which would be lost"
    if not refusal and name is None:
        before = repr(held).removesuffix("()")  # with its parameters
    return site(before, name, bool(getattr(held, "inplace", False)), refusal)


def computes(module: nn.Module) -> str | None:
    """Return the name of the activation that a module computes and nothing else; None if there is none.

    Such a module has no parameters, buffers or modules, and holds nothing but numbers, texts, flags, functions of
    PyTorch and its methods. A copy of it, which is not in place, must agree with PyTorch's function in float64 and
    float32, value and gradient, in training and evaluation mode, for tiny to large inputs of any arrangement. The
    output must be a new tensor with the input's dtype.
    """
    kind = type(module)
    if next(module.children(), None) is not None or any(True for _ in (*module.parameters(), *module.buffers())):
        return None
    held = {name: value for name, value in vars(module).items() if name not in EMPTY | {"inplace", "forward"}}
    if not all(_is_plain(value, module) for value in held.values()) or argument_of(kind.forward) is None:
        return None
    hashable: Any = kind
    return _by_module(hashable, kind.forward, tuple((name, type(value), value) for name, value in held.items()))


def _is_plain(value: Any, module: nn.Module) -> bool:
    if isinstance(value, FUNCTION):
        return getattr(value, "func", value) in CALLED
    return type(value) in PLAIN or getattr(value, "__self__", None) is module


def computed_by(
    function: Any, args: Sequence[Any] = (), given: Mapping[str, Any] = MappingProxyType({})
) -> str | None:
    """Return the name of the activation that a function of PyTorch computes, if any.

    `args` are what it is called with after its input, `given` what it is called with by name.
    """
    some = tuple(value for value in args if not isinstance(value, bool))  # which only means that it is in place
    named = tuple((name, value) for name, value in given.items() if name not in ("input", "inplace"))
    if function not in CALLED or not all(type(value) in PLAIN for value in (*some, *dict(named).values())):
        return None
    return _by_function(function, some, named)


def argument_of(forward: Callable[..., Any]) -> str | None:
    """Return the name of the one argument that a method takes; None if it takes none, or may take others."""
    try:
        parameters = [*inspect.signature(forward).parameters.values()][1:]
    except (TypeError, ValueError):  # it has no signature
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    alone = len(parameters) == 1 and parameters[0].kind in kinds
    return parameters[0].name if alone else None


@lru_cache(maxsize=256)
def _by_module(kind: type[nn.Module], _: Any, held: Attributes) -> str | None:
    with _by_itself():
        copied = kind.__new__(kind)
        nn.Module.__init__(copied)
        vars(copied).update({"inplace": False} | {name: value for name, _, value in held})
        return _name(copied, kind.__name__.lower())


@lru_cache(maxsize=256)
def _by_function(function: Any, args: tuple[Any, ...], given: tuple[tuple[str, Any], ...]) -> str | None:
    with _by_itself():
        return _name(lambda x: function(x, *args, **dict(given)), function.__name__)


@contextmanager
def _by_itself() -> Iterator[None]:
    """Enter a context in which an activation can be tried with real tensors, unseen by modes around it."""
    with ExitStack() as stack:
        stack.enter_context(unset_fake_temporarily())
        stack.enter_context(without_torch_function())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(saved_tensors_hooks(Tensor.detach, Tensor.detach))  # nobody counts what trials save
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        yield


def _name(tried: Callable[[Tensor], Any], likely: str) -> str | None:
    """Return the name of the function that is computed at all inputs that are tried; `likely` is tried first."""
    try:
        names = sorted(FUNCTIONS, key=lambda name: name != likely)
        return next((name for name in names if _is(tried, FUNCTIONS[name])), None)
    except Exception:  # an activation would run
        return None


def _is(tried: Callable[[Tensor], Any], function: Callable[[Tensor], Tensor]) -> bool:
    grid = _inputs()
    arrangements = (grid, grid.flip(0), grid.view(4, -1, 3).mT, grid[:24].view(2, 3, 2, 2))
    for mode in (True, False) if isinstance(tried, nn.Module) else (True,):
        if isinstance(tried, nn.Module):
            tried.train(mode)
        for dtype in (torch.float64, torch.float32):
            if not all(_agrees(tried, function, x.to(dtype)) for x in arrangements):
                return False
    return all(tried(torch.ones(4, dtype=dtype)).dtype == dtype for dtype in (torch.bfloat16, torch.float16))


@cache
def _inputs() -> Tensor:
    """Return unordered numbers at which the activations differ, some tiny and some large, and no breakpoints."""
    generator = torch.Generator().manual_seed(0)
    usual = 3 * torch.randn(278, generator=generator, dtype=torch.float64)
    others = torch.tensor([1e-30, 1e-4, 7.0, 13.0, 19.0, 21.0, 31.0, 60.0, 87.0, 1e3, 1e4], dtype=torch.float64)
    numbers = torch.cat([usual, others, -others])
    return numbers[torch.randperm(len(numbers), generator=generator)]


def _agrees(tried: Callable[[Tensor], Any], function: Callable[[Tensor], Tensor], values: Tensor) -> bool:
    x, reference = (values.clone().requires_grad_() for _ in range(2))
    y, expected = tried(x), function(reference)
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype or not torch.equal(x, values):
        return False
    if not _near(y, expected) or not y.requires_grad:
        return False
    weights = torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view(x.shape)
    (gradient,) = torch.autograd.grad(y, x, weights)
    return _near(gradient, torch.autograd.grad(expected, reference, weights)[0])


def label(module: nn.Module) -> str:
    """Return the name of the fit of a replacement."""
    if isinstance(module, Held):
        return label(module.activation)
    if isinstance(module, InPlace):
        return f"{label(module.activation)}, in place"
    return registered(type(module)).name


@cache
def shipped_class(name: str, method: str, bits: int | None) -> type[nn.Module] | None:
    """Return the class of a shipped activation of at most these bits, by default the method's; None if none is."""
    for width in [None] if bits is None or method == "output" else range(bits, 0, -1):
        try:
            return type(activation(name, method=method, bits=width))
        except UsageError:
            continue
    return None
