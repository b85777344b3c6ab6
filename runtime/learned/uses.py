"""Recognising modules with learned numbers: which formula a module computes, and from which parameters.

PyTorch's and transformers' are known by their classes; others, such as the DyT layers of many models, by their
parameters and by running a copy: value and gradients must be those of a formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import permutations
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy

from ..torch_internals import parameters_in, unset_fake_temporarily, without_torch_function
from .function import LearnedModule
from .ops import Learned, find

PRELU = ("torch.nn.modules.activation.PReLU", "timm.layers.activations.PReLU")
XIELU = "transformers.activations.XIELUActivation"
RELATIVE, ABSOLUTE = 1e-4, 1e-4  # several float32 roundings, also of sums of a hundred terms
PROBE = 60  # elements of what a module without channels is tried with
MOST = 4  # parameters
PLAIN = frozenset((bool, int, float, str, type(None)))  # what a recognised module may hold, and tuples of these
EMPTY = frozenset(vars(nn.Module()))
OURS = "fitact_"  # what the names of the attributes of modules that rebuild begin with


@dataclass(frozen=True)
class Use:
    """How a module computes a formula with learned numbers.

    Attributes:
        formula: its name in the catalog; `""` if the module has constants of its own.
        numbers: for each learned number the name of the module's parameter, or its value if the module has none.
        dim: the dimension of x that the channels lie along.
        shape: one that x may have.
        refusal: why the module must be left alone; `""` if it need not.

    """

    formula: str
    numbers: tuple[str | float, ...]
    dim: int
    shape: tuple[int, ...]
    refusal: str = ""

    def takes(self, x: Tensor) -> bool:
        """Return whether the channels of x are where they were when the module was tried."""
        if len(self.shape) == 1:
            return True  # one of each number serves all of x
        there = x.dim() > self.dim if self.dim >= 0 else x.dim() == len(self.shape) or (self.dim == -1 and x.dim())
        return bool(there) and x.shape[self.dim] == self.shape[self.dim]

    def coded(self, most: int, least: int = 1) -> Learned | None:
        """Return the shipped formula with the widest codes, of `least` to `most` bits; None if there is none."""
        for bits in range(most, least - 1, -1):
            path = f"fitact.generated.{self.formula}_coded{bits}"
            if find_spec(path) is not None:
                module = import_module(path)
                return find(module._KEY)
        return None


def use_of(module: nn.Module, kind: type[nn.Module]) -> Use | None:
    """Return how a module computes a formula with learned numbers; None if it does not, or it is not certain.

    Args:
        module: the module; it is not changed, and its tensors may be fake.
        kind: its class, as it was before anything was rebuilt.

    """
    name = f"{kind.__module__}.{kind.__name__}"
    own = {name: one for name, one in parameters_in(module).items() if one is not None}
    if name in PRELU:
        size = own["weight"].numel()
        return Use("prelu", ("weight",), 1, (3, size) if size > 1 else (PROBE,))
    if name == XIELU:
        return _xielu(module)
    if not 1 <= len(own) <= MOST or any(map(is_lazy, own.values())):
        return None
    if kind.__module__.partition(".")[0] == "torch" or isinstance(module, LearnedModule):
        return None
    if next(module.children(), None) is not None or next(module.buffers(), None) is not None:
        return None
    held = {name: value for name, value in vars(module).items() if name not in EMPTY and not name.startswith(OURS)}
    sizes = tuple((name, tuple(one.shape)) for name, one in own.items())
    if not all(map(_plain, held.values())) or not _channels(sizes):
        return None
    hashable: Any = kind
    return _recognised(hashable, kind.forward, tuple((name, type(one), one) for name, one in held.items()), sizes)


def _plain(value: object) -> bool:
    return type(value) in PLAIN or (isinstance(value, tuple) and all(type(one) in PLAIN for one in value))


def _xielu(module: nn.Module) -> Use:
    """Return how transformers' xIELU computes its formula, whose learned numbers pass through softplus."""
    own = vars(module)
    constants = {"_beta_scalar": 0.5, "_eps_scalar": -1e-6}  # which may be rounded to bfloat16
    usual = all(math.isclose(own.get(name, math.nan), one, rel_tol=0.01) for name, one in constants.items())
    refusal = "" if own.get("_xielu_cuda_obj") is None else "it runs the CUDA kernels of the package xielu"
    return Use("xielu" if usual else "", ("alpha_p", "alpha_n"), -1, (PROBE,), refusal)


# ------------------------------------------------------------------------------------------- by what they compute


class _Formula(NamedTuple):
    """A formula in PyTorch's operators, and which parameters a module of it has.

    Attributes:
        value: of x and the numbers, in the order of the catalog; each is one number, or one for every channel.
        default: for each number, its value where a module does not have it; None if it must.

    """

    value: Callable[..., Tensor]
    default: tuple[float | None, ...]


def _xielu_value(x: Tensor, p: Tensor, n: Tensor) -> Tensor:
    below = (torch.expm1(torch.clamp(x, max=-1e-6)) - x) * (0.5 + F.softplus(n))
    return torch.where(x > 0, F.softplus(p) * x * x, below) + 0.5 * x


