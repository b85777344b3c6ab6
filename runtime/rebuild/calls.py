"""Calls of PyTorch's functions in a module's own `forward`: what they keep, and the notes on their outputs.

A mode of `torch.overrides` sees each call. A call that would keep something that can be rebuilt goes through
`operation`. An output that can be rebuilt from what its call keeps gets a note of this. All other calls pass. The
mode is on in the `forward` of modules that are given to it, outside of modules that rebuild themselves.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from fitact.runtime.autocast import active_autocast
from fitact.runtime.recipes import Note, note, plain
from fitact.runtime.torch_internals import (
    GROUPED_MM,
    SAFE_SOFTMAX,
    innermost_mode,
    never_alone,
    saved_tensor_hooks,
    storage_id,
)

from . import functions
from .attention.steps import attention
from .derivatives import Plain
from .dropout import dropout as dropped
from .operation import (
    DEEPEST,
    SHARED,
    Expression,
    Rule,
    bound,
    is_narrow,
    keep_everything,
    keep_factors,
    keep_indexed,
    keep_input,
    keep_normed,
    keep_nothing,
    keep_quotient,
    keep_summed_factors,
    note_if_narrow,
    operation,
    rebuilds,
)
from .recipes import NARROW, Source, cast, kept_source, narrow, narrower, note_kept, owned, shares_cast, source
from .routing import numbers, weights

Function = Callable[..., Any]


# --------------------------------------------------------------------------------------------------------- rules

INPUT, OUTPUT, CARRIED, INDEX = Rule(keep_input), Rule(keep_nothing, True), Rule(keep_nothing), Rule(keep_indexed)
PRODUCT = Rule(keep_factors, noted=False, cast=True)
_HOMES = {"F": F, "torch": torch, "Tensor": Tensor}
_RULES: dict[Rule, dict[str, str]] = {
    INPUT: {
        "F": "gelu silu mish hardswish hardsigmoid leaky_relu elu selu celu softplus hardtanh relu6 glu",
        "torch": "clamp clamp_min clamp_max clip pow square celu selu",
        "Tensor": "clamp clamp_min clamp_max clip pow __pow__ square",
    },
    OUTPUT: {
        "F": "relu",
        "torch": "sigmoid tanh relu exp",
        "Tensor": "sigmoid tanh relu exp",
    },
    CARRIED: {
        "torch": "neg negative add sub subtract rsub cat concat concatenate stack clone reshape flatten",
        "Tensor": "neg __neg__ negative add __add__ __radd__ sub __sub__ __rsub__ subtract clone contiguous "
        "reshape flatten to type float double half bfloat16 type_as",
    },
    INDEX: {"torch": "index_select", "Tensor": "__getitem__ index_select"},
    Rule(keep_factors): {"torch": "mul multiply", "Tensor": "mul __mul__ __rmul__ multiply"},
    Rule(keep_quotient): {
        "torch": "div divide true_divide",
        "Tensor": "div __div__ __truediv__ divide true_divide",
    },
    Rule(keep_normed, replaced=False): {"F": "layer_norm", "torch": "layer_norm"},
    PRODUCT: {"torch": "matmul mm bmm", "Tensor": "matmul __matmul__ mm bmm"},
    Rule(keep_summed_factors, noted=False, cast=True): {"torch": "addmm baddbmm", "Tensor": "addmm baddbmm"},
}
FUSED = Rule(keep_everything, noted=False, cast=True)


def _ruled(rule: Rule, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what a function returns, which keeps less or is noted, as its rule says."""
    tensors, call = bound(function, args, kwargs)
    options = (*args, *kwargs.values())
    if (
        not any(one.requires_grad for one in tensors)
        or not all(map(plain, tensors))
        or "out" in kwargs
        or (rule.noted and any(one is True for one in options))  # it may be in place
    ):
        return function(*args, **kwargs)
    found = [source(one) if rule.replaced else None for one in tensors]
    dtype = active_autocast(tensors[0].device.type) if rule.cast else None
    if dtype is not None:
        if any(shares_cast(one, dtype) and not owned(one) for one in tensors):
            return function(*args, **kwargs)  # PyTorch has to cast it: all readers share the cast
        tensors = [_cast(*both, dtype) for both in zip(tensors, found, strict=True)]
        found = [source(one) for one in tensors]
    elif rule is CARRIED and len(tensors) > 1:
        found = [None if one is None or is_narrow(one) else one for one in found]
    keeps = rule.keeps(tensors)
    if rule.replaced:
        found = [
            narrower(tensor) if one is None and kept and dtype in (None, tensor.dtype) else one
            for one, kept, tensor in zip(found, keeps, tensors, strict=True)
        ]
    less = any(one is not None and kept for one, kept in zip(found, keeps, strict=True))
    if rule is INDEX:
        found = [found[0], *map(partial(_fewer, tensors[0]), tensors[1:])]
    if rule.noted:
        found = [
            one if one is not None or kept else kept_source(tensor)
            for one, kept, tensor in zip(found, keeps, tensors, strict=True)
        ]
    noted = rule.noted and all(one is not None or kept for one, kept in zip(found, keeps, strict=True))
    less = less or (noted and rule.keeps_output)
    if not (less or noted or (rule is INDEX and any(found[1:]))):
        return _passed(rule, function(*args, **kwargs), call, tensors)
    rebuild = None
    if noted:
        expression = Expression(call, tensors, found)
        if expression.depth <= DEEPEST:
            state = expression.take_state()
            rebuild = Source(Plain(expression, tensors[0].device.type), state)
    if less or (rule is INDEX and any(found[1:])):
        output: Any = operation(call, tensors, rebuild if rule.keeps_output else None)
    else:
        output = function(*args, **kwargs)
    if not isinstance(output, Tensor):  # `Tensor.type()` returns a name
        return output
    if rebuild is not None and storage_id(output) in map(storage_id, tensors):
        return output  # a view, or the tensor itself
    if rebuild is not None:
        note(output, rebuild.function, *rebuild.state)
    here.tell(output, less and rebuilds(output))
    return output


