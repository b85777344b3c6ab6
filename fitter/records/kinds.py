"""The kinds of fit."""

from __future__ import annotations

from .fit import ExactFit, InvertedFit, StepFit
from .gate import GateFit
from .learned import ExactLearnedFit, LearnedFit

KINDS = (StepFit, ExactFit, InvertedFit, GateFit, LearnedFit, ExactLearnedFit)
AnyPlainFit = StepFit | ExactFit | InvertedFit  # of functions of x alone
AnyLearnedFit = LearnedFit | ExactLearnedFit
AnyFit = AnyPlainFit | GateFit | AnyLearnedFit
