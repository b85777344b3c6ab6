"""What the template of gates needs: the factors as code, and the tables of those that are coded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fitact.fitter.analysis.activation import Activation
from fitact.fitter.analysis.gate import is_identity
from fitact.fitter.records.coded import CodedFit
from fitact.fitter.records.gate import CodedGateFit
from fitact.fitter.records.kinds import AnyGateFit

from . import dialects, printers
from .tables import lines, pairs, search_steps


def context(fit: AnyGateFit) -> dict[str, Any]:
    """Return the values for the template of a gate."""
    codes = (fit.code_g, fit.code_u) if isinstance(fit, CodedGateFit) else (None, None)
    a, b = fit.activation.a, fit.activation.b
    return {
        "kept": _kept(codes),
        "exact": codes == (None, None),
        "factors": [
            {"of": "g", "name": "a", **_tables(codes[0])},
            {"of": "u", "name": "b", **_tables(codes[1])},
        ],
        "half": any(printers.device(factor.formula)[1] for factor in (a, b)),
        **{f"{name}{what}": code for name, of in (("a", a), ("b", b)) for what, code in _codes(of).items()},
        "composed": {"a": _composed(a), "b": _composed(b)},
    }


def _kept(codes: Sequence[CodedFit | None]) -> str:
    texts = [
        f"{argument} as it is" if code is None else f"{code.bits} bits of {argument}"
        for argument, code in zip("gu", codes, strict=True)
    ]
    return "g and u" if codes == (None, None) else " and ".join(texts)


def _tables(code: CodedFit | None) -> dict[str, Any]:
    """Return the tables of a code, for the template: all are empty for a kept argument."""
    if code is None:
        return {"borders": [], "table": [], "bits": 0, "steps": 0}
    return {
        "borders": lines(code.borders),
        "table": pairs(code),
        "bits": code.bits,
        "steps": search_steps(code.borders),
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
