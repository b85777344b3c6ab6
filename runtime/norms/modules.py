"""Memory-sharing norms: LayerNorm and RMSNorm that keep their output and a number per row (Approx-BP, section 5).

    LayerNorm: σ = √(mean((x − mean(x))²) + ε), z = (x − mean(x))/σ, dx = (dz − mean(dz) − z·mean(z·dz))/σ
    RMSNorm:   σ = √(mean(x²) + ε),             z = x/σ,             dx = (dz − z·mean(z·dz))/σ

They have no weight and no bias: these go into the next linear layers (`fitact.runtime.norms.merge`). Such a layer
keeps its input, which is z. So norm and layer together keep one tensor and one number per row, while PyTorch's
norm also keeps x. Nothing is saved where the next operation does not keep the same storage: a frozen layer,
dropout, a residual sum.

    fitact::norm_forward(Tensor x, int dims, bool centred, float eps, ScalarType dtype) -> (Tensor z, Tensor scale)
    fitact::norm_backward(Tensor grad, Tensor z, Tensor scale, int dims, bool centred, ScalarType dtype) -> Tensor

`dims` counts the normalised dimensions, from the last one; `scale` is 1/σ. The ops see only contiguous tensors and
are opaque to compilers, which could otherwise keep x. On CUDA (and ROCm) the kernels of `kernels` run; on all
other devices and for float64, PyTorch's operators run. Statistics are in float32, for float64 in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fitact.runtime.ops.autograd import autocast_dtype
from fitact.runtime.ops.launch import options
from fitact.runtime.ops.library import (
    KERNEL_DTYPES,
    Gradients,
    Op,
    check_dtype,
    define,
    ops,
    refuse_second_derivative,
    with_signature,
)
from fitact.runtime.ops.reference import TILE, arithmetic_dtype, chunk

from . import kernels

NAME = "memory-sharing norm"  # in errors


def ms_layer_norm(input: Tensor, normalized_shape: int | Sequence[int], eps: float = 1e-5) -> Tensor:
    """Return `torch.nn.functional.layer_norm` without weight and bias, keeping its output for backward.

    Args:
        input: float16, bfloat16, float32 or float64, of any strides, whose last dimensions are `normalized_shape`.
            A partial DTensor, or one that is split along a normalised dimension, is gathered first.
        normalized_shape: the dimensions that mean and variance are taken over, at least one.
        eps: added to the variance.

    Returns:
        A contiguous tensor of the shape of input. Its dtype is that of input; under autocast it is the autocast
        dtype, so that the next layer keeps the same storage and no copy of it.

    Raises:
        TypeError: input is not a tensor of one of these dtypes.
        ValueError: the shape of input does not end in `normalized_shape`.
        RuntimeError: a second derivative or a forward-mode derivative was requested.

    """
    return _norm("ms_layer_norm", input, normalized_shape, eps, centred=True)


def ms_rms_norm(input: Tensor, normalized_shape: int | Sequence[int], eps: float | None = None) -> Tensor:
    """Return `torch.nn.functional.rms_norm` without weight, keeping its output for backward.

    Args:
        input: as for `ms_layer_norm`.
        normalized_shape: the dimensions that the mean square is taken over, at least one.
        eps: added to the mean square; None stands, as in PyTorch, for the machine epsilon of the arithmetic: that
            of float64 for float64, else that of float32.

    Returns:
        A tensor like that of `ms_layer_norm`.

    Raises:
        TypeError, ValueError, RuntimeError: as `ms_layer_norm`.

    """
    return _norm("ms_rms_norm", input, normalized_shape, eps, centred=False)


class _Norm(nn.Module):
    """A norm without parameters; `weight` and `bias` are None, as in PyTorch's norms without them."""

    def __init__(self, normalized_shape: int | Sequence[int], eps: float | None) -> None:
        super().__init__()
        self.normalized_shape = _shape(normalized_shape)
        self.eps = eps
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)

    def extra_repr(self) -> str:
        """Return shape and epsilon, as PyTorch's norms print them."""
        return f"{self.normalized_shape}, eps={self.eps}"


class MSLayerNorm(_Norm):
    """`nn.LayerNorm` without weight and bias that keeps its output and 1/σ of each row; see `ms_layer_norm`.

    Args:
        normalized_shape: the last dimensions of its input.
        eps: added to the variance.

    """

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-5) -> None:
        super().__init__(normalized_shape, eps)

    def forward(self, input: Tensor) -> Tensor:
        """Return `ms_layer_norm` of a tensor of any shape that ends in `normalized_shape`."""
        return _norm("MSLayerNorm", input, self.normalized_shape, self.eps, centred=True)


