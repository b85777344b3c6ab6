"""Calls of PyTorch's functions in a module's own `forward`: what they keep, and what is noted on their outputs.

A mode of `torch.overrides` sees each call. A call that would keep something that can be rebuilt is made through
`operation`; on what can be rebuilt from what a call keeps, this is noted. All other calls pass. The mode is on in
the `forward` of modules that are given to it, outside of modules that rebuild themselves.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fitact.runtime.recipes import Note, note, plain
from fitact.runtime.torch_internals import GROUPED_MM, innermost_mode, saved_tensor_hooks, storage_id

from . import functions
from .derivatives import Plain
from .operation import Expression, bound, depth, operation, rebuilds
from .recipes import (
    Read,
    Source,
    cast,
    kept_source,
    narrow,
    narrower,
    normed,
    note_kept,
    note_narrow,
    owned,
    shares_cast,
    source,
)

Function = Callable[..., Any]
SHARED = "_fitact_shared"  # the attribute of storages from which scores are rebuilt, perhaps of several layers
SHALLOW = 1  # functions of what is kept, in a sum that is rebuilt: what is rebuilt of one is kept in another
DEEPEST = 64  # functions of functions, each of which takes five frames of Python's stack in backward


# --------------------------------------------------------------------------------------------------------- rules

Keeps = Callable[[Sequence[Tensor]], Sequence[bool]]


class Rule(NamedTuple):
    """What a function of PyTorch keeps; each is one operation, which reads its tensors once.

    Attributes:
        keeps: of the tensors among its arguments, whether it keeps each.
        keeps_output: whether it keeps what it returns; it has one tensor then.
        noted: whether it is noted what the output is rebuilt from: not of products, which are not computed again.
        replaced: whether it may keep something else, as `operation` does it.
        cast: whether autocast casts its arguments.

    """

    keeps: Keeps
    keeps_output: bool = False
    noted: bool = True
    replaced: bool = True
    cast: bool = False


def _nothing(tensors: Sequence[Tensor]) -> Sequence[bool]:
    return [False] * len(tensors)


def _everything(tensors: Sequence[Tensor]) -> Sequence[bool]:
    return [True] * len(tensors)


def _input(tensors: Sequence[Tensor]) -> Sequence[bool]:
    """Keep one tensor."""
    return [one.requires_grad for one in tensors] if len(tensors) == 1 else _nothing(tensors)


def _factors(tensors: Sequence[Tensor]) -> Sequence[bool]:
    """Keep each of two factors for the other's gradient, and what follows them."""
    if len(tensors) < 2:
        return _nothing(tensors)
    a, b, *others = tensors
    return [b.requires_grad, a.requires_grad, *(True for _ in others)]


def _summed_factors(tensors: Sequence[Tensor]) -> Sequence[bool]:
    return [False, *_factors(tensors[1:])]


def _quotient(tensors: Sequence[Tensor]) -> Sequence[bool]:
    if len(tensors) < 2:
        return _nothing(tensors)
    a, b = tensors
    return [b.requires_grad, a.requires_grad or b.requires_grad]


def _indexed(tensors: Sequence[Tensor]) -> Sequence[bool]:
    """Keep indices, if they are numbers."""
    return [False, *(one.dtype == torch.int64 for one in tensors[1:])]


def _normed(tensors: Sequence[Tensor]) -> Sequence[bool]:
    """Keep what is normed, and parameters, which are there anyway."""
    x, *parameters = tensors
    return [x.requires_grad, *(isinstance(one, nn.Parameter) for one in parameters)]


