"""The tables that the command line prints: the catalog, the analysis of an activation, fits side by side."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import click

from fitact.errors import UsageError
from fitact.fitter.analysis.activation import Activation
from fitact.fitter.analysis.float_check import problem
from fitact.fitter.analysis.gate import Gate
from fitact.fitter.analysis.learned import Learned
from fitact.fitter.analysis.shape import Asymptote, Monotone, Range
from fitact.fitter.expr.catalog import CATALOG, GATES, LEARNED
from fitact.fitter.expr.parser import text_of
from fitact.fitter.expr.work import MILLION, WorkError, budget
from fitact.fitter.methods import coded, exact, fewbit, inverted, relumix
from fitact.fitter.records.coded import DEVIATIONS, CodedFit
from fitact.fitter.records.fit import InvertedFit, StepFit
from fitact.fitter.records.gate import CodedGateFit, GateFit
from fitact.fitter.records.kinds import AnyFit, AnyGateFit
from fitact.fitter.records.learned import CodedLearnedFit, ExactLearnedFit, LearnedFit
from fitact.fitter.records.stochastic import StochasticFit
from fitact.text import columns

# Operations on a formula: for its analysis, and for each method that is tried on it.
SHOWING, TRYING = 3 * MILLION, 1 * MILLION
MOST = 12  # the most breakpoints, pieces or roots that are listed


def catalog() -> None:
    """Print the catalog: names, formulas and PyTorch's functions."""
    rows = [("name", "f(x)", "PyTorch")]
    for name, entry in CATALOG.items():
        call = "none" if entry.torch is None else entry.filled(entry.torch, {})
        rows.append((name, entry.filled(entry.expression, {}), call))
    _print(rows)
    click.echo()
    _print([("gate", "h(g, u)"), *GATES.items()])
    click.echo()
    formulas = [Learned.of(name, {}) for name in LEARNED]
    _print(
        [
            ("formula", "f(x)", "learned, from"),
            *((formula.name or "", formula.expression, starts(formula)) for formula in formulas),
        ]
    )


def starts(formula: Learned) -> str:
    """Return the learned numbers of a formula with their starts, as --learn takes them."""
    return ", ".join(f"{number.name}{':channel' * number.channel}={number.start:g}" for number in formula.numbers)


def learned(shown: Learned) -> None:
    """Print the derivatives of a formula with learned numbers."""
    derivatives = zip(shown.names, shown.gradient_formulas, strict=True)
    _print(
        [
            ("f(x)", shown.expression),
            ("learned", starts(shown)),
            ("computed as", text_of(shown.formula)),
            ("f'(x)", text_of(shown.derivative_formula)),
            *((f"by {name}", text_of(formula)) for name, formula in derivatives),
            ("rebuild", "yes: exact, keeping x"),
            ("coded", "yes: 3 to 8 bits for x"),
        ]
    )


def gate(shown: Gate) -> None:
    """Print the analysis of a gate's factors, both as functions of x, and which methods apply to the gate."""
    coded_as = []
    for name, argument, factor in (("a", "g", shown.a), ("b", "u", shown.b)):
        click.echo(f"{name}({argument}), with x for {argument}:")
        activation(factor)
        click.echo()
        coded_as.append(_coded(factor))
    refused = [text for text in coded_as if text.startswith("no")]
    _print(
        [
            ("h(g, u)", shown.expression),
            ("rebuild", "yes: exact, keeping g and u"),
            ("coded", refused[0] if refused else "yes: 3 to 8 bits for g; 6, 8 or 16 for u"),
        ]
    )


def activation(f: Activation) -> None:
    """Print the analysis of an activation over the reals, and which methods apply to it."""
    with budget(f, SHOWING):
        rows, even = _analysed(f)
    methods: dict[str, Callable[[Activation], str]] = {
        "fewbit": partial(_fewbit, even=even),
        "relumix": _relumix,
        "inverted": _inverted,
        "exact": _exact,
        "coded": _coded,
    }
    for name, method in methods.items():
        try:
            with budget(f, TRYING):
                rows.append((name, method(f)))
        except WorkError as error:
            rows.append((name, f"unknown: {str(error).partition(': ')[2]}"))
    _print(rows)


