"""What the template of formulas with learned numbers needs: the formula and its derivatives as code."""

from __future__ import annotations

import re
from typing import Any

from fitact.fitter.expr.atoms import Expr
from fitact.fitter.records.kinds import AnyLearnedFit
from fitact.fitter.records.learned import OUTPUT, CodedLearnedFit, ExactLearnedFit

from . import dialects, printers
from .tables import lines, search_steps


def context(fit: AnyLearnedFit) -> dict[str, Any]:
    """Return the values for the template of a formula with learned numbers."""
    formula = fit.activation
    of, derivatives = "x", (formula.derivative_formula, *formula.gradient_formulas)
    if isinstance(fit, ExactLearnedFit):
        of, derivatives = OUTPUT, fit.formulas
    names = ("derivative", *(f"by_{name}" for name in formula.names))
    formulas = [
        ("value", "x", formula.formula),
        *((name, of, one) for name, one in zip(names, derivatives, strict=True)),
    ]
    device = [(name, of, _device(one, of)) for name, of, one in formulas]
    half = dialects.short(device[0][2])
    if half is not None:
        device.append(("value_half", "x", half))
    code = fit.code if isinstance(fit, CodedLearnedFit) else None
    return {
        "kept": f"a code of x of {code.bits} bits" if code else "the output" if of == OUTPUT else "x",
        "of": of,
        "half": half is not None,
        "numbers": [
            {"name": number.name, "start": repr(number.start), "channel": number.channel}
            for number in formula.numbers
        ],
        "closed": [("x", fit.derivative), *((name, fit.gradients[name]) for name in formula.names)]
        if isinstance(fit, ExactLearnedFit)
        else [],
        "told": ", ".join(f"{n.name}{' (one a channel)' if n.channel else ''}" for n in formula.numbers),
        "wide": any(number.channel for number in formula.numbers),
        "device": [
            {"name": name, "of": of, "code": one, "loads": _loads(one, formula.names)} for name, of, one in device
        ],
        "functions": [
            {"name": name, "of": of, "code": printers.render(one, dialects.TORCH, variable=of)}
            for name, of, one in formulas
        ],
        "bits": code.bits if code else 0,
        "steps": search_steps(code.borders) if code else 0,
        "borders": lines([repr(border) for border in code.borders], 4) if code else [],
        "points": lines([repr(point) for point in code.values], 4) if code else [],
    }


def _device(formula: Expr, of: str) -> dialects.Code:
    return dialects.precise(printers.render(formula, dialects.TRITON, variable=of))


def _loads(code: dialects.Code, names: tuple[str, ...]) -> list[dict[str, str]]:
    """Return the learned numbers that code uses, each with the distance to its place."""
    texts = " ".join([code.result, *(text for _, text in code.steps)])
    used = set(re.findall(r"\b[A-Za-z]\w*\b", texts))
    distances = ["", " + _stride", *(f" + {k} * _stride" for k in range(2, len(names)))]
    return [{"name": name, "by": by} for name, by in zip(names, distances, strict=False) if name in used]
