"""The kinds of fit."""

from __future__ import annotations

from .coded import CodedFit
from .fit import ExactFit, InvertedFit, StepFit
from .gate import CodedGateFit, GateFit
from .stochastic import StochasticFit

KINDS = (StepFit, ExactFit, InvertedFit, CodedFit, StochasticFit, GateFit, CodedGateFit)
AnyGateFit = GateFit | CodedGateFit
AnyFit = StepFit | ExactFit | InvertedFit | CodedFit | StochasticFit | AnyGateFit