def _analysed(f: Activation) -> tuple[list[tuple[str, str]], bool]:
    """Return what is shown of an activation, and whether its derivative is even."""
    high = fewbit.DOMAIN[1]
    even, odd = f.has_even_derivative(high), f.has_odd_derivative(high)
    monotone = f.monotone()
    breaks = [
        f"{_number(b.at)} ({b.kind} of {'f' if b.kind == 'jump' else 'the derivative'})" for b in f.breakpoints()
    ]
    rows = [("f(x)", f.expression)]
    if (text := text_of(f.formula)) != f.expression:
        rows.append(("computed as", text))
    rows += [
        ("f'(x)", text_of(f.derivative_formula)),
        ("PyTorch", f.torch or "none: computed by the formula"),
        ("breakpoints", _listed(breaks, "none")),
        ("derivative is", "even: steps code |x|" if even else "odd" if odd else "neither even nor odd"),
        ("toward -inf", _toward(f.asymptotes[0])),
        ("toward +inf", _toward(f.asymptotes[1])),
        ("pieces", _pieces(monotone)),
        ("roots of f'", _roots(monotone)),
        ("range of f'", _range(f.derivative_range())),
        ("arithmetic", problem(f) or "float32 computes f well from -1e38 to 1e38"),
    ]
    return rows, even


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
    if not monotone.complete:
        few = ", ".join(texts) if count <= MOST else f"{count} of them"
        return f"{few} for |x| below {monotone.reach:.3g}; beyond, f' has too many roots to be counted"
    bits = (count - 1).bit_length()
    told = "" if count < 2 else f"; {bits} bit{'s'[: bits > 1]} tell{'s'[: bits < 2]} them apart"
    return _listed(texts, "none") + told


def _roots(monotone: Monotone) -> str:
    texts = []
    for root in sorted(monotone.roots, key=lambda root: abs(root.at)):
        below, above = (_number(order) for order in (root.order_below, root.order_above))
        order = f"order {below}" if below == above else f"order {below} from below, {above} from above"
        texts.append(f"{_number(root.at)} ({order})")
    return _listed(
        texts, "none but where f is constant" if any(p.direction == 0 for p in monotone.pieces) else "none"
    )


def _range(values: Range) -> str:
    ends = f"{_number(values.low)} to {_number(values.high)}"
    return ends if values.complete else f"at least {ends}; beyond what could be seen it may be more"


def _fewbit(f: Activation, even: bool) -> str:
    low, high = fewbit.DOMAIN
    try:
        fewbit.check_finite(f, low, high)
    except WorkError:
        raise
    except UsageError as error:
        return f"no: {error}"
    steps = f.steps(0.0 if even else low, high)
    if steps is not None:
        bits = max((steps - 1).bit_length(), 1)
        return f"yes: exact at {bits} bit{'s'[: bits > 1]}, as the derivative is a step function"
    ends = f.derivative_range()
    if math.isinf(ends.low) or math.isinf(ends.high):
        return f"yes, but beyond the domain {low:g} {high:g} an unbounded derivative is cut off"
    return "yes: 1 to 4 bits"


def _coded(f: Activation) -> str:
    try:
        coded.check(f)
    except WorkError:
        raise
    except UsageError as error:
        return f"no: {error}"
    return "yes: 3 to 8 bits, for the value too"


def _relumix(f: Activation) -> str:
    try:
        left, right = relumix.asymptotes(f)
    except WorkError:
        raise
    except UsageError as error:
        return f"no: {str(error).partition(': ')[2]}"
    if any(point.kind == "jump" for point in f.breakpoints()):
        return "yes, but at 2 to 4 bits only with --objective derivative, as it jumps"
    return "yes: 2 to 4 bits" if left.slope == right.slope else "yes: 1 to 4 bits"


def _inverted(f: Activation) -> str:
    try:
        count = len(inverted.cells(f))
    except WorkError:
        raise
    except UsageError as error:
        return f"no: {str(error).partition(': ')[2]}"
    bits = (count - 1).bit_length()
    told = f"{bits} bit{'s'[: bits > 1]} or more beside the output" if bits else "the output alone, 0 bits"
    return (
        f"yes: {told}, if its {count} smooth pieces can be fitted"
        if count > 1
        else f"yes: {told}, if it can be fitted"
    )


def _exact(f: Activation) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return f"yes: f'(x) = {exact.fit(f, 'shown').derivative}"
        except WorkError:
            raise
        except UsageError as error:
            return f"no: {str(error).partition(': ')[2]}"


def _print(rows: Sequence[tuple[str, ...]], align: str = "") -> None:
    for line in columns(rows, align):
        click.echo(line)