INPUT, OUTPUT, CARRIED, INDEX = Rule(_input), Rule(_nothing, True), Rule(_nothing), Rule(_indexed)
PRODUCT = Rule(_factors, noted=False, cast=True)
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
    Rule(_factors): {"torch": "mul multiply", "Tensor": "mul __mul__ __rmul__ multiply"},
    Rule(_quotient): {
        "torch": "div divide true_divide",
        "Tensor": "div __div__ __truediv__ divide true_divide",
    },
    Rule(_normed, replaced=False): {"F": "layer_norm", "torch": "layer_norm"},
    PRODUCT: {"torch": "matmul mm bmm", "Tensor": "matmul __matmul__ mm bmm"},
    Rule(_summed_factors, noted=False, cast=True): {"torch": "addmm baddbmm", "Tensor": "addmm baddbmm"},
    Rule(_everything, noted=False, cast=True): {"F": "scaled_dot_product_attention"},
}


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
    dtype = _product_dtype(rule, tensors)
    if dtype is not None:
        if any(shares_cast(one, dtype) and not owned(one) for one in tensors):
            return function(*args, **kwargs)  # PyTorch has to cast it, for all that read its cast
        tensors = [_cast(*both, dtype) for both in zip(tensors, found, strict=True)]
        found = [source(one) for one in tensors]
    elif rule is CARRIED and len(tensors) > 1:
        found = [None if one is None or _is_narrow(one) else one for one in found]
    keeps = rule.keeps(tensors)
    if rule.replaced:
        found = [
            narrower(tensor) if one is None and kept and dtype in (None, tensor.dtype) else one
            for one, kept, tensor in zip(found, keeps, tensors, strict=True)
        ]
    less = any(one is not None and kept for one, kept in zip(found, keeps, strict=True))
    if rule.noted:
        found = [
            one if one is not None or kept else kept_source(tensor)
            for one, kept, tensor in zip(found, keeps, tensors, strict=True)
        ]
    noted = rule.noted and all(one is not None or kept for one, kept in zip(found, keeps, strict=True))
    less = less or (noted and rule.keeps_output)
    if not (less or noted):
        return _passed(rule, function(*args, **kwargs), call, tensors)
    rebuild = None
    if noted:
        expression = Expression(call, tensors, found)
        if expression.depth <= DEEPEST:
            state = expression.take_state()
            rebuild = Source(Plain(expression, tensors[0].device.type), state)
    if less:
        output: Any = operation(call, tensors, rebuild if rule.keeps_output else None)
    else:
        output = function(*args, **kwargs)
    if not isinstance(output, Tensor):  # a name
        return output
    if rebuild is not None and storage_id(output) in map(storage_id, tensors):
        return output  # a view, or the tensor itself
    if rebuild is not None:
        note(output, rebuild.function, *rebuild.state)
    here.tell(output, less and rebuilds(output))
    return output


def _passed(rule: Rule, output: Any, call: Function, tensors: Sequence[Tensor]) -> Any:
    """Note what PyTorch's operation keeps itself, or what it would take fewer bytes to keep."""
    if rule.keeps_output:
        note_kept(output)
    elif rule.noted and rule.replaced and isinstance(output, Tensor):
        _note_narrow(output, call, tensors, rule.keeps(tensors))
    return output


class _Narrow(Plain):
    """What takes fewer bytes to keep than its output."""


def _is_narrow(found: Source) -> bool:
    """Whether a tensor is kept as something narrower; a sum with it is not, or each would be rebuilt from all."""
    return isinstance(found.function, Read) and isinstance(found.function.recipe.function, _Narrow)


def _note_narrow(output: Tensor, call: Function, tensors: Sequence[Tensor], keeps: Sequence[bool]) -> None:
    """Note on an output if it takes no more bytes to keep what it is a function of: of a cast, a sum, a copy."""
    widens, extra, found = output.dtype != tensors[0].dtype, dict[int, int](), []
    for tensor, kept in zip(tensors, keeps, strict=True):
        one, more = narrow(tensor)
        widens = widens or one is not None
        if one is None:
            near = source(tensor)
            if near is not None and depth(near.function) <= SHALLOW and not _is_narrow(near):
                one = near
            elif not kept:
                more = _held(tensor)
        found.append(one)
        extra |= more
    if sum(extra.values()) < output.nbytes + widens:
        expression = Expression(call, tensors, found)
        if expression.depth <= DEEPEST:
            state = expression.take_state()
            noted = note_narrow(output, _Narrow(expression, output.device.type), state, extra)
            if noted is not None:
                here.narrow.append(weakref.ref(noted))
                here.tell(output, False)


def _held(tensor: Tensor) -> dict[int, int]:
    """Return the memory that is held if a tensor is: none of a parameter, or of what others keep anyway."""
    storage = tensor.untyped_storage()
    free = owned(tensor) or hasattr(storage, SHARED) or normed(tensor)
    return {} if free else {storage_id(storage): storage.nbytes()}


