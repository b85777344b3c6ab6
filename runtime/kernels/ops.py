"""The two ops that run every kernel, and their autograd.

`forward` returns y and the codes, `backward` the gradients of x and of `other`, which is a gate's u or the learned
parameters. `saved` is x or y; what a kind does not have is None, and a gradient that is not wanted is empty.
`dtype` is that of y in forward, and of the gradient of x in backward, as its place in DTYPES: before 2.12,
programs compiled ahead of time misread PyTorch's own dtypes. In a standalone folder, which has a copy of this
file, the ops have the folder's own namespace.

To PyTorch they are opaque: a compiler cannot look inside, save x and compute the codes again. The key, a hash of
the fit and of the generated text, finds the kernel; so a compiled graph holds no Python object. On CUDA (and ROCm)
the generated Triton kernels run; all other devices, and float64, run `compute` and `gradients` of the kernel. With
TRITON_INTERPRET=1 the CPU runs the Triton kernels too, interpreted.

The ops see tensors in memory order: before calling them, `differentiable` permutes the input, and autograd undoes
that, so codes and gradients are always in the same order. x is contiguous then, but a gate's g and u may be views.
`dims` is the permutation back (None for none, as AOTInductor takes no empty list): PyTorch's own activations round
differently in different layouts, and are evaluated in the caller's.

With learned parameters, element i has channel (i // inner) mod channels. A norm has rows of `inner` elements, adds
`eps` to their variance, and its codes are 1/σ of each row.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import starmap
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from . import reference
from .inputs import DTYPES, KERNEL_DTYPES
from .recompute import offer_recompute
from .registry import Backward, Forward, Kernel, find

NUMBER = {dtype: number for number, dtype in enumerate(DTYPES)}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = find_spec("triton") is not None
KERNEL_DEVICES = () if not HAS_TRITON else ("cuda", "cpu") if INTERPRETED else ("cuda",)
FORWARD = "(Tensor x, Tensor? other, SymInt inner, float eps, int[]? dims, int dtype, str key) -> (Tensor, Tensor)"
BACKWARD = (
    "(Tensor dy, Tensor? saved, Tensor? other, Tensor? codes, SymInt inner, int dtype, bool wants_x, "
    "bool wants_other, str key) -> (Tensor, Tensor)"
)


# Of the ops: what the package around this runtime says in `__ops__`, else its name.
_home = sys.modules[__name__.removesuffix(".runtime.kernels.ops")]
NAMESPACE: str = getattr(_home, "__ops__", _home.__name__.replace(".", "_"))
ops: Any = getattr(torch.ops, NAMESPACE)
Function = TypeVar("Function", bound=Callable[..., Any])
Two = tuple[Tensor, Tensor]
Batches = tuple[tuple[Tensor, ...], tuple[int, ...]]


def differentiable(
    x: Tensor, other: Tensor | None, dtype: torch.dtype, key: str, *, inner: int = 1, eps: float = 0.0,
    dims: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Return y in `dtype`, saving for backward what the kernel needs; the tensors are in memory order.

    Where that is x, how to recompute y is stated on its storage, for a context of `fitact.saving`.
    """
    rest = inner, eps, dims, NUMBER[dtype], key
    if torch.compiler.is_compiling():
        # In a traced Function, an in-place change of y would go unnoticed, and an export would lack a gradient.
        compiled: Tensor = ops.forward(x, other, *rest)[0]
        return compiled
    y: Tensor = KernelFunction.apply(x, other, *rest)[0]
    kernel = find(key)
    if other is None or not kernel.saves_input:
        return y
    return offer_recompute(y, lambda x, other: ops.forward(x, other, *rest)[0], x, other)


# ------------------------------------------------------------------------------------------------------ the passes


def _forward_fake(*arguments: Any) -> Two:
    given = Forward(*arguments)
    y = given.x.new_empty(given.x.shape, dtype=DTYPES[given.dtype])
    return y, find(given.key).codes(given)


def _forward_given(arguments: Any) -> Forward:
    """Return the arguments, x contiguous: an exported program may get other strides than its example had."""
    given = Forward(*arguments)
    return given if find(given.key).reads_views else Forward(given.x.contiguous(), *given[1:])


def _forward_reference(*arguments: Any) -> Two:
    given = _forward_given(arguments)
    with torch.no_grad():
        y, codes = find(given.key).compute(given)
    return y, codes


