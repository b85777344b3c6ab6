"""The kinds of fit."""

from __future__ import annotations

from .coded import CodedFit
from .fit import ExactFit, InvertedFit, StepFit
from .gate import CodedGateFit, GateFit
from .learned import CodedLearnedFit, ExactLearnedFit, LearnedFit

KINDS = (
    *(StepFit, ExactFit, InvertedFit, CodedFit),
    *(GateFit, CodedGateFit, LearnedFit, ExactLearnedFit, CodedLearnedFit),
)
AnyPlainFit = StepFit | ExactFit | InvertedFit | CodedFit  # of functions of x alone
AnyGateFit = GateFit | CodedGateFit
AnyLearnedFit = LearnedFit | ExactLearnedFit | CodedLearnedFit
AnyFit = AnyPlainFit | AnyGateFit | AnyLearnedFit