FORMULAS: Mapping[str, _Formula] = {
    "dyt": _Formula(lambda x, a, g, b: g * torch.tanh(a * x) + b, (None, 1.0, 0.0)),
    "derf": _Formula(lambda x, a, s, g, b: g * torch.erf(a * x + s) + b, (None, 0.0, 1.0, 0.0)),
    "swish_beta": _Formula(lambda x, b: x * torch.sigmoid(b * x), (None,)),
    "prelu": _Formula(lambda x, w: torch.where(x > 0, x, w * x), (None,)),
    "xielu": _Formula(_xielu_value, (None, None)),
}
Sizes = tuple[tuple[str, tuple[int, ...]], ...]  # of parameters, by name
Held = tuple[tuple[str, type, Any], ...]  # attributes: name, type and value


def _channels(sizes: Sizes) -> int | None:
    """Return how many channels a module has, 1 if all of its parameters are single numbers.

    None if a parameter has more than one dimension of channels, or two have different ones.
    """
    wide = {math.prod(size) for _, size in sizes} - {1}
    if len(wide) > 1 or any(max(size, default=1) != math.prod(size) for _, size in sizes):
        return None
    return wide.pop() if wide else 1


def _matched(formula: _Formula, names: Sequence[str]) -> Iterator[tuple[str | float, ...]]:
    """Yield the orders in which a module's parameters may be the numbers of a formula."""
    for places in permutations(range(len(formula.default)), len(names)):
        named = dict(zip(places, names, strict=True))
        filled = [named.get(i, one) for i, one in enumerate(formula.default)]
        found = tuple(one for one in filled if one is not None)
        if len(found) == len(filled):
            yield found


@lru_cache(maxsize=256)
def _recognised(kind: type[nn.Module], _: Any, held: Held, sizes: Sizes) -> Use | None:
    """Return what modules of a class with given attributes and parameters compute."""
    channels, names = _channels(sizes) or 1, [name for name, _ in sizes]
    layouts: dict[int, tuple[int, ...]] = {-1: (PROBE,)}
    if channels > 1:
        layouts = {-1: (3, 7, channels), -2: (2, channels, 5), -3: (2, channels, 3, 4)}
    with by_itself():
        random = torch.Generator().manual_seed(0)
        size = {name: torch.rand(shape, generator=random) + 0.3 for name, shape in sizes}
        trials = [({name: sign * one for name, one in size.items()}, mode) for sign in (1, -1) for mode in (1, 0)]
        for dim, shape in layouts.items():
            x = 3 * torch.randn(shape, generator=random)
            found = [_run(twin_of(kind, held, values).train(bool(mode)), x) for values, mode in trials]
            for name, formula in FORMULAS.items():
                for numbers in _matched(formula, names):
                    expected = (_expected(formula, numbers, values, dim, x) for values, _ in trials)
                    if all(map(_near, found, expected)):
                        return Use(name, numbers, dim, shape)
    return None


@contextmanager
def by_itself() -> Iterator[None]:
    """Enter a context in which a copy of a module can be tried with real tensors, unseen by modes around it."""
    with ExitStack() as stack:
        stack.enter_context(unset_fake_temporarily())
        stack.enter_context(without_torch_function())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(saved_tensors_hooks(Tensor.detach, Tensor.detach))  # nobody counts what trials keep
        stack.enter_context(torch.autocast("cpu", enabled=False))
        yield


def twin_of(kind: type[nn.Module], held: Held, values: Mapping[str, Tensor] | None = None) -> nn.Module:
    """Return a module of a class with given attributes and values of its parameters."""
    twin = kind.__new__(kind)
    nn.Module.__init__(twin)
    vars(twin).update({name: value for name, _, value in held})
    for name, value in (values or {}).items():
        twin.register_parameter(name, nn.Parameter(value))
    return twin


Outcome = list[Tensor]  # value, gradient of x, and those of the parameters by name


def _run(twin: nn.Module, x: Tensor) -> Outcome | None:
    """Return what a module computes; None if it cannot be run so, or returns no new tensor like x."""
    leaf = x.clone().requires_grad_()
    try:
        y = twin(leaf)
        if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype or not torch.equal(leaf, x):
            return None
        return [y, *torch.autograd.grad(y, [leaf, *twin.parameters()], _weights(x))]
    except Exception:  # whatever it needs, it is not a function of a tensor alone
        return None


def _expected(
    formula: _Formula, numbers: Sequence[str | float], values: Mapping[str, Tensor], dim: int, x: Tensor
) -> Outcome:
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    leaf = x.clone().requires_grad_()
    y = formula.value(leaf, *_columns(numbers, leaves, dim))
    return [y, *torch.autograd.grad(y, [leaf, *leaves.values()], _weights(x))]


def _columns(numbers: Sequence[str | float], leaves: Mapping[str, Tensor], dim: int) -> Iterator[Tensor | float]:
    after = (1,) * (-1 - dim)
    for one in numbers:
        yield leaves[one].reshape(-1, *after) if isinstance(one, str) else one


def _weights(x: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, x.numel()).view(x.shape)


def _near(found: Outcome | None, expected: Outcome) -> bool:
    return found is not None and all(
        torch.allclose(a, b, RELATIVE, ABSOLUTE) for a, b in zip(found, expected, strict=True)
    )
