"""The kinds of fit."""

from __future__ import annotations

from .coded import CodedFit
from .fit import ExactFit, InvertedFit, StepFit
from .gate import CodedGateFit, GateFit

KINDS = (StepFit, ExactFit, InvertedFit, CodedFit, GateFit, CodedGateFit)
AnyGateFit = GateFit | CodedGateFit
AnyFit = StepFit | ExactFit | InvertedFit | CodedFit | AnyGateFit
