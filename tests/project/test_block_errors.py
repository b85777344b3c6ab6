"""benchmarks/evidence/blocks: errors of quantised gradients, in the document and again."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.convergence.tasks import SMALL
from benchmarks.evidence import blocks, convolutions
from tests.conftest import ROOT

RECORD: dict[str, Any] = json.loads(blocks.RESULTS.read_text("utf-8"))
DOCUMENT = (ROOT / "docs" / "storage.md").read_text("utf-8")


def test_the_documents_numbers() -> None:
    assert "\n".join(blocks.table(RECORD["rows"])) in DOCUMENT
    for way, said in {"encode": "coding takes 2.8 to 4.0 ns", "decode": "decoding 1.6 to 2.4,"}.items():
        found = [row["nanoseconds"][way] for row in RECORD["times"]]
        assert f"{min(found):.1f} to {max(found):.1f}" in said
        assert said in DOCUMENT
        assert max(found) < 5
    ratios = {way: [row[way] for row in RECORD["times"]] for way in ("encode", "decode")}
    said = " times and ".join(f"{min(one):.0f} to {max(one):.0f}" for one in ratios.values())
    assert f"{said} times as long as PyTorch's GELU" in DOCUMENT.replace("\n", " ")


def test_what_the_document_says_of_them() -> None:
    errors = [row["error"] for row in RECORD["rows"]]
    assert max(error["rounding"] for error in errors) < 0.01
    assert tuple(round(of(error["coarse"] for error in errors), 2) for of in (min, max)) == (0.07, 0.11)
    ratios = [error["e4m3, 1×128"] / error["8 bits"] for error in errors]
    assert (round(min(ratios)), round(max(ratios))) == (4, 5)


def test_the_document_of_convolutions() -> None:
    record: dict[str, Any] = json.loads(convolutions.RESULTS.read_text("utf-8"))
    assert "\n".join(convolutions.table(record["rows"])) in DOCUMENT
    with_relu = record["rows"][:4]
    assert all(row["error"]["rounding, batch norms too"] < 0.01 for row in with_relu)
    assert all(row["saved"]["rounding, batch norms too"] < row["saved"]["exact"] / 2 for row in with_relu)
    assert all(row["error"]["rounding"] < 0.01 for row in record["rows"])


@pytest.mark.long
def test_the_numbers_again() -> None:
    """A model that was trained for less time; errors are of the same order."""
    recipe = replace(SMALL.recipes["characters"], steps=60, rate=blocks.RATE, validation=8)
    for row in blocks.rows(recipe):
        (stated,) = (
            one for one in RECORD["rows"] if all(one[key] == row[key] for key in ("model", "inputs", "dtype"))
        )
        for policy, error in row["error"].items():
            assert stated["error"][policy] / 2 < error < 2 * stated["error"][policy], (row, policy)