class MSRMSNorm(_Norm):
    """`nn.RMSNorm` without weight that keeps its output and 1/σ of each row; see `ms_rms_norm`.

    Args:
        normalized_shape: the last dimensions of its input.
        eps: added to the mean square; None for the machine epsilon of float32, or of float64 for float64.

    """

    def __init__(self, normalized_shape: int | Sequence[int], eps: float | None = None) -> None:
        super().__init__(normalized_shape, eps)

    def forward(self, input: Tensor) -> Tensor:
        """Return `ms_rms_norm` of a tensor of any shape that ends in `normalized_shape`."""
        return _norm("MSRMSNorm", input, self.normalized_shape, self.eps, centred=False)


def _shape(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape:
        raise ValueError("normalized_shape: expected at least one dimension, got ()")
    return shape


def _norm(
    name: str, x: Tensor, normalized_shape: int | Sequence[int], eps: float | None, *, centred: bool
) -> Tensor:
    shape = _shape(normalized_shape)
    check_dtype(name, x)
    if x.shape[-len(shape) :] != shape:
        raise ValueError(f"{name}: expected a tensor whose shape ends in {shape}, got {tuple(x.shape)}")
    if type(x).__name__ == "DTensor":
        return _distributed(x, len(shape), eps, centred)
    return _apply(x, len(shape), eps, centred)


def _apply(x: Tensor, dims: int, eps: float | None, centred: bool) -> Tensor:
    if eps is None:
        eps = torch.finfo(arithmetic_dtype(x)).eps
    dtype, x = autocast_dtype(x), x.contiguous()
    if torch.compiler.is_compiling():
        # In a traced Function, a later in-place change of z would go unnoticed; with an op it is an error.
        z: Tensor = ops.norm_forward(x, dims, centred, eps, dtype)[0]
    else:
        z = _MemorySharing.apply(x, dims, centred, eps, dtype)[0]
    return z


def _distributed(x: Any, dims: int, eps: float | None, centred: bool) -> Tensor:
    """Return the norm of a DTensor, with the same placements; each process has whole rows."""
    from torch.distributed.tensor import DTensor, Replicate

    def whole(placement: Any) -> bool:
        return not placement.is_partial() and (placement.is_replicate() or placement.dim < x.dim() - dims)

    if not all(map(whole, x.placements)):
        x = x.redistribute(placements=[p if whole(p) else Replicate() for p in x.placements])
    local = _apply(x.to_local(), dims, eps, centred)
    stride = torch.empty(x.shape, device="meta").stride()
    y: Tensor = DTensor.from_local(
        local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=stride
    )
    return y


class _MemorySharing(torch.autograd.Function):
    """Saves z, which ties the gradient to x, and the scale."""

    generate_vmap_rule = True

    @staticmethod
    @with_signature
    def forward(x: Tensor, dims: int, centred: bool, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        z, scale = ops.norm_forward(x, dims, centred, eps, dtype)
        return z, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        _keep(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None, *_: None) -> tuple[Tensor | None, None, None, None, None]:
        if dz is None:
            return None, None, None, None, None
        z, scale = ctx.saved_tensors
        dx = Gradients.apply(NAME, z, "norm_backward", dz.contiguous(), z, scale, *ctx.settings)
        return dx, None, None, None, None


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, dims, centred, _, _ = inputs
    ctx.settings = dims, centred, x.dtype
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output)


def _refuse_second_derivative(ctx: Any, *_: Any) -> NoReturn:
    refuse_second_derivative(NAME)


def _differentiate(ctx: Any, dz: Tensor | None, _: None) -> tuple[Tensor | None, None, None, None, None]:
    if dz is None:
        return None, None, None, None, None
    dx = ops.norm_backward(dz.contiguous(), *ctx.saved_tensors, *ctx.settings)
    return dx, None, None, None, None


# ----------------------------------------------------------------------------------------------------- the op pair


def _rows(x: Tensor, dims: int) -> Tensor:
    """Return a contiguous tensor of at least one element as (rows, columns)."""
    return x.view(-1, x.shape[x.dim() - dims :].numel())


def _chunks(rows: Tensor) -> Iterator[slice]:
    """Yield slices of rows: on a CPU about a chunk of `ops.reference`, else all of them."""
    size = max(1, chunk() * TILE // rows.shape[1]) if rows.device.type == "cpu" else len(rows)
    for first in range(0, len(rows), size):
        yield slice(first, first + size)


def _forward_fake(x: Tensor, dims: int, centred: bool, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = x.new_empty(x.shape[: x.dim() - dims], dtype=arithmetic_dtype(x))
    return torch.empty_like(x, dtype=dtype), scale


def _backward_fake(grad: Tensor, z: Tensor, scale: Tensor, dims: int, centred: bool, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(grad, dtype=dtype)


def _forward_reference(
    x: Tensor, dims: int, centred: bool, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    z, scale = _forward_fake(x, dims, centred, eps, dtype)
    if not x.numel():
        return z, scale.zero_()
    rows, normalised, inverses = _rows(x, dims), _rows(z, dims), scale.view(-1, 1)
    with torch.no_grad():
        for part in _chunks(rows):
            value, result, inverse = rows[part].to(scale.dtype), normalised[part], inverses[part]
            if centred:
                layer_norm = torch.native_layer_norm(value, value.shape[1:], None, None, eps)
                result.copy_(layer_norm[0])
                inverse.copy_(layer_norm[2])
            else:
                inverse.copy_(value.square().mean(1, keepdim=True).add_(eps).rsqrt_())
                torch.mul(value, inverse, out=result)
    return z, scale


def _backward_reference(
    grad: Tensor, z: Tensor, scale: Tensor, dims: int, centred: bool, dtype: torch.dtype
) -> Tensor:
    dx = _backward_fake(grad, z, scale, dims, centred, dtype)
    if not grad.numel():
        return dx
    gradients, normalised, results = (_rows(tensor, dims) for tensor in (grad, z, dx))
    inverses = scale.view(-1, 1)
    with torch.no_grad():
        for part in _chunks(gradients):
            gradient, value = (rows[part].to(scale.dtype) for rows in (gradients, normalised))
            if centred:  # PyTorch's own backward for normalised rows, with mean 0 and σ 1
                zero, one = torch.zeros_like(inverses[part]), torch.ones_like(inverses[part])
                wanted = [True, False, False]
                dx_one, *_ = torch.ops.aten.native_layer_norm_backward(
                    gradient, value, value.shape[1:], zero, one, None, None, wanted
                )
            else:
                dx_one = torch.addcmul(gradient, value, (gradient * value).mean(1, keepdim=True), value=-1)
            torch.mul(dx_one, inverses[part], out=results[part])
    return dx


def _launch(kernel: Any, over: Tensor, *arguments: Any, centred: bool) -> None:
    """Run `kernel(*arguments, centred, ...)` over (rows, columns)."""
    plan = kernels.plan(*over.shape)
    grid = (-(-over.shape[0] // plan.height),)
    with torch.cuda.device_of(over):
        chosen = options(plan.threads, over.device)
        kernel[grid](*arguments, centred, plan.height, plan.width, plan.whole, **chosen)


def _forward_triton(x: Tensor, dims: int, centred: bool, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if x.dtype not in KERNEL_DTYPES or not x.numel():
        return _forward_reference(x, dims, centred, eps, dtype)
    z, scale = _forward_fake(x, dims, centred, eps, dtype)
    rows = _rows(x, dims)
    _launch(kernels.ms_norm_forward, rows, x, z, scale, *rows.shape, eps, centred=centred)
    return z, scale


def _backward_triton(
    grad: Tensor, z: Tensor, scale: Tensor, dims: int, centred: bool, dtype: torch.dtype
) -> Tensor:
    if grad.dtype not in KERNEL_DTYPES or not grad.numel():
        return _backward_reference(grad, z, scale, dims, centred, dtype)
    dx = _backward_fake(grad, z, scale, dims, centred, dtype)
    rows = _rows(grad, dims)
    _launch(kernels.ms_norm_backward, rows, grad, z, scale, dx, *rows.shape, centred=centred)
    return dx


def _batch(x: Tensor, dim: int | None, size: int) -> Tensor:
    """Return a contiguous batch with the batch dimension first."""
    whole = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return whole.contiguous()


def _forward_vmap(
    info: Any, in_dims: Any, x: Tensor, *settings: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    z, scale = ops.norm_forward(_batch(x, in_dims[0], info.batch_size), *settings)
    return (z, scale), (0, 0)


def _backward_vmap(
    info: Any, in_dims: Any, grad: Tensor, z: Tensor, scale: Tensor, *settings: Any
) -> tuple[Tensor, int]:
    tensors = (_batch(x, dim, info.batch_size) for x, dim in zip((grad, z, scale), in_dims[:3], strict=True))
    return ops.norm_backward(*tensors, *settings), 0


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pass


define(
    "norm",
    {
        "norm_forward": Op(
            "(Tensor x, int dims, bool centred, float eps, ScalarType dtype) -> (Tensor, Tensor)",
            _forward_reference,
            _forward_triton,
            _forward_fake,
            _forward_vmap,
            _differentiate,
            _keep,
        ),
        "norm_backward": Op(
            "(Tensor grad, Tensor z, Tensor scale, int dims, bool centred, ScalarType dtype) -> Tensor",
            _backward_reference,
            _backward_triton,
            _backward_fake,
            _backward_vmap,
            _refuse_second_derivative,
            _save_nothing,
        ),
    },
)
