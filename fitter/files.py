"""The kinds of JSON files that are read here. What they hold is read by `records`; this imports no SymPy."""

from __future__ import annotations

from fitact.base import Kind

FIT = Kind("fitact.fit/1", "a fitact fit", 1 << 20)
WEIGHTS = Kind("fitact.weights/1", "a file of fitact calibrate", 1 << 25)