def _forward_triton(*arguments: Any) -> Two:
    given = _forward_given(arguments)
    if given.x.dtype not in KERNEL_DTYPES or not given.x.numel():
        return _forward_reference(*arguments)
    y, codes = _forward_fake(*arguments)
    with torch.cuda.device_of(y):
        find(given.key).launch(given, y, codes)
    return y, codes


def _backward_fake(*arguments: Any) -> Two:
    given = Backward(*arguments)
    dy, other = given.dy, given.other
    dx = dy.new_empty(dy.shape, dtype=DTYPES[given.dtype]) if given.wants_x else dy.new_empty(0)
    return dx, dy.new_empty(0) if other is None or not given.wants_other else other.new_empty(other.shape)


def _backward_given(arguments: Any) -> Backward:
    """Return the arguments, likewise."""
    given = Backward(*arguments)
    views = given.saved is None or find(given.key).reads_views
    return Backward(given.dy.contiguous(), given.saved if views else given.saved.contiguous(), *given[2:])


def _backward_reference(*arguments: Any) -> Two:
    given = _backward_given(arguments)
    if not given.dy.numel():
        dx, d_other = _backward_fake(*arguments)
        return dx, d_other.zero_()
    with torch.no_grad():
        gradients = find(given.key).gradients(given)
    dx, d_other = (given.dy.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return dx, d_other


def _backward_triton(*arguments: Any) -> Two:
    given = _backward_given(arguments)
    if given.dy.dtype not in KERNEL_DTYPES or not given.dy.numel():
        return _backward_reference(*arguments)
    dx, d_other = _backward_fake(*arguments)
    wanted = dx if given.wants_x else None, d_other if given.wants_other else None
    with torch.cuda.device_of(dx):
        find(given.key).launch_backward(given, *wanted)
    return dx, d_other


# -------------------------------------------------------------------------------------------------------- autograd


def with_signature(forward: Function) -> Function:
    """Cache the signature of a Function's forward, which PyTorch would otherwise compute at every call."""
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return forward


def _keep_key(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.key = inputs[-1]


def _refuse(ctx: Any, *_: Any) -> NoReturn:
    raise RuntimeError(
        f"{find(ctx.key).name}: a second derivative was requested, but only what the first needs is saved; "
        "use PyTorch's own operators where gradients are differentiated again"
    )


class Gradients(torch.autograd.Function):
    """Gradients by the op, which cannot be differentiated again: otherwise second derivatives would be wrong."""

    generate_vmap_rule = True
    setup_context = staticmethod(_keep_key)
    backward = staticmethod(_refuse)

    @staticmethod
    @with_signature
    def forward(autograd_anchor: Tensor, *arguments: Any) -> Any:
        """Return the gradients; the anchor, which is empty, ties them to the input."""
        return ops.backward(*arguments)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save what the kernel saves; `output` is y, the codes, and perhaps what ties gradients to the inputs."""
    (x, other, ctx.inner, *_, ctx.key), (y, codes, *autograd_anchor) = inputs, output
    kernel, ctx.dtype = find(ctx.key), NUMBER[x.dtype]
    saved = y if kernel.saves_output else x if kernel.saves_input else None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(saved, other, codes if kernel.saves_codes else None, *autograd_anchor)


def _differentiate(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 7
    saved, other, codes, *autograd_anchor = ctx.saved_tensors
    wants = ctx.needs_input_grad[:2]
    arguments = dy.contiguous(), saved, other, codes, ctx.inner, ctx.dtype, *wants, ctx.key
    gradients = Gradients.apply(*autograd_anchor, *arguments) if autograd_anchor else ops.backward(*arguments)
    return *(gradient if wanted else None for gradient, wanted in zip(gradients, wants, strict=True)), *(None,) * 5


class KernelFunction(torch.autograd.Function):
    """Saves what the kernel saves, and an empty tensor that ties the gradients to the inputs."""

    generate_vmap_rule = True
    backward = staticmethod(_differentiate)

    @staticmethod
    @with_signature
    def forward(x: Tensor, *others: Any) -> tuple[Tensor, ...]:
        """Return y, the codes, and the empty tensor."""
        return *ops.forward(x, *others), x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save."""
        ctx.mark_non_differentiable(output[1])
        _save(ctx, inputs, output)


# ------------------------------------------------------------------------------------------------------------ vmap


def _flat(kernel: Kernel, size: int, in_dims: Any, *tensors: Tensor | None) -> Iterator[Any]:
    """Yield batches as (size, elements), contiguous; with codes, each element has tiles of its own, padded.

    `in_dims` are the dimensions of the batches, None for one element that all of the batch share. None stays None.
    """
    for x, dim in zip(tensors, in_dims, strict=False):
        if x is None:
            yield None
            continue
        batch = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        flat = batch.reshape(size, batch.shape[1:].numel())
        yield torch.nn.functional.pad(flat, (0, -flat.shape[1] % reference.TILE if kernel.bits else 0))


def _by_element(op: Any, size: int, in_dims: Any, arguments: Any) -> Batches:
    """Call an op for each element of a batch."""
    pairs = [*zip(arguments, in_dims, strict=True)]
    elements = ([x if dim is None else x.select(dim, i).contiguous() for x, dim in pairs] for i in range(size))
    return tuple(map(torch.stack, zip(*starmap(op, elements), strict=True))), (0, 0)


def _forward_vmap(info: Any, in_dims: Any, *arguments: Any) -> Batches:
    (x, other, inner, eps, _, dtype, key), size = arguments, info.batch_size
    kernel = find(key)
    if kernel.by_element:
        return _by_element(ops.forward, size, in_dims, arguments)
    shape = torch.Size((size, *x.shape)) if in_dims[0] is None else x.movedim(in_dims[0], 0).shape
    x, other = _flat(kernel, size, in_dims, x, other)
    y, codes = ops.forward(x, other, inner, eps, None, dtype, key)
    return (y[:, : shape[1:].numel()].reshape(shape), codes.view(size, codes.numel() // max(size, 1))), (0, 0)


def _backward_vmap(info: Any, in_dims: Any, *arguments: Any) -> Batches:
    given, size = Backward(*arguments), info.batch_size
    kernel, dy, codes = find(given.key), given.dy, given.codes
    if kernel.by_element:
        return _by_element(ops.backward, size, in_dims, arguments)
    shape = torch.Size((size, *dy.shape)) if in_dims[0] is None else dy.movedim(in_dims[0], 0).shape
    dy, saved, other = _flat(kernel, size, in_dims, dy, given.saved, given.other)
    if codes is not None:
        codes = (codes.expand(size, -1) if in_dims[3] is None else codes.movedim(in_dims[3], 0)).reshape(-1)
    gradients = ops.backward(dy, saved, other, codes, *arguments[4:])
    wants = given.wants_x, given.wants_other
    return tuple(
        gradient[:, : shape[1:].numel()].reshape(shape) if wanted else gradient.new_empty(size, 0)
        for gradient, wanted in zip(gradients, wants, strict=True)
    ), (0, 0)


# ------------------------------------------------------------------------------------------------------ definition


def _define(name: str, schema: str, passes: Sequence[Callable[..., Any]], vmap: Any, *autograd: Any) -> None:
    """Define an op in the namespace; it stays if a copy of this runtime with the same text has defined it.

    No schema may end with an optional argument. Inductor's cache on disk leaves a trailing None out of its
    keys, so a later schema without this argument would find graphs that still pass it. `passes` compute the op by
    PyTorch's operators, by Triton's kernels, and without numbers; `autograd` is its backward, and what saves.
    """
    holder, whole = f"library_of_{name}", f"{NAMESPACE}::{name}"
    if hasattr(ops, holder):
        return
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    by_reference, by_triton, fake = passes
    library.impl(name, by_reference, "CompositeExplicitAutograd")
    for device in KERNEL_DEVICES:
        library.impl(name, by_triton, device.upper())
    torch.library.register_fake(whole, fake, lib=library)
    torch.library.register_vmap(whole, vmap, lib=library)
    torch.library.register_autograd(whole, autograd[0], setup_context=autograd[1], lib=library)
    setattr(ops, holder, library)  # the op lives as long as this object


_forward = _forward_reference, _forward_triton, _forward_fake
_backward = _backward_reference, _backward_triton, _backward_fake
_define("forward", FORWARD, _forward, _forward_vmap, _differentiate, _save)
_define("backward", BACKWARD, _backward, _backward_vmap, _refuse, _keep_key)
