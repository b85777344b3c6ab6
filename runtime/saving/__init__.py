"""`saving`: a context in which each tensor that autograd saves is stored in the least bytes."""

from .context import ERRORS, baseline, saving

__all__ = ["ERRORS", "baseline", "saving"]
