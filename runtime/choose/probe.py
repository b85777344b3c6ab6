"""Recognising a user's own activation modules by comparing what they compute with PyTorch's functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fitact.runtime.torch_internals import unset_fake_temporarily, without_torch_function

# By their names in the catalog, with the parameters that are shipped.
NAMES = (
    *("celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid"),
    *("mish", "relu", "relu6", "selu", "sigmoid", "silu", "softplus", "softshrink", "softsign", "tanh"),
    "tanhshrink",
)


def _squareplus(x: Tensor) -> Tensor:
    """Return (x + √(x² + 4))/2, as a quotient where that would cancel."""
    root = torch.sqrt(x * x + 4)
    return torch.where(x > 0, (x + root) / 2, 2 / (root - x))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(F, name) for name in NAMES},
    "exp": torch.exp,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: F.relu(x).square(),
    "serf": lambda x: x * torch.erf(F.softplus(x)),
    "snake": lambda x: x + torch.sin(x).square(),
    "squareplus": _squareplus,
    "threshold": lambda x: F.threshold(x, 1.0, 0.0),
}
PLAIN = frozenset((bool, int, float, str, type(None)))  # what a recognised module may hold
EMPTY = frozenset(vars(nn.Module()))
Held = tuple[tuple[str, type, Any], ...]  # attributes: name, type and value
# Tolerances of several float32 roundings: relative to a value, and to the terms of a difference.
RELATIVE, ABSOLUTE = 1e-5, 2e-6


def computes(module: nn.Module) -> str | None:
    """Return which activation of the catalog a module computes; None if it is none or not certain.

    Only modules without parameters, buffers and submodules are tried, if their `forward` takes one tensor and
    nothing else, and they hold only numbers and texts. Value and gradient must be those of the activation within
    several roundings of float32, in training and evaluation mode, for tiny to large inputs of any arrangement. The
    output must be a new tensor with the input's dtype.

    Args:
        module: the module; a copy of it is run, and it is not changed.

    """
    kind = type(module)
    if kind.__module__.partition(".")[0] == "torch" or next(module.children(), None) is not None:
        return None
    if any(True for _ in (*module.parameters(), *module.buffers())):
        return None
    held = {name: value for name, value in vars(module).items() if name not in EMPTY}
    if not all(type(value) in PLAIN for value in held.values()) or argument_of(kind.forward) is None:
        return None
    hashable: Any = kind
    return _computed(hashable, kind.forward, tuple((name, type(value), value) for name, value in held.items()))


def argument_of(forward: Callable[..., Any]) -> str | None:
    """Return the name of the one argument that a method takes; None if it takes none, or may take others."""
    try:
        parameters = [*inspect.signature(forward).parameters.values()][1:]
    except (TypeError, ValueError):  # it has no signature
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    alone = len(parameters) == 1 and parameters[0].kind in kinds
    return parameters[0].name if alone else None


@contextmanager
def _by_itself() -> Iterator[None]:
    """Enter a context in which a copy of a module can be tried with real tensors, unseen by modes around it."""
    with ExitStack() as stack:
        stack.enter_context(unset_fake_temporarily())
        stack.enter_context(without_torch_function())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(saved_tensors_hooks(Tensor.detach, Tensor.detach))  # nobody counts what trials save
        stack.enter_context(torch.autocast("cpu", enabled=False))
        yield


@lru_cache(maxsize=256)
def _computed(kind: type[nn.Module], _: Any, held: Held) -> str | None:
    """Return what modules of a class with given attributes compute."""
    with _by_itself():
        twin = kind.__new__(kind)
        nn.Module.__init__(twin)
        vars(twin).update({name: value for name, _, value in held})
        try:
            return next((name for name, function in FUNCTIONS.items() if _is(twin, function)), None)
        except Exception:  # an activation would run
            return None


def _is(module: nn.Module, function: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a module computes a function at all inputs that are tried."""
    grid = _inputs()
    arrangements = (grid, grid.flip(0), grid.view(4, -1, 3).mT, grid[:24].view(2, 3, 2, 2))
    dtypes = (torch.float64, torch.float32)
    return all(
        _agrees(module.train(mode), function, x.to(dtype))
        for mode in (True, False)
        for dtype in dtypes
        for x in arrangements
    ) and all(_kept_dtype(module, dtype) for dtype in (torch.bfloat16, torch.float16))


def _inputs() -> Tensor:
    """Return unordered numbers at which the activations differ, some tiny and some large, and no breakpoints."""
    generator = torch.Generator().manual_seed(0)
    usual = 3 * torch.randn(278, generator=generator, dtype=torch.float64)
    others = torch.tensor([1e-30, 1e-4, 7.0, 13.0, 19.0, 21.0, 31.0, 60.0, 87.0, 1e3, 1e4], dtype=torch.float64)
    numbers = torch.cat([usual, others, -others])
    return numbers[torch.randperm(len(numbers), generator=generator)]


def _agrees(module: nn.Module, function: Callable[[Tensor], Tensor], values: Tensor) -> bool:
    x, reference = (values.clone().requires_grad_() for _ in range(2))
    y, expected = module(x), function(reference)
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype or not torch.equal(x, values):
        return False
    if not _near(y, expected) or not y.requires_grad:
        return False
    weights = torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view(x.shape)
    (gradient,) = torch.autograd.grad(y, x, weights)
    return _near(gradient, torch.autograd.grad(expected, reference, weights)[0])


def _near(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=RELATIVE, atol=ABSOLUTE)


def _kept_dtype(module: nn.Module, dtype: torch.dtype) -> bool:
    y = module(torch.ones(4, dtype=dtype))
    return isinstance(y, Tensor) and y.dtype == dtype
