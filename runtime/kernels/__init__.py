"""The ops of activations, gates, formulas with learned numbers and norms, and their kernels.

They import nothing else of fitact: standalone folders have copies of all files here. Generated modules use the
names below: the kinds, their registration and ops; for kernels, Triton, the tile loops and functions that Triton
lacks; for PyTorch, the functions that it lacks.
"""

from . import reference_math as reference_math
from .activations import Exact as Exact
from .activations import Inverted as Inverted
from .activations import Step as Step
from .activations import apply as apply
from .gate_tiles import gate_backward_tile as gate_backward_tile
from .gate_tiles import gate_forward_tile as gate_forward_tile
from .gates import Gate as Gate
from .gates import apply_gate as apply_gate
from .learned import Learned as Learned
from .learned import LearnedModule as LearnedModule
from .learned import Number as Number
from .learned import apply_learned as apply_learned
from .learned_tiles import learned_backward_block as learned_backward_block
from .learned_tiles import learned_forward_tile as learned_forward_tile
from .math import asinh as asinh
from .math import atan as atan
from .math import cosh as cosh
from .math import erfc as erfc
from .math import exp_full as exp_full
from .math import exp_half as exp_half
from .math import expm1 as expm1
from .math import expm1_half as expm1_half
from .math import hypot1 as hypot1
from .math import isru as isru
from .math import log1p as log1p
from .math import logcosh as logcosh
from .math import ndtr as ndtr
from .math import ndtr_half as ndtr_half
from .math import power as power
from .math import radical as radical
from .math import relu as relu
from .math import sech2 as sech2
from .math import sech2_half as sech2_half
from .math import sigmoid as sigmoid
from .math import sigmoid_half as sigmoid_half
from .math import sign as sign
from .math import sinh as sinh
from .math import softplus as softplus
from .math import softplus_half as softplus_half
from .math import softsign as softsign
from .math import squareplus as squareplus
from .math import tan as tan
from .math import tanh as tanh
from .math import tanh_half as tanh_half
from .math import tanh_softplus as tanh_softplus
from .math import tanh_softplus_half as tanh_softplus_half
from .math import tsech2 as tsech2
from .registry import register as register
from .tiles import backward_tile as backward_tile
from .tiles import encode as encode
from .tiles import forward_tile as forward_tile
from .tiles import pick as pick
from .tiles import quotient as quotient
from .triton_compat import constexpr as constexpr
from .triton_compat import jit as jit
from .triton_compat import tl as tl
