"""Paired comparison with few pairs: intervals, tests, and what could have been seen at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.optimize import brentq
from scipy.special import ndtr

LEVEL = 0.05  # of a test; an interval covers 1 − LEVEL
POWER = 0.8
QUANTILES = 10_000


@dataclass(frozen=True)
class Paired:
    """Differences of pairs.

    Attributes:
        mean, deviation: of the differences, the latter with n − 1.
        half: half the width of the interval of Student's t with n − 1 degrees of freedom around the mean.
        p: two-sided, of no difference.
        pairs: n.

    """

    mean: float
    deviation: float
    half: float
    p: float
    pairs: int


def paired(differences: Sequence[float]) -> Paired:
    """Return the paired t test of at least two finite differences.

    Of differences that are all alike, as those of accuracies may be, t says nothing: p is then that of the sign
    test, 2^(1 − n), or 1 if they are 0.
    """
    n = len(differences)
    if n < 2 or not np.isfinite(differences).all():
        raise ValueError(f"expected at least two finite differences, got {list(differences)}")
    mean, deviation = float(np.mean(differences)), float(np.std(differences, ddof=1))
    error = deviation / math.sqrt(n)
    if error == 0:
        return Paired(mean, 0.0, 0.0, 2.0 ** (1 - n) if mean else 1.0, n)
    p = 2 * stats.t.sf(abs(mean) / error, n - 1)
    return Paired(mean, deviation, float(stats.t.ppf(1 - LEVEL / 2, n - 1)) * error, float(p), n)


def holm(ps: Sequence[float]) -> list[float]:
    """Return p values adjusted for their number.

    S. Holm, *A Simple Sequentially Rejective Multiple Test Procedure*, Scandinavian Journal of Statistics 6, 1979:
    the i-th smallest of m, from 0, times m − i, never less than the one before, at most 1.
    """
    adjusted = [0.0] * len(ps)
    least = 0.0
    for rank, i in enumerate(np.argsort(ps, kind="stable")):
        least = max(least, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = least
    return adjusted


def detectable(deviation: float, pairs: int, tests: int) -> float:
    """Return the true difference that a test at LEVEL / tests finds with probability POWER.

    LEVEL / tests is the level of the strictest of Holm's tests.

    Args:
        deviation: standard deviation of a difference.
        pairs: at least 2.
        tests: how many are made together.

    """
    freedom = pairs - 1
    # |difference + noise| > limit · estimated deviation, averaged over the distribution of the estimate:
    # scipy.stats.nct, which would say it in one call, returns NaN for few degrees of freedom
    quantiles = (np.arange(QUANTILES) + 0.5) / QUANTILES
    limits = stats.t.ppf(1 - LEVEL / tests / 2, freedom) * np.sqrt(stats.chi2.ppf(quantiles, freedom) / freedom)

    def lacking(shift: float) -> float:
        return float(np.mean(ndtr(shift - limits) + ndtr(-shift - limits))) - POWER

    return float(brentq(lacking, 0.0, 10 * limits[-1])) * deviation / math.sqrt(pairs)
