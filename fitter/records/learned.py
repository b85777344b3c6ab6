"""The record of a formula with learned numbers."""

from __future__ import annotations

from dataclasses import dataclass

from fitact.fitter.analysis.learned import Learned

from .fit import Fit


@dataclass(frozen=True, kw_only=True)
class LearnedFit(Fit):
    """A formula that keeps x for backward, and computes all else from it again, exactly.

    Attributes:
        activation: the formula.
        error: empty.

    """

    METHODS = ("learned_rebuild",)
    ERRORS = ()

    activation: Learned
