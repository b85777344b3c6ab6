"""The one list of cheap functions: pure, without random numbers, and without a product of matrices.

What they save is not listed anywhere: it is observed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]
CHEAP = """
    abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh celu clamp clamp_max clamp_min clip clone cos
    cosh cumsum deg2rad div divide erf erfc exp exp2 expm1 flatten gather index_select lerp log log10 log1p log2
    logaddexp logit logsumexp masked_fill max maximum mean min minimum mul multiply nan_to_num neg negative
    polar pow prod reciprocal relu repeat_interleave reshape roll rsqrt selu sigmoid sin sinc sinh softmax sqrt
    square std sub subtract sum take_along_dim tan tanh tile tril triu true_divide var where xlogy amax amin
    gelu silu mish hardswish hardsigmoid leaky_relu elu softplus hardtanh relu6 glu logsigmoid softsign
    tanhshrink softshrink hardshrink threshold prelu softmin log_softmax normalize pad layer_norm rms_norm
    group_norm local_response_norm pixel_shuffle pixel_unshuffle avg_pool1d avg_pool2d avg_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d max_pool1d max_pool2d max_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d cat concat concatenate stack hstack vstack rsub
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __div__ __pow__ __rpow__ __neg__ __getitem__
    __abs__ contiguous repeat
"""
CASTS = "to type type_as float double half bfloat16"  # of a tensor
# Methods that change a tensor in place, and the pure ones with the same values.
IN_PLACE = {
    "relu_ sigmoid_ tanh_ add_ sub_ mul_ div_ clamp_ pow_ exp_ sqrt_ rsqrt_ square_ neg_ abs_ masked_fill_": "",
    "__iadd__": "add",
    "__isub__": "sub",
    "__imul__": "mul",
    "__itruediv__": "div",
    "__ipow__": "pow",
}
# Others that do, by Python's operators.
OPERATORS = "__setitem__ __ior__ __iand__ __ixor__ __ilshift__ __irshift__ __imod__ __ifloordiv__"
# What reads a tensor at indices: no index is as large as the largest size of the tensors it reads.
INDEXING = """gather index_select __getitem__ index_add index_add_ scatter scatter_ scatter_add scatter_add_
    index_copy index_copy_ index_fill embedding topk sort max min kthvalue median mode __setitem__ index_put
    index_put_"""
# Products of matrices, whose arguments autocast casts and which save these copies alone.
_PRODUCTS = "linear bilinear addmm addbmm baddbmm bmm mm matmul chain_matmul __matmul__ __rmatmul__"
_CONVOLUTIONS = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"
# What adds or copies rows to others, or gathers: of these rows, or what is gathered, backward reads but the shape.
_ADDING = "index_add index_add_ index_copy index_copy_ gather take_along_dim"


def named(names: str) -> frozenset[Function]:
    """Return PyTorch's functions and methods of these names, apart by spaces.

    A mode sees some operators, such as `1 - x`, in what PyTorch has wrapped around them, and others without.
    """
    members = (getattr(home, name, None) for home in (F, torch, Tensor, torch.linalg) for name in names.split())
    functions = [member for member in members if callable(member)]
    return frozenset({*functions, *map(inspect.unwrap, functions)})


CHEAP_FUNCTIONS = named(CHEAP)
CAST_FUNCTIONS = named(CASTS)
PURE: Mapping[Function, Function] = {
    getattr(home, name): getattr(Tensor, pure or name[:-1])
    for names, pure in IN_PLACE.items()
    for name in names.split()
    for home in (Tensor, torch)
    if hasattr(home, name)
}
INDEXING_FUNCTIONS = named(INDEXING)
EXTREMA = named("max min")  # which read integers too, as the other of two tensors
# What saves where in the last dimensions of its input a largest element is, and how many dimensions.
POOLING: Mapping[Function, int] = {
    function: count
    for count in (1, 2, 3)
    for kind in ("max", "adaptive_max", "fractional_max")
    for function in named(f"{kind}_pool{count}d {kind}_pool{count}d_with_indices")
}
CONVOLUTIONS = named(_CONVOLUTIONS)
PRODUCTS = named(_PRODUCTS) | CONVOLUTIONS
COPYING = PRODUCTS | named("einsum")
ADDING = named(_ADDING)
# So does that of pooling, and of a convolution whose weight is frozen, and the order of dimensions in memory.
_AVERAGES = "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"
SHAPED = ADDING | POOLING.keys() | named(_AVERAGES) | CONVOLUTIONS
SUMS = named("add __add__ __radd__")
DIFFERENCES = named("sub subtract rsub __sub__ __rsub__")
# Kinds of ReLU whose backward asks only whether the output is above 0, or the input, or this between two numbers.
RELUS = named("relu relu_")
LEAKY = named("leaky_relu")
CLIPPED = F.relu6, F.hardtanh
KINKED = RELUS | LEAKY | set(CLIPPED)
