"""Modules that note what their outputs are rebuilt from, or keep that in place of their input.

A module gets another class: a subclass of its own, of the same name, whose `forward` does what the module's did.
So its parameters, hooks, attributes and the keys of the state stay, and `isinstance` holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial, wraps
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fitact.runtime.records import Kind, SiteRecord
from fitact.runtime.torch_internals import has_hooks, in_functorch_transform, parameters_in

from . import functions
from .calls import Looking, here
from .codes import AnyCodes, Codes, Gate, LearnedCodes, NormCodes, OwnCodes
from .convolution import convolution
from .derivatives import chained
from .dropout import dropout
from .recipes import narrower, note_kept, note_normed

KEEP_INPUT = nn.SiLU, nn.Hardswish, nn.Mish, nn.Hardsigmoid, nn.Hardtanh, nn.ReLU6  # in place and elsewhere
PATH = "fitact_path"  # the attribute by which a module knows its path, and so do its copies
ONLY = "fitact_only"  # the attribute with the only functions whose calls are looked at; without it all are

_read: ContextVar[set[str] | None] = ContextVar("_read", default=None)


@contextmanager
def reading() -> Iterator[set[str]]:
    """Gather the paths of the activations and norms whose outputs some layer is going to rebuild."""
    found: set[str] = set()
    token = _read.set(found)
    try:
        yield found
    finally:
        _read.reset(token)


class _Noticed:
    """What a module computes; notices that a layer is going to compute it again."""

    def __init__(self, function: Callable[..., Tensor], module: Any) -> None:
        self.function, self.module = function, module

    def use(self) -> None:
        found = _read.get()
        if found is not None:
            found.add(vars(self.module)[PATH])

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


class Rebuilding:
    """What the classes below share; their names must not hide those of a user's module.

    Attributes:
        fitact_stock: the module's own class, whose `forward` the compiler traces.
        fitact_kind: a key of CLASSES.
        fitact_argument: the name of the input.
        fitact_exact: whether gradients stay stock's: an input that is not rebuilt bit for bit is kept then.

    """

    fitact_stock: type[Any]
    fitact_kind: str
    fitact_argument: str
    fitact_exact = True

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Do what the module does: by `_fitact_forward`, or by the module's own class where that returns None."""
        if not args and kwargs.keys() == {self.fitact_argument}:
            args, kwargs = tuple(kwargs.values()), {}
        if len(args) != 1 or kwargs or torch.compiler.is_compiling():
            return self.fitact_stock.forward(self, *args, **kwargs)
        with Looking(False) if here.on else nullcontext():
            output = self._fitact_forward(*args)
            return self.fitact_stock.forward(self, *args) if output is None else output

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to make the module again: its class is nowhere to be imported from."""
        return _empty, (self.fitact_kind, self.fitact_stock), self.__dict__.copy()


class Activation(Rebuilding):
    """An activation that keeps its input."""

    def _fitact_forward(self: Any, input: Tensor) -> Tensor:
        function = _Noticed(partial(self.fitact_stock.forward, self), self)
        output = chained(function, function, input, self.fitact_exact)
        return functions.noted(function(input), function, input) if output is None else output


class Chained(Rebuilding):
    """An activation that keeps its output, or works in place; if its input is rebuilt, so is its output."""

    def _fitact_forward(self: Any, input: Tensor) -> Tensor:
        run = partial(self.fitact_stock.forward, self)
        function = _Noticed(_apart(self) if getattr(self, "inplace", False) else run, self)
        output = chained(run, function, input, self.fitact_exact)
        return note_kept(run(input), function) if output is None else output


class Composed(Rebuilding):
    """An activation of several operations, which keep more than its input."""

    def _fitact_forward(self: Any, input: Tensor) -> Tensor:
        return functions.again(_Noticed(partial(self.fitact_stock.forward, self), self), input)


def _apart(module: Any) -> Callable[[Tensor], Tensor]:
    """Return what a module computes in place, with the same derivative, as a function that leaves its input."""
    stock = module.fitact_stock
    if stock not in KEEP_INPUT:
        return lambda x: stock.forward(module, x.clone())  # the derivative may be another elsewhere, as ELU's
    twin = stock.__new__(stock)
    twin.__dict__.update(vars(module), inplace=False)
    return partial(stock.forward, twin)


def _of_parameters(module: Any) -> tuple[_Noticed, list[Tensor]]:
    """Return what a module computes, as a function of x and the parameters, and these."""
    stock, rest = module.fitact_stock, vars(module)
    there = {name: parameter for name, parameter in parameters_in(module).items() if parameter is not None}

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        twin = stock.__new__(stock)
        given = parameters_in(module) | dict(zip(there, parameters, strict=True))
        twin.__dict__.update(rest, _parameters=given)
        result: Tensor = stock.forward(twin, x)
        return result

    return _Noticed(function, module), [*there.values()]


def _from_input(module: Any, x: Tensor) -> Tensor:
    """Return what a module computes of x, to be rebuilt from x and the parameters."""
    function, parameters = _of_parameters(module)
    if module.fitact_composed:
        return functions.again(function, x, *parameters)
    return functions.noted(module.fitact_stock.forward(module, x), function, x, *parameters)


class Norm(Rebuilding):
    """A norm. It keeps its input, what takes fewer bytes, or codes; its parameters are kept anyway."""

    fitact_composed = False
    fitact_codes: NormCodes | None = None

    def _fitact_forward(self: Any, hidden_states: Tensor) -> Tensor:
        coded: Tensor | None = None if self.fitact_codes is None else self.fitact_codes.apply(self, hidden_states)
        if coded is not None:
            return coded
        if functions.recorded(hidden_states, *(one for one in parameters_in(self).values() if one is not None)):
            again = self.fitact_composed or self.fitact_stock in (nn.LayerNorm, nn.RMSNorm)
            found = narrower(hidden_states) if again else None
            if found is not None:
                function, parameters = _of_parameters(self)
                return functions.again(function, hidden_states, *parameters, found=found)
            note_normed(hidden_states)
        return _from_input(self, hidden_states)


class ComposedNorm(Norm):
    """A norm of several operations, which keep more than its input and are computed again."""

    fitact_composed = True


class Learned(Rebuilding):
    """An activation with learned numbers: its input is kept, or codes."""

    fitact_composed = False
    fitact_codes: LearnedCodes | None = None

    def _fitact_forward(self: Any, input: Tensor) -> Tensor:
        output: Tensor | None = None
        if self.fitact_codes is not None:
            output = self.fitact_codes.apply(self, input)
        elif not self.fitact_composed:
            function, parameters = _of_parameters(self)
            run = partial(self.fitact_stock.forward, self)
            output = chained(run, function, input, self.fitact_exact, parameters)
        return _from_input(self, input) if output is None else output


class ComposedLearned(Learned):
    """One of several operations, which keep more than its input and are computed again."""

    fitact_composed = True


class BatchNorm(Rebuilding):
    """A norm over a batch; its statistics are computed again, and its running ones are left alone."""

    def _fitact_forward(self: Any, input: Tensor) -> Any:
        return self.fitact_normed(self.fitact_stock.forward(self, input), input)

    def fitact_normed(self: Any, output: Tensor, input: Tensor) -> Tensor:
        """Return the output, to be rebuilt from the input."""
        training, eps = self.training or self.running_mean is None, self.eps
        names = ("weight", "bias") if training else ("weight", "bias", "running_mean", "running_var")
        there = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        tracked = training and self.track_running_stats and self.running_mean is not None
        dtype = self.running_mean.dtype if tracked else None

        def again(x: Tensor, *kept: Tensor) -> Tensor:
            given = dict.fromkeys(("running_mean", "running_var")) | dict(zip(there, kept, strict=True))
            if dtype is not None:  # then the statistics are computed in this dtype
                given |= zip(("running_mean", "running_var"), x.new_zeros(2, x.shape[1], dtype=dtype), strict=True)
            result: Tensor = F.batch_norm(x, **given, training=training, momentum=0.0, eps=eps)
            return result

        return functions.noted(output, _Noticed(again, self), input, *there.values())


class BatchNormAct(BatchNorm):
    """timm's, followed by its dropout and its activation."""

    def _fitact_forward(self: Any, x: Tensor) -> Any:
        return self.act(self.drop(self.fitact_normed(nn.BatchNorm2d.forward(self, x), x)))