def fits(shown: Sequence[AnyFit]) -> None:
    """Print the errors of fits side by side, one table for each kind of fit."""
    steps: list[tuple[str, ...]] = [
        ("", "bits", "objective", "||f'-q||", "max|f'-q|", "rms", "||h-h~||", "max|h-h~|")
    ]
    dtypes = ("bfloat16", "float16", "float32")
    inverse: list[tuple[str, ...]] = [("", "bits", *dtypes, *(f"floor {dtype}" for dtype in dtypes))]
    closed: list[tuple[str, ...]] = [("", *dtypes, "f'(x) as a function of y")]
    codes: list[tuple[str, ...]] = [
        ("", "bits", "objective", *(f"f/f' at {deviation:g}" for deviation in DEVIATIONS), "reach")
    ]
    drawn: list[tuple[str, ...]] = [
        (
            "",
            "bits",
            "objective",
            *(f"f/f' at {deviation:g}" for deviation in DEVIATIONS),
            *(f"bias at {deviation:g}" for deviation in DEVIATIONS),
            "f in the mean from",
        )
    ]
    gates: list[tuple[str, ...]] = [
        ("", "bits of g", "of u", *(f"dg/du/h at {deviation:g}" for deviation in DEVIATIONS), "h(g, u)")
    ]
    formulas: list[tuple[str, ...]] = [
        ("", "bits", *(f"f/f'/learned at {deviation:g}" for deviation in DEVIATIONS), "learned", "f(x)")
    ]
    for fit in shown:
        e = fit.error
        if isinstance(fit, GateFit | CodedGateFit):
            gates.append(_gate_row(fit))
            continue
        if isinstance(fit, ExactLearnedFit):
            both = (f"{e[f'derivative_{dtype}']:.2g}/{e[f'learned_{dtype}']:.2g}" for dtype in dtypes)
            texts = (f"in {name}: {fit.gradients[name]}" for name in fit.activation.names)
            closed.append((fit.name, *both, f" {'; '.join([fit.derivative, *texts])}"))
            continue
        if isinstance(fit, LearnedFit | CodedLearnedFit):
            formulas.append(_formula_row(fit))
            continue
        if isinstance(fit, StepFit):
            # the integral of the weight turns a mean into a norm
            norm = e["rms"] * math.sqrt(fit.mass)
            errors = (e["objective"], norm, e["max"], e["rms"], e["primitive_norm"], e["primitive_max"])
            steps.append((fit.name, str(fit.bits), *(f"{error:.7g}" for error in errors)))
            continue
        if isinstance(fit, CodedFit):
            pairs = ((e[f"value_{deviation:g}"], e[f"derivative_{deviation:g}"]) for deviation in DEVIATIONS)
            both = (f"{value:.3g}/{derivative:.3g}" for value, derivative in pairs)
            codes.append((fit.name, str(fit.bits), f"{e['objective']:.7g}", *both, f"{fit.reach:.4g}"))
            continue
        if isinstance(fit, StochasticFit):
            both = (
                f"{e[f'value{bias}_{deviation:g}']:.3g}/{e[f'derivative{bias}_{deviation:g}']:.3g}"
                for bias in ("", "_bias")
                for deviation in DEVIATIONS
            )
            unbiased = f"{fit.nodes[0]:g} to {fit.nodes[-1]:g}"
            drawn.append((fit.name, str(fit.bits), f"{e['objective']:.6g}", *both, unbiased))
            continue
        stated = [f"{e[dtype]:.4g}" for dtype in dtypes]
        if isinstance(fit, InvertedFit):
            inverse.append((fit.name, str(fit.bits), *stated, *(f"{fit.floor[dtype]:.4g}" for dtype in dtypes)))
        else:
            closed.append((fit.name, *stated, f" {fit.derivative}"))
    for table, align in (
        (steps, "<>>>>>>>"),
        (inverse, "<>>>>>>>"),
        (closed, "<>>>"),
        (codes, "<>>>>>>>"),
        (drawn, "<>>>>>>>>>>>"),
        (gates, "<>>>>>><"),
        (formulas, "<>>>>><<"),
    ):
        if len(table) > 1:
            _print(table, align)


def _gate_row(fit: AnyGateFit) -> tuple[str, ...]:
    """Return the line of a gate in the table of these."""
    if isinstance(fit, GateFit):
        return (fit.name, "kept", "kept", *("exact" for _ in DEVIATIONS), fit.activation.expression)
    errors = ("/".join(f"{fit.error[f'{what}_{at:g}']:.3g}" for what in ("dg", "du", "h")) for at in DEVIATIONS)
    of_u = "kept" if fit.code_u is None else str(fit.code_u.bits)
    return (fit.name, str(fit.bits), of_u, *errors, fit.activation.expression)


def _formula_row(fit: LearnedFit | CodedLearnedFit) -> tuple[str, ...]:
    """Return the line of a formula with learned numbers in the table of these."""
    told = starts(fit.activation), fit.activation.expression
    if isinstance(fit, LearnedFit):
        return (fit.name, "kept", *("exact" for _ in DEVIATIONS), *told)
    whats = ("value", "derivative", "learned")
    errors = ("/".join(f"{fit.error[f'{what}_{at:g}']:.3g}" for what in whats) for at in DEVIATIONS)
    return (fit.name, str(fit.bits), *errors, *told)
