"""Memory-sharing norms: LayerNorm and RMSNorm that save their output and a number per row (Approx-BP, section 5).

    LayerNorm: σ = √(mean((x − mean(x))²) + ε), z = (x − mean(x))/σ, dx = (dz − mean(dz) − z·mean(z·dz))/σ
    RMSNorm:   σ = √(mean(x²) + ε),             z = x/σ,             dx = (dz − z·mean(z·dz))/σ

They have no weight and no bias: these go into the next linear layers (`fitact.runtime.norms.merge`). Such a layer
saves its input, which is z. So norm and layer together save one tensor and one number per row, while PyTorch's
norm also saves x. Nothing is gained where the next operation does not save the same storage: a frozen layer,
dropout, a residual sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fitact.runtime import kernels


def ms_layer_norm(input: Tensor, normalized_shape: int | Sequence[int], eps: float = 1e-5) -> Tensor:
    """Return `torch.nn.functional.layer_norm` without weight and bias, saving its output for backward.

    Args:
        input: float16, bfloat16, float32 or float64, of any strides, whose last dimensions are `normalized_shape`.
            A partial DTensor, or one that is split along a normalised dimension, is gathered first.
        normalized_shape: the dimensions that mean and variance are taken over, at least one.
        eps: added to the variance.

    Returns:
        A contiguous tensor of the shape of input. Its dtype is that of input; under autocast it is the autocast
        dtype, so that the next layer saves the same storage and no copy of it.

    Raises:
        TypeError: input is not a tensor of one of these dtypes.
        ValueError: the shape of input does not end in `normalized_shape`.
        RuntimeError: a second derivative or a forward-mode derivative was requested.

    """
    return _norm("ms_layer_norm", input, normalized_shape, eps, centred=True)


def ms_rms_norm(input: Tensor, normalized_shape: int | Sequence[int], eps: float | None = None) -> Tensor:
    """Return `torch.nn.functional.rms_norm` without weight, saving its output for backward.

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

    centred: ClassVar[bool]

    def __init__(self, normalized_shape: int | Sequence[int], eps: float | None) -> None:
        super().__init__()
        self.normalized_shape = _shape(normalized_shape)
        self.eps = eps
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)

    def extra_repr(self) -> str:
        """Return shape and epsilon, as PyTorch's norms print them."""
        return f"{self.normalized_shape}, eps={self.eps}"

    def forward(self, input: Tensor) -> Tensor:
        """Return the norm of a tensor of any shape that ends in `normalized_shape`."""
        return _norm(type(self).__name__, input, self.normalized_shape, self.eps, centred=self.centred)


class MSLayerNorm(_Norm):
    """`nn.LayerNorm` without weight and bias that saves its output and 1/σ of each row; see `ms_layer_norm`.

    Args:
        normalized_shape: the last dimensions of its input.
        eps: added to the variance.

    """

    centred = True

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-5) -> None:
        super().__init__(normalized_shape, eps)


class MSRMSNorm(_Norm):
    """`nn.RMSNorm` without weight that saves its output and 1/σ of each row; see `ms_rms_norm`.

    Args:
        normalized_shape: the last dimensions of its input.
        eps: added to the mean square; None for the machine epsilon of float32, or of float64 for float64.

    """

    centred = False

    def __init__(self, normalized_shape: int | Sequence[int], eps: float | None = None) -> None:
        super().__init__(normalized_shape, eps)


def _shape(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape:
        raise ValueError("normalized_shape: expected at least one dimension, got ()")
    return shape


def _norm(
    name: str, x: Tensor, normalized_shape: int | Sequence[int], eps: float | None, *, centred: bool
) -> Tensor:
    shape = _shape(normalized_shape)
    kernels.check_dtype(name, x)
    if x.shape[-len(shape) :] != shape:
        raise ValueError(f"{name}: expected a tensor whose shape ends in {shape}, got {tuple(x.shape)}")
    key, dim = kernels.LAYER if centred else kernels.RMS, x.dim() - len(shape)
    eps = torch.finfo(kernels.arithmetic_dtype(x)).eps if eps is None else eps

    def of_rows(x: Tensor, _: Any = None) -> Tensor:
        inner = x.shape[dim:].numel() or 1
        return kernels.differentiable(x.contiguous(), None, kernels.autocast_dtype(x), key, inner=inner, eps=eps)

    def whole(placement: Any) -> bool:
        """Whether each process has whole rows of a DTensor."""
        return not placement.is_partial() and (placement.is_replicate() or placement.dim < dim)

    return of_rows(x) if kernels.mesh_of(x) is None else kernels.sharded(x, of_rows, whole, contiguous=True)