class Convolution(Rebuilding):
    """A convolution that keeps what its input is rebuilt from."""

    def _fitact_forward(self: Any, input: Tensor) -> Tensor | None:
        return convolution(self, input, self.fitact_exact)


class Linear(Rebuilding):
    """A linear layer that keeps what its input is rebuilt from."""

    fitact_transposed = False

    def _fitact_forward(self: Any, input: Tensor) -> Tensor | None:
        return functions.linear(input, self.weight, self.bias, self.fitact_transposed, self.fitact_exact)


class Conv1D(Linear):
    """The linear layer of transformers' GPT-2, with a weight of (inputs, outputs)."""

    fitact_transposed = True


class Dropout(Rebuilding):
    """Dropout that keeps a mask and hands on what its input is rebuilt from."""

    def _fitact_forward(self: Any, input: Tensor) -> Tensor | None:
        return dropout(input, self.p) if self.training and not self.inplace else None


class GatedMLP(Rebuilding):
    """down(f(g) · u), which keeps g and u, or codes. As f itself may not be called, it must have no hooks."""

    fitact_codes: Codes | OwnCodes | None = None

    def _fitact_forward(self: Any, x: Tensor) -> Tensor | None:
        gate: Gate = self.fitact_gate
        return None if has_hooks(getattr(self, gate.activation)) else gate.compute(self, x, self.fitact_codes)


