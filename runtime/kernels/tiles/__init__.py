"""The kernels' tile loops in Triton, and the functions that Triton lacks.

Importing this imports Triton, which takes a fifth of a second; so nothing does before a kernel runs.
"""

from .activations import backward_tile as backward_tile
from .activations import encode as encode
from .activations import forward_tile as forward_tile
from .activations import pick as pick
from .activations import quotient as quotient
from .blocks import decode_tile as decode_tile
from .blocks import encode_tile as encode_tile
from .gates import gate_backward_tile as gate_backward_tile
from .gates import gate_forward_tile as gate_forward_tile
from .learned import BLOCK as BLOCK
from .learned import HEIGHT as HEIGHT
from .learned import TRIPS as TRIPS
from .learned import WIDTH as WIDTH
from .learned import learned_backward_block as learned_backward_block
from .learned import learned_forward_tile as learned_forward_tile
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
from .norms import ms_norm_backward as ms_norm_backward
from .norms import ms_norm_forward as ms_norm_forward
from .triton import constexpr as constexpr
from .triton import jit as jit
from .triton import tl as tl
