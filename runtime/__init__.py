"""What generated activations and models trained with them need at run time.

Generated modules use only the names below: the kinds of activation, their registration and op; for kernels,
Triton, the tile loops and functions that Triton lacks; for PyTorch, the functions that it lacks.
"""

from typing import NoReturn

from .kernels import GENERATE_AGAIN
from .kernels.gates import gate_backward_tile, gate_forward_tile
from .kernels.learned import learned_backward_block, learned_forward_tile
from .kernels.math import (
    asinh,
    atan,
    cosh,
    erfc,
    exp_full,
    exp_half,
    expm1,
    expm1_half,
    hypot1,
    isru,
    log1p,
    logcosh,
    ndtr,
    ndtr_half,
    power,
    radical,
    relu,
    sech2,
    sech2_half,
    sigmoid,
    sigmoid_half,
    sign,
    sinh,
    softplus,
    softplus_half,
    softsign,
    squareplus,
    tan,
    tanh,
    tanh_half,
    tanh_softplus,
    tanh_softplus_half,
    tsech2,
)
from .kernels.tiles import backward_tile, encode, forward_tile, pick, quotient
from .kernels.triton_compat import constexpr, jit, tl
from .learned.function import LearnedModule, apply_learned
from .learned.ops import Learned, Number, register_learned
from .ops import reference_math
from .ops.autograd import apply
from .ops.factors import Factor
from .ops.gate_ops import Gate, register_gate
from .ops.gates import apply_gate
from .ops.registry import Exact, Inverted, Step, register

__all__ = [
    "Exact",
    "Factor",
    "Gate",
    "Inverted",
    "Learned",
    "LearnedModule",
    "Number",
    "Step",
    "apply",
    "apply_gate",
    "apply_learned",
    "asinh",
    "atan",
    "backward_tile",
    "constexpr",
    "cosh",
    "encode",
    "erfc",
    "exp_full",
    "exp_half",
    "expm1",
    "expm1_half",
    "forward_tile",
    "gate_backward_tile",
    "gate_forward_tile",
    "hypot1",
    "isru",
    "jit",
    "learned_backward_block",
    "learned_forward_tile",
    "log1p",
    "logcosh",
    "ndtr",
    "ndtr_half",
    "pick",
    "power",
    "quotient",
    "radical",
    "reference_math",
    "register",
    "register_gate",
    "register_learned",
    "relu",
    "sech2",
    "sech2_half",
    "sigmoid",
    "sigmoid_half",
    "sign",
    "sinh",
    "softplus",
    "softplus_half",
    "softsign",
    "squareplus",
    "tan",
    "tanh",
    "tanh_half",
    "tanh_softplus",
    "tanh_softplus_half",
    "tl",
    "tsech2",
]


def __getattr__(name: str) -> NoReturn:
    if name in ("composed", "Coded", "CodedFactor"):  # older generated files import them
        raise ImportError(GENERATE_AGAIN)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
