"""The tables that the command line prints: the catalog, the analysis of an activation, fits side by side."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fitact.base import UsageError, columns
from fitact.fitter.analysis import REALS, Activation, Asymptote, Gate, Learned, Monotone, problem, roots
from fitact.fitter.catalog import CATALOG, GATES, LEARNED
from fitact.fitter.expr import text_of
from fitact.fitter.methods import fewbit, inverted, output, relumix
from fitact.fitter.numerics import DTYPES
from fitact.fitter.records import AnyFit, GateFit, InvertedFit, LearnedFit, OutputFit, StepFit

MOST = 12  # the most breakpoints, pieces or roots that are listed


def catalog() -> list[str]:
    """Return the catalog: names, formulas and PyTorch's functions."""
    rows = [("name", "f(x)", "PyTorch")]
    for name, entry in CATALOG.items():
        call = "none" if entry.torch is None else entry.filled(entry.torch, {})
        rows.append((name, entry.filled(entry.expression, {}), call))
    gates = [("gate", "h(g, u)"), *GATES.items()]
    formulas = [("formula", "f(x)", "learned, from")]
    for name in LEARNED:
        formula = Learned.of(name, {})
        formulas.append((name, formula.expression, starts(formula)))
    return [*columns(rows), "", *columns(gates), "", *columns(formulas)]


def starts(formula: Learned) -> str:
    """Return the learned parameters of a formula with their starts, as --learn takes them."""
    return ", ".join(f"{number.name}{':channel' * number.channel}={number.start:g}" for number in formula.numbers)


def learned(shown: Learned) -> list[str]:
    """Return the derivatives of a formula with learned parameters."""
    derivatives = zip(shown.names, shown.gradient_formulas, strict=True)
    return columns(
        [
            ("f(x)", shown.expression),
            ("learned", starts(shown)),
            ("computed as", text_of(shown.formula)),
            ("f'(x)", text_of(shown.derivative_formula)),
            *((f"by {name}", text_of(formula)) for name, formula in derivatives),
            ("recompute", "yes: exact, saving x"),
        ]
    )


def gate(shown: Gate) -> list[str]:
    """Return the analysis of a gate's factors, both as functions of x."""
    lines = []
    for name, argument, factor in (("a", "g", shown.a), ("b", "u", shown.b)):
        lines += [f"{name}({argument}), with x for {argument}:", *activation(factor), ""]
    return lines + columns([("h(g, u)", shown.expression), ("recompute", "yes: exact, saving g and u")])


def activation(f: Activation) -> list[str]:
    """Return the analysis of an activation over the reals, and which methods apply to it."""
    parity = f.derivative_parity(fewbit.DOMAIN[1])
    monotone = f.monotone()
    breaks = [
        f"{_number(b.at)} ({b.kind} of {'f' if b.kind == 'jump' else 'the derivative'})" for b in f.breakpoints()
    ]
    text = text_of(f.formula)
    more = "at least " * math.isfinite(roots(f.second_derivative_formula, -REALS, REALS).reach)
    rows = [
        ("f(x)", f.expression),
        *([("computed as", text)] if text != f.expression else []),
        ("f'(x)", text_of(f.derivative_formula)),
        ("PyTorch", f.torch or "none: computed by the formula"),
        ("breakpoints", _listed(breaks, "none")),
        ("derivative is", "even: steps code |x|" if parity == "even" else parity or "neither even nor odd"),
        ("toward -inf", _toward(f.asymptotes[0])),
        ("toward +inf", _toward(f.asymptotes[1])),
        ("pieces", _pieces(monotone)),
        ("roots of f'", _roots(monotone)),
        ("range of f'", more + " to ".join(map(_number, f.derivative_range()))),
        ("arithmetic", problem(f) or "float32 computes f well from -1e38 to 1e38"),
        *((name, _answer(f, method)) for name, method in _METHODS.items()),
    ]
    return columns(rows)


def _number(value: float) -> str:
    return f"{value + 0.0:.10g}"


def _listed(texts: Sequence[str], nothing: str) -> str:
    more = f", and {len(texts) - MOST} more" if len(texts) > MOST else ""
    return ", ".join(texts[:MOST]) + more or nothing


def _toward(end: Asymptote) -> str:
    match end.kind:
        case "line" if end.slope:
            m = {1.0: "", -1.0: "-"}.get(end.slope, f"{_number(end.slope)}*")
            b = f" {'-' if end.intercept < 0 else '+'} {_number(abs(end.intercept))}" if end.intercept else ""
            return f"the line {m}x{b}"
        case "line":
            return f"the limit {_number(end.limit)}"
        case "infinite":
            return f"{'+' if end.limit > 0 else '-'}infinity, along no line"
        case "none":
            return "no limit"
        case _:
            return "undefined"


def _pieces(monotone: Monotone) -> str:
    verbs = {1: "rises", -1: "falls", 0: "is constant"}
    texts = []
    for piece in monotone.pieces:
        low = "" if abs(piece.low) >= monotone.reach or piece.low < -1e38 else f" from {_number(piece.low)}"
        high = "" if abs(piece.high) >= monotone.reach or piece.high > 1e38 else f" to {_number(piece.high)}"
        texts.append(verbs[piece.direction] + (f"{low}{high}" or " everywhere"))
    count = len(texts)
    if math.isfinite(monotone.reach):
        few = ", ".join(texts) if count <= MOST else f"{count} of them"
        return f"{few} for |x| below {monotone.reach:.3g}; beyond, the roots of f' are not known"
    bits = (count - 1).bit_length()
    apart = "" if count < 2 else f"; {bits} bit{'s'[: bits > 1]} tell{'s'[: bits < 2]} them apart"
    return _listed(texts, "none") + apart


