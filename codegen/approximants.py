"""The approximants of an inverted fit as source text in which a code chooses one of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from fitact.fitter.records.approximants import FLAT, Approximant, PublishedApproximant, Radical

from .dialects import TRITON, Code, Dialect, number
from .printers import render


def choice(approximants: Sequence[Approximant], dialect: Dialect, size: int) -> Code:
    """Print t of an inverted fit's quotients, or f′ by the paper's approximants, from `y` and `code`.

    Args:
        approximants: one for each code, all of one sort.
        dialect: the target.
        size: how many codes there may be; device code has other bits above those of a code.

    """
    steps: list[tuple[str, str]] = []
    results: list[str] = []
    for i, approximant in enumerate(approximants):
        if isinstance(approximant, PublishedApproximant):
            code = render(approximant.shape, dialect, "v")
            own = {name: f"{name}_{i}" for name, _ in code.steps}
            steps += [(own[name], _renamed(text, own)) for name, text in code.steps]
            steps.append((f"q{i}", _renamed(code.result, own)))
            results.append(f"q{i}")
        elif len(approximant.numerator) + len(approximant.denominator) == 2:  # a constant, whatever t is
            results.append(results[-1] if results else "")
        else:
            results.append(_variable(approximant.radicals, dialect))
    first = next((result for result in results if result), "y")
    runs = [(result, len(list(group))) for result, group in itertools.groupby(r or first for r in results)]
    chosen, start = runs[-1][0], sum(count for _, count in runs[:-1])
    for result, count in reversed(runs[:-1]):
        chosen = dialect.where.format(f"code < {start}", result, chosen)
        start -= count
    if len(runs) > 1 and dialect is TRITON:
        steps.insert(0, ("code", f"code & {size - 1}"))
    if isinstance(approximants[0], PublishedApproximant):
        at, sigmoid = approximants[0].anchor, approximants[0].approximates == "sigmoid"
        steps = [("y", dialect.clamp.format("y", number(at)[0], FLAT)), ("v", _away("y", at)), *steps]
        if sigmoid:  # SiLU's derivative follows from it
            steps.append(("q", chosen))
            chosen = "q * (1.0 - y) + y"
    return Code(tuple(steps), chosen)


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
    home = "_rt" if dialect is TRITON else "_rt.reference_math"
    return f"{home}.radical({away}, order={radical.order}, side={radical.side})"
