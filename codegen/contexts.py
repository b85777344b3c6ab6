"""What each kind of fit gives to its template: formulas as code, numbers as text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fitact.fitter.analysis import REALS, Activation
from fitact.fitter.expr import x
from fitact.fitter.records import (
    FLAT,
    AnyFit,
    Approximant,
    GateFit,
    InvertedFit,
    LearnedFit,
    OutputFit,
    PublishedApproximant,
    Quotient,
    Radical,
    StepFit,
)

from .dialects import TORCH, TRITON, Code, Dialect, number
from .printers import device, in_torch, render


def _value(activation: Activation) -> dict[str, Any]:
    """Return the code of an activation, on devices and in PyTorch."""
    full, half = device(activation.formula)
    return {
        "composed": activation.torch is None,
        "triton_code": full,
        "half": half,
        "torch_code": in_torch(activation),
    }


def _step(fit: StepFit) -> dict[str, Any]:
    of = "f" if fit.options.get("objective") == "primitive" else "f'"
    alias = {"gelu": " (ReGELU2)", "silu": " (ReSiLU2)"}.get(fit.activation.name or "") if fit.bits == 2 else None
    paper = fit.options.get("source")
    nearest = f"that is nearest to {of}{alias if alias and of == 'f' else ''}"
    return _value(fit.activation) | {
        "source": f"whose coefficients are those of {paper}" if paper else nearest,
        "saved": _bits(fit.bits),
        "domain": " to ".join(f"{end:g}" for end in fit.domain),
        "bits": fit.bits,
        "even": fit.even,
        "borders": [repr(border) for border in fit.borders],
        "levels": [repr(level) for level in fit.levels],
    }


def _output(fit: OutputFit) -> dict[str, Any]:
    return _value(fit.activation) | {
        "derivative": fit.derivative,
        "triton_derivative": render(fit.formula, TRITON, variable="y"),
        "torch_derivative": render(fit.formula, TORCH, variable="y"),
    }


def _inverted(fit: InvertedFit) -> dict[str, Any]:
    return _value(fit.activation) | {
        "saved": f" and {_bits(fit.bits)} per element" if fit.bits else "",
        "bits": fit.bits,
        "size": 2**fit.bits,
        "domain": None if fit.domain is None else " to ".join(f"{end:g}" for end in fit.domain),
        "paper": fit.options.get("source"),
        "rational": all(
            isinstance(approximant, Quotient) for some in fit.approximants.values() for approximant in some
        ),
        "dtypes": [_by_dtype(fit, dtype) for dtype in ("float32", "bfloat16", "float16")],
    }


def _by_dtype(fit: InvertedFit, dtype: str) -> dict[str, Any]:
    """Return what a module has for one dtype of y; codes without a cell of their own repeat the last cell."""
    size = 2**fit.bits
    borders = [repr(border) for border in fit.borders[dtype]]
    approximants = [*fit.approximants[dtype]]
    part: dict[str, Any] = {
        "name": dtype,
        "borders": borders + [repr(float(REALS))] * (size - 1 - len(borders)),
        "triton": _PRINTED[type(approximants[0])](approximants, TRITON, size),
        "torch": _PRINTED[type(approximants[0])](approximants, TORCH, size),
    }
    quotients = [approximant for approximant in approximants if isinstance(approximant, Quotient)]
    if quotients:
        quotients += quotients[-1:] * (size - len(quotients))
        part["ends"] = [
            [repr(quotient.low) for quotient in quotients],
            [repr(quotient.high) for quotient in quotients],
        ]
        part["numerator"] = _rows([quotient.numerator for quotient in quotients])
        part["denominator"] = _rows([quotient.denominator for quotient in quotients])
    return part


def _rows(polynomials: Sequence[Sequence[float]]) -> list[list[str]]:
    """Return coefficients as a row for each power, the highest first, a column for each polynomial."""
    rows = range(max(map(len, polynomials)) - 1, -1, -1)
    return [[repr(p[k] if k < len(p) else 0.0) for p in polynomials] for k in rows]


def _bits(count: int) -> str:
    return f"{count} bit{'s'[: count > 1]}"


def _quotients(approximants: Sequence[Quotient], dialect: Dialect, size: int) -> Code:
    """Print t of quotients, one for each code; a constant takes the t of its neighbour."""
    results: list[str] = []
    for approximant in approximants:
        constant = len(approximant.numerator) + len(approximant.denominator) == 2
        results.append((results[-1] if results else "") if constant else _variable(approximant.radicals, dialect))
    first = next((result for result in results if result), "y")
    steps, chosen = _chosen([result or first for result in results], dialect, size)
    return Code((*steps,), chosen)


def _published(approximants: Sequence[PublishedApproximant], dialect: Dialect, size: int) -> Code:
    """Print f′ by the paper's approximants, one for each code."""
    anchor = approximants[0].anchor
    steps = [("y", dialect.clamp.format("y", number(anchor)[0], FLAT)), ("v", _away("y", anchor))]
    masks, chosen = _chosen([f"q{i}" for i in range(len(approximants))], dialect, size)
    steps += masks
    for i, approximant in enumerate(approximants):
        code = render(approximant.shape, dialect, "v")
        own = {name: f"{name}_{i}" for name, _ in code.steps}
        steps += [(own[name], _renamed(text, own)) for name, text in code.steps]
        steps.append((f"q{i}", _renamed(code.result, own)))
    if approximants[0].approximates == "sigmoid":  # SiLU's derivative follows from it
        steps.append(("q", chosen))
        chosen = "q * (1.0 - y) + y"
    return Code((*steps,), chosen)


