"""The methods by name, and how a fit is made again from its record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from fitact.fitter.analysis.activation import Activation
from fitact.fitter.analysis.gate import Gate
from fitact.fitter.analysis.learned import Learned
from fitact.fitter.expr.work import MILLION, budget, stage
from fitact.fitter.records.coded import CodedFit
from fitact.fitter.records.fit import ExactFit, InvertedFit, StepFit
from fitact.fitter.records.gate import CodedGateFit, GateFit
from fitact.fitter.records.kinds import AnyFit, AnyGateFit, AnyLearnedFit, AnyPlainFit
from fitact.fitter.records.learned import CodedLearnedFit, ExactLearnedFit, LearnedFit

from . import coded, exact, fewbit, inverted, inverted_published, relumix

FITTING = 3 * MILLION  # operations on the formula: its analysis, and its values
# The methods of activations, of gates and of formulas with learned numbers, each with its options beside the
# function and a name.
METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    "activations": {
        "fewbit": ("bits", "domain", "weight", "seed"),
        "relumix": ("bits", "objective", "restarts", "seed"),
        "inverted": ("bits", "domain", "tol", "family"),
        "exact": (),
        "coded": ("bits", "domain", "weight"),
    },
    "gates": {"rebuild": (), "coded": ("bits", "bits-u", "weight", "weight-u")},
    "formulas": {"rebuild": (), "exact": (), "coded": ("bits", "domain", "weight")},
}
BITS_REQUIRED = {"fewbit": "1 to 4", "relumix": "1 to 4", "coded": "3 to 8"}
# What the options are by default, where the method has them.
DOMAINS = {"fewbit": fewbit.DOMAIN, "coded": coded.DOMAIN}
WEIGHTS = {"coded": coded.WEIGHT}


@contextmanager
def _fitting(formula: Activation | Gate | Learned) -> Iterator[None]:
    """Bound the work of a fit. What is not finite is refused where it matters, so NumPy does not warn of it."""
    with budget(formula, FITTING), stage("the fit", "write it with fewer functions"), np.errstate(all="ignore"):
        yield


def make(method: str, activation: Activation, name: str, **options: Any) -> AnyPlainFit:
    """Fit by the method of that name; `options` are arguments of its `fit`.

    Raises:
        WorkError: the formula takes too many operations.

    """
    with _fitting(activation):
        return _made(method, activation, name, **options)


def _made(method: str, activation: Activation, name: str, **options: Any) -> AnyPlainFit:
    if method == "exact":
        return exact.fit(activation, name, **options)
    if method == "inverted":
        if options.pop("family", "rational") == "parametric":
            return inverted_published.fit(activation, name)
        return inverted.fit(activation, name, **options)
    bits = options.pop("bits")
    if method == "coded":
        return coded.fit(activation, bits, name, **options)
    if method == "relumix":
        return relumix.fit(activation, bits, name, **options)
    return fewbit.fit(activation, bits, name, **options)


def make_gate(method: str, gate: Gate, name: str, **options: Any) -> AnyGateFit:
    """Fit a gate by the method of that name; `options` are arguments of `coded.fit_gate`."""
    if method == "rebuild":
        return GateFit(name=name, method="gate_rebuild", activation=gate, error={})
    with _fitting(gate):
        return coded.fit_gate(gate, name=name, **options)


def make_learned(method: str, formula: Learned, name: str, **options: Any) -> AnyLearnedFit:
    """Fit a formula with learned numbers by the method of that name; `options` are arguments of its fit."""
    if method == "rebuild":
        coded.warn_at_start(formula)
        return LearnedFit(name=name, method="learned_rebuild", activation=formula, error={})
    with _fitting(formula):
        if method == "exact":
            coded.warn_at_start(formula)
            return exact.fit_learned(formula, name)
        return coded.fit_learned(formula, name=name, **options)


def again(fit: AnyFit) -> AnyFit:
    """Make a fit again from the options in its record: the same bytes, if nothing has changed."""
    options: dict[str, Any]
    if isinstance(fit, CodedGateFit):
        return coded.fit_gate_again(fit)
    if isinstance(fit, GateFit):
        return make_gate("rebuild", fit.activation, fit.name)
    if isinstance(fit, CodedFit):
        with _fitting(fit.activation):
            return coded.again(fit)
    if isinstance(fit, LearnedFit | ExactLearnedFit):
        return make_learned(fit.method.removeprefix("learned_"), fit.activation, fit.name)
    if isinstance(fit, CodedLearnedFit):
        code = fit.code
        options = {"domain": code.domain, "weight": code.weight, **code.options}
        return make_learned("coded", fit.activation, fit.name, bits=code.bits, **options)
    if fit.name in relumix.PUBLISHED:
        return relumix.published(fit.name)
    if fit.name in inverted_published.NAMES:
        return inverted_published.published(fit.name)
    options = {} if isinstance(fit, ExactFit) else {"bits": fit.bits, **fit.options}
    if isinstance(fit, InvertedFit):
        options |= {"domain": fit.domain}
    if isinstance(fit, StepFit) and fit.method == "fewbit":
        options |= {"domain": fit.domain, "weight": fit.weight}
    return make(fit.method, fit.activation, fit.name, **options)
