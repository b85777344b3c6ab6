"""What the template of gates needs: the factors as code."""

from __future__ import annotations

from typing import Any

from fitact.fitter.analysis.activation import Activation
from fitact.fitter.analysis.gate import is_identity
from fitact.fitter.records.fit import GateFit

from . import dialects, printers


def context(fit: GateFit) -> dict[str, Any]:
    """Return the values for the template of a gate."""
    a, b = fit.activation.a, fit.activation.b
    return {
        "half": any(printers.device(factor.formula)[1] for factor in (a, b)),
        **{f"{name}{what}": code for name, of in (("a", a), ("b", b)) for what, code in _codes(of).items()},
        "composed": {"a": _composed(a), "b": _composed(b)},
    }


def _codes(activation: Activation) -> dict[str, dialects.Code]:
    """Return a factor in PyTorch's operators, and on devices: value and derivative, and a shorter form of each."""
    value, half = printers.device(activation.formula)
    derivative, derivative_half = printers.device(activation.derivative_formula)
    return {
        "": printers.in_torch(activation),
        "_device": value,
        "_half": half or value,
        "_derivative": derivative,
        "_derivative_half": derivative_half or derivative,
    }


def _composed(activation: Activation) -> bool:
    """Whether a factor takes several operators, each of which would round."""
    return activation.torch is None and not is_identity(activation)