# Kinds of approximants, which are all of one kind in a fit, and what prints them from `y` and `code`.
_PRINTED: dict[type[Approximant], Callable[[Any, Dialect, int], Code]] = {
    Quotient: _quotients,
    PublishedApproximant: _published,
}


def _chosen(results: Sequence[str], dialect: Dialect, size: int) -> tuple[list[tuple[str, str]], str]:
    """Return steps, and a text that chooses a result by the code; device code has other bits above those of it."""
    runs = [(result, len(list(group))) for result, group in itertools.groupby(results)]
    chosen, start = runs[-1][0], sum(count for _, count in runs[:-1])
    for result, count in reversed(runs[:-1]):
        chosen = dialect.where.format(f"code < {start}", result, chosen)
        start -= count
    return [("code", f"code & {size - 1}")] if len(runs) > 1 and dialect is TRITON else [], chosen


def _renamed(text: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        text = re.sub(rf"\b{old}\b", new, text)
    return text


def _variable(radicals: Sequence[Radical], dialect: Dialect) -> str:
    text = "".join(f" {'-' if radical.sign < 0 else '+'} {_radical(radical, dialect)}" for radical in radicals)
    return text.removeprefix(" + ") if text.startswith(" + ") else f"-{text.removeprefix(' - ')}"


def _away(text: str, anchor: float) -> str:
    return f"{text} {'-' if anchor > 0 else '+'} {abs(anchor)!r}" if anchor else text


def _radical(radical: Radical, dialect: Dialect) -> str:
    away = _away("y", radical.anchor)
    if radical.order == 1 and radical.side == 0:
        return away if away == "y" else f"({away})"
    home = "_tiles" if dialect is TRITON else "_rt.reference_math"
    return f"{home}.radical({away}, order={radical.order}, side={radical.side})"


def _gate(fit: GateFit) -> dict[str, Any]:
    a, b = fit.activation.a, fit.activation.b
    return {
        "half": any(device(factor.formula)[1] for factor in (a, b)),
        **{f"{name}{what}": code for name, of in (("a", a), ("b", b)) for what, code in _codes(of).items()},
        # a formula of several operators would round in each
        "composed": {name: of.torch is None and of.formula != x for name, of in (("a", a), ("b", b))},
    }


def _codes(activation: Activation) -> dict[str, Code]:
    """Return a factor in PyTorch's operators, and on devices: value and derivative, and a shorter form of each."""
    value, half = device(activation.formula)
    derivative, derivative_half = device(activation.derivative_formula)
    return {
        "": in_torch(activation),
        "_device": value,
        "_half": half or value,
        "_derivative": derivative,
        "_derivative_half": derivative_half or derivative,
        "_torch_derivative": render(activation.derivative_formula, TORCH),
    }


def _learned(fit: LearnedFit) -> dict[str, Any]:
    formula = fit.activation
    formulas = {"value": formula.formula, "derivative": formula.derivative_formula}
    formulas |= {
        f"by_{name}": gradient for name, gradient in zip(formula.names, formula.gradient_formulas, strict=True)
    }
    functions, halves = [], []
    for name, expr in formulas.items():
        full, half = device(expr)
        functions.append({"name": name, "code": full})
        if half is not None:
            functions.append({"name": f"{name}_half", "code": half})
            halves.append(name)
    if any(name.startswith("by_") for name in halves):
        halves.append("gradient")
    return {
        "halves": halves,
        "numbers": [vars(number) | {"start": repr(number.start)} for number in formula.numbers],
        "parameters": ", ".join(f"{n.name}{' (one a channel)' if n.channel else ''}" for n in formula.numbers),
        "wide": any(number.channel for number in formula.numbers),
        "device": functions,
        "functions": [{"name": name, "code": render(expr, TORCH)} for name, expr in formulas.items()],
    }


# Kinds of fit: the template of each, and what gives the values that only this template needs.
TEMPLATES: dict[type[AnyFit], tuple[str, Callable[[Any], dict[str, Any]]]] = {
    StepFit: ("step.py.j2", _step),
    OutputFit: ("output.py.j2", _output),
    InvertedFit: ("inverted.py.j2", _inverted),
    GateFit: ("gate.py.j2", _gate),
    LearnedFit: ("learned.py.j2", _learned),
}
