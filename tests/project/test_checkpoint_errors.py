"""benchmarks/evidence/checkpoints: errors of the gradient of checkpointed blocks, in the document and again."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.convergence.tasks import SMALL
from benchmarks.evidence import blocks, checkpoints
from fitact.runtime.saving.blocks import nbytes
from tests.conftest import ROOT

RECORD: dict[str, Any] = json.loads(checkpoints.RESULTS.read_text("utf-8"))
DOCUMENT = (ROOT / "docs" / "saving.md").read_text("utf-8")


def test_what_the_document_says() -> None:
    assert "\n".join(checkpoints.table(RECORD["rows"])) in DOCUMENT
    errors = [row["error"] for row in RECORD["rows"]]
    ratios = [error[checkpoints.FLOAT8] / error["8 bits"] for error in errors]
    assert (round(min(ratios)), round(max(ratios))) == (3, 5)
    assert 0.0025 < min(error["8 bits"] for error in errors) < max(error["8 bits"] for error in errors) < 0.0135
    first, *_, last = ([row for row in RECORD["rows"] if row["blocks"] == depth] for depth in checkpoints.DEPTHS)
    for a, b in zip(first, last, strict=True):
        low, high = (1.05, 1.15) if a["dtype"] == "float32" else (1.2, 1.45)
        assert low < b["error"]["8 bits"] / a["error"]["8 bits"] < high
    shape = 2048, 4096
    assert [round(nbytes(shape, bits) / (2 * 2048 * 4096), 2) for bits in (8, 4)] == [0.52, 0.27]


@pytest.mark.long
def test_the_numbers_again() -> None:
    """A model that was trained for less time; errors are of the same order."""
    recipe = replace(SMALL.recipes["characters"], steps=60, rate=blocks.RATE, validation=8)
    for row, stated in zip(checkpoints.rows(recipe, (4,)), RECORD["rows"][:4], strict=True):
        for name, error in row["error"].items():
            assert stated["error"][name] / 3 < error < 3 * stated["error"][name], (row, name)
