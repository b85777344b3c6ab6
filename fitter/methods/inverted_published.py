"""The approximants that the paper made by hand for GELU and SiLU, with its coefficients.

Novikov and Oseledets, *Inverted Activations*, arXiv 2407.15545, section 5.1. There SiLU's two rows are swapped,
and they approximate sigmoid(x), not f′.
"""

from __future__ import annotations

from dataclasses import replace

from fitact.fitter.analysis import Activation
from fitact.fitter.expr import value
from fitact.fitter.numerics import DTYPES
from fitact.fitter.records import Approximates, InvertedFit, Kind, PublishedApproximant

from .inverted import cell_borders, cells, record, samples_of, stated

# By name: the activation, what is approximated, and the kind and coefficients of the left and the right piece.
PUBLISHED: dict[str, tuple[str, Approximates, tuple[tuple[Kind, tuple[float, ...]], ...]]] = {
    "gelu_inverted_published": (
        "gelu",
        "derivative",
        (
            ("power", (0.001217659791976, -0.296412101274584, 0.442363293155713, 0.831270529039268)),
            (
                "exponential",
                (-1.383717971214795, 1.558420184350027, 0.04404574801811, 0.032146736769376, -2.119885089843949),
            ),
        ),
    ),
    "silu_inverted_published": (
        "silu",
        "sigmoid",
        (
            ("root", (0.217177007595768, -0.507684370508263, 0.079631397669175, 0.357494204859375)),
            (
                "exponential",
                (-1.31085640213098, 0.848589647031652, -0.162990512595109, 0.002696163985044, -5.770613302664509),
            ),
        ),
    ),
}


def published(name: str) -> InvertedFit:
    """Return the fit that has the paper's coefficients, by its name, one of `PUBLISHED`; it serves all dtypes."""
    function, approximates, sides = PUBLISHED[name]
    activation = Activation.of(function)
    parts = cells(activation)
    anchor = float(value(activation.formula, parts[1].low, 30))
    borders = cell_borders(activation, parts)

    def approximant(dtype: str, s: int) -> PublishedApproximant:
        kind, coefficients = sides[s]
        made = PublishedApproximant(kind=kind, approximates=approximates, anchor=anchor, coefficients=coefficients)
        error, floor = stated(made, samples_of(activation, parts[s], dtype, borders, s))
        return replace(made, error=error, floor=floor)

    return record(
        {dtype: (approximant(dtype, 0), approximant(dtype, 1)) for dtype in DTYPES},
        activation=activation,
        name=name,
        bits=1,
        domain=None,
        borders=dict.fromkeys(DTYPES, borders),
        options={"source": "arXiv 2407.15545"},
    )
