"""From a fit to the source text of a PyTorch activation."""

from . import bundle as bundle
from .generate import MODULES as MODULES
from .generate import drift as drift
from .generate import generate as generate
from .generate import plan as plan
