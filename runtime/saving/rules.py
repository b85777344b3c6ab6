"""The rules of calls: which are cheap, and what is done for dropout, attention, losses and changes in place."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from ctypes import c_float
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from fitact.runtime.torch_internals import (
    SAFE_SOFTMAX,
    base_of,
    mark_of,
    next_call,
    storage_id,
    version_of,
)

from . import cheap
from .attention import RecomputedAttention, attention, recomputed
from .capture import CHANGES, FLAGS, RULES, Capture, call_of, change, is_plain, named, set_recompute, written
from .cheap import Function
from .loss import by_rows
from .recompute import PLAIN, Operand
from .storage import Mark, Quantised, Stored, layout_of, marked, quietly

Pure = tuple[Function, Sequence[Any], dict[str, Any]]  # a call that returns what another writes in place


def _cheap(capture: Capture, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Make a cheap call of a function that may be asked to change its input."""
    given = len(args) > 1 or kwargs.get("inplace")  # most calls have but a tensor
    if given and FLAGS.get(func) == "inplace" and written(func, args, kwargs):
        return _changing(capture, func, args, kwargs, (func, (), {**named(func, args, kwargs), "inplace": False}))
    return capture.cheap(func, args, kwargs)


def _kinked(capture: Capture, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Make a call of a kind of ReLU, whose slope is stored in bits when nothing else can read what it saves."""

    def stored_of(value: Tensor) -> Stored | None:
        mark: Mark | None = mark_of(value.untyped_storage()) if is_plain(value) else None
        return None if mark is None else mark.stored(version_of(value), layout_of(value))

    capture.store_slopes()
    x = args[0] if args else kwargs["input"]
    before = stored_of(x)
    output = _cheap(capture, func, args, kwargs)
    read = [output] if func in cheap.RELUS else [x, output]  # the output of a leaky one may be recomputed from x
    stored = stored_of(read[0])
    if stored is not None and stored is not before and type(stored) in (Stored, Quantised) and stored.at_hand:
        stored.kinked, stored.spared = stored.readers, output.nbytes - output.numel() // 8
        mark = mark_of(read[0].untyped_storage())
        capture.kinked.append((weakref.ref(stored), mark, func, [TensorWeakRef(each) for each in read]))
    return output


def _divided(capture: Capture, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Make the two calls that PyTorch makes for a number divided by a tensor."""
    if len(args) < 2 or not isinstance(args[1], int | float) or not is_plain(args[0]):
        return capture.plain(func, args, kwargs)
    return capture.call(Tensor.mul, capture.call(Tensor.reciprocal, args[0]), args[1])


def _cumsum(capture: Capture, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Make a call of a cumulative sum; a GPU adds up a single row in any order."""
    x = args[0] if args else kwargs.get("input")
    single = isinstance(x, Tensor) and x.numel() == max(x.shape, default=1)
    return (Capture.plain if single else Capture.cheap)(capture, func, args, kwargs)


def _cast(capture: Capture, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    output = func(*args, **kwargs)
    if output is not args[0] and is_plain(output) and output.requires_grad and output.device == args[0].device:
        set_recompute(capture, output, Tensor.to, (args[0], output.dtype), {})
    return output


def _changing(
    capture: Capture,
    func: Function,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    pure: Pure | None = None,
) -> Any:
    """Make a call that changes tensors in place."""
    tensors = written(func, args, kwargs)
    if len(tensors) != 1 or not is_plain(tensors[0]):
        return capture.writing(func, args, kwargs)
    (x,) = tensors
    mark, layout = mark_of(x.untyped_storage()), layout_of(x)
    recompute = before = None
    if mark is not None:
        if args and func in cheap.PURE:
            pure = cheap.PURE[func], args, kwargs
        before = mark.recompute
        if before is not None and (before.version != version_of(x) or base_of(x) is not None):
            before = None
        given = (*args, *kwargs.values())
        same_dtype = all(argument.dtype == x.dtype for argument in given if isinstance(argument, Tensor))
        if pure is not None and before is not None and same_dtype:
            recompute = set_recompute(capture, x, *pure, version=1)
        change(tensors)
        mark_of(x.untyped_storage()).recompute = recompute
    call = call_of(func, args, kwargs)
    number = next_call()  # of the function itself: PyTorch may also record a copy of x
    output, undecided = capture.made(func, args, kwargs, changed=x)
    for stored, storage in undecided:
        stored.read_by(number)
        how, value = None, x
        if storage is x.untyped_storage():
            how = recompute if recompute is not None and version_of(x) == recompute.version else None
        elif pure is not None and stored.layout == layout and stored.tensor.dtype == x.dtype:
            how, value = before, stored.tensor  # PyTorch's copy of x before the change
        computed = capture.recomputed(how, value, call)
        if computed is not None and how is before and computed.guard is not None:  # that counts changes of x
            computed.readers -= 1
            computed = None
        if computed is not None:
            computed.read_by(number)
            stored.recompute_instead(capture.computed(computed, value, call))
        else:
            capture.settle(stored, storage, output)
    return output


def _dropout(capture: Capture, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Make a call of dropout; its mask is stored in bits, from which the output can be recomputed."""
    given = {"p": 0.5, "training": True, "inplace": False} | dict(zip(DROPOUT, args, strict=False)) | kwargs
    x, p = given["input"], given["p"]
    if given["inplace"] or not (given["training"] and is_plain(x) and x.requires_grad and 0 < p < 1):
        return (_changing if given["inplace"] else Capture.plain)(capture, func, args, kwargs)
    capture.masks, capture.p = [], p
    try:
        output = capture.plain(func, args, kwargs)
        masks = capture.masks
    finally:
        capture.masks = None
    y = output[0] if isinstance(output, tuple) else output
    if len(masks) == 1:
        bits, mark = masks[0]
        set_recompute(capture, y, dropped, (x, Operand(mark, bits.version, bits.layout), p), {})
    return output


DROPOUT = ("input", "p", "training", "inplace")


def dropped(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """Return what PyTorch's dropout makes of x, rounded as it rounds.

    Args:
        x: any shape.
        mask: on a GPU, or of `torch.native_dropout`, bool; else the factors 0 and 1/(1 - p).
        p: the probability of a 0.

    """
    if not x.is_cuda and (mask.dtype != torch.bool or x.element_size() == 2):
        return x * (mask.to(x.dtype).div_(1 - p) if mask.dtype == torch.bool else mask)
    # a GPU's kernel rounds once too: its factor is of float32, computed from 1 - p of float32
    keep = c_float(1 - p).value if x.is_cuda and x.dtype != torch.float64 else 1 - p
    return (x * mask).mul_(1 / keep)


def _attention(capture: Capture, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Make a call of attention, or its operations where PyTorch does not fuse it, or one that backward repeats."""
    made = recomputed(capture.call, func, args, kwargs) if capture.recompute_attention else None
    if made is not None:
        call, tensors = made
        number = next_call()  # before those of the operations in its forward
        output = capture.plain(func, args, kwargs, lambda: RecomputedAttention.apply(call, *tensors))  # type: ignore[no-untyped-call]
        for tensor in tensors:
            mark = None if tensor is None else mark_of(tensor.untyped_storage())
            for stored in () if tensor is None or mark is None else mark.alive(version_of(tensor)):
                stored.read_by(number)
        set_recompute(capture, output, call.run, tensors, {})
        return output
    shared: list[Stored] = []

    def share(*tensors: Tensor) -> None:
        """Store queries, keys and values that are views of one tensor, if their wide copies take more."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        size = sum(storage.nbytes() for storage in {storage_id(storage): storage for storage in storages}.values())
        if not all(tensor.requires_grad for tensor in tensors) or size >= sum(
            4 * tensor.numel() for tensor in tensors
        ):
            return
        capture.current = func, args
        for tensor in tensors:
            mark = marked(tensor, capture.hooks)
            if mark.recompute is None and mark.stored(version_of(tensor), layout_of(tensor)) is None:
                shared.append(capture.store(tensor, mark, True))
                shared[-1].ours = True
        capture.current = None

    output = attention(capture.call, args, kwargs, share)
    return capture.plain(func, args, kwargs) if output is None else output


def _opened(capture: Capture, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Make each call that a function in Python makes by its rule: PyTorch hands the function to modes as one."""
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    if not all(type(each) in PLAIN for each in tensors):  # a class may have its own way with the whole
        return capture.plain(func, args, kwargs)
    names = {**func.__globals__, "has_torch_function": lambda tensors: False}
    body = FunctionType(func.__code__, names, func.__name__, func.__defaults__)
    with capture.again():
        return body(*args, **kwargs)


def _cross_entropy(capture: Capture, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Make a call of the loss, by rows where logits take fewer bytes than what PyTorch's loss saves."""
    loss = by_rows(**named(func, args, kwargs))
    return capture.plain(func, args, kwargs) if loss is None else loss


def _batch_norm(capture: Capture, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given = named(func, args, kwargs)
    output = capture.writing(func, args, kwargs)
    x = given.pop("input")
    if not (is_plain(output) and output.requires_grad):
        return output
    if given["training"]:  # a dtype of running statistics other than the input's decides how PyTorch sums
        statistics = [given.pop(name) for name in ("running_mean", "running_var")]
        given["running"] = [
            None if statistic is None else (statistic.size(), statistic.dtype) for statistic in statistics
        ]
        function: Function = _batch_norm_again
    else:  # the model may change them before backward
        function = F.batch_norm
        with quietly():
            given |= {name: given[name].clone() for name in ("running_mean", "running_var")}
    set_recompute(capture, output, function, (x,), given)
    return output


def _batch_norm_again(x: Tensor, running: Any, **given: Any) -> Tensor:
    """Return the norm of a batch as in training, without a change of running statistics."""
    mean, var = (
        None if statistic is None else torch.zeros(statistic[0], dtype=statistic[1], device=x.device)
        for statistic in running
    )
    return F.batch_norm(x, mean, var, **given)


RULES |= {each: _cheap if each in FLAGS else Capture.cheap for each in cheap.CHEAP_FUNCTIONS}
RULES |= dict.fromkeys(cheap.RELUS | cheap.LEAKY, _kinked) | dict.fromkeys(cheap.CAST_FUNCTIONS, _cast)
RULES |= {inspect.unwrap(F.dropout): _dropout, torch.native_dropout: _dropout, F.cross_entropy: _cross_entropy}
RULES |= dict.fromkeys(cheap.named("__rdiv__ __rtruediv__"), _divided)
RULES |= dict.fromkeys(cheap.named("cumsum"), _cumsum)
RULES[inspect.unwrap(F.scaled_dot_product_attention)] = _attention
RULES[F.multi_head_attention_forward] = _opened
RULES |= dict.fromkeys(cheap.PURE, _changing) | {SAFE_SOFTMAX: Capture.cheap, F.batch_norm: _batch_norm}
CHANGES.update(cheap.PURE)