def _passed(rule: Rule, output: Any, call: Function, tensors: Sequence[Tensor]) -> Any:
    """Note that PyTorch's operation keeps its output, or what could be kept in fewer bytes."""
    if rule.keeps_output:
        note_kept(output)
    elif rule.noted and rule.replaced and isinstance(output, Tensor):
        here.hold(note_if_narrow(output, call, tensors, rule.keeps(tensors)), output)
    return output


def _fewer(x: Tensor, index: Tensor) -> Source | None:
    """Return what takes fewer bytes than an index of x; not for one number (a view), nor for a buffer."""
    module = here.module
    if not index.dim() or module is None or any(storage_id(one) == storage_id(index) for one in module.buffers()):
        return None
    return numbers.fewer(index, max(x.shape, default=0))


def _cast(tensor: Tensor, found: Source | None, dtype: torch.dtype) -> Tensor:
    if tensor.dtype == torch.float64:
        return tensor
    if found is None and narrow(tensor)[0] is None:
        return cast(tensor, dtype) if owned(tensor) else tensor
    made: Tensor = _ruled(CARRIED, Tensor.to, (tensor, dtype), {})
    return made


# ------------------------------------------------------------------------------- functions that have their own


def _linear(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
    x, weight, bias = (given.get(name) for name in ("input", "weight", "bias"))
    output = None
    if isinstance(x, Tensor) and isinstance(weight, Tensor) and plain(weight) and weight.dim() == 2:
        output = functions.linear(x, weight, bias)
    if output is None:
        return _ruled(PRODUCT, function, args, kwargs)
    here.tell(output, True)
    return output


def _dropout(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    given: dict[str, Any] = {"p": 0.5, "training": True, "inplace": False}
    given |= {**dict(zip(("input", *given), args, strict=False)), **kwargs}
    x = given.get("input")
    output = None
    if isinstance(x, Tensor) and given["training"] and not given["inplace"]:
        output = dropped(x, given["p"])
    if output is None:
        return function(*args, **kwargs)
    here.tell(output, False)
    return output


def _own(handler: Function, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a handler that looks at the arguments itself, and tell what is noted on its outputs."""
    output = handler(function, args, kwargs)
    for one in output if isinstance(output, tuple) else (args[0] if output is None else output,):
        if isinstance(one, Tensor) and plain(one):
            here.hold(getattr(one.untyped_storage(), NARROW, (None,))[0], one)
            here.tell(one, isinstance(one.grad_fn, BackwardCFunction))  # a node of ours
    return output


def _softmax(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Keep the output, or the input if that is narrower."""
    tensors, call = bound(function, args, kwargs)
    if len(tensors) != 1 or source(tensors[0]) is not None or not (tensors[0].requires_grad and plain(tensors[0])):
        return _ruled(OUTPUT, function, args, kwargs)
    (x,) = tensors
    dtype = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.dtype)), x.dtype)
    if active_autocast(x.device.type) and dtype != torch.float64:
        dtype = torch.float32
    size = x.numel() * dtype.itemsize
    found, extra = narrow(x)
    if not (x.untyped_storage().nbytes() < size if found is None else sum(extra.values()) <= size):
        return _ruled(OUTPUT, function, args, kwargs)
    near = found or Source(lambda x: x, (x.detach(),))
    for one in near.state:
        setattr(one.untyped_storage(), SHARED, True)
    again = Plain(lambda *state: call(near.function(*state)), x.device.type)
    rebuild = Source(again, near.state, near.exact)
    output = operation(call, tensors, rebuild)
    note(output, again, *near.state, exact=rebuild.exact)
    here.tell(output, True)
    return output


