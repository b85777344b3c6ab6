"""What the template of formulas with learned numbers needs: the formula and its derivatives as code."""

from __future__ import annotations

from typing import Any

from fitact.fitter.records.kinds import AnyLearnedFit
from fitact.fitter.records.learned import OUTPUT, ExactLearnedFit

from . import dialects, printers


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
    device, halves = [], []
    for name, argument, one in formulas:
        full, half = printers.device(one, argument)
        device.append({"name": name, "of": argument, "code": full})
        if half is not None:
            device.append({"name": f"{name}_half", "of": argument, "code": half})
            halves.append(name)
    if any(name.startswith("by_") for name in halves):
        halves.append("gradient")
    return {
        "kept": "the output" if of == OUTPUT else "x",
        "of": of,
        "halves": halves,
        "numbers": [
            {"name": number.name, "start": repr(number.start), "channel": number.channel}
            for number in formula.numbers
        ],
        "closed": [("x", fit.derivative), *((name, fit.gradients[name]) for name in formula.names)]
        if isinstance(fit, ExactLearnedFit)
        else [],
        "told": ", ".join(f"{n.name}{' (one a channel)' if n.channel else ''}" for n in formula.numbers),
        "wide": any(number.channel for number in formula.numbers),
        "device": device,
        "functions": [
            {"name": name, "of": of, "code": printers.render(one, dialects.TORCH, variable=of)}
            for name, of, one in formulas
        ],
    }
