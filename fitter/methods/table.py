"""The methods by name, and how a fit is made again from its record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fitact.fitter.analysis import Activation, Gate, Learned, float_check
from fitact.fitter.records import AnyFit, GateFit, LearnedFit

from . import fewbit, inverted, inverted_published, output, relumix


def _gate(gate: Gate, name: str) -> GateFit:
    """Return the fit of a gate; warn if floating point fails on a factor."""
    float_check.warn(gate.a)
    float_check.warn(gate.b)
    return GateFit(name=name, method="gate_recompute", activation=gate, error={})


def _learned(formula: Learned, name: str) -> LearnedFit:
    """Return the fit of a formula with learned parameters; warn if floating point fails on its start."""
    if (start := formula.start()) is not None:
        float_check.warn(start)
    return LearnedFit(name=name, method="learned_recompute", activation=formula, error={})


# What makes a fit, by the method that the record names.
_FIT: dict[str, Callable[..., AnyFit]] = {
    "fewbit": fewbit.fit,
    "relumix": relumix.fit,
    "inverted": inverted.fit,
    "output": output.fit,
    "gate_recompute": _gate,
    "learned_recompute": _learned,
}


@np.errstate(all="ignore")  # what is not finite is refused where it matters
def make(method: str, activation: Activation | Gate | Learned, name: str, **options: Any) -> AnyFit:
    """Fit by the method of that name in records; `options` are arguments of its `fit`."""
    return _FIT[method](activation, name=name, **options)


def again(fit: AnyFit) -> AnyFit:
    """Make a fit again from the options in its record: the same bytes, if nothing has changed."""
    if fit.name in relumix.PUBLISHED:
        return relumix.published(fit.name)
    if fit.name in inverted_published.PUBLISHED:
        return inverted_published.published(fit.name)
    return make(fit.method, fit.activation, fit.name, **fit.made_with)