class OwnGate(Rebuilding):
    """A gate that notes itself what its output is rebuilt from."""


class Calls(Rebuilding):
    """A module that calls PyTorch's functions itself, which keep less."""

    def __init_subclass__(cls) -> None:
        stock = cls.fitact_stock.forward

        @wraps(stock)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not torch.is_grad_enabled() or in_functorch_transform():
                return stock(self, *args, **kwargs)
            with Looking(module=self, only=vars(self).get(ONLY)):
                return stock(self, *args, **kwargs)

        cls.forward = forward  # type: ignore[method-assign]


CLASSES: dict[str, type[Any]] = {
    **{kind.__name__: kind for kind in (Activation, Chained, Composed, Learned, ComposedLearned)},
    **{kind.__name__: kind for kind in (Norm, ComposedNorm, BatchNorm, BatchNormAct, Linear, Conv1D)},
    **{kind.__name__: kind for kind in (Convolution, Dropout, GatedMLP, OwnGate, Calls)},
}


KINDS: dict[str, Kind] = {
    **dict.fromkeys(("Activation", "Chained", "Composed", "Learned", "ComposedLearned"), "activation"),
    **dict.fromkeys(("Norm", "ComposedNorm", "BatchNorm", "BatchNormAct"), "norm"),
    **dict.fromkeys(("GatedMLP", "OwnGate"), "gate"),
    "Calls": "calls",
}
REBUILT = "rebuilt"


def is_activation(module: Rebuilding) -> bool:
    """Return whether a module is an activation."""
    return KINDS.get(module.fitact_kind) == "activation"


def activation_of(module: object) -> str | None:
    """Return the name of the child that is the activation of a gate; None if the module is no gate."""
    gate: Gate | None = vars(module).get("fitact_gate") if isinstance(module, Rebuilding) else None
    return None if gate is None else gate.activation


@cache
def _class(kind: str, stock: Any) -> Any:
    names = {
        "fitact_stock": stock,
        "fitact_kind": kind,
        "fitact_argument": next(iter([*signature(stock.forward).parameters][1:]), ""),
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
    }
    return type(stock.__name__, (CLASSES[kind], stock), names)


def _empty(kind: str, stock: Any) -> Any:
    made = _class(kind, stock)
    return made.__new__(made)


def swap(
    module: nn.Module,
    kind: str,
    path: str,
    gate: Gate | None = None,
    codes: AnyCodes | None = None,
    *,
    exact: bool = True,
) -> None:
    """Give a module the class of a kind.

    Args:
        module: the module.
        kind: a key of CLASSES.
        path: its path in the model.
        gate: what its children are, if it is a gated MLP.
        codes: which codes that keeps; None to keep none.
        exact: whether gradients stay stock's; if not, the codes of a coded activation are kept for its output.

    """
    stock: Any = type(module)
    module.__class__ = _class(kind, stock)
    given = {PATH: path, "fitact_gate": gate, "fitact_codes": codes, "fitact_exact": None if exact else False}
    vars(module).update({name: value for name, value in given.items() if value is not None})


def original_class(module: Any) -> type[Any]:
    """Return a module's class as it was before `swap`."""
    return module.fitact_stock if isinstance(module, Rebuilding) else type(module)


def put_back(module: Any) -> None:
    """Give a module its own class again."""
    if isinstance(module, Rebuilding):
        module.__class__ = module.fitact_stock
        for name in (PATH, ONLY, "fitact_gate", "fitact_codes", "fitact_exact"):
            vars(module).pop(name, None)


def label(module: object) -> str:
    """Return the names of the codes that a rebuilding module keeps, or that its output is rebuilt."""
    codes: AnyCodes | None = vars(module).get("fitact_codes")
    return REBUILT if codes is None else ", ".join(codes.names)


def standing(module: nn.Module) -> tuple[str | None, str]:
    """Return what a report says about a module that an earlier conversion made rebuild its output, and a note."""
    told = label(module)
    return (told, "") if told == REBUILT else (None, f"already {told}")


def restore(model: nn.Module) -> Iterator[SiteRecord]:
    """Give every module of a model its own class again, and yield what was rebuilt."""
    for path, module in model.named_modules():
        if isinstance(module, Rebuilding):
            kind = KINDS.get(module.fitact_kind)
            before = label(module)
            put_back(module)
            if kind is not None:
                yield SiteRecord(path, kind, before, type(module).__name__)