def _attention(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    output = attention(_seen, args, kwargs)
    return _ruled(FUSED, function, args, kwargs) if output is None else output


def _seen(function: Function, *args: Any, **kwargs: Any) -> Any:
    """Make a call as if a module had made it."""
    function = inspect.unwrap(function)
    return HANDLERS[function](function, args, kwargs)


_OWN: dict[Function, Sequence[Function]] = {
    numbers.index_add: (Tensor.index_add_,),
    numbers.ranked: (*numbers.ARGUMENTS,),
    numbers.ordered: (torch.sort, Tensor.sort, torch.argsort, Tensor.argsort),
    numbers.following: (torch.floor_divide, Tensor.floor_divide, Tensor.__floordiv__),
    numbers.hot: (F.one_hot,),
    numbers.placed: (torch.where,),
    numbers.counted: (torch.arange,),
    numbers.assigned: (Tensor.__setitem__,),
    weights.total: (torch.sum, Tensor.sum),
    weights.divided: (Tensor.div_, Tensor.__itruediv__),
    functions.cross_entropy: (F.cross_entropy,),
}


def _handlers() -> dict[Any, Function]:
    # the functions themselves, even where they are wrapped: calls end there
    dropout = inspect.unwrap(F.dropout)
    found: dict[Any, Function] = {F.linear: _linear, dropout: _dropout}
    for handler, those in _OWN.items():
        found |= dict.fromkeys(those, partial(_own, handler))
    found |= dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), _softmax)
    for rule, homes in _RULES.items():
        for home, names in homes.items():
            for name in names.split():
                function = getattr(_HOMES[home], name, None)  # not every version has all
                if function is not None:
                    found[inspect.unwrap(function)] = partial(_ruled, rule)
    found[inspect.unwrap(F.scaled_dot_product_attention)] = _attention
    found[SAFE_SOFTMAX] = partial(_ruled, OUTPUT)
    found[GROUPED_MM] = partial(_ruled, Rule(keep_factors, noted=False))
    return found


HANDLERS = _handlers()
LOSSES = frozenset({F.cross_entropy, Tensor.float, Tensor.to})  # and what makes logits wider for them


# ------------------------------------------------------------------------------------------------------ the mode


class _Here(threading.local):
    """Where a thread's forward pass is.

    Attributes:
        on: whether calls are looked at now.
        pushed: whether the mode sees them.
        hooks: of saved tensors, as they were when the innermost module was entered. In a checkpoint inside of a
            module nothing is looked at: it would be run again in backward, outside of the module.
        watch: is told each output, and whether its operation keeps something other than PyTorch's.
        narrow: the innermost module's notes of tensors that perhaps nothing will keep.
        module: the innermost module.
        only: the functions that are looked at; None for all.

    """

    on = False
    pushed = False
    hooks: Any = None
    watch: Callable[[Tensor, bool], None] | None = None
    module: nn.Module | None = None
    only: Collection[Any] | None = None

    def __init__(self) -> None:
        self.narrow: list[weakref.ref[Note]] = []

    def tell(self, output: Tensor, less: bool) -> None:
        if self.watch is not None:
            self.watch(output, less)

    def hold(self, noted: Note | None, output: Tensor) -> None:
        """Let a note be cleared when the innermost module has run, if nothing uses it."""
        if noted is not None:
            self.narrow.append(weakref.ref(noted))
            self.tell(output, False)


here = _Here()


class _Calls(TorchFunctionMode):
    @never_alone
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # a part of a module, which is traced
            return func(*args, **(kwargs or {}))
        handler = HANDLERS.get(func) if here.only is None or func in here.only else None
        if handler is None or not here.on or not (torch.is_grad_enabled() or func is F.one_hot):
            return func(*args, **(kwargs or {}))
        hooks = saved_tensor_hooks()
        if hooks is False or hooks != here.hooks:
            return func(*args, **(kwargs or {}))
        return handler(func, args, kwargs or {})


MODE: Any = _Calls()


class Looking:
    """A context in which calls are looked at, or with `on=False` are not."""

    def __init__(
        self, on: bool = True, module: nn.Module | None = None, only: Collection[Any] | None = None
    ) -> None:
        self.on, self.module, self.only = on, module, only

    def __enter__(self) -> None:
        self.before = here.on, here.hooks, here.pushed, here.narrow, here.module, here.only
        if self.on:
            here.hooks, here.narrow, here.module, here.only = saved_tensor_hooks(), [], self.module, self.only
        elif here.pushed and innermost_mode() is MODE:  # so that it costs nothing
            MODE.__exit__(None, None, None)
            here.pushed = False
        if self.on and not here.pushed:
            MODE.__enter__()
            here.pushed = True
        here.on = self.on

    def __exit__(self, *_: Any) -> None:
        pushed = here.pushed
        if self.on:
            for one in here.narrow:
                noted = one()
                if noted is not None and not noted.recipe.readers:
                    noted.state = ()
        here.on, here.hooks, here.pushed, here.narrow, here.module, here.only = self.before
        if pushed and not here.pushed:
            MODE.__exit__(None, None, None)
        elif here.pushed and not pushed:
            MODE.__enter__()
