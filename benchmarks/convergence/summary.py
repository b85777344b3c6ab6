"""What the runs say: paired differences to exact training, and plain sentences made from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .methods import EXACT, METHODS
from .statistics import LEVEL, POWER, detectable, holm, paired
from .tasks import TASKS
from .training import Run

METRICS = {"loss": "held-out loss", "accuracy": "accuracy on held-out images"}
UNITS = {"loss": "nats", "accuracy": "percentage points"}
SCALE = {"loss": 1.0, "accuracy": 100.0}
LEAST = 3  # seeds: with two, an interval is 13 times as wide as the differences are apart
# Which methods are compared with which; each list is one family of tests.
COMPARISONS = {
    "exact": [(name, EXACT.name) for name in METHODS if name != EXACT.name],
    "same bits": [(f"fewbit{k}", f"stochastic{k}") for k in (1, 2, 3, 4)],
    "same parameters": [("norms", "norms-baseline")],
}
DIFFERENCES = {
    "exact": "Differences from it",
    "same bits": "Differences of Few-Bit from stochastic quantisation of as many bits",
    "same parameters": "Difference of memory-sharing norms from PyTorch's norms whose affine part is merged too",
}


@dataclass(frozen=True)
class Comparison:
    """A method beside another, over the seeds that both were run with.

    Attributes:
        task, metric, family: the last a key of COMPARISONS.
        method, reference: names.
        pairs: seeds.
        diverged: of the method's runs among these; with any, there are no numbers below but the mean of the
            reference.
        reference_mean, reference_deviation: final value of the reference, in nats or in per cent.
        difference, half: method less reference, and half the width of its 95 % interval.
        p, adjusted: of no difference, and after Holm's correction over the family.
        detectable: the difference that would have been found with probability POWER.
        distinguishable: whether `adjusted` is below LEVEL.

    """

    task: str
    metric: str
    family: str
    method: str
    reference: str
    pairs: int
    diverged: int
    reference_mean: float | None
    reference_deviation: float | None
    difference: float | None = None
    half: float | None = None
    p: float | None = None
    adjusted: float | None = None
    detectable: float | None = None
    distinguishable: bool | None = None


def compare(runs: Iterable[Run]) -> list[Comparison]:
    """Return all comparisons for which there are LEAST seeds."""
    values = {(run.task, run.method, run.seed): run for run in runs}
    comparisons = []
    for task in TASKS.values():
        for metric in METRICS if task.accuracy else ["loss"]:
            for family, pairs in COMPARISONS.items():
                comparisons += compare_pairs(values, task.name, metric, family, pairs)
    return comparisons


def compare_pairs(
    values: dict[tuple[str, str, int], Run], task: str, metric: str, family: str, pairs: list[tuple[str, str]]
) -> list[Comparison]:
    """Return the comparisons of one family of tests, of pairs (method, reference) with LEAST seeds in common."""
    rows: list[dict[str, Any]] = []
    for method, reference in pairs:
        seeds = [seed for t, m, seed in values if (t, m) == (task, method) and (task, reference, seed) in values]
        if len(seeds) < LEAST:
            continue
        both = [
            [getattr(values[task, name, seed], metric) for seed in sorted(seeds)] for name in (method, reference)
        ]
        diverged = sum(value is None for value in both[0])
        row = {"method": method, "reference": reference, "pairs": len(seeds), "diverged": diverged}
        row |= {"reference_mean": None, "reference_deviation": None}
        if None not in both[1]:
            other = SCALE[metric] * np.array(both[1])
            row |= {"reference_mean": float(other.mean()), "reference_deviation": float(other.std(ddof=1))}
            if not diverged:
                result = paired((SCALE[metric] * np.array(both[0]) - other).tolist())
                row |= {"difference": result.mean, "half": result.half, "p": result.p}
                row["deviation"], row["n"] = result.deviation, result.pairs
        rows.append(row)
    tested = [row for row in rows if "p" in row]
    for row in tested:
        row["detectable"] = detectable(row.pop("deviation"), row.pop("n"), len(tested))
    for row, adjusted in zip(tested, holm([row["p"] for row in tested]), strict=True):
        row |= {"adjusted": adjusted, "distinguishable": adjusted < LEVEL}
    return [Comparison(task, metric, family, **row) for row in rows]


def sentences(comparisons: Sequence[Comparison]) -> list[str]:
    """Return what can and what cannot be told apart, a paragraph for each task, metric and family."""
    groups: dict[tuple[str, str, str], list[Comparison]] = {}
    for test in comparisons:
        groups.setdefault((test.task, test.metric, test.family), []).append(test)
    return [_paragraph(*key, group) for key, group in groups.items()]


def _paragraph(task: str, metric: str, family: str, group: list[Comparison]) -> str:
    tested = [test for test in group if test.difference is not None]
    same = [METHODS[test.method].label for test in tested if test.difference == test.half == 0]
    different = [_difference(test) for test in tested if test.distinguishable]
    rest = [test for test in tested if not test.distinguishable and METHODS[test.method].label not in same]
    parts = [_heading(task, metric, family, group)]
    if different:
        parts.append(f"Distinguishable: {'; '.join(different)}.")
    if rest:
        parts.append(f"Not distinguishable: {'; '.join(map(_difference, rest))}.")
        parts.append(_missed(rest, UNITS[metric]))
    if same:
        parts.append(f"Identical from every seed: {'; '.join(same)}.")
    for test in group:
        if test.diverged:
            parts.append(
                f"{_capital(METHODS[test.method].label)} diverged in {test.diverged} of {test.pairs} runs."
            )
        elif test.difference is None:
            parts.append(
                f"{_capital(METHODS[test.reference].label)} diverged, {METHODS[test.method].label} did not."
            )
    return " ".join(parts)


def _heading(task: str, metric: str, family: str, group: list[Comparison]) -> str:
    pairs = sorted({test.pairs for test in group})
    seeds = f"{pairs[0]}" if len(pairs) == 1 else f"{pairs[0]} to {pairs[-1]}"
    heading = f"{_capital(TASKS[task].title)}, {METRICS[metric]}, {seeds} seeds."
    if family == "exact":
        mean, deviation = group[0].reference_mean, group[0].reference_deviation
        unit = "nats" if metric == "loss" else "%"
        if mean is None or deviation is None:
            return f"{heading} Exact training diverged."
        digits = _digits(deviation)
        heading += f" Exact training ends at {mean:.{digits}f} {unit}, ± {deviation:.{digits}f} from seed to seed."
    heading += f" {DIFFERENCES[family]}, in {UNITS[metric]}, with 95 % intervals, each by itself"
    return (
        f"{heading}; tests at 5 %, corrected (Holm) for {len(group)}."
        if len(group) > 1
        else f"{heading}; test at 5 %."
    )


def _difference(test: Comparison) -> str:
    assert test.difference is not None and test.half is not None
    digits = _digits(test.half or test.difference)
    difference = f"{round(test.difference, digits) + 0.0:+.{digits}f}".replace("-", "−")
    worse = (test.difference > 0) == (test.metric == "loss")
    verdict = f" ({'worse' if worse else 'better'})" if test.distinguishable else ""
    return f"{METHODS[test.method].label} {difference} ± {test.half:.{digits}f}{verdict}"


def _missed(rest: list[Comparison], unit: str) -> str:
    """Say how large an effect would have been found; that nothing was told apart does not make things equal."""
    sizes = sorted(test.detectable for test in rest if test.detectable is not None)
    each = [f"{size:.{_digits(size)}f}" for size in sizes]
    size = each[0] if len(each) == 1 else f"{each[0]} to {each[-1]}"
    which = "" if len(each) == 1 else ", depending on the method,"
    return f"Of these, a true difference of {size} {unit}{which} would have been found with probability {POWER}."


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _digits(value: float) -> int:
    """Return how many decimals show a number to two digits, six at most."""
    return min(6, max(0, 1 - math.floor(math.log10(abs(value))))) if value else 1


def table(comparisons: Sequence[Comparison], saved: dict[tuple[str, str], int]) -> str:
    """Return all comparisons with exact training side by side.

    Args:
        comparisons: from `compare`.
        saved: bytes that autograd saved of a step, by task and method.

    """
    rows = [("task", "method", "saved", "metric", "difference", "95 % interval", "p, Holm", "detectable")]
    for test in comparisons:
        if test.family != "exact":
            continue
        share = saved[test.task, test.method] / saved[test.task, test.reference]
        start = (test.task, METHODS[test.method].label, f"{share:.0%}", test.metric)
        if test.difference is None or test.half is None or test.adjusted is None or test.detectable is None:
            rows.append((*start, "diverged", f"{test.diverged} of {test.pairs}", "", ""))
            continue
        low, high = test.difference - test.half, test.difference + test.half
        digits = 4 if test.metric == "loss" else 2
        rows.append(
            (
                *start,
                f"{test.difference:+.{digits}f}",
                f"{low:+.{digits}f} to {high:+.{digits}f}",
                f"{test.adjusted:.2g}{' *' if test.distinguishable else '  '}",
                f"{test.detectable:.{digits}f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join([*map(str.ljust, row[:2], widths[:2]), *map(str.rjust, row[2:], widths[2:])]) for row in rows
    )


def as_record(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison for JSON, its numbers to five digits."""
    return {
        key: float(f"{value:.5g}") if isinstance(value, float) else value
        for key, value in asdict(comparison).items()
    }
