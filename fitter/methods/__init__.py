"""The methods, one per file; `table` has all of them by name."""

from . import fewbit as fewbit
from . import inverted as inverted
from . import output as output
from . import relumix as relumix
from .inverted_published import published as published
from .table import again as again
from .table import make as make
