"""The record of a gate h = a(g)·b(u)."""

from __future__ import annotations

from dataclasses import dataclass

from fitact.fitter.analysis.gate import Gate

from .fit import Fit


@dataclass(frozen=True, kw_only=True)
class GateFit(Fit):
    """A gate that keeps g and u for backward and nothing else: a, a′, b and b′ are computed again, exactly.

    Attributes:
        activation: the gate.
        error: empty.

    """

    METHODS = ("gate_rebuild",)
    ERRORS = ()

    activation: Gate
