"""Integrals, best quotients, weights, the errors of a step function, the dtypes in which outputs are saved."""

from .dtypes import DTYPES as DTYPES
from .dtypes import halves as halves
from .dtypes import in_single as in_single
from .dtypes import rounded as rounded
from .dtypes import stored as stored
from .errors import step_errors as step_errors
from .histogram import DIGITS as DIGITS
from .histogram import of_counts as of_counts
from .minimax import Coefficients as Coefficients
from .minimax import least_squares as least_squares
from .minimax import minimax as minimax
from .minimax import singles_of as singles_of
from .moments import Function as Function
from .moments import Moments as Moments
from .moments import about as about
from .moments import nodes as nodes
from .moments import quadrature as quadrature
from .moments import running as running
from .partition import dp_borders as dp_borders
from .partition import newton as newton
from .weight import LARGEST as LARGEST
from .weight import Weight as Weight
