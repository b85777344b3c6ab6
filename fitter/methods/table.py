"""The methods by name, and how a fit is made again from its record."""

from __future__ import annotations

from typing import Any

import numpy as np

from fitact.fitter.analysis import float_check
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.analysis.gate import Gate
from fitact.fitter.analysis.learned import Learned
from fitact.fitter.records.fit import AnyFit, AnyPlainFit, ExactFit, GateFit, InvertedFit, LearnedFit, StepFit

from . import exact, fewbit, inverted, inverted_published, relumix

# The methods of activations, of gates and of formulas with learned numbers, each with its options beside the
# function and a name.
METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    "activations": {
        "fewbit": ("bits", "domain", "weight", "seed"),
        "relumix": ("bits", "objective", "restarts", "seed"),
        "inverted": ("bits", "domain", "tol", "family"),
        "exact": ("derivative",),
    },
    "gates": {"rebuild": ()},
    "formulas": {"rebuild": ()},
}
BITS_REQUIRED = {"fewbit": "1 to 4", "relumix": "1 to 4"}
# What the options are by default, where the method has them.
DOMAINS = {"fewbit": fewbit.DOMAIN}


@np.errstate(all="ignore")  # what is not finite is refused where it matters
def make(method: str, activation: Activation, name: str, **options: Any) -> AnyPlainFit:
    """Fit by the method of that name; `options` are arguments of its `fit`."""
    if method == "exact":
        return exact.fit(activation, name, **options)
    if method == "inverted":
        if options.pop("family", "rational") == "parametric":
            return inverted_published.fit(activation, name)
        return inverted.fit(activation, name, **options)
    bits = options.pop("bits")
    if method == "relumix":
        return relumix.fit(activation, bits, name, **options)
    return fewbit.fit(activation, bits, name, **options)


def make_gate(gate: Gate, name: str) -> GateFit:
    """Return the fit of a gate, which approximates nothing."""
    return GateFit(name=name, method="gate_rebuild", activation=gate, error={})


def make_learned(formula: Learned, name: str) -> LearnedFit:
    """Return the fit of a formula with learned numbers; warn if floating point fails on its start."""
    if (start := formula.start()) is not None:
        float_check.warn(start)
    return LearnedFit(name=name, method="learned_rebuild", activation=formula, error={})


def again(fit: AnyFit) -> AnyFit:
    """Make a fit again from the options in its record: the same bytes, if nothing has changed."""
    if isinstance(fit, GateFit):
        return make_gate(fit.activation, fit.name)
    if isinstance(fit, LearnedFit):
        return make_learned(fit.activation, fit.name)
    if fit.name in relumix.PUBLISHED:
        return relumix.published(fit.name)
    if fit.name in inverted_published.NAMES:
        return inverted_published.published(fit.name)
    options: dict[str, Any] = {}
    options |= {"derivative": fit.derivative} if isinstance(fit, ExactFit) else {"bits": fit.bits, **fit.options}
    if isinstance(fit, InvertedFit):
        options |= {"domain": fit.domain}
    if isinstance(fit, StepFit) and fit.method == "fewbit":
        options |= {"domain": fit.domain, "weight": fit.weight}
    return make(fit.method, fit.activation, fit.name, **options)
