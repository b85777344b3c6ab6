"""Indices: operations that keep them in fewer bytes, and tensors that follow from them alone.

The indices of the largest are kept, because PyTorch does not promise to choose the same among equals twice. An
order by such indices, its inverse, and the rows that it leads to are computed again: they follow from the indices,
and sorting integers on one device gives the same order each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fitact.runtime.recipes import note, plain
from fitact.runtime.torch_internals import base_of, storage_id

from ..derivatives import Plain, once
from ..functions import recorded
from ..operation import DEEPEST, Expression, bound
from ..recipes import Function, Source, applied, kept_source, layout, narrow, note_narrow, small, source, use

ORDER = "_fitact_order"  # the attribute of storages of numbers that are those from 0 on, in some order
COUNTED = "_fitact_counted"  # the same, in their own order
SORTED = "cpu", "cuda"  # devices on which numbers are sorted without a race between threads


def noted(
    output: Tensor,
    function: Function,
    tensors: Sequence[Tensor],
    found: Sequence[Source | None],
    extra: dict[int, int] | None = None,
) -> None:
    """Note on an output that it is a function of tensors.

    Args:
        output: of the function, with memory of its own.
        function: of the tensors.
        tensors: its arguments.
        found: what these are rebuilt from; None if it is kept.
        extra: the bytes of storages that nothing keeps yet, by storage; None if all are kept.

    """
    expression = Expression(function, tensors, found)
    again, state = Plain(expression, output.device.type), expression.take_state()
    if expression.depth > DEEPEST:
        return
    if extra is None:
        note(output, again, *state)
    else:
        note_narrow(output, again, state, extra)


# ------------------------------------------------------------------------------------------- what keeps numbers


class _IndexAdd(torch.autograd.Function):
    """x with rows of a source added in place; PyTorch's keeps the source too, only to ask for its shape."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, index: Tensor, source: Tensor, rebuild: Function | None, *state: Tensor
    ) -> Tensor:
        ctx.dim, ctx.rebuild = dim, rebuild
        ctx.save_for_backward(*state)
        ctx.mark_dirty(x)
        return x.index_add_(dim, index, source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        once()
        state = ctx.saved_tensors
        index = state[0] if ctx.rebuild is None else ctx.rebuild(*state)
        return grads[0], None, None, grads[0].index_select(ctx.dim, index), None, *(None for _ in state)


def index_add(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Add rows of a source to rows of x in place, and return x; x may be neither a view nor a trained leaf."""
    given = {**dict(zip(("self", "dim", "index", "source"), args, strict=False)), **kwargs}
    x, dim, index, rows = (given.get(name) for name in ("self", "dim", "index", "source"))
    if not (isinstance(x, Tensor) and isinstance(index, Tensor) and isinstance(rows, Tensor)):
        return function(*args, **kwargs)
    if (
        not all(map(plain, (x, index, rows)))
        or len(given) != 4
        or len(args) + len(kwargs) != 4
        or not recorded(rows)
        or not rows.dim() == x.dim() > 0
        or base_of(x) is not None
        or (x.is_leaf and x.requires_grad)
    ):
        return function(*args, **kwargs)
    found = fewer(index, max(x.shape))
    rebuild, state = (None, (index,)) if found is None else found[:2]
    if rebuild is not None:
        use(rebuild)
    return applied(_IndexAdd, x, dim, index, rows, rebuild, *state)


def fewer(index: Tensor, size: int) -> Source | None:
    """Return what takes fewer bytes to keep than numbers from -size to size - 1, None if nothing does."""
    return source(index) or small(index, size)


class _Ranked(torch.autograd.Function):
    """The largest along a dimension, and their indices, which PyTorch keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any, dim: int, whole: bool) -> tuple[Tensor, Tensor]:
        values, index = function(x)
        ctx.shape, ctx.dim, ctx.whole = x.shape, dim, whole
        kept = small(index, x.shape[dim])
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(index if kept is None else kept.state[0])
        return values, index

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        once()
        index, grad = ctx.saved_tensors[0].long(), grads[0]
        if not ctx.whole:
            index, grad = index.unsqueeze(ctx.dim), grad.unsqueeze(ctx.dim)
        return grad.new_zeros(ctx.shape).scatter_(ctx.dim, index, grad), None, None, None


ARGUMENTS: dict[Any, Sequence[str]] = {
    **dict.fromkeys((torch.topk, Tensor.topk), ("input", "k", "dim")),
    **dict.fromkeys((torch.max, Tensor.max), ("input", "dim", "keepdim")),
}


def ranked(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the largest along a dimension, and their indices, which are kept in fewer bytes."""
    given = {**dict(zip(ARGUMENTS[function], args, strict=False)), **kwargs}
    x, dim = given.get("input", given.get("self")), given.get("dim", -1 if "k" in given else None)
    if not isinstance(x, Tensor) or not x.dim() or type(dim) is not int or "out" in kwargs:
        return function(*args, **kwargs)
    tensors, call = bound(function, args, kwargs)
    if len(tensors) != 1 or not recorded(x) or not plain(x):
        return function(*args, **kwargs)
    whole = "k" in given or given.get("keepdim", False)
    values, index = applied(_Ranked, x, call, dim, whole)
    kept = small(index, x.shape[dim])
    if kept is not None:
        note(index, kept.function, *kept.state)
        _note_largest(values, partial(_at, dim, whole), [x, index], kept)
    return (torch.return_types.topk if "k" in given else torch.return_types.max)((values, index))


def _note_largest(values: Tensor, function: Function, tensors: Sequence[Tensor], kept: Source) -> None:
    """Note that values are numbers of a tensor at an index, if the tensor can be rebuilt."""
    x = tensors[0]
    found, extra = source(x) or kept_source(x), None
    if found is None:
        found, extra = narrow(x)
    if found is not None:
        noted(values, function, tensors, [found, kept], extra)


def _at(dim: int, whole: bool, x: Tensor, index: Tensor) -> Tensor:
    """Return the numbers of x at an index."""
    return x.gather(dim, index) if whole else x.gather(dim, index.unsqueeze(dim)).squeeze(dim)


# --------------------------------------------------------------------------------------- what follows from numbers


def following(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what a function returns, with a note that it is a function of integers that can be rebuilt."""
    output = function(*args, **kwargs)
    tensors, call = bound(function, args, kwargs)
    found = [source(one) for one in tensors]
    if not tensors or "out" in kwargs or None in found or any(one.is_floating_point() for one in tensors):
        return output
    outputs = output if isinstance(output, tuple) else [output] if isinstance(output, Tensor) else []
    for number, one in enumerate(outputs):
        again = call if one is output else partial(_part, call, number)
        if storage_id(one) not in map(storage_id, tensors):
            noted(one, again, tensors, found)
    return output


def _part(call: Function, number: int, *given: Tensor) -> Tensor:
    part: Tensor = call(*given)[number]
    return part


def ordered(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return numbers sorted, and their order, or that alone."""
    x = args[0] if args else None
    if not isinstance(x, Tensor) or x.is_floating_point() or x.device.type not in SORTED:
        return function(*args, **kwargs)
    output = following(function, args, kwargs)
    order = output if isinstance(output, Tensor) else output[1]
    if order.dim() == 1:
        setattr(order.untyped_storage(), ORDER, layout(order))
    return output


def hot(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return one-hot rows; noted if the number of classes is given, so that backward need not wait for it."""
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    return following(function, args, kwargs) if classes > 0 else function(*args, **kwargs)


def placed(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return where numbers are not 0; their count is known now, so that backward need not wait for it."""
    output = function(*args, **kwargs)
    x = args[0] if len(args) == 1 and not kwargs else None
    found = source(x) if isinstance(x, Tensor) and x.dim() else None
    columns = base_of(output[0]) if found is not None and isinstance(output, tuple) and output else None
    if x is not None and columns is not None:
        noted(columns, partial(_places, len(columns)), [x], [found])
    return output


def _places(count: int, x: Tensor) -> Tensor:
    rows = (x != 0).reshape(-1).to(torch.uint8).argsort(descending=True, stable=True)[:count]
    columns = []
    for size in reversed(x.shape):
        columns.append(rows % size)
        rows = rows // size
    return torch.stack(columns[::-1], 1)


def counted(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the numbers from 0 on."""
    output = function(*args, **kwargs)
    if (
        len(args) == 1
        and type(args[0]) is int
        and not {"start", "end", "step", "out"} & {*kwargs}
        and plain(output)
    ):
        setattr(output.untyped_storage(), COUNTED, layout(output))
    return output


def assigned(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Set elements of a tensor; if these are 0, 1, 2, … at the places of an order, note that it is the inverse."""
    function(*args, **kwargs)
    if len(args) != 3 or not all(isinstance(one, Tensor) and plain(one) for one in args):
        return
    x, order, value = args
    found = source(order) if _is(order, ORDER) and _is(value, COUNTED) else None
    if (
        found is not None
        and x.shape == order.shape == value.shape
        and x.dtype == order.dtype == value.dtype
        and x.device == order.device
    ):
        noted(x, _inverse, [order], [found])


def _is(x: Tensor, attribute: str) -> bool:
    return getattr(x.untyped_storage(), attribute, None) == layout(x)


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
