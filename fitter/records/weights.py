"""The record of a calibration: for each activation of a model, a weight that says what goes into it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fitact.base import UsageError, check_keys, columns, few, quote, readable, string
from fitact.base import read as read_as
from fitact.fitter.files import WEIGHTS
from fitact.fitter.numerics import DIGITS, Weight, of_counts

from .validate import check_numbers

LONGEST = 500  # characters of a path
# The weight of a site: TAIL of it is Student's t with FREEDOM degrees and the data's mean and deviation. Its tails
# fall as a power of x, so that what was not seen counts too.
TAIL, FREEDOM = 0.05, 3
NARROWEST = 2.0**-16  # deviation of that tail


@readable
@dataclass(frozen=True, kw_only=True)
class Site:
    """What goes into one activation of a model.

    Attributes:
        path: of the activation in the model; for a function that a module calls itself `path:function`.
        activation: its name in the catalog, or its formula or class.
        count: how many numbers were seen, at least one.
        left_out: how many were NaN, infinite or huge, and are not counted.
        mean, deviation, least, largest: of the numbers.
        quantiles: those of 0.1 % and 99.9 %, to the width of a cell of the fine histogram.
        weight: their density, with a tail.

    Raises:
        UsageError: a field is not valid; the message names it.

    """

    path: str
    activation: str
    count: int
    left_out: int
    mean: float
    deviation: float
    least: float
    largest: float
    quantiles: tuple[float, ...]
    weight: Weight

    def __post_init__(self) -> None:
        for what in ("path", "activation"):
            value = getattr(self, what)
            if not 0 < len(value) <= LONGEST or not value.isprintable():
                raise UsageError(f"{what}: expected 1 to {LONGEST} printable characters, got {quote(value)}")
        for what, least in (("count", 1), ("left_out", 0)):
            if (number := getattr(self, what)) < least:
                raise UsageError(f"{what}: expected {least} or more, got {quote(number)}")
        for what in ("mean", "deviation", "least", "largest"):
            check_numbers(what, (getattr(self, what),), 1)
        check_numbers("quantiles", self.quantiles, 2)
        if self.deviation < 0:
            raise UsageError(f"deviation: expected no negative number, got {self.deviation!r}")
        if self.least > self.largest or self.quantiles[0] > self.quantiles[1]:
            raise UsageError("least, quantiles: expected no more than largest, and the lesser quantile first")


def site(
    path: str,
    activation: str,
    *,
    left_out: int,
    mean: float,
    deviation: float,
    extremes: tuple[float, float],
    cells: tuple[Sequence[float], Sequence[int]],
) -> Site:
    """Return the record of a site from what was counted there: `cells` are edges and counts, a fine histogram."""
    edges, counts = cells
    histogram = of_counts(edges, counts)
    scale = max(deviation, abs(mean) * NARROWEST, NARROWEST)
    tail = f"student({FREEDOM}, {mean:.{DIGITS}g}, {scale:.{DIGITS}g})"
    return Site(
        path=path,
        activation=activation,
        count=sum(counts),
        left_out=left_out,
        mean=_short(mean),
        deviation=_short(deviation),
        least=_short(extremes[0]),
        largest=_short(extremes[1]),
        quantiles=_quantiles(edges, counts, extremes),
        weight=Weight(f"{1 - TAIL:g}*{histogram.text} + {TAIL:g}*{tail}"),
    )


def _short(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")


def _quantiles(edges: Sequence[float], counts: Sequence[int], extremes: tuple[float, float]) -> tuple[float, ...]:
    """Return the quantiles of 0.1 % and 99.9 %: as if numbers were spread evenly over a cell."""
    sums = np.concatenate([[0], np.cumsum(np.asarray(counts, dtype=np.int64))])
    quantiles = np.interp(np.array([0.001, 0.999]) * sums[-1], sums, edges)
    return tuple(_short(quantile) for quantile in np.clip(quantiles, *extremes).tolist())


@dataclass(frozen=True)
class Calibration:
    """What goes into the activations of a model.

    Attributes:
        sites: one for each activation, or for each group of them.
        notes: what was not seen or left out; they are not a part of the file.

    Raises:
        UsageError: there is no site, or a path appears twice.

    """

    sites: tuple[Site, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.sites:
            raise UsageError("sites: expected at least one activation, got none")
        paths: set[str] = set()
        for i, site in enumerate(self.sites):
            if site.path in paths:
                raise UsageError(f"sites[{i}].path: {quote(site.path)} appears twice")
            paths.add(site.path)

    def weight(self, path: str | None = None) -> Weight:
        """Return the weight of a site; without a path, that of the only one.

        Raises:
            UsageError: there is no such site, or several.

        """
        paths = [quote(site.path, 40) for site in self.sites]
        if path is None and len(paths) > 1:
            raise UsageError(f"it has {len(paths)} sites, choose one: {few(paths)}")
        for site in self.sites:
            if path in (None, site.path):
                return site.weight
        raise UsageError(f"it has no site {quote(path)}: there are {few(paths)}")

    def to_json(self) -> str:
        """Return the calibration's file: the same numbers give the same bytes."""
        sites = [vars(site) | {"weight": site.weight.text} for site in self.sites]
        record = {"schema": WEIGHTS.schema, "sites": sites}
        return json.dumps(record, indent=2, sort_keys=True, allow_nan=False) + "\n"

    def __str__(self) -> str:
        """Return the table of the sites, and the notes."""
        rows: list[tuple[str, ...]] = [
            ("site", "activation", "count", "mean", "deviation", "0.1 %", "99.9 %", "least", "largest")
        ]
        for site in self.sites:
            stated = (site.mean, site.deviation, *site.quantiles, site.least, site.largest)
            rows.append((site.path, site.activation, f"{site.count:,}", *(f"{number:.4g}" for number in stated)))
        return "\n".join([*columns(rows, "<<>>>>>>>"), *(f"note: {note}" for note in self.notes)])


def read_weights(path: Path) -> Calibration:
    """Read a calibration from its file and check every field; a UsageError names the file and the field."""
    return WEIGHTS.read(path, from_json)


def from_json(source: str) -> Calibration:
    """Read a calibration from its JSON. Nothing in it is ever executed.

    Raises:
        UsageError: the text is not such a record; the message names the field.

    """
    record = WEIGHTS.record(source)
    check_keys(record, ("sites",))
    readers = {Weight: lambda value, what: Weight(string(value, what))}
    sites: tuple[Site, ...] = read_as(tuple[Site, ...], record["sites"], "sites", readers)
    return Calibration(sites)
