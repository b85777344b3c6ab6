"""The analysis of a formula: roots, shape, and where floating point fails."""

from . import float_check as float_check
from .activation import Activation as Activation
from .activation import Formula as Formula
from .float_check import FLOAT32 as FLOAT32
from .float_check import bears as bears
from .float_check import problem as problem
from .gate import Gate as Gate
from .learned import Learned as Learned
from .learned import Number as Number
from .roots import REALS as REALS
from .roots import breaks as breaks
from .roots import gap as gap
from .roots import roots as roots
from .shape import Asymptote as Asymptote
from .shape import Monotone as Monotone
from .shape import breakpoints as breakpoints
from .shape import switch_points as switch_points
