"""What the template of formulas with learned numbers needs: the formula and its derivatives as code."""

from __future__ import annotations

import re
from typing import Any

from fitact.fitter.expr.atoms import Expr
from fitact.fitter.records.kinds import AnyLearnedFit
from fitact.fitter.records.learned import CodedLearnedFit

from . import dialects, printers
from .tables import lines, search_steps


def context(fit: AnyLearnedFit) -> dict[str, Any]:
    """Return the values for the template of a formula with learned numbers."""
    formula = fit.activation
    formulas = {"value": formula.formula, "derivative": formula.derivative_formula}
    formulas |= {f"by_{name}": one for name, one in zip(formula.names, formula.gradient_formulas, strict=True)}
    value = _device(formula.formula)
    half = dialects.short(value)
    device = {name: _device(one) for name, one in formulas.items()} | (
        {} if half is None else {"value_half": half}
    )
    code = fit.code if isinstance(fit, CodedLearnedFit) else None
    return {
        "kept": f"a code of x of {code.bits} bits" if code else "x",
        "half": half is not None,
        "numbers": [
            {"name": number.name, "start": repr(number.start), "channel": number.channel}
            for number in formula.numbers
        ],
        "told": ", ".join(f"{n.name}{' (one a channel)' if n.channel else ''}" for n in formula.numbers),
        "wide": any(number.channel for number in formula.numbers),
        "device": [
            {"name": name, "code": one, "loads": _loads(one, formula.names)} for name, one in device.items()
        ],
        "functions": [
            {"name": name, "code": printers.render(one, dialects.TORCH)} for name, one in formulas.items()
        ],
        "bits": code.bits if code else 0,
        "steps": search_steps(code.borders) if code else 0,
        "borders": lines([repr(border) for border in code.borders], 4) if code else [],
        "points": lines([repr(point) for point in code.values], 4) if code else [],
    }


def _device(formula: Expr) -> dialects.Code:
    return dialects.precise(printers.render(formula, dialects.TRITON))


def _loads(code: dialects.Code, names: tuple[str, ...]) -> list[dict[str, str]]:
    """Return the learned numbers that code uses, each with the distance to its place."""
    texts = " ".join([code.result, *(text for _, text in code.steps)])
    used = set(re.findall(r"\b[A-Za-z]\w*\b", texts))
    distances = ["", " + _stride", *(f" + {k} * _stride" for k in range(2, len(names)))]
    return [{"name": name, "by": by} for name, by in zip(names, distances, strict=False) if name in used]
