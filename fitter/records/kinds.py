"""The kinds of fit."""

from __future__ import annotations

from .coded import CodedFit
from .fit import ExactFit, InvertedFit, StepFit

KINDS = (StepFit, ExactFit, InvertedFit, CodedFit)
AnyFit = StepFit | ExactFit | InvertedFit | CodedFit