def _product_dtype(rule: Rule, tensors: Sequence[Tensor]) -> torch.dtype | None:
    """Return the dtype to which autocast casts the arguments of a function, None if it does not."""
    device = tensors[0].device.type
    return torch.get_autocast_dtype(device) if rule.cast and torch.is_autocast_enabled(device) else None


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
        output = functions.dropout(x, given["p"])
    if output is None:
        return function(*args, **kwargs)
    here.tell(output, False)
    return output


def _index_add(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    given = {**dict(zip(("self", "dim", "index", "source"), args, strict=False)), **kwargs}
    output = None
    if (
        len(given) == 4
        and len(args) + len(kwargs) == 4
        and all(isinstance(one, Tensor) for one in (given["index"], given["source"]))
    ):
        output = functions.index_add(given["self"], given["dim"], given["index"], given["source"])
    if output is None:
        return function(*args, **kwargs)
    here.tell(output, True)
    return output


def _softmax(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Keep the output, or the input if that is narrower."""
    tensors, call = bound(function, args, kwargs)
    if len(tensors) != 1 or source(tensors[0]) is not None or not (tensors[0].requires_grad and plain(tensors[0])):
        return _ruled(OUTPUT, function, args, kwargs)
    (x,) = tensors
    device = x.device.type
    dtype = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.dtype)), x.dtype)
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.float32
    size = x.numel() * dtype.itemsize
    found, extra = narrow(x)
    if not (x.untyped_storage().nbytes() < size if found is None else sum(extra.values()) <= size):
        return _ruled(OUTPUT, function, args, kwargs)
    near = found or Source(lambda x: x, (x.detach(),))
    for one in near.state:
        setattr(one.untyped_storage(), SHARED, True)
    again = Plain(lambda *state: call(near.function(*state)), device)
    rebuild = Source(again, near.state, near.exact)
    output = operation(call, tensors, rebuild)
    note(output, again, *near.state, exact=rebuild.exact)
    here.tell(output, True)
    return output


def _handlers() -> dict[Any, Function]:
    found: dict[Any, Function] = {F.linear: _linear, F.dropout: _dropout, Tensor.index_add_: _index_add}
    found |= dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), _softmax)
    for rule, homes in _RULES.items():
        for home, names in homes.items():
            for name in names.split():
                function = getattr(_HOMES[home], name, None)  # not every version has all
                if function is not None:
                    found[function] = partial(_ruled, rule)
    found[GROUPED_MM] = partial(_ruled, Rule(_factors, noted=False))
    return found


HANDLERS = _handlers()


# ------------------------------------------------------------------------------------------------------ the mode


class _Here(threading.local):
    """Where a thread's forward pass is.

    Attributes:
        on: whether calls are looked at now.
        pushed: whether the mode sees them.
        hooks: of saved tensors, as they were when the innermost module was entered. In a checkpoint inside of a
            module nothing is looked at: it would be run again in backward, outside of the module.
        watch: is told of outputs, and whether their operation keeps something else than PyTorch's.
        narrow: notes of the innermost module, which hold what none may keep.

    """

    on = False
    pushed = False
    hooks: Any = None
    watch: Callable[[Tensor, bool], None] | None = None

    def __init__(self) -> None:
        self.narrow: list[weakref.ref[Note]] = []

    def tell(self, output: Tensor, less: bool) -> None:
        if self.watch is not None:
            self.watch(output, less)


here = _Here()


class _Calls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # a part of a module, which is traced
            return func(*args, **(kwargs or {}))
        handler = HANDLERS.get(func)
        if handler is None or not here.on or not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        hooks = saved_tensor_hooks()
        if hooks is False or hooks != here.hooks:
            return func(*args, **(kwargs or {}))
        return handler(func, args, kwargs or {})


MODE: Any = _Calls()


class Looking:
    """A context in which calls are looked at, or with `on=False` are not."""

    def __init__(self, on: bool = True) -> None:
        self.on = on

    def __enter__(self) -> None:
        self.before = here.on, here.hooks, here.pushed, here.narrow
        if self.on:
            here.hooks = saved_tensor_hooks()
            here.narrow = []
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
        here.on, here.hooks, here.pushed, here.narrow = self.before
        if pushed and not here.pushed:
            MODE.__exit__(None, None, None)
        elif here.pushed and not pushed:
            MODE.__enter__()
