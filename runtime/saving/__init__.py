"""`saving`: a context in which each tensor that autograd saves is stored in the least bytes."""

from . import blocks as blocks
from . import storage as storage
from .blocks import BITS as BITS
from .blocks import decode as decode
from .blocks import encode as encode
from .blocks import nbytes as nbytes
from .capture import observing as observing
from .context import baseline as baseline
from .context import saving as saving
from .modules import CHECKPOINT as CHECKPOINT
from .modules import CONTEXT as CONTEXT
from .modules import Context as Context
from .modules import attach as attach
from .modules import attaching as attaching
from .modules import detach as detach
from .modules import is_attached as is_attached
from .offload import DEPTH as DEPTH
from .offload import LINKS as LINKS
from .offload import META as META
from .offload import Amount as Amount
from .pair import checkpoint as checkpoint
from .pair import hooks as hooks
from .quantising import DTYPES as DTYPES
from .quantising import FEW as FEW
from .quantising import POLICIES as POLICIES
from .quantising import SHARP as SHARP
from .quantising import STATISTIC as STATISTIC
from .quantising import policy_of as policy_of
from .storage import Watched as Watched

ERRORS = tuple(POLICIES)  # in their order: each may be further off than those before it
