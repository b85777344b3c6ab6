"""What the template of formulas with learned numbers needs: the formula and its derivatives as code."""

from __future__ import annotations

from typing import Any

from fitact.fitter.records.fit import LearnedFit

from . import dialects, printers


def context(fit: LearnedFit) -> dict[str, Any]:
    """Return the values for the template of a formula with learned numbers."""
    formula = fit.activation
    formulas = {"value": formula.formula, "derivative": formula.derivative_formula}
    formulas |= {f"by_{name}": one for name, one in zip(formula.names, formula.gradient_formulas, strict=True)}
    device, halves = [], []
    for name, one in formulas.items():
        full, half = printers.device(one)
        device.append({"name": name, "code": full})
        if half is not None:
            device.append({"name": f"{name}_half", "code": half})
            halves.append(name)
    if any(name.startswith("by_") for name in halves):
        halves.append("gradient")
    return {
        "halves": halves,
        "numbers": [
            {"name": number.name, "start": repr(number.start), "channel": number.channel}
            for number in formula.numbers
        ],
        "told": ", ".join(f"{n.name}{' (one a channel)' if n.channel else ''}" for n in formula.numbers),
        "wide": any(number.channel for number in formula.numbers),
        "device": device,
        "functions": [
            {"name": name, "code": printers.render(one, dialects.TORCH)} for name, one in formulas.items()
        ],
    }
