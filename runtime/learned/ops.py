"""The ops of formulas with learned numbers, and which formulas there are.

    fitact::learned_forward(Tensor x, Tensor numbers, SymInt inner, str key) -> Tensor y
    fitact::learned_backward(
        Tensor dy, Tensor kept, Tensor numbers, SymInt inner, bool, bool, str key
    ) -> (Tensor dx, Tensor gradients of numbers)

They are opaque to PyTorch like those of `ops.autograd`, and see contiguous tensors. `kept` is x or y;
the two bools say which gradients are wanted. `numbers` has a row for each number, and a column for each channel or
one column; it is float64 if x is, else float32. Element i has channel (i // inner) mod channels.

The gradients of numbers are sums over elements, in the dtype of `numbers`: first over parts of the tensor, then
over these, always in the same order and without atomics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.learned import BLOCK, HEIGHT, TRIPS, WIDTH
from ..ops.launch import Launch, options, threads_of
from ..ops.library import KERNEL_DTYPES, Op, Registry, alone, define, ops, save_key

PART = 1 << 17  # elements whose gradients are added up at once, 512 KiB of float32
THREADS = 256


class Number(NamedTuple):
    """A learned number: its name, its start, and whether there is one for every channel."""

    name: str
    start: float
    channel: bool


@dataclass(frozen=True, kw_only=True)
class Learned:
    """A registered formula, with all that the ops need to run it.

    Attributes:
        key: identifies the fit and the generated text.
        name: its name in messages.
        numbers: the learned numbers.
        value: of x and the numbers, in PyTorch's operators; all are of one dtype, float32 or float64.
        derivative: likewise in x, of what is kept and the numbers.
        gradients: likewise in each number.
        forward, backward: Triton kernels; their arguments are those that the functions below launch them with.
        keeps_output: whether y is kept in place of x.

    """

    key: str
    name: str
    numbers: tuple[Number, ...]
    value: Callable[..., Tensor]
    derivative: Callable[..., Tensor]
    gradients: tuple[Callable[..., Tensor], ...]
    forward: Any
    backward: Any
    keeps_output: bool = False


_registry: Registry[Learned] = Registry("formula")
register_learned = _registry.register
find = _registry.find
refuse_second_derivative = _registry.refuse_second_derivative


# ------------------------------------------------------------------------------------------ by PyTorch's operators


def _columns(numbers: Tensor) -> tuple[Tensor, ...]:
    """Return each number so that it meets (rows, channels, inner)."""
    return tuple(row.unsqueeze(-1) for row in numbers)


def _parts(size: int, channels: int, inner: int) -> Iterator[slice]:
    """Yield slices of the rows of (rows, channels, inner), which depend on the sizes alone."""
    width = max(channels * inner, 1)
    step = max(PART // width, 1)
    rows = size // width
    yield from (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _computed(formula: Learned, x: Tensor, numbers: Tensor, inner: int) -> Tensor:
    """Return the formula of a contiguous tensor in its dtype, computed in that of the numbers."""
    y, columns, shape = torch.empty_like(x), _columns(numbers), (-1, numbers.shape[1], inner)
    if x.numel():
        rows, out = x.view(shape), y.view(shape)
        for part in _parts(x.numel(), *shape[1:]):
            out[part] = formula.value(rows[part].to(numbers.dtype), *columns)
    return y


def _forward_reference(x: Tensor, numbers: Tensor, inner: int, key: str) -> Tensor:
    with alone(x):
        return _computed(find(key), x, numbers, inner)


def _backward_reference(
    dy: Tensor, kept: Tensor, numbers: Tensor, inner: int, wants_x: bool, wants_numbers: bool, key: str
) -> tuple[Tensor, Tensor]:
    formula = find(key)
    dx, found = _backward_fake(dy, kept, numbers, inner, wants_x, wants_numbers, key)
    if not dy.numel():
        return dx, found.zero_()
    with alone(dy):
        shape = (-1, numbers.shape[1], inner)
        columns, of, rows, sums = _columns(numbers), kept.view(shape), dy.view(shape), []
        for part in _parts(dy.numel(), *shape[1:]):
            at, grad = of[part].to(numbers.dtype), rows[part].to(numbers.dtype)
            if wants_x:
                dx.view(shape)[part] = grad * formula.derivative(at, *columns)
            if wants_numbers:
                shares = [(grad * one(at, *columns)).sum((0, 2)) for one in formula.gradients]
                sums.append(torch.stack(shares))
        return dx, torch.stack(sums).sum(0) if wants_numbers else found


# ------------------------------------------------------------------------------------------------------- by Triton


def _channels(numbers: Tensor, inner: int) -> tuple[int | None, int | None]:
    """Return what kernels take for the channels, and for the elements of each that lie beside each other."""
    return (numbers.shape[1], inner if inner > 1 else None) if numbers.shape[1] > 1 else (None, None)


def _launch(over: Tensor, numbers: Tensor, inner: int) -> Launch:
    """Return what launches a forward kernel: over tiles, or over blocks as `learned_forward_tile` takes them."""
    channels, beside = _channels(numbers, inner)
    if channels is not None and channels >= WIDTH.value and beside is None:
        launch = Launch(over, THREADS)
        launch.grid = (_heights(over.numel() // channels) * _widths(channels),)
        return launch
    return Launch(over, threads_of(over.dtype))


def _heights(rows: int) -> int:
    return -(-rows // int(HEIGHT.value * TRIPS.value))


def _widths(channels: int) -> int:
    return -(-channels // int(WIDTH.value))


def _forward_triton(x: Tensor, numbers: Tensor, inner: int, key: str) -> Tensor:
    if x.dtype not in KERNEL_DTYPES:
        return _forward_reference(x, numbers, inner, key)
    y = torch.empty_like(x)
    channels = _channels(numbers, inner)
    _launch(x, numbers, inner)(find(key).forward, x, y, numbers, *channels)
    return y


def _backward_triton(
    dy: Tensor, kept: Tensor, numbers: Tensor, inner: int, wants_x: bool, wants_numbers: bool, key: str
) -> tuple[Tensor, Tensor]:
    if dy.dtype not in KERNEL_DTYPES:
        return _backward_reference(dy, kept, numbers, inner, wants_x, wants_numbers, key)
    formula = find(key)
    dx, found = _backward_fake(dy, kept, numbers, inner, wants_x, wants_numbers, key)
    if not dy.numel():
        return dx, found.zero_()
    channels, beside = _channels(numbers, inner)
    rows = dy.numel() // (numbers.shape[1] * (beside or 1))
    if channels is not None and beside is None:
        parts = _heights(rows)
        grid = (parts * _widths(channels),)
    else:
        parts = -(-rows * (beside or 1) // (BLOCK.value * TRIPS.value))
        grid = (parts * numbers.shape[1],)
    sums = numbers.new_empty(parts, *numbers.shape) if wants_numbers else None
    arguments = (dy, kept, numbers, dx if wants_x else None, sums, channels, beside, rows)
    with torch.cuda.device_of(dy):
        formula.backward[grid](*arguments, **options(THREADS, dy.device))
    return dx, found if sums is None else sums.sum(0)


# ----------------------------------------------------------------------------------------------------- for PyTorch


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, numbers, ctx.inner, ctx.key = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output if find(ctx.key).keeps_output else x, numbers)


def _differentiate(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
    if dy is None:
        return None, None, None, None
    wants_x, wants_numbers = ctx.needs_input_grad[:2]
    kept, numbers = ctx.saved_tensors
    dx, found = ops.learned_backward(dy.contiguous(), kept, numbers, ctx.inner, wants_x, wants_numbers, ctx.key)
    return dx if wants_x else None, found if wants_numbers else None, None, None


def _forward_fake(x: Tensor, numbers: Tensor, inner: int, key: str) -> Tensor:
    return torch.empty_like(x)


def _backward_fake(
    dy: Tensor, kept: Tensor, numbers: Tensor, inner: int, wants_x: bool, wants_numbers: bool, key: str
) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(dy) if wants_x else dy.new_empty(0)
    return dx, torch.empty_like(numbers) if wants_numbers else numbers.new_empty(0)


def _by_element(op: str) -> Callable[..., Any]:
    """Return an op's rule for batches: it is called for each element of the batch."""

    def rule(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        found = [
            getattr(ops, op)(
                *(
                    one if dim is None else one.select(dim, i).contiguous()
                    for one, dim in zip(arguments, in_dims, strict=True)
                )
            )
            for i in range(info.batch_size)
        ]
        if isinstance(found[0], Tensor):
            return torch.stack(found), 0
        return tuple(torch.stack(one) for one in zip(*found, strict=True)), (0,) * len(found[0])

    return rule


define(
    "learned",
    {
        "learned_forward": Op(
            "(Tensor x, Tensor numbers, SymInt inner, str key) -> Tensor",
            _forward_reference,
            _forward_triton,
            _forward_fake,
            _by_element("learned_forward"),
            _differentiate,
            _save,
        ),
        "learned_backward": Op(
            "(Tensor dy, Tensor kept, Tensor numbers, SymInt inner, bool wants_x, bool wants_numbers, str key) "
            "-> (Tensor, Tensor)",
            _backward_reference,
            _backward_triton,
            _backward_fake,
            _by_element("learned_backward"),
            refuse_second_derivative,
            save_key,
        ),
    },
)
