"""The kinds of fit."""

from __future__ import annotations

from .fit import ExactFit, InvertedFit, StepFit
from .gate import GateFit
from .learned import LearnedFit

KINDS = (StepFit, ExactFit, InvertedFit, GateFit, LearnedFit)
AnyPlainFit = StepFit | ExactFit | InvertedFit  # of functions of x alone
AnyFit = AnyPlainFit | GateFit | LearnedFit