def _roots(monotone: Monotone) -> str:
    texts = []
    for root in sorted(monotone.roots, key=lambda root: abs(root.at)):
        below, above = (_number(order) for order in (root.order_below, root.order_above))
        order = f"order {below}" if below == above else f"order {below} from below, {above} from above"
        texts.append(f"{_number(root.at)} ({order})")
    constant = any(piece.direction == 0 for piece in monotone.pieces)
    return _listed(texts, "none but where f is constant" if constant else "none")


def _answer(f: Activation, method: Callable[[Activation], str]) -> str:
    """Return what a method says of an activation, or why it does not apply."""
    try:
        return method(f)
    except UsageError as error:
        return f"no: {str(error).removeprefix(f'{f}: ')}"


def _fewbit(f: Activation) -> str:
    low, high = fewbit.DOMAIN
    fewbit.check_finite(f, low, high)
    steps = f.steps(0.0 if f.derivative_parity(high) == "even" else low, high)
    if steps is not None:
        bits = max(len(steps).bit_length(), 1)
        every = f.steps()
        there = "" if every is not None and np.abs(every).max(initial=0.0) < high else f" from {low:g} to {high:g}"
        return f"yes: exact at {bits} bit{'s'[: bits > 1]}, as the derivative is a step function{there}"
    if any(map(math.isinf, f.derivative_range(low, high))):
        raise UsageError(f"an unbounded derivative in the domain {low:g} {high:g}")
    if any(map(math.isinf, f.derivative_range())):
        return f"yes, but beyond the domain {low:g} {high:g} an unbounded derivative is cut off"
    return "yes: 1 to 4 bits"


def _relumix(f: Activation) -> str:
    left, right = relumix.asymptotes(f)
    if any(point.kind == "jump" for point in f.breakpoints()):
        return "yes, but at 2 to 4 bits only with --objective derivative, as it jumps"
    return "yes: 2 to 4 bits" if left.slope == right.slope else "yes: 1 to 4 bits"


def _inverted(f: Activation) -> str:
    count = len(inverted.cells(f))
    bits = (count - 1).bit_length()
    saved = f"{bits} bit{'s'[: bits > 1]} or more beside the output" if bits else "the output alone, 0 bits"
    what = f"its {count} smooth pieces" if count > 1 else "it"
    return f"yes: {saved}, if {what} can be fitted"


def _output(f: Activation) -> str:
    with warnings.catch_warnings(action="ignore"):
        return f"yes: f'(x) = {output.fit(f, 'shown').derivative}"


_METHODS = {"fewbit": _fewbit, "relumix": _relumix, "inverted": _inverted, "output": _output}


def fits(shown: Sequence[AnyFit]) -> list[str]:
    """Return the errors of fits side by side, one table for each kind of fit."""
    lines = []
    for kinds, head, align, row in _TABLES:
        rows = [row(fit) for fit in shown if isinstance(fit, kinds)]
        lines += columns([head, *rows], align) if rows else []
    return lines


def _step_row(fit: StepFit) -> tuple[str, ...]:
    e = fit.error
    norm = e["rms"] * math.sqrt(fit.mass)  # the integral of the weight turns a mean into a norm
    errors = (e["objective"], norm, e["max"], e["rms"], e["primitive_norm"], e["primitive_max"])
    return (fit.name, str(fit.bits), *(f"{error:.7g}" for error in errors))


def _inverted_row(fit: InvertedFit) -> tuple[str, ...]:
    stated = (f"{numbers[dtype]:.4g}" for numbers in (fit.error, fit.floor) for dtype in DTYPES)
    return (fit.name, str(fit.bits), *stated)


def _output_row(fit: OutputFit) -> tuple[str, ...]:
    return (fit.name, *(f"{fit.error[dtype]:.4g}" for dtype in DTYPES), f" {fit.derivative}")


STEP_HEAD = ("", "bits", "objective", "||f'-q||", "max|f'-q|", "rms", "||h-h~||", "max|h-h~|")
# Kinds of fit, the heads of their table, its alignment, and the row of a fit.
_TABLES: tuple[tuple[Any, tuple[str, ...], str, Callable[[Any], tuple[str, ...]]], ...] = (
    (StepFit, STEP_HEAD, "<>>>>>>>", _step_row),
    (InvertedFit, ("", "bits", *DTYPES, *(f"floor {dtype}" for dtype in DTYPES)), "<>>>>>>>", _inverted_row),
    (OutputFit, ("", *DTYPES, "f'(x) as a function of y"), "<>>>", _output_row),
    (GateFit, ("", "saved", "h(g, u)"), "", lambda fit: (fit.name, "g and u", fit.activation.expression)),
    (
        LearnedFit,
        ("", "saved", "learned", "f(x)"),
        "",
        lambda fit: (fit.name, "x", starts(fit.activation), fit.activation.expression),
    ),
)
