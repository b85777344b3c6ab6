"""Activations from the literature, as users write them: value and derivative against mpmath's, to nine digits.

The tests leave out what no float64 formula can promise: results below 1e-37, points within 1e-3 of a root of the
compared function, and the derivative at a corner.
"""

import math

import numpy as np
import pytest

from fitact.fitter.analysis.activation import Activation
from fitact.fitter.analysis.float_check import problem
from fitact.fitter.catalog import CATALOG
from tests.support.literature import LITERATURE, Entry, derivative, settled
from tests.support.reals import MP, Oracle

RTOL = 1e-9
TINY = 1e-37
REACH = 1e-3  # of a root
WINDOW = np.linspace(-REACH, REACH, 17)
# No identity of the table covers these, and the check in floating point says so.
REPORTED = ("soft_clipping", "colu", "soft_root_sign")
KEPT = [entry for entry in LITERATURE if entry.name not in REPORTED]
EACH = pytest.mark.parametrize("entry", KEPT, ids=lambda entry: entry.name)


def _points() -> np.ndarray:
    random = np.random.default_rng(0)
    far = np.geomspace(2e-3, 1e4, 33)
    return np.unique(
        np.concatenate(
            [
                np.linspace(-12, 12, 97),
                far,
                -far,
                random.uniform(-6, 6, 16),
                random.uniform(-100, 100, 32),
                random.uniform(-1e4, 1e4, 8),
            ]
        )
    )


POINTS = _points()


def misses(found: np.ndarray, points: np.ndarray, oracle: Oracle) -> list[str]:
    """Return a line for each point where a result is not the oracle's."""
    assert found.shape == points.shape
    lines = []
    for point, result in zip(points.tolist(), found.tolist(), strict=True):
        true = settled(oracle, point)
        if abs(true) < TINY:
            continue
        error = abs(MP.mpf(result) - true) / abs(true) if math.isfinite(result) else math.inf
        if error > RTOL and not is_near_root(oracle, point):
            lines.append(f"at {point!r}: {result!r}, not {float(true)!r}; off by {float(error):.1e}")
    return lines


def is_near_root(oracle: Oracle, point: float) -> bool:
    """Whether the oracle changes its sign, or touches 0, within REACH of a point."""
    values = [settled(oracle, at) for at in point + WINDOW]
    if min(values) <= 0 <= max(values):
        return True
    least = min(range(len(values)), key=lambda i: abs(values[i]))
    if not 0 < least < len(values) - 1:
        return False
    left, middle, right = values[least - 1 : least + 2]
    vertex = middle - (right - left) ** 2 / (8 * (right - 2 * middle + left))
    return bool(abs(vertex) <= max(abs(left), abs(right)) / 100)


def report(entry: Entry, lines: list[str]) -> str:
    return "\n".join([f"{entry.text}: wrong at {len(lines)} of {POINTS.size} points", *lines[:8]])


@EACH
def test_value(entry: Entry) -> None:
    lines = misses(Activation.of(entry.text).value(POINTS), POINTS, entry.oracle)
    assert not lines, report(entry, lines)


# Three terms of order 1 leave 2/(3π|x|³) there, and no atom has their sum: right to 1e-15 of the largest
# derivative.
CANCELS = {"calu": 1e-15}


@EACH
def test_derivative(entry: Entry) -> None:
    points = np.setdiff1d(POINTS, entry.corners)
    oracle = derivative(entry.oracle)
    found = Activation.of(entry.text).derivative(points)
    lines = misses(found, points, oracle)
    if entry.name in CANCELS:
        assert lines
        wrong = [abs(float(settled(oracle, at)) - value) for at, value in zip(points, found, strict=True)]
        assert max(wrong) <= CANCELS[entry.name]
        points = points[points > -100]
        lines = misses(Activation.of(entry.text).derivative(points), points, oracle)
    assert not lines, report(entry, lines)


@pytest.mark.parametrize("entry", [entry for entry in LITERATURE if entry.name in REPORTED])
def test_what_floating_point_fails_on_is_reported(entry: Entry) -> None:
    assert (found := problem(Activation.of(entry.text))) is not None
    assert "write it" in found


def test_the_table_adds_to_the_catalog() -> None:
    names = [entry.name for entry in LITERATURE]
    assert len(names) == len(set(names)) >= 40
    assert set(names) & set(CATALOG) == {"serf", "snake", "squareplus"}  # here as one types them
    known = {entry.filled(entry.expression, {}) for entry in CATALOG.values()}
    assert not {entry.text for entry in LITERATURE} & known
