"""`saving`: a context in which each tensor that autograd saves is stored in the least bytes."""

from .context import baseline, saving
from .offload import Amount
from .pair import checkpoint, hooks
from .quantising import POLICIES

ERRORS = tuple(POLICIES)  # in their order: each may be further off than those before it

__all__ = ["ERRORS", "Amount", "baseline", "checkpoint", "hooks", "saving"]
